"""Elementwise operators and activations where tables of random cases do not reach.

Gradients are those of PyTorch 2.13 at the same points unless a comment says otherwise.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup, operators
from tests.support.gradient_points import assert_point, operator

inf, nan = np.inf, np.nan
MODULES = ("elementwise", "activation", "logic", "reduction")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "inputs", "values", "gradients", "attributes"),
    [
        ("Abs", [[-1, 0, 2]], [1, 0, 2], [[-1, 0, 1]], {}),
        ("Max", [[1, 2], [1, 1]], [1, 2], [[0.5, 1], [0.5, 0]], {}),
        ("Min", [[1, 2], [1, 1]], [1, 1], [[0.5, 0], [0.5, 1]], {}),
        ("Clip", [[-1, 0, 0.5, 1, 2], 0, 1], [0, 0, 0.5, 1, 1], [[0, 1, 1, 1, 0], 1, 1], {}),
        ("Clip", [[0, 5], 3, 1], [1, 1], [[0, 0], 0, 2], {}),
        ("Pow", [[0, 0, 0, 0], [2, 1, 0.5, 0]], [0, 0, 0, 1], [[0, 1, inf, 0], [0] * 4], {}),
        ("Sqrt", [[0]], [0], [[inf]], {}),
        ("Relu", [[-1, 0, 2, nan]], [0, 0, 2, nan], [[0, 0, 1, 1]], {}),
        ("LeakyRelu", [[-1, 0, 2]], [-0.25, 0, 2], [[0.25, 0.25, 1]], {"alpha": 0.25}),
        ("PRelu", [[-1, 0, 2], 0.25], [-0.25, 0, 2], [[0.25, 0.25, 1], -1], {}),
        ("Elu", [[-1e4, 0, 1e4]], [-1, 0, 1e4], [[0, 1, 1]], {}),
        ("Celu", [[-1e4, 0, 1e4]], [-0.5, 0, 1e4], [[0, 1, 1]], {"alpha": 0.5}),
        ("Celu", [[-2, 0, 1e4]], [-6.3890561, 0, 1e4], [[7.3890561, 1, 1]], {"alpha": -1.0}),
        ("Selu", [[-1e4, 0, 1]], [-1.7580993, 0, 1.0507010], [[0, 1.7580993, 1.0507010]], {}),
        ("HardSigmoid", [[-2.5, 0, 2.5]], [0, 0.5, 1], [[0, 0.2, 0]], {}),
        ("HardSwish", [[-3, 0, 3]], [0, 0, 3], [[0, 0.5, 1]], {}),
        ("Softplus", [[-1e4, 0, 1e4]], [0, 0.6931472, 1e4], [[0, 0.5, 1]], {}),
        ("Softsign", [[-1, 0, 2]], [-0.5, 0, 2 / 3], [[0.25, 1, 1 / 9]], {}),
        ("Mish", [[-1e4, 0, 1e4]], [0, 0, 1e4], [[0, 0.6, 1]], {}),
        ("Swish", [[-1e4, 0, 1e4]], [0, 0, 1e4], [[0, 0.5, 1]], {}),
        # in double precision; PyTorch's 1 + erf cancels in float32
        ("Gelu", [[-5, 0]], [-1.4332579e-06, 0], [[-7.1469460e-06, 0.5]], {}),
        ("Shrink", [[-0.5, 0.5, 0.6]], [0, 0, 0.6], [[0, 0, 1]], {}),
        ("ThresholdedRelu", [[1, 1.5]], [0, 1.5], [[0, 1]], {}),
    ],
)
def test_gradient_at_awkward_points(name, inputs, values, gradients, attributes):
    assert_point(name, inputs, values, *gradients, **attributes)


@pytest.mark.parametrize("name", ["Max", "Min"])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_extrema_propagate_nan(name, place):
    result = operator(name)(place(np.float32([nan, 1])), place(np.float32([1, nan])))
    assert np.isnan(result).all()


@pytest.mark.parametrize(("exponent", "second"), [(0.0, 0), (1.0, 0), (2.0, 2), (3.0, 0)])
def test_pow_at_zero_in_second_order(exponent, second):
    f = jax.grad(jax.grad(lambda x: operator("Pow")(x, np.float32(exponent))))
    assert f(np.float32(0)) == second


@pytest.mark.parametrize("constant", [np.asarray, jnp.asarray])
def test_pow_of_a_negative_base_with_constant_exponent(constant):
    x = np.array([-3, -2], np.float32)
    f = jax.jit(jax.grad(lambda x, y: operator("Pow")(x, y).sum()))
    np.testing.assert_allclose(f(x, constant(np.float32([2, 3]))), [-6, 12])


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint32])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_integer_division_truncates(dtype, place):
    a, b = np.array([7, -7, 7, -7, 0]).astype(dtype), np.array([2, 2, -2, -2, 5]).astype(dtype)
    expected = np.trunc(a.astype(float) / b.astype(float)).astype(dtype)
    result = operator("Div")(place(a), place(b))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)


def test_known_integers_keep_64_bits():
    big = np.array([2**62 + 1, -(2**62) - 1])
    for name, other, expected in (
        ("Add", 1, big + 1),
        ("Div", 1, big),
        ("Mod", 2, [1, 1]),
        ("Max", 0, [2**62 + 1, 0]),
        ("Where", big, big),
    ):
        condition = [np.array(True)] if name == "Where" else []
        result = operator(name)(*condition, big, np.asarray(other))
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.int64
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(operator("Pow")(np.array([3]), np.array([39])), [3**39])


def test_pow_of_integers():
    base, exponent = np.array([2, -1, -1, 1, 5, 3]), np.array([-1, -3, -2, -5, 0, 4])
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(operator("Pow")(base, exponent), [0, -1, 1, 1, 1, 81])
    result = operator("Pow")(jnp.array([2, 3]), jnp.array([0.5, 2.5]))
    np.testing.assert_array_equal(result, [1, 15])


def test_floor_modulus_of_infinities():
    a, b = np.array([5, -5, 1, -1, inf, 1], np.float32), np.array([3, 3, -inf, inf, 3, 0], "f")
    result = operator("Mod")(jnp.asarray(a), jnp.asarray(b))
    np.testing.assert_array_equal(result, [2, 1, -inf, inf, nan, nan])


@pytest.mark.parametrize("fmod", [-256, 2])
def test_a_modulus_is_of_one_of_two_kinds(fmod):
    with pytest.raises(NodeError, match=f"fmod must be .*got {fmod}"):
        operator("Mod")(jnp.ones(2), jnp.ones(2), fmod=fmod)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_zero_of_the_floor_modulus_has_the_sign_of_the_divisor(dtype, compiled):
    mod = operator("Mod")
    a, b = np.array([0, -0.0, 0, -0.0, 4, -4, 4, -4, 5]), np.array([2, 2, -2, -2, 2, 2, -2, -2, -3])
    a, b = a.astype(dtype), b.astype(dtype)
    negative = b < 0
    with jax.enable_x64(True):
        result = (jax.jit(mod) if compiled else mod)(jnp.asarray(a), jnp.asarray(b))
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, [0] * 8 + [-1])
        np.testing.assert_array_equal(np.signbit(result), negative)
        np.testing.assert_array_equal(np.signbit(mod(a, b)), negative)
        by_a, by_b = jax.grad(lambda a, b: mod(a, b).sum(), (0, 1))(jnp.asarray(a), jnp.asarray(b))
        np.testing.assert_array_equal(by_a, np.ones_like(a))
        np.testing.assert_array_equal(by_b, -np.floor(a / b))


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_bit_shift_beyond_the_width(place, dtype):
    x = place(np.array([-8, 5, -1, 7], dtype))
    for y in (place(np.full(4, 100, dtype)), place(np.full(4, -1, dtype))):
        np.testing.assert_array_equal(operator("BitShift")(x, y, direction="RIGHT"), [-1, 0, -1, 0])
        np.testing.assert_array_equal(operator("BitShift")(x, y, direction="LEFT"), [0, 0, 0, 0])


def test_strings_are_compared_and_selected():
    a, b = np.array(["x", "y"], object), np.array(["x", "z"], object)
    assert operator("Equal")(a, b).tolist() == [True, False]
    assert operator("Where")(np.array([True, False]), a, b).tolist() == ["x", "z"]


def test_a_row_of_minus_infinity_has_no_softmax():
    x = np.array([[-inf, -inf], [0, -inf]], np.float32)
    np.testing.assert_array_equal(operator("Softmax")(x), [[nan, nan], [1, 0]])  # as onnxruntime
    np.testing.assert_array_equal(operator("LogSoftmax")(x), [[nan, nan], [0, -inf]])


@pytest.mark.deep
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_masked_entries_have_no_gradient(name):
    x = np.array([0, -inf, 1], np.float32)
    p = np.array([0.26894142, 0, 0.73105858])
    expected = np.array([1, 0, 0]) - p if name == "LogSoftmax" else p[0] * ([1, 0, 0] - p)

    def first(x):
        return operator(name)(x)[0]

    np.testing.assert_allclose(jax.grad(first)(x), expected, rtol=1e-6)
    assert np.isfinite(jax.hessian(first)(x)).all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Softmax", (0, 3)),
        ("Softmax", (3, 0)),
        ("LogSoftmax", (0, 3)),
        ("LogSoftmax", (3, 0)),
        ("Hardmax", (0, 3)),  # the maximum of an empty row has no place
    ],
)
@pytest.mark.parametrize("opset", [1, 13])
def test_softmax_of_nothing(name, opset, shape):
    assert operator(name, opset)(jnp.zeros(shape)).shape == shape


UNARY = [
    o
    for o in operators()
    if o.function.__module__.removeprefix("jaxonnx.ops.") in MODULES
    and o.inputs == 1
    and not o.required
    and o.name != "BitwiseNot"
]


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("o", UNARY, ids=lambda o: f"{o.name}-{o.since}")
def test_half_precision_is_kept_known_and_traced(o, dtype):
    x = np.array([[0.5, 0.25]], dtype)
    with np.errstate(all="ignore"):
        folded = np.asarray(o(x))
    traced = o(jnp.asarray(x))
    if not o.name.startswith(("Arg", "Is", "Not")):
        assert traced.dtype == dtype
        assert folded.dtype == dtype
    np.testing.assert_allclose(folded.astype(float), np.asarray(traced, float), rtol=1e-2)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Hardmax"])
def test_of_nothing(name):
    assert operator(name, 13)(np.ones((2, 0), np.float32)).shape == (2, 0)


@pytest.mark.parametrize(
    ("name", "opset", "inputs", "attributes", "message"),
    [
        ("Add", 6, [(2, 3), (3,)], {}, "broadcast=1"),
        ("Add", 6, [(2, 3), (2,)], {"broadcast": 1}, "not part of"),
        ("Add", 6, [(2, 3), (3,)], {"broadcast": 1, "axis": 2}, "axis 2"),
        ("SwiGLU", 28, [(2, 3), (3,)], {}, r"b has shape \[3\]; .* D = \[2, 3\]"),
        ("Gelu", 20, [(2,)], {"approximate": "sigmoid"}, "approximate"),
        ("Softmax", 11, [(2,)], {"axis": 1}, "axis 1"),
        ("BitShift", 11, [(2,), (2,)], {"direction": "UP"}, "direction"),
    ],
)
def test_what_the_specification_forbids(name, opset, inputs, attributes, message):
    with pytest.raises(NodeError, match=message):
        operator(name, opset)(*(np.ones(shape, np.float32) for shape in inputs), **attributes)


def test_clip_of_half_precision_has_no_default_bound():
    x = np.array([inf, -inf, 65504], np.float16)
    np.testing.assert_array_equal(lookup("", "Clip", 6)(x), x)
