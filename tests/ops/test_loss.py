"""Losses over labels at awkward points; values and gradients are those of PyTorch 2.13."""

import jax
import numpy as np
import pytest

from jaxonnx.errors import NodeError
from tests.support.gradient_points import operator

inf = np.inf
SCORES = np.array([[1.0, 2.0, -inf], [0.0, 0.0, 0.0]], np.float32)
LABELS = np.array([1, 2])


def loss(scores, labels, **attributes):
    return operator("SoftmaxCrossEntropyLoss")(scores, labels, **attributes)[0]


def test_masked_classes():
    gradient = jax.grad(loss)(SCORES, LABELS)
    expected = [[0.1344707, -0.1344707, 0], [0.1666667, 0.1666667, -0.3333333]]
    np.testing.assert_allclose(loss(SCORES, LABELS), 0.7059370, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_ignored_labels_have_no_gradient():
    labels = np.array([1, -100])
    value, gradient = jax.value_and_grad(loss)(SCORES, labels, ignore_index=-100)
    np.testing.assert_allclose(value, 0.3132617, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0.2689414, -0.2689414, 0], [0, 0, 0]], rtol=1e-5)


def test_labels_out_of_range():
    with pytest.raises(NodeError, match=r"outside \[0, 3\)"):
        loss(SCORES, np.array([1, 3]))
    assert np.isnan(jax.jit(loss)(SCORES, np.array([1, -1])))
    with pytest.raises(NodeError, match=r"reduction must be .*got 'max'"):
        loss(SCORES, LABELS, reduction="max")
