"""Losses of classes: scores of large vocabularies, which are summed in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxonnx import losses
from jaxonnx.losses import _labels, cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["causal_lm", "weighted", "sum"])
def test_large_scores_are_summed_in_parts(kind, smoothing, monkeypatch):
    random = np.random.default_rng(0)
    loss = {
        "causal_lm": losses.causal_lm(),
        "weighted": cross_entropy(weight=random.random(50), ignore_index=-100, axis=-1),
        "sum": cross_entropy(reduction="sum", axis=-1),
    }[kind]
    loss = losses.find(loss.with_label_smoothing(smoothing))
    scores = jnp.asarray(3 * random.standard_normal((3, 7, 50)), jnp.float32)
    labels = random.integers(0, 50, (3, 7))
    labels[:, 2] = -100 if kind != "sum" else 1
    weight = jnp.array([1.0, 0.0, 0.5])

    def mean(scores):
        total, count = loss.totals(scores, labels, weight)
        return total / count

    results = []
    for large in (1 << 26, 1):
        monkeypatch.setattr(_labels, "LARGE", large)
        monkeypatch.setattr(_labels, "PART", 4 * 50 * 5)  # of 21 rows 3 at a time
        results.append((jax.jit(mean)(scores), *jax.jit(jax.value_and_grad(mean))(scores)))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_gradients_take_the_place_of_large_scores(monkeypatch):
    monkeypatch.setattr(_labels, "LARGE", 1 << 20)
    monkeypatch.setattr(_labels, "PART", 1 << 16)

    def mean(x, w, labels):
        total, count = losses.causal_lm().totals(x @ w, labels, jnp.ones(2))
        return total / count

    shapes = [((2, 64, 16), jnp.float32), ((16, 8192), jnp.float32), ((2, 64), jnp.int32)]
    arrays = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    program = jax.jit(jax.value_and_grad(mean)).lower(*arrays).compile()
    scores = 2 * 64 * 8192 * 4
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * scores
