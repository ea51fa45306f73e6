"""Sequences and optionals."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import pytest

import jaxonnx

X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def function(text, opset=22):
    """A graph in ONNX's text format as a pure function of its inputs."""
    header = f'<ir_version: 10, opset_import: ["": {opset}]>'
    model = jaxonnx.load(onnx.parser.parse_model(f"{header} {text}"))
    return lambda *inputs: model.apply(model.params, *inputs)


def models():
    """The sequence models of ONNX's suite, here also under `jax.jit`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.model import collect_testcases

        return [case for case in collect_testcases() if "sequence" in case.name]


@pytest.mark.parametrize("case", models(), ids=lambda case: case.name)
def test_models_of_the_suite(case):
    model = jaxonnx.load(case.model)
    for inputs, outputs in case.data_sets:
        assert model.apply(model.params, *inputs).shape == outputs[0].shape
        np.testing.assert_allclose(model.apply(model.params, *inputs), outputs[0])
        if case.name != "test_sequence_model8":  # its split is an input, which shapes the result
            np.testing.assert_allclose(jax.jit(model.apply)(model.params, *inputs), outputs[0])


EDIT = """
g (float[2,3] x, float[2,3] y) => (float[n,3] z, int64 n) {
  first = Constant<value_int = 0>()
  last = Constant<value_int = -1>()
  none = SequenceEmpty<dtype = 1>()
  one = SequenceInsert(none, x)
  two = SequenceInsert(one, y, first)
  both = SequenceConstruct(x, y, x)
  less = SequenceErase(both, last)
  least = SequenceErase(less)
  a = SequenceAt(two, first)
  b = SequenceAt(least, last)
  n = SequenceLength(two)
  ab = SequenceConstruct(a, b)
  z = ConcatFromSequence<axis = 0>(ab)
}
"""


def test_editing_is_compiled_differentiable_and_batched():
    f = function(EDIT)
    for run in (f, jax.jit(f)):
        z, n = run(X, -X)
        np.testing.assert_array_equal(z, np.concatenate([-X, X]))
        assert n == 2
    np.testing.assert_array_equal(jax.grad(lambda x: (f(x, -X)[0] ** 2).sum())(X), 2 * X)
    z, n = jax.vmap(f)(np.stack([X, 2 * X]), np.stack([-X, X]))
    np.testing.assert_array_equal(z[1], np.concatenate([X, 2 * X]))
    np.testing.assert_array_equal(n, [2, 2])


@pytest.mark.parametrize(
    ("split", "attributes", "parts"),
    [
        ("", "axis = 1", [1, 1, 1]),
        ("", "axis = -1, keepdims = 0", [None, None, None]),
        ("two", "axis = 1, keepdims = 0", [2, 1]),
        ("parts", "axis = 1", [0, 3]),
    ],
)
@pytest.mark.parametrize("opset", [11, 24])
def test_split_and_join(opset, split, attributes, parts):
    f = function(
        f"""g (float[2,3] x) => (seq(float) s) {{
          two = Constant<value = int64 {{2}}>()
          parts = Constant<value = int64[2] {{0, 3}}>()
          s = SplitToSequence<{attributes}>(x{", " + split if split else ""})
        }}""",
        opset,
    )
    for run in (f, jax.jit(f)):
        pieces = run(X)
        shapes = [(2,) if part is None else (2, part) for part in parts]
        assert [piece.shape for piece in pieces] == shapes
        join = np.stack if parts[0] is None else np.concatenate
        np.testing.assert_array_equal(join(pieces, axis=1), X)
    both = jax.vmap(f)(np.stack([X, -X]))
    np.testing.assert_array_equal(both[0][1], -pieces[0])
    slope = jax.grad(lambda x: sum((piece**2).sum() for piece in f(x)))(X)
    np.testing.assert_array_equal(slope, 2 * X)


def test_stack_of_a_sequence():
    f = function("""
      g (float[2,3] x) => (float[2,3,2] y) {
        s = SequenceConstruct(x, x)
        y = ConcatFromSequence<axis = -1, new_axis = 1>(s)
      }""")
    np.testing.assert_array_equal(f(X), np.stack([X, X], axis=-1))


MAP = """
g (seq(float[2,3]) s, seq(float) t, float x) => (seq(float) a, seq(float) b) {
  a, b = SequenceMap (s, t, x) <
    body = f (float[2,3] p, float q, float r) => (float[2,3] u, float v) {
    pq = Mul(p, q)
    u = Add(pq, r)
    v = Neg(q)
  }>
}
"""


def test_map_over_several_sequences():
    f = function(MAP)
    three = jnp.float32(3)
    for run in (f, jax.jit(f)):
        a, b = run([X, -X], [jnp.float32(2), jnp.float32(5)], three)
        np.testing.assert_array_equal(a[1], -5 * X + 3)
        np.testing.assert_array_equal(b, [-2, -5])
    a, _ = jax.vmap(f, (None, 0, None))([X, -X], [np.float32([2, 4]), np.float32([5, 6])], three)
    np.testing.assert_array_equal(a[1][1], -6 * X + 3)
    assert f([], [], three) == ([], [])
    with pytest.raises(jaxonnx.Error, match="cannot be mapped together"):
        f([X, X], [three], three)
    gradient = jax.grad(lambda x: sum(y.sum() for y in f([X, -X], [three, three], x)[0]))(three)
    assert gradient == 12


@pytest.mark.parametrize("opset", [15, 18, 28])
def test_optionals(opset):
    f = function(
        """
        g (float[2,3] x) => (float[2,3] y, bool has, bool lacks) {
          full = Optional(x)
          empty = Optional()
          y = OptionalGetElement(full)
          has = OptionalHasElement(full)
          lacks = OptionalHasElement(empty)
        }""",
        opset,
    )
    for run in (f, jax.jit(f)):
        y, has, lacks = run(X)
        np.testing.assert_array_equal(y, X)
        assert (bool(has), bool(lacks)) == (True, False)
    y, has, _ = jax.vmap(f)(np.stack([X, -X]))
    np.testing.assert_array_equal(y[1], -X)
    assert has.all()
    np.testing.assert_array_equal(jax.grad(lambda x: (f(x)[0] ** 2).sum())(X), 2 * X)


def test_the_condition_of_an_optional_is_known_while_tracing():
    f = function("""
      g (optional(float[2,3]) o, float[2,3] x) => (float[2,3] y) {
        has = OptionalHasElement(o)
        y = If (has) <
          then_branch = t () => (float[2,3] a) { a = OptionalGetElement(o) },
          else_branch = e () => (float[2,3] b) { b = Identity(x) }
        >
      }""")
    np.testing.assert_array_equal(jax.jit(f)(-X, X), -X)
    np.testing.assert_array_equal(jax.jit(f)(None, X), X)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("y = SequenceAt(s, two)", "position 2 is out of range"),
        ("t = SequenceErase(s, two) y = SequenceAt(t, two)", "position 2 is out of range"),
        ("t = SequenceInsert(s, x, three) y = SequenceAt(t, two)", "position 3 is out of range"),
        ("t = SequenceEmpty() y = ConcatFromSequence<axis = 0>(t)", "cannot be concatenated"),
        ("o = Optional() y = OptionalGetElement(o)", "empty"),
        ("t = SplitToSequence<axis = 1>(x, two2) y = SequenceAt(t, two)", "does not add up"),
    ],
)
def test_what_is_refused(node, message):
    f = function(
        f"""g (float[2,3] x) => (float[2,3] y) {{
          two = Constant<value_int = 2>()
          three = Constant<value_int = 3>()
          two2 = Constant<value_ints = [2, 2]>()
          s = SequenceConstruct(x, x)
          {node}
        }}""",
        18,
    )
    with pytest.raises(jaxonnx.Error, match=message):
        f(X)


def test_a_traced_position_is_refused():
    f = function("""
      g (float[2,3] x, int64 i) => (float[2,3] y) {
        s = SequenceConstruct(x, x)
        y = SequenceAt(s, i)
      }""")
    np.testing.assert_array_equal(f(X, jnp.array(1)), X)
    with pytest.raises(jaxonnx.Error, match="input 'i'"):
        jax.jit(f)(X, 1)
