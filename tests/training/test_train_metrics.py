"""Metrics of a run against scikit-learn, over batches whose fill does not count."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import jaxonnx
from jaxonnx.training import Batch
from jaxonnx.training._objective import find_objective
from tests.support.lazy_cases import Module
from tests.support.sources import make_source
from tests.support.tiny_networks import text

oracle = Module("sklearn.metrics")
CLASSES = 4
LABELS = "softmax_cross_entropy_with_integer_labels"
NAMES = ("accuracy", "precision", "recall", "f1")
MACRO = {"average": "macro", "zero_division": 0}


def network(*endings, shape=("n", CLASSES)):
    """Parameters that give the outputs: x + w, through each ending."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Add", ["x", "w"], ["logits"])]
    nodes += [helper.make_node(e, ["logits"], [f"y{i}"]) for i, e in enumerate(endings)]
    outputs = [f"y{i}" for i in range(len(endings))]
    graph = helper.make_graph(
        nodes,
        "net",
        [info("x", TensorProto.FLOAT, shape)],
        [info(name, TensorProto.FLOAT, shape) for name in outputs or ["logits"]],
        [helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return jaxonnx.load(model, trainable="w")


def measurer(loss, metrics):
    """A function that gives the row of an epoch in which the model has some outputs."""
    goal = find_objective(network(), loss, metrics)
    add = jax.jit(goal.add)

    def measured(outputs, targets, size=8):
        batches = make_source((outputs, targets), network().inputs, size, 0)
        sums = None
        for batch in batches.batches(0):
            sums = goal.start(batch.inputs[0], batch) if sums is None else sums
            sums = add(sums, batch.inputs[0], batch)
        return goal.row(sums)

    return measured


@pytest.fixture(scope="module")
def classes():
    return measurer(LABELS, [*NAMES, "top_2", "top_3"])


@pytest.fixture(scope="module")
def yes_or_no():
    return measurer("sigmoid_binary_cross_entropy", NAMES)


@pytest.fixture(scope="module")
def numbers():
    return measurer("squared_error", ["mae", "mse", "r2"])


def draws(shape, values):
    return st.lists(values, min_size=prod(shape), max_size=prod(shape)).map(
        lambda drawn: np.array(drawn).reshape(shape)
    )


@pytest.mark.deep
@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    scores=draws((19, CLASSES), st.integers(-999, 999)),
    labels=draws((19,), st.integers(0, CLASSES - 1)),
)
def test_classes(classes, scores, labels):
    # no ties, which scikit-learn breaks in its own way
    scores = (scores + np.linspace(0, 0.5, CLASSES)).astype(np.float32)
    found = classes(scores, labels)
    chosen = scores.argmax(1)
    expected = {"accuracy": oracle.accuracy_score(labels, chosen)}
    for name in NAMES[1:]:
        expected[name] = getattr(oracle, f"{name}_score")(labels, chosen, **MACRO)
    for k in (2, 3):
        expected[f"top_{k}"] = oracle.top_k_accuracy_score(
            labels, scores, k=k, labels=range(CLASSES)
        )
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"validation_{name}"], value, rtol=1e-5, err_msg=name)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    outputs=draws((19, 3), st.integers(-9, 9)),
    targets=draws((19, 3), st.booleans()),
)
def test_yes_or_no(yes_or_no, outputs, targets):
    found = yes_or_no(outputs.astype(np.float32), targets.astype(np.float32))
    chosen = outputs > 0
    np.testing.assert_allclose(found["validation_accuracy"], (chosen == targets).mean(), rtol=1e-5)
    for name in NAMES[1:]:
        value = getattr(oracle, f"{name}_score")(targets, chosen, **MACRO)
        np.testing.assert_allclose(found[f"validation_{name}"], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(21,), (21, 1)])
