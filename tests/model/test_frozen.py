"""A network as a part of another JAX program: its weights are constants, its inputs JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import onnxruntime
import pytest
from jax.experimental import jet

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA

X = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)


def run(proto, x):
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def test_a_network_without_parameters_is_closed_over():
    proto = demo.mlp().to_onnx()
    frozen = jaxonnx.load(proto, trainable=[])
    assert frozen.params == {}
    expected = run(proto, X)
    f, bound = frozen.function(), demo.mlp().function()
    calls = [f, jax.jit(f), jax.jit(bound), lambda x: frozen.apply({}, x)]
    calls += [jax.vmap(lambda x: f(x[None])[0]), lambda x: bound(x=x)]
    for call in calls:
        np.testing.assert_allclose(call(X), expected, rtol=1e-5, atol=1e-5)
    weights = {"x": X * 2}
    gradient = jax.grad(lambda w: f(w["x"])[0, 0])(weights)["x"]
    step = np.zeros_like(X)
    step[0, 0, 3, 3] = 1e-2
    difference = (f(X * 2 + step) - f(X * 2 - step))[0, 0] / 2e-2
    np.testing.assert_allclose(gradient[0, 0, 3, 3], difference, rtol=1e-2, atol=1e-4)


def test_state_of_a_frozen_network_stays():
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    x = np.load(DATA / "lenet_bn.legacy.npz")["x"]
    np.testing.assert_allclose(
        jax.jit(model.function())(x), run(model.to_onnx(), x), rtol=1e-4, atol=1e-4
    )


KINDS = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n] x, int32[n] i) => (float[n] y) { f = Cast<to = 1>(i) y = Div(x, f) }
"""


@pytest.mark.parametrize("dtypes", [("f8", "i4"), ("f4", "i8"), ("f8", "i8")])
def test_arrays_of_numpy_are_taken_alike_with_and_without_jit(dtypes):
    model = jaxonnx.load(onnx.parser.parse_model(KINDS))
    x, i = np.array([1, 2, 3], dtypes[0]), np.array([3, 2, 1], dtypes[1])
    for _ in range(2):
        for call in (model, jax.jit(model), lambda *a: model.apply({}, *a)):
            y = call(x, i)
            assert y.dtype == np.float32
            np.testing.assert_allclose(y, np.float32([1 / 3, 1, 3]), rtol=1e-7)
    fixed = model.with_fixed_inputs({"i": i})
    np.testing.assert_allclose(fixed(x), np.float32([1 / 3, 1, 3]), rtol=1e-7)
    with pytest.raises(jaxonnx.InputError, match=r"input i: int32\[n\] was given int64"):
        model(x, np.array([1, 2, 2**40]))
    with pytest.raises(jaxonnx.InputError, match="casts nothing silently"):
        model(x.astype(np.float16), i)
    with jax.enable_x64(True):
        for call in (model, jax.jit(model)):
            with pytest.raises(jaxonnx.InputError, match="casts nothing silently"):
                call(x, i)


SURROGATE = """
<ir_version: 9, opset_import: ["": 18]>
g (float[n,3] x) => (float[n,3] y)
<float[3] w = {1, 2, 3}, float c = {1.41421}, float one = {1}> {
  a = Div(x, w)
  b = Tanh(a)
  s = Div(b, c)
  e = Erf(s)
  q = Add(e, w)
  y = Div(one, q)
}
"""


def test_jet_of_a_network_with_divisions():
    model = jaxonnx.load(onnx.parser.parse_model(SURROGATE))
    x, v = X.ravel()[:6].reshape(2, 3), np.ones((2, 3), np.float32)
    for f in (model.function(), model, jax.jit(model.function())):
        _, (first, second) = jet.jet(f, (x,), ((v, 0 * v),))

        def along(t, f=f):
            return f(x + t * v)

        once = jax.jit(jax.jacfwd(along))
        np.testing.assert_allclose(first, once(0.0), rtol=1e-5)
        np.testing.assert_allclose(second, jax.jit(jax.jacfwd(once))(0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("Softplus(x)", r"jax\.experimental\.jet does not take functions with a custom derivative"),
        ("LayerNormalization(x, w)", r"jax\.experimental\.jet does not take functions"),
        ("Tan(x)", r"jet has no rule for JAX's primitive 'tan'.*nested jax\.jvp"),
    ],
)
def test_what_jet_does_not_take_is_named(node, words):
    model = jaxonnx.load(
        onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 18]>
        g (float[n,3] x) => (float[n,3] y) <float[3] w = {{1, 2, 3}}> {{
          y = {node}
        }}""")
    )
    x = np.ones((2, 3), np.float32)
    for call in (model.function(), model):
        with pytest.raises(jaxonnx.NodeError, match=words):
            jet.jet(call, (x,), ((x, 0 * x),))
    second = jax.jvp(lambda x: jax.jvp(model.function(), (x,), (x,))[1], (x,), (x,))[1]
    assert jnp.isfinite(second).all()
