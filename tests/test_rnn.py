"""Recurrent layers: empty sequences, program size, refusals."""

import jax
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
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


def test_steps_may_be_absent():
    y, h, _ = lstm(X[:0], W, R)
    assert y.shape == (0, 1, 2, 4)
    np.testing.assert_array_equal(h, 0)


def test_refusals():
    with pytest.raises(NodeError, match="direction"):
        lstm(X, W, R, direction="sideways")
    with pytest.raises(NodeError, match="2 sets of weights"):
        lstm(X, W, R, direction="bidirectional")
    with pytest.raises(NodeError, match="3 activations"):
        lstm(X, W, R, activations=["Tanh"])
    with pytest.raises(NodeError, match="unknown activation"):
        rnn(X, W, R, activations=["Gelu"])
    with pytest.raises(NodeError, match="hidden_size"):
        lstm(X, W, R, hidden_size=5)
