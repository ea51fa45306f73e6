"""Tensors of models that an exported function captures keep their names."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import demo
from tests.support.tiny_networks import mlp

NET = jaxonnx.load(mlp())
X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def tensors(proto):
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def run(proto, *arrays):
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def by_global_name(x):
    return NET.apply(NET.params, x) * 2


def make_closure(net):
    return lambda x: net.apply(net.params, x) * 2


FUNCTIONS = {
    "closure": make_closure(NET),
    "global name": by_global_name,
    "jit": jax.jit(by_global_name),
    "jit within": lambda x: jax.jit(make_closure(NET))(x),
    "vmap": jax.vmap(lambda x: by_global_name(x[None])[0]),
    "partial": partial(lambda net, x: net.function()(x) * 2, NET),
    "default": lambda x, net=NET: net.function()(x) * 2,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_weights_of_a_captured_model_have_their_names(kind):
    proto = jaxonnx.to_onnx(FUNCTIONS[kind], X)
    written = tensors(proto)
    assert {"w1", "b1", "w2", "b2"} <= {*written}
    for name, value in NET.params.items():
        np.testing.assert_array_equal(written[name].reshape(value.shape), value)
    np.testing.assert_allclose(run(proto, X)[0], NET(X) * 2, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_model_reads_its_weights_by_name():
    f = NET.function()
    proto = jaxonnx.to_onnx(jax.grad(lambda x: f(x).sum()), X)
    assert {"w1", "b1", "w2"} & {*tensors(proto)} >= {"w1", "b1"}
    np.testing.assert_allclose(
        run(proto, X)[0], jax.grad(lambda x: f(x).sum())(X), rtol=1e-4, atol=1e-5
    )


def test_constants_of_a_function_without_a_model_are_constants():
    table = jnp.asarray(X)
    (name,) = tensors(jaxonnx.to_onnx(lambda x: x @ table.T, X))
    assert name == "constant"


def test_models_of_the_same_names_stay_apart():
    other = NET.replace(params={n: v + 1 for n, v in NET.params.items()})
    proto = jaxonnx.to_onnx(lambda x: NET.function()(x) + other.function()(x), X)
    written = tensors(proto)
    np.testing.assert_array_equal(written["w1"], NET.params["w1"])
    np.testing.assert_array_equal(written["w1_2"], other.params["w1"])
    np.testing.assert_allclose(run(proto, X)[0], NET(X) + other(X), rtol=1e-5, atol=1e-6)


def test_names_of_a_convolutional_network():
    model, x = demo.model(), np.ones((2, 1, 8, 8), np.float32)
    proto = jaxonnx.to_onnx(model.function(), x)
    names = {"0.weight", "3.weight", "7.weight", "12.weight", "12.bias", "14.weight", "14.bias"}
    assert names <= {*tensors(proto)}
