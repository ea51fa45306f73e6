"""Weights of examples and classes, and augmentation: what they do to losses and metrics.

The values of metrics and of balanced weights are those of scikit-learn.
"""

import jax
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx.losses import cross_entropy
from jaxonnx.training import evaluate
from jaxonnx.training._step.gradient import GradientStep
from tests.support.lazy_cases import Module
from tests.support.tiny_networks import LABELS, examples, mlp, same, train, weights

X, Y = examples(21)
sklearn, class_weight = Module("sklearn.metrics"), Module("sklearn.utils.class_weight")
W = np.random.default_rng(2).uniform(0.1, 3, 21).astype(np.float32)
STILL = {"optimizer": optax.sgd(0.0)}
NAMES = ["ant", "bee", "cat", "dog"]


@pytest.fixture(scope="module")
def scores():
    return np.asarray(jaxonnx.load(mlp())(X))


@pytest.fixture(scope="module")
def weighted():
    """The losses of two epochs of three batches, of which the last is short."""
    return train(data=(X, Y, W), epochs=2).history.losses


def test_metrics_are_weighted_over_a_short_batch(scores):
    wanted = ["accuracy", "f1", "precision", "recall", "top_2", "roc_auc", "per_class"]
    found = evaluate(mlp(), (X, Y, W), loss=LABELS, metrics=wanted, batch_size=8)
    choice, shares = scores.argmax(1), np.array(jax.nn.softmax(scores.astype(np.float64)))
    own = {"average": "macro", "sample_weight": W, "zero_division": 0}
    areas = [sklearn.roc_auc_score(c == Y, shares[:, c], sample_weight=W) for c in range(4)]
    expected = {
        "loss": sklearn.log_loss(Y, shares, sample_weight=W),
        "accuracy": sklearn.accuracy_score(Y, choice, sample_weight=W),
        "f1": sklearn.f1_score(Y, choice, **own),
        "precision": sklearn.precision_score(Y, choice, **own),
        "recall": sklearn.recall_score(Y, choice, **own),
        "top_2": sklearn.top_k_accuracy_score(Y, scores, k=2, sample_weight=W),
        "roc_auc": np.mean(areas),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    support = np.bincount(Y, W)
    np.testing.assert_allclose(found["per_class"].support, support, rtol=1e-6)
    small = evaluate(mlp(), (X, Y, W / 100), metrics=["per_class", "roc_auc"], batch_size=8)
    np.testing.assert_allclose(small["per_class"].recall, found["per_class"].recall, rtol=1e-5)
    assert small["roc_auc"] == pytest.approx(found["roc_auc"], rel=1e-5)


def test_errors_of_numbers_are_weighted(scores):
    targets = np.eye(4, dtype=np.float32)[Y]
    found = evaluate(mlp(), (X, targets, W), metrics=["mse", "mae", "r2"], batch_size=8)
    for name, function in (
        ("mse", sklearn.mean_squared_error),
        ("mae", sklearn.mean_absolute_error),
        ("r2", sklearn.r2_score),
    ):
        assert found[name] == pytest.approx(function(targets, scores, sample_weight=W), rel=1e-5)


def test_an_example_of_weight_two_is_there_twice():
    times = np.arange(21) % 3
    rows = np.repeat(np.arange(21), times)
    once = train(data=(X, Y, times), epochs=3, batch_size=21)
    twice = train(data=(X[rows], Y[rows]), epochs=3, batch_size=len(rows))
    for name, value in weights(once).items():
        np.testing.assert_allclose(value, weights(twice)[name], atol=2e-6)
    np.testing.assert_allclose(once.history.losses, twice.history.losses, rtol=1e-5)


@pytest.mark.deep
def test_forms(weighted, tmp_path):
    np.savez(tmp_path / "data.npz", x=X, label=Y, weight=W)
    for data in ({"x": X, "y": Y, "weight": W}, tmp_path / "data.npz"):
        assert train(data=data, epochs=2).history.losses == weighted
    in_order = [(X[i : i + 8], Y[i : i + 8], W[i : i + 8]) for i in (0, 8, 16)]
    losses = train(data=in_order, **STILL).history.losses
    each = optax.losses.softmax_cross_entropy_with_integer_labels(jaxonnx.load(mlp())(X), Y)
    parts = [np.average(each[i : i + 8], weights=W[i : i + 8]) for i in (0, 8, 16)]
    np.testing.assert_allclose(losses, parts, rtol=1e-5)
    step = jaxonnx.training.step(mlp(), LABELS, optax.sgd(0.1))
    _, (value, _) = step.update(step.init(), in_order[0])
    assert value == pytest.approx(parts[0], rel=1e-5)


def test_a_target_may_be_called_weight():
    alone = train(data={"x": X, "weight": Y}).history.losses
    assert alone == train(data=(X, Y)).history.losses


@pytest.mark.deep
def test_weights_of_classes():
    once = {"epochs": 1, "validation": 0.2}
    by_hand = train(data=(X, Y), loss=cross_entropy(weight=[1, 2, 1, 0.5]), **once)
    for loss in ("SoftmaxCrossEntropyLoss", jaxonnx.losses.cross_entropy(), None):
        named = {} if loss is None else {"loss": loss}
        run = train(data=(X, Y), class_weights={1: 2.0, "3": 0.5}, **named, **once)
        np.testing.assert_allclose(run.history.losses, by_hand.history.losses, rtol=1e-5)
        rows = run.history.epochs[0], by_hand.history.epochs[0]
        assert rows[0]["validation_loss"] == pytest.approx(rows[1]["validation_loss"], rel=1e-5)
        assert rows[0]["validation_accuracy"] == rows[1]["validation_accuracy"]
    one_hot = np.eye(4, dtype=np.float32)[Y], "softmax_cross_entropy"
    run = train(data=(X, one_hot[0]), loss=one_hot[1], class_weights={1: 2, 3: 0.5}, **once)
    np.testing.assert_allclose(run.history.losses, by_hand.history.losses, rtol=1e-5)


@pytest.mark.deep
def test_balanced_classes_and_their_names():
    labels = np.r_[Y, np.zeros(9, int)]
    data = np.r_[X, X[:9]], labels, np.r_[W, W[:9]]
    wanted = class_weight.compute_class_weight("balanced", classes=np.arange(4), y=labels)
    balanced = train(data=data, class_weights="balanced").history.losses
    np.testing.assert_allclose(
        train(data=data, class_weights=dict(enumerate(wanted))).history.losses, balanced, rtol=1e-6
    )
    one_hot = {"data": (data[0], np.eye(4, dtype=int)[labels], data[2])}
    run = train(**one_hot, loss="softmax_cross_entropy", class_weights="balanced")
    np.testing.assert_allclose(run.history.losses, balanced, rtol=1e-5)
    named = jaxonnx.load(mlp()).with_head(NAMES)
    runs = [
        train(named, data, class_weights=wanted).history.losses
        for wanted in ({"bee": 2.0}, {1: 2.0}, {2: 2.0})
    ]
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(jaxonnx.TrainingError, match="'be', which is none of 4 classes: try 'bee'"):
        train(named, data, class_weights={"be": 2.0})


def test_balanced_shares_of_classes():
    """One-hot labels are mostly real numbers; of a mixture each class has its share."""
    labels = np.r_[Y, np.zeros(9, int)]
    counts = np.bincount(labels, minlength=4)
    for smoothing in (0, 0.1):
        mixtures = (np.eye(4)[labels] * (1 - smoothing) + smoothing / 4).astype(np.float32)
        shares = counts * (1 - smoothing) + len(labels) * smoothing / 4
        weights = dict(enumerate(len(labels) / (4 * shares)))
        losses = [
            train(
                data=(np.r_[X, X[:9]], mixtures),
                loss="softmax_cross_entropy",
                class_weights=chosen,
                epochs=1,
            ).history.losses
            for chosen in ("balanced", weights)
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def test_weights_of_classes_by_output():
    network = jaxonnx.load(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
            two (float[n, 8] x) => (float[n, 4] kind, float[n, 3] color)
            <int64[2] sizes = {4, 3}, int64[1] last = {7}, int64[1] axis = {1}, int64[1] from = {0},
             float[7] bias = {0.1, -0.5, 0.7, 0.2, 0.4, -0.3, 0.6}> {
                first = Slice(x, from, last, axis)
                both = Add(first, bias)
                kind, color = Split <axis = 1> (both, sizes)
            }""")
    )
    targets = {"kind": Y, "color": Y[::-1] % 3}
    weights = {"kind": {1: 2.0, 3: 0.5}, "color": "balanced"}
    by_class = {"kind": np.array([1.0, 2.0, 1.0, 0.5])}
    by_class["color"] = class_weight.compute_class_weight(
        "balanced", classes=np.arange(3), y=targets["color"]
    )
    loss = dict.fromkeys(targets, LABELS)
    run = jaxonnx.train(
        network,
        (X, targets, W),
        loss=loss,
        optimizer=optax.sgd(0.1),
        batch_size=len(X),
        trainable="bias",
        class_weights=weights,
    )
    scores = network.name_outputs(network(X))
    expected = sum(
        sklearn.log_loss(y, jax.nn.softmax(scores[name]), sample_weight=W * by_class[name][y])
        for name, y in targets.items()
    )
    assert run.history.losses[0] == pytest.approx(expected, rel=1e-5)
    settings = {"optimizer": optax.sgd(0.1), "loss": loss, "trainable": "bias"}
    with pytest.raises(jaxonnx.TrainingError, match=r"by output, like \{'kind': \{0: 2\.0\}\}"):
        jaxonnx.train(network, (X, targets), class_weights={1: 2.0}, **settings)
    with pytest.raises(jaxonnx.TrainingError, match=r"has 'hue' .* 'kind', 'color'"):
        jaxonnx.train(network, (X, targets), class_weights={"hue": "balanced"}, **settings)


def first_score(outputs, targets):
    return outputs[0, 0]


def noisy(key, x):
    return x + jax.random.normal(key, x.shape)


def mixed(key, batch):
    share = jax.random.beta(key, 0.4, 0.4)

    def mix(a):
        return share * a + (1 - share) * a[::-1]

    targets = jax.nn.one_hot(batch.targets, 4)
    return batch._replace(inputs=jax.tree.map(mix, batch.inputs), targets=mix(targets))


class Stopped(Exception):
    pass


@pytest.mark.deep
def test_augmentation_is_for_training_and_resumes(tmp_path):
    def stop(step, metrics):
        if step == 4:
            raise Stopped

    settings = {"data": (X, Y, W), "augment": noisy, "epochs": 3}
    whole = train(**settings)
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(Stopped):
        train(**settings, **kept, on_log=stop)
    resumed = train(**settings, **kept, resume=True)
    assert same(resumed, whole)
    assert resumed.history.losses == whole.history.losses
    still = {"data": (X, Y, W), "validation": 0.2, **STILL, "epochs": 2}
    drawn, plain = train(**still, augment=noisy).history, train(**still).history
    assert len({*drawn.losses}) == len(drawn.losses) > len({*plain.losses} & {*drawn.losses})
    for a, b in zip(drawn.epochs, plain.epochs, strict=True):
        assert a["validation_loss"] == b["validation_loss"]


@pytest.mark.deep
def test_augmentation_of_batches_and_streams():
    mixing = {"loss": "softmax_cross_entropy", "augment": mixed}
    run = train(data=[(X[:8], Y[:8]), (X[8:16], Y[8:16])], **mixing)
    assert np.isfinite(run.history.losses).all()
    # other shapes than the data has
    wide = np.concatenate([X, X], axis=1)
    half = train(data=(wide, Y), augment=lambda key, x: x[:, :8]).history.losses
    assert half == train(data=(X, Y)).history.losses


def test_labels_that_a_function_made_are_not_waited_for(monkeypatch):
    """They lie on the device, and are checked some steps later."""
    drawn, checked = [], []
    check = GradientStep.check_labels

    def counted(*args):
        checked.append(len(drawn))
        check(*args)

    def batches(epoch):
        for i in range(12):
            drawn.append(i)
            yield X[:8], Y[:8]

    monkeypatch.setattr(GradientStep, "check_labels", counted)
    train(data=batches, augment=lambda key, batch: batch._replace(targets=batch.targets * 1))
    assert len(checked) == 12
    assert checked[0] > 8
    with pytest.raises(jaxonnx.TrainingError, match="a batch of epoch 1 has 8 labels outside"):
        train(data=batches, augment=lambda key, batch: batch._replace(targets=batch.targets + 4))


REFUSED = {
    "negative": ({"data": (X, Y, -W)}, r"the weight of example \d+ is negative or not finite: -"),
    "number": (
        {"data": (X, Y, W[:3])},
        r"one number for each of 21 examples, got float32\[3\]",
    ),
    "scalar": (
        {"data": (X, Y, W), "loss": lambda outputs, targets: outputs.mean()},
        "a scalar, so example weights cannot be applied",
    ),
    "scalar in validation": (
        {"validation": (X, Y, W), "loss": lambda outputs, targets: outputs.mean()},
        "a scalar, so example weights cannot be applied",
    ),
    "scalar metric": (
        {"validation": (X, Y, W), "metrics": [first_score]},
        "metric .* is a scalar, so example weights cannot be applied",
    ),
    "scalar, later": (
        {
            "data": [(X[:8], Y[:8], np.ones(8)), (X[8:16], Y[8:16], W[8:16])],
            "loss": lambda outputs, targets: outputs.mean(),
        },
        "batch of epoch 1: the loss is a scalar, so example weights cannot be applied",
    ),
    "no such class": ({"class_weights": {4: 1.0}}, "class_weights has 4; the classes .* 0 ... 3"),
    "no names": ({"class_weights": {"cat": 1.0}}, "does not say the names"),
    "no weights": ({"class_weights": {0: -1}}, "finite weights of at least 0"),
    "no word": ({"class_weights": "equal"}, "'balanced', or a dict"),
    "no labels": (
        {"data": [(X, Y)], "class_weights": "balanced"},
        "counts the labels of data in one piece",
    ),
    "no classes": (
        {"loss": lambda outputs, targets: outputs[:, 0], "class_weights": {0: 1.0}},
        "go with losses of classes",
    ),
    "twice": (
        {"loss": cross_entropy(weight=[1, 1, 1, 2]), "class_weights": {0: 1.0}},
        "has weights of classes already",
    ),
    "names": ({"augment": "flip"}, "names go with a folder of pictures"),
    "fewer": ({"augment": lambda key, x: x[:3]}, "must keep the 8 examples"),
    "no batch": ({"augment": lambda key, batch: batch.inputs}, "must return the batch"),
    "structure": ({"augment": lambda key, x: (x, x)}, "must return what it takes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(**{"data": (X, Y)} | settings)


PAIRS = np.random.default_rng(5).normal(size=(12, 8)).astype(np.float32)
PAIR_WEIGHTS = np.repeat([1.0, 3.0, 0.0, 0.5, 1.0, 2.0], 2).astype(np.float32)


@pytest.mark.parametrize("form", ["dict", "batches", "step"])
def test_data_without_targets_has_weights(form):
    """Of a loss that takes no targets, "weight" is none: the mean of weighted values by hand."""
    model, loss = jaxonnx.load(mlp()), jaxonnx.losses.in_batch_negatives(scale=2.0)
    name = model.inputs[0].name
    values = np.asarray(loss(np.asarray(model(PAIRS)), None, PAIR_WEIGHTS))
    expected = (values * PAIR_WEIGHTS).sum() / PAIR_WEIGHTS.sum()
    data = {name: PAIRS, "weight": PAIR_WEIGHTS}
    if form == "step":
        step = jaxonnx.training.step(model, loss, optax.sgd(0.0))
        _, (found, _) = jax.jit(step.update)(step.init(), data)
    else:
        data, size = (data, {"batch_size": 12}) if form == "dict" else ([data], {})
        found = evaluate(model, data, loss=loss, **size)["loss"]
    assert found == pytest.approx(expected, rel=1e-5)
