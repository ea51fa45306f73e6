"""A loss that nobody here has seen is one class: it has groups, labels, a second model, draws."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx import losses

LINEAR = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, -0.5, 0.25, 1, 0.5, 1}>
    { y = MatMul(x, w) }"""
X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
SETTINGS = {"optimizer": optax.sgd(0.1), "epochs": 3, "batch_size": 12, "progress": False}


def positive(outputs, targets):
    return (targets["sign"] > 0).astype(jnp.float32)


class Triples(losses.Loss):
    """Each first row of three nearer to the second than to the third, and all where they were."""

    name = "triples"
    group = 3
    metrics = (positive,)

    def __call__(self, outputs, targets):
        anchor, near, far = (outputs[i::3] for i in range(3))
        distance = ((anchor - near) ** 2).sum(1) - ((anchor - far) ** 2).sum(1)
        stay = ((outputs - targets["before"]) ** 2).sum(1)
        return jnp.repeat(targets["sign"][::3] * distance, 3) + stay

    def derive(self, model):
        return lambda inputs, values, what: np.sign(inputs[0][:, 0])

    def second(self, model):
        def add(batch):
            return {"sign": batch.targets, "before": model(*batch.inputs)}

        return add

    def draw(self, model):
        def scale(random, batch):
            return batch._replace(inputs=(np.float32(random.uniform(0.5, 1.5)) * batch.inputs[0],))

        return scale


losses.register("triples", Triples(), also_called="tripletmargin")


class Unfinished(losses.Loss):
    smooths = True


def test_what_a_loss_lacks_is_named():
    model = load()
    with pytest.raises(jaxonnx.UnsupportedError, match="Unfinished has no __call__"):
        jaxonnx.train(model, (X, X[:, :2]), loss=Unfinished(), **SETTINGS)
    with pytest.raises(jaxonnx.UnsupportedError, match=r"no with_label_smoothing"):
        jaxonnx.train(model, (X, X[:, :2]), loss=Unfinished(), label_smoothing=0.1, **SETTINGS)


def load():
    return jaxonnx.load(onnx.parser.parse_model(LINEAR))


def test_a_new_loss_is_trained_by_its_name():
    result = jaxonnx.train(load(), {"x": X}, loss="triples", validation={"x": X}, **SETTINGS)
    w = start = np.asarray(load().params["w"])
    expected = []
    for epoch in range(3):  # one batch each, whose triples may come in any order
        x = np.float32(np.random.default_rng([0, 0, epoch, 0]).uniform(0.5, 1.5)) * X

        def mean(w, x=x):
            targets = {"sign": np.sign(X[:, 0]), "before": X @ start}
            return Triples()(x @ w, targets).mean()

        value, gradient = jax.value_and_grad(mean)(jnp.asarray(w))
        expected.append(value)
        w = w - 0.1 * np.asarray(gradient)
    np.testing.assert_allclose(result.history.losses, expected, rtol=1e-4)
    np.testing.assert_allclose(result.model.params["w"], w, rtol=1e-4)
    assert result.history.epochs[-1]["validation_positive"] == pytest.approx((X[:, 0] > 0).mean())
    seen = jaxonnx.training.preview(load(), {"x": X}, loss="triples", **SETTINGS)
    assert seen.loss == pytest.approx(float(expected[0]), rel=1e-4)


def test_groups_of_a_new_loss_are_whole():
    with pytest.raises(jaxonnx.TrainingError, match=r"in groups of 3.*examples.*got 11"):
        jaxonnx.train(load(), {"x": X[:11]}, loss=Triples(), **SETTINGS)
    with pytest.raises(jaxonnx.TrainingError, match=r"in groups of 3.*batch_size.*got 8"):
        jaxonnx.train(load(), {"x": X}, loss=Triples(), **SETTINGS | {"batch_size": 8})


def test_a_new_loss_is_suggested():
    with pytest.raises(jaxonnx.TrainingError, match=r"try triples \(targets of the shape"):
        jaxonnx.train(load(), {"x": X}, loss="TripletMarginLoss", **SETTINGS)
    with pytest.raises(jaxonnx.TrainingError, match="must be a Loss"):
        losses.register("mean", jnp.mean)


def test_a_step_of_ones_own_gets_batches_that_are_drawn():
    step = jaxonnx.training.step(load(), "triples", optax.sgd(0.1))
    with pytest.raises(jaxonnx.TrainingError, match="the batch has no targets"):
        step.as_batch({"x": X})
