"""Shapes, slices and constants: what stays known, what is refused, and what is no number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx.errors import NodeError
from tests.support.gradient_points import operator

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def ints(*values):
    return np.array(values, np.int64)


def evaluate(text, opset=21):
    """A function of the graph inputs of a model in ONNX's textual form."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    model = jaxonnx.load(proto)
    return lambda *xs: jax.tree.leaves(model.apply({}, *xs))


FIXED = {
    "Split": "a, b = Split <axis = 0> (x, two) y = Add (a, b)",
    "equal Split": "a, b = Split <axis = 0> (x) y = Add (a, b)",
    "Squeeze": "first = Constant <value_ints = [0]> () y = Squeeze (x, first)",
    "SplitToSequence": "s = SplitToSequence (x, two) y = ConcatFromSequence <axis = 0> (s)",
}


@pytest.mark.parametrize("name", FIXED)
def test_a_batch_that_a_node_fixes(name):
    """As PyTorch writes detectors, image by image: the input says that it takes any number."""
    f = evaluate(
        f"g (float[n, 3] x) => (float[m, 3] y) <int64[2] two = {{1, 1}}> {{ {FIXED[name]} }}", 17
    )
    with pytest.raises(NodeError, match="if axis 0 is the batch, the exporter wrote the size"):
        f(np.ones((3, 3), np.float32))


def test_shape_arithmetic_leaves_the_jaxpr():
    f = evaluate("""
        g (float[2,3,4] x) => (float[4,6] y) {
            s = Shape(x)
            i = Constant<value_ints = [1]>()
            n = Gather(s, i)
            two = Constant<value_ints = [2]>()
            m = Mul(n, two)
            rest = Constant<value_ints = [-1]>()
            t = Concat<axis = 0>(rest, m)
            y = Reshape(x, t)
        }
    """)
    jaxpr = jax.make_jaxpr(f)(X)
    assert [str(e.primitive) for e in jaxpr.eqns] == ["reshape"]
    assert jaxpr.out_avals[0].shape == (4, 6)


def test_known_64_bit_values_stay_whole():
    f = evaluate("""
        g (float[2,3,4] x) => (y, big) {
            first = Constant<value_ints = [1]>()
            last = Constant<value_ints = [9223372036854775807]>()
            axis = Constant<value_ints = [2]>()
            y = Slice(x, first, last, axis)
            big = Identity(last)
        }
    """)
    with jax.enable_x64(False):
        y, big = f(jnp.asarray(X))
    assert y.shape == (2, 3, 3)
    assert big == np.iinfo(np.int64).max


def test_known_indices_become_slices():
    for indices in np.array(1), ints(1), ints(0, 2):
        jaxpr = str(jax.make_jaxpr(lambda x, i=indices: operator("Gather")(x, i, axis=1))(X))
        assert "gather" not in jaxpr
    assert "gather" in str(jax.make_jaxpr(lambda x: operator("Gather")(x, ints(1, 0)))(X))


def test_large_broadcasts_never_take_memory():
    f = evaluate("""
        g (float[1] x) => (y) {
            s = Constant<value_ints = [1000000000]>()
            c = ConstantOfShape(s)
            y = Add(c, x)
        }
    """)
    assert jax.eval_shape(f, jnp.ones(1))[0].shape == (10**9,)


def test_large_ranges_and_identities_are_computed_in_the_graph():
    f = evaluate("""
        g (float[300,300] x) => (r, e) {
            zero = Constant<value_float = 0.0>()
            end = Constant<value_float = 30000.0>()
            step = Constant<value_float = 0.5>()
            r = Range(zero, end, step)
            e = EyeLike(x)
        }
    """)
    r, e = f(np.zeros((300, 300), np.float32))
    np.testing.assert_array_equal(r, np.arange(60000, dtype=np.float32) / 2)
    np.testing.assert_array_equal(e, np.eye(300))
    assert not jax.make_jaxpr(f)(np.zeros((300, 300), np.float32)).consts


def test_a_negative_pad_removes_of_the_padding_where_the_axis_is_shorter():
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(operator("Pad")(x, ints(2, 0, -2, 0)), np.zeros((1, 3)))
    np.testing.assert_array_equal(operator("Pad")(x, ints(0, -4, 0, 3)), np.zeros((1, 2)))
    np.testing.assert_array_equal(operator("Pad")(x, ints(0, -2, 0, 1)), [[1, 0]])


def test_identity_of_sequences_and_optionals():
    assert operator("Identity")([X, X]) == [X, X]
    assert operator("Identity")(None) is None


def test_strings():
    words = np.array([["a", "b"]], object)
    assert operator("Pad")(words, ints(0, 0, 0, 1)).tolist() == [["a", "b", ""]]
    assert operator("Concat")(words, words, axis=0).tolist() == [["a", "b"]] * 2
    assert operator("Gather")(words, ints(1), axis=1).tolist() == [["b"]]
    assert operator("Constant")(value_strings=["a", "b"]).tolist() == ["a", "b"]
    assert operator("Constant")(value_string="ab").item() == "ab"
    assert operator("Split")(words, axis=1, outputs=2)[1].tolist() == [["b"]]
    assert operator("NonZero")(np.array(["", "a"], object)).tolist() == [[1]]


