"""Attention whose rows may see no key, as ten exporters write it, has finite, right gradients."""

import jax
import numpy as np
import onnx.parser
import pytest

import jaxonnx

LOWEST = np.finfo(np.float64).min
SPELLINGS = {
    "PyTorch, scaled_dot_product_attention": """
        m = Where(seen, zero, inf)  t = Add(s, m)  r = Softmax<axis=-1>(t)
        hidden = IsNaN(r)  p = Where(hidden, zero, r)""",
    "PyTorch, masked_fill": """
        t = Where(seen, s, inf)  r = Softmax<axis=-1>(t)  hidden = IsNaN(r)
        p = Where(hidden, zero, r)""",
    "transformers, eager": "m = Where(seen, zero, low)  t = Add(s, m)  p = Softmax<axis=-1>(t)",
    "transformers, GPT-2": "t = Where(seen, s, low)  p = Softmax<axis=-1>(t)",
    "transformers, BERT": """
        one_less = Sub(one, number)  m = Mul(one_less, low)  t = Add(s, m)
        p = Softmax<axis=-1>(t)""",
    "transformers, DeBERTa": """
        t = Where(seen, s, low)  r = Softmax<axis=-1>(t)  p = Where(seen, r, zero)""",
    "optimum, two masks whose sum overflows": """
        m = Where(seen, zero, low)  t = Add(s, m)  u = Add(t, m)  r = Softmax<axis=-1>(u)
        hidden = IsNaN(r)  p = Where(hidden, zero, r)""",
    "PyTorch, log_softmax": """
        t = Where(seen, s, inf)  l = LogSoftmax<axis=-1>(t)  hidden = IsNaN(l)
        r = Where(hidden, inf, l)  p = Exp(r)""",
    "Keras": """
        one_less = Sub(one, number)  m = Mul(one_less, billion)  t = Add(s, m)
        p = Softmax<axis=-1>(t)""",
    "JAX, nn.softmax": """
        t = Where(seen, s, inf)  top = ReduceMax<keepdims=1>(t, last)  none = IsInf(top)
        held = Where(none, zero, top)  d = Sub(t, held)  e = Exp(d)
        sum = ReduceSum<keepdims=1>(e, last)  total = Max(sum, tiny)  p = Div(e, total)""",
    "probabilities times the mask": "r = Softmax<axis=-1>(s)  p = Mul(r, number)",
    "ONNX, Attention": None,
}


def load(spelling):
    """The sum over all queries of attention of x to itself, with Q = x w, K = V = x."""
    body = "s = MatMul(q, k)" + f"{spelling}  y = MatMul(p, x)"
    if spelling is None:
        body = "h = Constant<value_ints=[1]>()  a = Unsqueeze(q, h)  b = Unsqueeze(x, h)"
        body += "  m = Unsqueeze(seen, h)  o = Attention<scale=1.0>(a, b, b, m)  y = Squeeze(o, h)"
    text = f"""
        <ir_version: 11, opset_import: ["": 23]>
        masked (double[n, t, 4] x, bool[n, t, t] seen) => (double[n, t, 4] y)
        <double[4, 4] w = {{{", ".join(map(str, np.random.default_rng(0).normal(size=16)))}}}> {{
          last = Constant<value_ints=[-1]>()
          number = Cast<to=11>(seen)
          q = MatMul(x, w)  k = Transpose<perm=[0, 2, 1]>(x)
          {body}
        }}"""
    proto = onnx.parser.parse_model(text)
    numbers = {"zero": 0, "one": 1, "inf": -np.inf, "low": LOWEST, "billion": -1e9, "tiny": 1e-30}
    for name, number in numbers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float64(number), name))
    return jaxonnx.load(proto)


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients_are_those_of_finite_differences(name):
    random = np.random.default_rng(1)
    x, direction = random.normal(size=(2, 3, 4)), random.normal(size=(4, 4))
    present = np.array([[False, False, True], [True, True, True]])  # padding at the left
    seen = np.tril(np.ones((3, 3), bool)) & present[:, None]
    with jax.enable_x64(True):
        model = load(SPELLINGS[name])

        @jax.jit
        def loss(w):
            return (model.apply({"w": w}, x, seen)[present] ** 2).sum()

        w = model.params["w"]
        found = jax.jit(jax.grad(loss))(w)
        near = (loss(w + 1e-5 * direction) - loss(w - 1e-5 * direction)) / 2e-5
        np.testing.assert_allclose((found * direction).sum(), near, rtol=1e-6)
        assert float(abs(near)) > 1e-3


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_a_row_of_minus_infinity_is_nan_without_a_gradient(operator):
    from jaxonnx.registry import lookup

    function = lookup("", operator, 20).function
    x = np.array([[-np.inf] * 3, [-np.inf, 1, 2]], np.float32)
    y, pull = jax.vjp(lambda x: function(x, axis=-1), x)
    assert np.isnan(y[0]).all()
    assert not np.isnan(y[1]).any()
    expected = jax.vjp(
        lambda x: getattr(jax.nn, {"Softmax": "softmax"}.get(operator, "log_softmax"))(x), x[1]
    )
    cotangent = np.array([[1, 2, 3], [0, 1, 4]], np.float32)
    (found,) = pull(cotangent)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1], expected[1](cotangent[1])[0], rtol=1e-6, atol=1e-7)
