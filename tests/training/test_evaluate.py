"""`evaluate` over all of some data, against scikit-learn; tables, curves and their plots."""

import jax
import matplotlib as mpl
import numpy as np
import onnx
import optax
import pytest
from onnx import TensorProto, helper
from PIL import Image

import jaxonnx
from jaxonnx.training import ConfusionMatrix, Curves, PerClass
from jaxonnx.training._objective import find_objective
from tests.support.lazy_cases import Module
from tests.support.tiny_networks import LABELS, examples, mlp, train

oracle = Module("sklearn.metrics")
mpl.use("Agg")


def network(ending="Identity", classes=4):
    """A network whose outputs are its inputs behind an operator."""
    info = helper.make_tensor_value_info
    values = [info(name, TensorProto.FLOAT, ["n", classes]) for name in ("x", "y")]
    nodes = [helper.make_node(ending, ["x"], ["y"])]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def draw(count=50, classes=4, seed=0):
    random = np.random.default_rng(seed)
    scores = random.normal(size=(count, classes)).astype(np.float32)
    return scores, (scores + random.normal(size=scores.shape)).argmax(1)


@pytest.mark.deep
def test_numbers_are_those_of_the_whole_data():
    model, (x, y) = jaxonnx.load(mlp()), examples(21)
    logits = np.asarray(model(x))
    names = ["accuracy", "f1", "top_2"]
    result = jaxonnx.evaluate(model, (x, y), metrics=names, loss=LABELS, batch_size=8)
    assert [*result] == ["loss", *names]
    assert all(type(value) is float for value in result.values())
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-5)
    assert result["accuracy"] == oracle.accuracy_score(y, logits.argmax(1))  # to the last bit
    f1 = oracle.f1_score(y, logits.argmax(1), average="macro", zero_division=0)
    assert result["f1"] == pytest.approx(f1)
    # in any form of data, and as training validates
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 21, 8)]
    for data in (batches, lambda epoch: batches, {"x": x, "labels": y}):
        size = 8 if isinstance(data, dict) else None
        other = jaxonnx.evaluate(mlp(), data, metrics=names, loss=LABELS, batch_size=size)
        assert other == pytest.approx(result)
    run = train(model, (x, y), optimizer=optax.sgd(0.0), validation=(x, y), metrics=names)
    row = run.history.epochs[-1]
    assert result == pytest.approx({name: row[f"validation_{name}"] for name in result})