def test_the_binary_case(shape):
    random = np.random.default_rng(0)
    goal = find_objective(network("Sigmoid"), "sigmoid_binary_cross_entropy", NAMES)
    targets, chosen = random.integers(0, 2, (2, *shape))
    probabilities = np.where(chosen, 0.7, 0.2).astype(np.float32)
    inputs = [replace(network().inputs[0], shape=("n", *shape[1:]))]
    batches = make_source((probabilities, targets), inputs, 8, 0)
    sums = None
    for batch in batches.batches(0):
        values = batch.inputs[0], jnp.log(batch.inputs[0])  # the output, and its logits
        sums = goal.start(values, batch) if sums is None else sums
        sums = goal.add(sums, values, batch)
    found = goal.row(sums)
    for name in NAMES:
        value = getattr(oracle, f"{name}_score")(targets.ravel(), chosen.ravel())
        np.testing.assert_allclose(found[f"validation_{name}"], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(21, 1), (6, 1, 2, 3)])
@pytest.mark.parametrize("loss", [None, lambda y, t: jnp.square(y[:, 0] - t).mean()])
def test_one_score_is_no_class(shape, loss):
    """Labels without its axis say yes or no, also beside a loss of the user's own."""
    random = np.random.default_rng(0)
    labels, chosen = random.integers(0, 2, (2, shape[0], *shape[2:]))
    x = np.where(chosen, 0.7, -0.2).astype(np.float32).reshape(shape)
    model = network("Sigmoid", shape=("n", *shape[1:]))
    metrics = [*NAMES, "confusion_matrix", "roc_auc"]
    found = jaxonnx.evaluate(model, (x, labels), metrics=metrics, loss=loss, batch_size=8)
    labels, chosen = labels.ravel(), chosen.ravel()
    for name in NAMES:
        value = getattr(oracle, f"{name}_score")(labels, chosen)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert found["roc_auc"] == pytest.approx(oracle.roc_auc_score(labels, chosen))
    counts = oracle.confusion_matrix(labels, chosen)
    np.testing.assert_array_equal(found["confusion_matrix"].counts, counts)


