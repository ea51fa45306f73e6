"""Casts: strings, values out of range known and traced, float8e8m0 and 6-bit floats, gradients."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto

import jaxonnx
from jaxonnx.errors import NodeError, StaticError
from tests.support.gradient_points import operator

EDGES = np.array([0, -0.0, 1.5, -2.7, 300, -300, 70000, 3e9, -3e9, 1e20, -1e20], np.float32)
SPECIAL = np.array([np.nan, np.inf, -np.inf], np.float32)


def cast(x, name, **attributes):
    return operator("Cast")(x, to=TensorProto.DataType.Value(name), **attributes)


@pytest.mark.parametrize(
    "name",
    ["INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32"],
)
def test_known_and_traced_values_convert_alike(name):
    for x in EDGES, SPECIAL, EDGES.astype(np.float64), SPECIAL.astype(ml_dtypes.bfloat16):
        with jax.enable_x64(True):
            traced = np.asarray(jax.jit(lambda x: cast(x, name))(x))
        known = cast(x, name)
        assert known.dtype == traced.dtype
        np.testing.assert_array_equal(known.astype(np.int64), traced.astype(np.int64))


def test_narrow_integers_keep_the_low_bits_and_wide_ones_saturate():
    assert cast(np.float32([300, -1, 1e20]), "UINT8").tolist() == [44, 255, 255]
    assert cast(np.float32([300, -1, 1e20]), "UINT32").tolist() == [300, 0, 2**32 - 1]
    assert cast(np.float32([np.nan, np.inf]), "INT64").tolist() == [0, 2**63 - 1]
    assert cast(np.array([2**40 + 7]), "INT32").tolist() == [7]


def test_numbers_as_strings_and_back():
    numbers = np.array([3.14, 100, -0.5, 1e20, np.nan, np.inf, -np.inf], np.float32)
    texts = ["3.14", "100", "-0.5", "1" + "0" * 20, "NaN", "INF", "-INF"]
    assert cast(numbers, "STRING").tolist() == texts
    np.testing.assert_array_equal(cast(np.array(texts, object), "FLOAT"), numbers)
    assert cast(np.array([[2**62 + 1]]), "STRING").tolist() == [[str(2**62 + 1)]]
    assert cast(np.array([str(2**62 + 1)], object), "INT64") == 2**62 + 1
    assert cast(np.array(["1e3", "-2"], object), "INT32").tolist() == [1000, -2]
    assert cast(np.array(["+inf", "nAn", "1e-5"], object), "FLOAT16").dtype == np.float16
    assert cast(np.array([], object), "INT32").dtype == np.int32
    with pytest.raises(NodeError, match="'Hello' is not a number"):
        cast(np.array(["Hello"], object), "FLOAT")
    with pytest.raises(StaticError, match="a cast to strings cannot be compiled"):
        jax.make_jaxpr(lambda x: cast(x, "STRING"))(numbers)


@pytest.mark.parametrize("through", ["FLOAT", "BOOL", "INT64"])
@pytest.mark.parametrize("size", [3, 100])
def test_a_call_casts_computed_numbers_to_strings(through, size):
    """The rest of the graph runs node by node, also where the input is too large to be fixed."""
    kind = TensorProto.DataType.Value(through)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 13]>
    g (float[n] x) => (float[n] y) {{
      twice = Add(x, x)
      a = Cast<to={kind}>(twice)
      s = Cast<to=8>(a)
      back = Cast<to=1>(s)
      y = Neg(back)
    }}""")
    x = np.resize(np.array([0, 1, 2.5], np.float32), size)
    (wanted,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    model = jaxonnx.load(proto)
    np.testing.assert_array_equal(model(x), wanted)
    np.testing.assert_array_equal(model(x[::-1].copy()), wanted[::-1])


@pytest.mark.parametrize(
    "convert", [cast, jax.jit(cast, static_argnums=(1,), static_argnames="saturate")]
)
def test_powers_of_two_at_the_edges(convert):
    """The table of the specification for float8e8m0."""
    edges = np.array([0, np.nan, np.inf, 3.4e38], np.float32)
    top, least = 2.0**127, 2.0**-127
    saturated = np.asarray(convert(edges, "FLOAT8E8M0")).astype(np.float64)
    np.testing.assert_array_equal(saturated, [least, np.nan, top, top])
    plain = np.asarray(convert(edges, "FLOAT8E8M0", saturate=0)).astype(np.float64)
    np.testing.assert_array_equal(plain, [np.nan] * 4)


def test_6_bit_floats_must_be_known():
    x = np.array([0.3, -9, 100, np.inf], np.float32)
    assert cast(x, "FLOAT6E2M3").astype(np.float32).tolist() == [0.25, -7.5, 7.5, 7.5]
    assert cast(x, "FLOAT6E3M2").astype(np.float32).tolist() == [0.3125, -9 + 1, 28, 28]
    with pytest.raises(NodeError, match="6-bit"):
        jax.make_jaxpr(lambda x: cast(x, "FLOAT6E2M3"))(x)


def test_gradients_pass_between_floating_types():
    def f(x, name):
        return cast(cast(x, name) * 2, "FLOAT").sum()

    for name in "FLOAT16", "BFLOAT16":
        assert jax.grad(f)(jnp.float32(1.5), name) == 2
    assert jax.grad(lambda x: cast(cast(x, "INT32"), "FLOAT"))(jnp.float32(1.5)) == 0


def test_cast_like_takes_only_the_type():
    assert operator("CastLike")(EDGES[:4], np.zeros(0, np.int8)).tolist() == [0, 0, 1, -2]


def test_bit_cast():
    def bits(x, name):
        return operator("BitCast")(x, to=TensorProto.DataType.Value(name))

    x = np.array([-1, 3, 7], ml_dtypes.int4)
    for f in bits, jax.jit(bits, static_argnums=1):
        assert np.asarray(f(x, "UINT4")).tolist() == [15, 3, 7]
        assert np.asarray(f(np.array([True, False]), "UINT8")).tolist() == [1, 0]
        assert np.asarray(f(np.float32([1, -2]), "UINT32")).tolist() == [0x3F800000, 0xC0000000]
    assert bits(np.array([1.0]), "INT64").tolist() == [0x3FF0000000000000]
    assert bits(np.array([1 + 2j], np.complex64), "DOUBLE").view(np.complex64) == 1 + 2j
    with pytest.raises(NodeError, match="same width"):
        bits(np.float32([1]), "INT16")
    with jax.enable_x64(False), pytest.raises(NodeError, match="jax_enable_x64"):
        jax.make_jaxpr(lambda x: bits(x, "INT64"))(jnp.zeros(1, jnp.complex64))
