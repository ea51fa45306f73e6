"""The converted tensors of a model's calls change nothing that can be seen but the time."""

import os
import subprocess
import sys

import jax
import numpy as np
import onnx
import pytest

import jaxonnx
from jaxonnx import demo

NAMES = ("w", "d", "scale", "b", "mean", "var")
TEXT = """
<ir_version: 8, opset_import: ["": 15]>
g (float[2, 4, 6, 5] x, float[8, 4, 3, 2] w, float[8] d, float[8] scale, float[8] b, float[8] mean,
   float[8] var) => (float[2, 8, 4, 4] y) {
  c = Conv(x, w, d)
  n = BatchNormalization(c, scale, b, mean, var)
  y = Relu(n)
}
"""


def load():
    """Return a model whose tensors an input may replace, each."""
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for info in proto.graph.input[1:]:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        value = rng.uniform(0.1, 3, shape) if info.name == "var" else rng.normal(size=shape)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), info.name))
    return jaxonnx.load(proto)


def image(seed=2):
    return np.random.default_rng(seed).normal(size=(2, 4, 6, 5)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_an_input_may_replace_a_tensor(name):
    model, x = load(), image()
    named = {name: 2 * np.asarray({**model.params, **model.state}[name])}
    plain, y = model(x), model(x, **named)
    np.testing.assert_allclose(y, model.apply(model.params, x, **named), rtol=1e-5, atol=1e-5)
    assert np.abs(y - plain).max() > 1e-3


def test_a_model_with_new_values_compiles_nothing_anew():
    model, x = load(), image()
    y = model(x)
    (parts,) = model.program._plan.parts.values()
    compiled = parts.compiled.alone._cache_size()
    other = model.replace(
        params={name: 2 * value for name, value in model.params.items()},
        state={name: value + 1 for name, value in model.state.items()},
    )
    expected = other.apply(other.params, x)
    np.testing.assert_allclose(other(x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert parts.compiled.alone._cache_size() == compiled
    unsafe = model.replace(state={name: value * np.nan for name, value in model.state.items()})
    assert np.isnan(unsafe(x)).any()
    np.testing.assert_array_equal(model(x), y)


def test_what_is_saved_and_shown_stays():
    model = load()
    before = model.to_onnx().SerializeToString()
    tensors = {name: np.array(value) for name, value in {**model.params, **model.state}.items()}
    model(image())
    assert model.to_onnx().SerializeToString() == before
    for name, value in {**model.params, **model.state}.items():
        np.testing.assert_array_equal(value, tensors[name])


def test_a_first_call_may_be_traced():
    model, x = load(), image()
    traced = jax.jit(lambda x: model(x))(x)
    np.testing.assert_allclose(model(x), traced, rtol=1e-6, atol=1e-6)

    def total(params):
        return model.replace(params=params)(x).sum()

    assert np.abs(jax.grad(total)(model.params)["scale"]).max() > 0.1


def test_a_call_copies_only_weights_of_convolutions():
    model = load()
    model(image())
    tensors = {**model._call_form.params, **model._call_form.state}
    stored = {id(x) for x in jax.tree.leaves({**model.params, **model.state})}
    assert {name for name, value in tensors.items() if id(value) not in stored} == {"w"}
    assert tensors["w"].value.shape == (3, 2, 4, 8)


ON_A_MESH = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxonnx import demo

model = demo.model()
where = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec())
moved = model.replace(
    params=jax.device_put(model.params, where), state=jax.device_put(model.state, where)
)
x = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)
np.testing.assert_allclose(moved(x), model(x), rtol=1e-5, atol=1e-5)

# an array that is bound to another device stays there
other = jax.devices()[1]
bound = model.replace(
    params=jax.device_put(model.params, other), state=jax.device_put(model.state, other)
)
assert bound(x).devices() == {other}
"""


def test_weights_stay_on_their_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ON_A_MESH], check=True, env=os.environ | flags)


def test_predict_is_the_call():
    model, x = demo.model(), np.ones((5, 1, 8, 8), np.float32)
    np.testing.assert_allclose(model.predict(x), model.apply(model.params, x), rtol=1e-5, atol=1e-5)