def own(logits, labels):
    """A loss without a name, which ignores labels below zero."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return (losses * (labels >= 0)).reshape(len(labels), -1).mean(1)


def test_labels_beside_a_loss_without_a_name():
    """Floats are labels, the fill of short texts is none, and others are refused."""
    random = np.random.default_rng(1)
    x, labels = random.normal(size=(9, CLASSES)).astype(np.float32), random.integers(0, CLASSES, 9)
    found = jaxonnx.evaluate(network(), (x, labels * 1.0), metrics="confusion_matrix")
    counts = oracle.confusion_matrix(labels, x.argmax(1), labels=range(CLASSES))
    np.testing.assert_array_equal(found["confusion_matrix"].counts, counts)
    model = jaxonnx.load(text())
    rows = [random.integers(0, 7, count) for count in (6, 2, 4)]
    words = [np.asarray(model(row[None], np.ones_like(row[None])))[0].argmax(-1) for row in rows]
    data = {"input_ids": rows, "labels": [[*word[1:], (word[0] + 1) % 7] for word in words]}
    for loss in (None, own):
        found = jaxonnx.evaluate(model, data, metrics="accuracy", loss=loss, batch_size=2)
        right = [np.equal(a, b) for a, b in zip(words, data["labels"], strict=True)]
        np.testing.assert_allclose(found["accuracy"], np.concatenate(right).mean(), rtol=1e-5)
    with pytest.raises(
        jaxonnx.TrainingError, match=r"outside of 0 ... 3, the first is 4 .*subtract"
    ):
        jaxonnx.evaluate(network(), (x, labels + 1), metrics="accuracy", loss=own)
    with pytest.raises(
        jaxonnx.TrainingError, match=r"labels outside of 0 ... 3, the first is 0\.5"
    ):
        jaxonnx.evaluate(network(), (x, labels * 0 + 0.5), metrics="f1")
    one, yes = network("Sigmoid", shape=("n", 1)), np.array([[1], [2]])
    with pytest.raises(jaxonnx.TrainingError, match="targets like 2, and the metric 'f1' takes 0"):
        jaxonnx.evaluate(one, (x[:2, :1], yes), metrics="f1")
    with pytest.raises(jaxonnx.TrainingError, match=r"sigmoid_binary.* of shape \(2, 1\)"):
        jaxonnx.evaluate(one, (x[:2, :1], yes[:, 0]), loss=LABELS)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    outputs=draws((19, 2), st.floats(-10, 10, width=32)),
    targets=draws((19, 2), st.floats(-10, 10, width=16)),
    offset=st.sampled_from([0, 1000]),
)
def test_numbers(numbers, outputs, targets, offset):
    """An offset that would cost all digits of a difference of sums of squares."""
    targets[0] += 1.0  # not constant
    outputs, targets = ((x + offset).astype(np.float32) for x in (outputs, targets))
    found = numbers(outputs, targets)
    assert found["validation_mae"] == pytest.approx(
        oracle.mean_absolute_error(targets, outputs), rel=1e-4
    )
    assert found["validation_mse"] == pytest.approx(
        oracle.mean_squared_error(targets, outputs), rel=1e-4
    )
    assert found["validation_r2"] == pytest.approx(oracle.r2_score(targets, outputs), rel=1e-3)


def test_fill_does_not_count():
    goal = find_objective(network(), LABELS, None)
    scores = np.eye(CLASSES, dtype=np.float32)[[0, 1, 1, 2]]
    labels = np.array([0, 1, 2, 3])
    batch = Batch((scores,), labels, np.float32([1, 1, 1, 0]))
    sums = goal.add(goal.start(scores, batch), scores, batch)
    assert goal.row(sums)["validation_accuracy"] == pytest.approx(2 / 3)


def test_labels_that_the_loss_ignores_do_not_count():
    random = np.random.default_rng(0)
    loss = jaxonnx.losses.cross_entropy(ignore_index=-1)
    scores = random.normal(size=(10, CLASSES, 3)).astype(np.float32)
    labels = random.integers(-1, CLASSES, (10, 3))
    found = measurer(loss, ["accuracy", "f1"])(scores, labels)
    kept = labels >= 0
    chosen = scores.argmax(1)[kept]
    assert found["validation_accuracy"] == pytest.approx((chosen == labels[kept]).mean())
    value = oracle.f1_score(labels[kept], chosen, average="macro")
    assert found["validation_f1"] == pytest.approx(value)
    log_prob = jax.nn.log_softmax(scores, 1)
    picked = np.take_along_axis(log_prob, np.where(kept, labels, 0)[:, None], 1)[:, 0]
    assert found["validation_loss"] == pytest.approx(float(-picked[kept].mean()), rel=1e-5)


@pytest.mark.parametrize("loss", [LABELS, jaxonnx.losses.cross_entropy(axis=-1), None])
def test_narrow_labels_are_all_counted(loss):
    """geti PR 3264, with 200 classes: in uint8 a label of -100, which does not count, is 156."""
    scores = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    labels = np.where(np.arange(300) % 2, scores.argmax(1), 156)
    model = network(shape=("n", 200))
    names = ["accuracy", "top_5", "f1"]
    row = jaxonnx.evaluate(model, (scores, labels.astype(np.uint8)), loss=loss, metrics=names)
    assert row["accuracy"] == pytest.approx((scores.argmax(1) == labels).mean())
    value = oracle.f1_score(labels, scores.argmax(1), average="macro")
    assert row["f1"] == pytest.approx(value)
    assert row == jaxonnx.evaluate(model, (scores, labels), loss=loss, metrics=names)


def test_functions():
    def error(outputs, targets):
        return jnp.abs(outputs - targets).mean(1)

    def largest(outputs, targets):
        return outputs.max()

    measured = measurer("squared_error", [error, largest])
    outputs = np.arange(36, dtype=np.float32).reshape(9, 4)
    found = measured(outputs, outputs * 0, size=4)
    assert found["validation_error"] == pytest.approx(outputs.mean())
    assert np.isnan(found["validation_largest"])  # of a batch with fill, which `train` drops
    found = measured(outputs, outputs * 0, size=9)
    assert found["validation_largest"] == 35


def test_one_hot_targets_are_classes():
    measured = measurer("softmax_cross_entropy", "accuracy")
    scores = np.eye(CLASSES, dtype=np.float32)[[0, 1, 1]]
    found = measured(scores, np.eye(CLASSES, dtype=np.float32)[[0, 1, 2]])
    assert found["validation_accuracy"] == pytest.approx(2 / 3)


X = np.zeros((4, CLASSES), np.float32)
Y = np.zeros(4, np.int64)
BAD = {
    "unknown": (LABELS, Y, "acuracy", "no metric 'acuracy'; there are accuracy"),
    "number": (LABELS, Y, 5, "no metric 5; there are"),
    "list": (LABELS, Y, [["f1"]], r"no metric \['f1'\]; there are"),
    "no name": (LABELS, Y, lambda o, t: 0.0, "has no name"),
    "twice": (LABELS, Y, ["f1", "f1"], "two metrics 'f1'"),
    "too many": (LABELS, Y, "top_5", r"as many classes.*\(32, 4\)"),
    "no labels": ("squared_error", X, "top_2", "as many classes"),
    "shape": (LABELS, Y, "mae", "targets of the shape"),
    "unknown meaning": (lambda o, t: (o - t).sum(1), X, "f1", "threshold of a positive output"),
    "shape of a function": (LABELS, Y, jnp.subtract, "32 examples"),
    "output": (LABELS, Y, {"z": "f1"}, "keys must be outputs of the model, which are 'logits'"),
    "no validation": (LABELS, Y, "f1", "pass validation="),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    loss, targets, metrics, message = BAD[case]
    validation = None if case == "no validation" else (X, targets)
    if case == "shape of a function":

        def metrics(outputs, targets):
            return outputs[:2]

    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.train(
            network(),
            (X, targets),
            loss=loss,
            optimizer=optax.sgd(0.1),
            validation=validation,
            metrics=metrics,
        )


def test_overlaps_of_segmentations():
    """Pixels of images (n, classes, height, width) against scikit-learn's, all pixels as a list."""
    random = np.random.default_rng(0)
    x = random.normal(size=(11, CLASSES, 3, 5)).astype(np.float32)
    labels = random.integers(0, CLASSES, (11, 3, 5))
    metrics = ["iou", "dice"]
    found = jaxonnx.evaluate(
        network(shape=("n", CLASSES, 3, 5)), (x, labels), metrics=metrics, batch_size=4
    )
    pixels = labels.reshape(-1), x.argmax(1).reshape(-1)
    np.testing.assert_allclose(found["iou"], oracle.jaccard_score(*pixels, **MACRO), rtol=1e-6)
    np.testing.assert_allclose(found["dice"], oracle.f1_score(*pixels, **MACRO), rtol=1e-6)
    one = network("Sigmoid", shape=("n", 1, 3, 5))  # a mask of one thing
    x, mask = x[:, :1], labels[:, None] % 2
    found = jaxonnx.evaluate(one, (x, mask.astype(np.float32)), metrics=metrics, batch_size=4)
    pixels = mask.reshape(-1), x.reshape(-1) > 0
    np.testing.assert_allclose(found["iou"], oracle.jaccard_score(*pixels), rtol=1e-6)


