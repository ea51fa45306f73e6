"""The curve of losses over learning rates."""

import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx import RateCurve, find_rate
from tests.support.tiny_networks import LABELS, examples, mlp


def test_losses_are_those_of_a_rising_rate():
    x, y = examples()
    curve = find_rate(mlp(), (x, y), least=1e-3, most=10.0, steps=30, batch_size=8, seed=3)
    count = len(curve.losses)
    np.testing.assert_allclose(curve.rates, np.geomspace(1e-3, 10, 30)[:count], rtol=1e-4)
    rule = optax.adam(lambda i: 1e-3 * 1e4 ** (i / 29))
    settings = {"loss": LABELS, "optimizer": rule, "batch_size": 8, "seed": 3, "max_steps": count}
    losses = jaxonnx.train(mlp(), (x, y), **settings).history.losses
    np.testing.assert_allclose(curve.losses, losses, rtol=1e-4)
    assert 1e-3 <= curve.suggestion < 1.0
    assert curve.averages[curve.rates.searchsorted(curve.suggestion)] < curve.averages[0] * 1.1


def test_the_suggestion_is_where_the_average_falls_fastest():
    rates = np.geomspace(1e-5, 1, 101)
    place = np.log10(rates)
    losses = 2 - np.tanh(3 * (place + 3)) + 5 * np.maximum(place + 1, 0) ** 2
    curve = RateCurve(rates, losses)
    # the average runs ten steps of 0.05 decades behind the losses
    assert -3.1 < np.log10(curve.suggestion) < -2.4
    first, *rows, last = str(curve).splitlines()
    assert first.split() == ["rate", "loss"]
    assert len(rows) == 16
    assert rows[0].count("#") > rows[11].count("#")
    assert last == f"suggestion: {curve.suggestion:.2g}, where the loss falls fastest"
    axes = curve.plot()
    assert axes.get_xscale() == "log"
    assert len(axes.get_lines()) == 3


def test_a_run_that_diverges_ends_early():
    x, y = examples()
    far = {"optimizer": "sgd", "least": 1.0, "most": 1e6, "batch_size": 8}
    curve = find_rate(mlp(), (x, y), steps=60, **far)
    assert 3 <= len(curve.losses) < 60
    assert np.isfinite(curve.losses).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"least": 1.0, "most": 0.1}, "most must be above least=1"),
        ({"steps": 2}, "steps must be an integer of at least 3"),
        ({"learning_rate": 0.1, "epochs": 2}, "does not take learning_rate, epochs"),
        ({"optimizer": optax.sgd(0.1)}, "optimizer must be 'adam', "),
    ],
)
def test_arguments_that_are_refused(settings, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        find_rate(mlp(), examples(), **settings)
