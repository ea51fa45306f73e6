"""Recurrent layers: empty sequences, program size, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.lowering._recurrence import elementwise, transposed
from jaxonnx.registry import lookup

rnn, lstm = (lookup("", name, 22).function for name in ("RNN", "LSTM"))
rng = np.random.default_rng(0)
X = rng.normal(size=(5, 2, 3)).astype(np.float32)
W, R = (
    rng.normal(size=(1, 16, 3)).astype(np.float32),
    rng.normal(size=(1, 16, 4)).astype(np.float32),
)


def test_an_empty_sequence_keeps_the_initial_state():
    start = rng.normal(size=(1, 2, 4)).astype(np.float32)
    y, h, c = lstm(X, W, R, None, np.array([0, 5], np.int32), start, start)
    np.testing.assert_array_equal(y[:, 0, 0], 0)
    np.testing.assert_array_equal(h[0, 0], start[0, 0])
    np.testing.assert_array_equal(c[0, 0], start[0, 0])


def test_padding_has_no_gradient():
    def loss(x):
        return (lstm(x, W, R, None, np.array([2, 5], np.int32))[1] ** 2).sum()

    gradient = jax.grad(loss)(X)
    np.testing.assert_array_equal(gradient[2:, 0], 0)
    assert np.all(gradient[:2, 0] != 0)


def test_accelerators_project_the_input_of_all_steps_at_once():
    every = f"tensor<{X.shape[0] * X.shape[1]}x{W.shape[1]}xf32>"
    traced = jax.jit(lambda x: lstm(x, W, R)).trace(X)
    for platform, at_once in (("cuda", True), ("tpu", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") == 2
        assert (every in text) == at_once


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_steps_may_be_absent(direction):
    y, h, _ = lstm(X[:0], W, R, direction=direction)
    assert y.shape == (0, 1, 2, 4)
    np.testing.assert_array_equal(h, 0)
    gradient = jax.grad(lambda r: lstm(X[:0], W, r, direction=direction)[0].sum())(R)
    np.testing.assert_array_equal(gradient, 0)


def test_a_gradient_multiplies_for_the_weights_once():
    """No loop carries a gradient of a weight, and the program has five products."""
    text = jax.jit(jax.grad(lambda w, r: lstm(X, w, r)[1].sum(), (0, 1))).lower(W, R).as_text()
    assert text.count("stablehlo.dot_general") == 5
    loops = re.findall(r"stablehlo\.while.*", text)
    assert len(loops) == 2
    carried = re.findall(r"tensor<([0-9x]+)xf32>", " ".join(loops))
    constant = sorted(x for x in carried if sorted(x.split("x")) in (["16", "3"], ["16", "4"]))
    assert constant == ["16x4", "3x16", "4x16"]


@pytest.mark.parametrize("hidden", [3, 5, 8])
def test_transposed(hidden):
    w = rng.normal(size=(hidden, 2))
    np.testing.assert_array_equal(transposed(w), w.T)


@pytest.mark.deep
def test_a_function_element_by_element_has_derivatives_of_all_orders():
    check_grads(lambda x, y: elementwise(lambda x, y: jnp.tanh(x) * y * x, x, y), (0.3, 0.7), 3)


def test_refusals():
    with pytest.raises(NodeError, match="direction"):
        lstm(X, W, R, direction="sideways")
    with pytest.raises(NodeError, match="2 sets of weights"):
        lstm(X, W, R, direction="bidirectional")
    with pytest.raises(NodeError, match="three axes"):
        lstm(X, W[..., None], R)
    with pytest.raises(NodeError, match="3 activations"):
        lstm(X, W, R, activations=["Tanh"])
    with pytest.raises(NodeError, match="unknown activation"):
        rnn(X, W, R, activations=["Gelu"])
    with pytest.raises(NodeError, match="hidden_size"):
        lstm(X, W, R, hidden_size=5)
    for clip in (-1.0, -np.inf, np.nan):  # which onnxruntime refuses, for GRU and LSTM
        with pytest.raises(NodeError, match="no number lies between"):
            lstm(X, W, R, clip=clip)
