"""Rounding that a file spells out passes gradients, as it did when the network was trained."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import pytest

import jaxonnx

WEIGHT = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
STEP = np.float32(0.1)
X = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
SPELLED = {
    "clipped behind": "d = Div(w, s) r = Round(d) c = Clip(r, low, high) v = Mul(c, s)",
    "clipped in front": "d = Div(w, s) c = Clip(d, low, high) r = Round(c) v = Mul(r, s)",
    "with a zero point": """d = Div(w, s) r = Round(d) a = Add(r, one) c = Clip(a, low, high)
      b = Sub(c, one) v = Mul(b, s)""",
    "with another name for the step": """d = Div(w, s) r = Round(d) c = Clip(r, low, high)
      v = Mul(c, s2)""",
    "as a difference that is detached": """d = Div(w, s) k = Clip(d, low, high) r = Round(k)
      e = Sub(r, k) f = Identity(e) c = Add(k, f) v = Mul(c, s)""",
}


def load(nodes, **tensors):
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]> g (float[n, 6] x) => (float[n, m] y) {{ {nodes} }}
    """)
    tensors = {"w": WEIGHT, "s": STEP, "s2": STEP, "low": -7, "high": 7, "one": 1} | tensors
    for name, value in tensors.items():
        if any(name in node.input for node in proto.graph.node):
            tensor = onnx.numpy_helper.from_array(np.asarray(value, np.float32), name)
            proto.graph.initializer.append(tensor)
    return jaxonnx.load(proto)


@pytest.mark.parametrize("name", SPELLED)
def test_weights_are_trained_through_it(name):
    model = load(f"{SPELLED[name]} y = MatMul(x, v)")
    assert {*model.params} == {"w"}
    steps = np.round(WEIGHT / STEP) + ("zero point" in name)
    value = (np.clip(steps, -7, 7) - ("zero point" in name)) * STEP
    np.testing.assert_allclose(model(X), X @ value, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda params: model.apply(params, X).sum())(model.params)["w"]
    straight = np.broadcast_to(X.sum(0)[:, None], WEIGHT.shape) * (np.abs(steps) < 7)
    inside = np.abs(steps) != 7  # there it is PyTorch's convention which side counts
    np.testing.assert_allclose(gradient[inside], straight[inside], rtol=1e-4, atol=1e-4)


def test_activations_pass_gradients_and_a_learned_step_is_trained():
    model = load(
        "h = MatMul(x, w) d = Div(h, p) r = Round(d) c = Clip(r, low, high) q = Mul(c, p) "
        "y = MatMul(q, w2)",
        p=np.float32([0.1, 0.2, 0.3, 0.4]),
        w2=WEIGHT[:4, :3],
    )
    gradients = jax.grad(lambda params: (model.apply(params, X) ** 2).sum())(model.params)
    assert np.abs(gradients["w"]).max() > 0


def test_other_rounding_has_its_own_derivative():
    model = load("h = MatMul(x, w) d = Div(h, s) r = Round(d) y = Mul(r, other)", other=2.0)
    gradients = jax.grad(lambda params: model.apply(params, X).sum())(model.params)
    assert not jnp.any(gradients["w"])