def test_perplexity():
    """As exp of scikit-learn's log loss; and of next tokens, without padding."""
    random = np.random.default_rng(0)
    x = random.normal(size=(11, CLASSES)).astype(np.float32)
    labels = random.integers(0, CLASSES, 11)
    shares = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    want = np.exp(oracle.log_loss(labels, shares, labels=range(CLASSES)))
    for model in (network(), network("Softmax"), network("LogSoftmax")):
        found = jaxonnx.evaluate(model, (x, labels), metrics="perplexity", loss=LABELS)
        np.testing.assert_allclose(found["perplexity"], want, rtol=1e-5)
    model, own = jaxonnx.load(text()), []
    rows = [random.integers(0, 7, count) for count in (6, 2, 4, 6, 3)]
    for row in rows:
        logits = np.asarray(model(row[None], np.ones_like(row[None])), np.float64)[0]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own += [logs[t - 1, row[t]] for t in range(1, len(row))]
    settings = {"metrics": "perplexity", "loss": "causal_lm", "batch_size": 2}
    found = jaxonnx.evaluate(model, {"input_ids": rows}, **settings)
    np.testing.assert_allclose(found["perplexity"], np.exp(-np.mean(own)), rtol=1e-4)
    loss = "sigmoid_binary_cross_entropy"
    with pytest.raises(jaxonnx.TrainingError, match="'perplexity' is for class labels"):
        jaxonnx.evaluate(network(), (x, x), metrics="perplexity", loss=loss)