@pytest.mark.parametrize("ending", ["Identity", "Softmax", "LogSoftmax"])
def test_tables_and_curves_of_classes(ending):
    x, y = draw()
    names = ["confusion_matrix", "per_class", "roc_curve", "precision_recall_curve", "roc_auc"]
    names += ["average_precision"]
    result = jaxonnx.evaluate(network(ending), (x, y), metrics=names, batch_size=16)
    chosen, shares = x.argmax(1), np.asarray(jax.nn.softmax(x.astype(np.float64)))
    np.testing.assert_array_equal(
        result["confusion_matrix"].counts, oracle.confusion_matrix(y, chosen)
    )
    expected = oracle.precision_recall_fscore_support(y, chosen)
    table = result["per_class"]
    for ours, theirs in zip(
        (table.precision, table.recall, table.f1, table.support), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for label, curve in enumerate(result["roc_curve"].points):
        fpr, tpr, thresholds = oracle.roc_curve(
            y == label, shares[:, label], drop_intermediate=False
        )
        np.testing.assert_allclose(curve.x, fpr)
        np.testing.assert_allclose(curve.y, tpr)
        if ending != "LogSoftmax":
            np.testing.assert_allclose(curve.thresholds, thresholds, rtol=1e-5)
    for label, curve in enumerate(result["precision_recall_curve"].points):
        precision, recall, _ = oracle.precision_recall_curve(y == label, shares[:, label])
        np.testing.assert_allclose(curve.x, recall[::-1])
        np.testing.assert_allclose(curve.y, precision[::-1])
    one_hot = np.eye(4)[y]
    assert result["roc_auc"] == pytest.approx(oracle.roc_auc_score(one_hot, shares))
    average = oracle.average_precision_score(one_hot, shares)
    assert result["average_precision"] == pytest.approx(average)


def test_more_predictions_than_single_precision_counts():
    goal = find_objective(jaxonnx.load(network()), None, ["accuracy"])
    with jax.enable_x64(True):
        many, one = (np.float64(2**24),) * 2, (np.float32(1),) * 2
        sums = jax.jit(goal.merge_sums)({"accuracy": many}, {"accuracy": one})
    assert [int(x) for x in sums["accuracy"]] == [2**24 + 1] * 2


def test_a_folder_of_pictures_names_the_classes(tmp_path):
    for name, light in (("dark", 10), ("light", 240)):
        (tmp_path / name).mkdir()
        for i in range(3):
            pixels = np.full((2, 2), light + i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 17]>
        net (float[n, 2, 2] x) => (float[n, 2] y) <float[4, 2] w = {-1, 1, -1, 1, -1, 1, -1, 1},
        float[2] b = {2, -2}> { f = Flatten(x)  y = Gemm(f, w, b) }""")
    settings = {"scale": 1 / 255}
    result = jaxonnx.evaluate(
        proto, tmp_path, metrics=["accuracy", "confusion_matrix"], preprocess=settings, batch_size=4
    )
    assert result["accuracy"] == 1
    assert result["confusion_matrix"].classes == ("dark", "light")


def test_yes_and_no():
    x, _ = draw(60, 3)
    y = (x + np.random.default_rng(1).normal(size=x.shape) > 0).astype(np.float32)
    x[7] = x[8]  # ties
    loss = "sigmoid_binary_cross_entropy"
    names = ["per_class", "roc_auc", "average_precision"]
    result = jaxonnx.evaluate(network(classes=3), (x, y), metrics=names, loss=loss, batch_size=16)
    assert result["roc_auc"] == pytest.approx(oracle.roc_auc_score(y, x))
    ranks = names[1:], {name: result[name] for name in names[1:]}  # which need no threshold
    assert jaxonnx.evaluate(network(classes=3), (x, y), metrics=ranks[0]) == ranks[1]
    assert result["average_precision"] == pytest.approx(oracle.average_precision_score(y, x))
    np.testing.assert_array_equal(result["per_class"].support, y.sum(0))
    one = network("Sigmoid", classes=1)
    names = ["confusion_matrix", "roc_curve", "precision"]
    result = jaxonnx.evaluate(one, (x[:, :1], y[:, :1]), metrics=names)
    np.testing.assert_array_equal(
        result["confusion_matrix"].counts, oracle.confusion_matrix(y[:, 0], x[:, 0] > 0)
    )
    assert [*result["roc_curve"].by_class] == ["yes"]
    assert result["roc_curve"].area == pytest.approx(oracle.roc_auc_score(y[:, 0], x[:, 0]))


def test_scalars_do_not_count_what_fills_a_batch():
    """keras#8421: an own metric of the same data differed with the size of the batches."""
    model, (x, y) = jaxonnx.load(mlp()), examples(21)

    def accuracy(outputs, targets):
        return (outputs.argmax(-1) == targets).mean()

    def loss(outputs, targets):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    outputs = model(x)
    expected = {"loss": float(loss(outputs, y)), "accuracy": float(accuracy(outputs, y))}
    row = jaxonnx.evaluate(model, (x, y), loss=loss, metrics=[accuracy], batch_size=8)
    assert row == pytest.approx(expected, rel=1e-6)
    settings = {"loss": loss, "metrics": [accuracy], "batch_size": 8, "optimizer": optax.sgd(0.0)}
    history = jaxonnx.train(model, (x, y), validation=(x, y), **settings).history
    validated = {name: history.epochs[-1][f"validation_{name}"] for name in expected}
    assert validated == pytest.approx(expected, rel=1e-6)


def test_a_mean_over_nothing_is_not_a_number():
    """As PyTorch's: 0 would be the best loss."""
    x, y = examples(8)
    nothing = x, y, np.zeros(8, np.float32)
    names = ["accuracy", "top_2", "perplexity"]
    found = jaxonnx.evaluate(mlp(), nothing, loss=LABELS, metrics=names, batch_size=4)
    assert found.keys() == {"loss", *names}
    assert np.isnan([*found.values()]).all()
    with pytest.warns(UserWarning, match="validation_loss, .* was NaN in all of 2 rows"):
        run = train(data=(x, y), validation=nothing, epochs=2, patience=2)
    assert np.isnan(run.history.epochs[-1]["validation_loss"])
    assert {event["event"] for event in run.history.events} == {"not finite in validation"}


def test_a_class_that_does_not_occur():
    x, _ = draw()
    result = jaxonnx.evaluate(network(), (x, np.arange(50) % 3), metrics=["roc_curve", "roc_auc"])
    areas = [curve.area for curve in result["roc_curve"].points]
    assert np.isnan(areas[3])
    assert result["roc_auc"] == pytest.approx(np.mean(areas[:3]))


def test_tables_print_and_draw():
    matrix = ConfusionMatrix.of(np.array([[1200, 3], [4, 5]]))
    table = PerClass.of([1204, 8], [1203, 9], [1200, 5]).with_names(["cat", "dog"])
    curves = Curves.of("roc", (np.array([[0.1], [0.9]]), np.array([[False], [True]]), np.ones(2)))
    assert str(matrix).splitlines()[1] == "0                 1,200  3"
    assert str(table).splitlines()[2] == "dog       0.6250  0.5556  0.5882        9"
    assert "yes" in str(curves)
    assert curves.area == 1
    assert table.with_names(["a"]).classes == ("cat", "dog")
    assert [t.get_text() for t in matrix.plot().texts] == ["1200", "3", "4", "5"]
    assert len(table.plot().patches) == 6
    axes = curves.plot()
    assert axes.get_xlabel() == "false positive rate"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["yes (1.000)"]
    mpl.pyplot.close("all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"evaluate computes metrics=.* or loss="),
        ({"metrics": "acuracy"}, "there is no metric 'acuracy'.*confusion_matrix"),
        ({"metrics": "accuracy", "y": np.arange(50)}, "50 labels|46 labels outside of 0 ... 3"),
        ({"metrics": "accuracy", "y": np.ones((50, 4))}, "positive output: there is no named loss"),
        ({"metrics": "mse"}, "needs targets of the shape of the outputs"),
        (
            {"metrics": "confusion_matrix", "y": np.ones((50, 4)), "loss": "hinge_loss"},
            "use 'per_class'",
        ),
    ],
)
def test_what_does_not_fit(settings, message):
    x, y = draw()
    y = settings.pop("y", y)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.evaluate(network(), (x, y), **settings)