def test_sparse_constant():
    values = numpy_helper.from_array(np.array([5, 7], np.float32), "v")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(ints(0, 3)), [2, 2])
    node = helper.make_node("Constant", [], ["y"], sparse_value=sparse)
    graph = helper.make_graph([node], "g", [], [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    np.testing.assert_array_equal(jaxonnx.load(model)(), [[5, 0], [0, 7]])


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
def test_narrow_types_compile(dtype):
    """XLA on the CPU aborts the process when it concatenates 2-bit integers."""
    x = np.array([0, 1, 1, 0]).astype(getattr(ml_dtypes, dtype))
    y = jax.jit(lambda x: operator("Concat")(x, x, axis=0))(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.astype(np.float32), np.tile([0, 1, 1, 0], 2))


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "message"),
    [
        ("Reshape", [X, ints(8, 4)], {}, r"\(2, 3, 4\) .* froze that axis"),
        ("Reshape", [X, ints(-1, 5)], {}, r"cannot reshape \(2, 3, 4\)"),
        ("Reshape", [X, ints(-1, -1)], {}, "at most one -1"),
        ("Reshape", [X, ints(0, 0, 0, 0)], {}, "names no axis"),
        ("Reshape", [X, ints(0, -1)], {"allowzero": 1}, "both 0 and -1"),
        ("Squeeze", [X, ints(0)], {}, "not all of size 1"),
        ("Squeeze", [X[:1], ints(0)[None]], {}, "axes must be a vector"),
        ("Squeeze", [X, ints(5)], {}, "axis 5 is out of range"),
        ("Unsqueeze", [X, ints(0, 0)], {}, "twice"),
        ("Unsqueeze", [X, ints().reshape(3, 0)], {}, "axes must be a vector"),
        ("Transpose", [X], {"perm": [0, 0, 1]}, "not a permutation"),
        ("Tile", [X, ints(1, 2)], {}, "repeats .* must be .rank D"),
        ("Tile", [X, np.array(2)], {}, "repeats .* must be .rank D"),
        ("Split", [X, ints(1, 1)], {"axis": 1, "outputs": 2}, "do not add up"),
        ("Split", [X], {"axis": 1, "outputs": 2}, "equal parts"),
        ("Slice", [X, ints(0), ints(1), ints(0), ints(0)], {}, "step of 0"),
        ("Slice", [X, ints(0), ints(1, 2)], {}, "ends has .* n = 1"),
        ("Slice", [X, ints(0, 0), np.array(1), ints(0, 1)], {}, "ends has .* n = 2"),
        ("ConstantOfShape", [ints(1, 2)[None]], {}, r"must be \(r\)"),
        ("Reshape", [X, np.array(-1)], {}, r"must be \(r\)"),
        ("Pad", [X, ints(0, 1)], {}, "two numbers for each"),
        (
            "Pad",
            [X, ints(0, 0, 0, 0, 0, 1)],
            {"mode": "mirror"},
            "mode must be .*got 'mirror'",
        ),
        ("Pad", [X, ints(-2, 0, 0, -1, 0, 0)], {}, "remove more"),
        ("Pad", [X, ints(0, 4, 0, 0, -4, 0)], {"mode": "edge"}, "leave nothing of axis 1"),
        ("CenterCropPad", [X, ints(1, 2)], {"axes": [1]}, "2 sizes are given for 1 axes"),
        ("Gather", [X, ints(2)], {}, "index 2 is out of range for an axis of size 2"),
        ("Gather", [X, ints(-4)], {"axis": 1}, "index -4"),
        ("GatherND", [X, ints(0, 3)], {}, "index 3"),
        ("GatherND", [X, ints(0, 0, 0, 0)], {}, "do not fit shape"),
        ("ScatterND", [X, ints(0)[None], X], {}, "updates must have shape"),
        ("ScatterElements", [X, X[:1].astype(int), X[:1]], {"axis": 2}, "out of range"),
        (
            "ScatterElements",
            [X, X.astype(int) * 0, X],
            {"reduction": "mean"},
            "got 'mean'",
        ),
        ("TensorScatter", [X, X[:, :1], ints(0, 3)], {"axis": 1}, "index 3"),
        ("DepthToSpace", [X[None]], {"blocksize": 2}, "with blocksize = 2"),
        ("ReverseSequence", [X, ints(1, 2, 3)], {}, "must lie in"),
        ("ReverseSequence", [X, ints(2)], {}, "do not fit 3 sequences"),
        ("Range", [ints(0), ints(3), ints(0)], {}, "delta of 0"),
        ("Range", [np.float16(i) for i in (0, 3, 0.5)], {"stash_type": 6}, "stash_type"),
        ("EyeLike", [X], {}, r"must be \(N, M\)"),
        ("Constant", [], {}, "exactly one attribute"),
    ],
)
def test_refused(name, inputs, attributes, message):
    with pytest.raises(NodeError, match=message):
        operator(name)(*inputs, **attributes)