def test_training_has_numbers_only():
    for metric in ("confusion_matrix", "roc_auc"):
        with pytest.raises(jaxonnx.TrainingError, match=r"pass it to jaxonnx\.evaluate"):
            train(validation=examples(), metrics=[metric])


@pytest.mark.parametrize("labels", [True, False])
def test_a_score_that_is_nan_has_no_rank(labels):
    """scikit-learn refuses it; a sort gives it the last rank, and an area like any other."""
    x, y = draw()
    x[5, 1] = np.nan
    y = y if labels else np.eye(4, dtype=np.float32)[y]
    names = ["roc_auc", "average_precision", "roc_curve"]
    result = jaxonnx.evaluate(network(), (x, y), metrics=names)
    assert np.isnan([*map(result.get, names[:2]), result["roc_curve"].area]).all()
    weight = (np.arange(50) != 5).astype(np.float32)  # an example that does not count may have it
    result = jaxonnx.evaluate(network(), (x, y, weight), metrics=names)
    assert np.isfinite([*map(result.get, names[:2]), result["roc_curve"].area]).all()


def undecided(scores):
    """The values of all metrics of 50 examples, of which scores of the sixth may be NaN."""
    settings = {"loss": "squared_error"} if scores == "numbers" else {}
    x, y = draw()
    if scores == "classes":
        names = ["accuracy", "top_2", "perplexity", "f1", "dice", "iou", "precision", "recall"]
    elif scores == "answers":
        names, y = ["accuracy", "f1", "iou", "recall"], np.eye(4, dtype=np.float32)[y]
        settings = {"loss": "sigmoid_binary_cross_entropy"}
    else:
        names, y = ["mse", "mae", "r2"], np.ones((50, 4), np.float32)

    def values(x, y=y, weight=None):
        weight = np.ones(50, np.float32) if weight is None else weight
        data, more = (x, y, weight), {"metrics": names, "batch_size": 16, **settings}
        row = jaxonnx.evaluate(network(), data, **more)
        return np.array([row[name] for name in names])

    return x, y, values


@pytest.mark.parametrize("scores", ["classes", "answers", "numbers"])
def test_metrics_of_outputs_that_are_nan_are_nan(scores):
    """They counted as the class that argmax says, or as no; scikit-learn refuses them."""
    x, y, values = undecided(scores)
    whole, (broken, odd) = values(x), (x.copy(), (np.arange(50) != 5).astype(np.float32))
    broken[5, 1] = np.nan
    assert np.isfinite(whole).all()
    assert np.isnan(values(broken)).all()
    # an example that does not count may have them
    assert np.isfinite(values(broken, weight=odd)).all()
    np.testing.assert_allclose(values(broken, weight=odd), values(x, weight=odd), rtol=1e-6)
    if scores != "classes":  # as of targets that are
        y = y.copy()
        y[5, 1] = np.nan
        assert np.isnan(values(x, y)).all()
        assert np.isfinite(values(x, y, weight=odd)).all()


def test_tables_of_outputs_that_are_nan():
    x, y = draw()
    broken, counts = x.copy(), np.arange(50) != 5
    broken[5, 1] = np.nan
    names = ["confusion_matrix", "per_class"]
    with pytest.warns(UserWarning, match="outputs of 1 prediction are NaN, which is no class"):
        row = jaxonnx.evaluate(network(), (broken, y), metrics=names)
    rest = jaxonnx.evaluate(network(), (x[counts], y[counts]), metrics=names)
    np.testing.assert_array_equal(row["confusion_matrix"].counts, rest["confusion_matrix"].counts)
    assert np.isnan(
        [row["per_class"].precision, row["per_class"].recall, row["per_class"].f1]
    ).all()
    np.testing.assert_array_equal(row["per_class"].support, np.bincount(y))
