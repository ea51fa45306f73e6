"""Losses of a run: ONNX's, several at once, and of the logits before the last node.

The values of `jaxonnx.losses` are those of PyTorch 2.13.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx import losses
from jaxonnx.losses import cross_entropy, negative_log_likelihood
from jaxonnx.training._objective import find_objective

LABELS = "softmax_cross_entropy_with_integer_labels"
SCORES = ((np.arange(24).reshape(2, 3, 4) * 7 % 11 - 5) / 3).astype(np.float32)
TARGETS = np.array([[0, 1, 2, -1], [2, -1, 1, 0]])
WEIGHT = [1, 2, 0.5]


def network(body, outputs="float[n, 3] y", opset=17):
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
        net (float[n, 2] x) => ({outputs})
        <float[2, 3] w = {{0.5, -1, 2, 1, 0.25, -0.5}}, float[2, 1] v = {{0.5, -0.25}}>
        {{ {body} }}"""
    return jaxonnx.load(onnx.parser.parse_model(text))


def examples(count=12):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 2)).astype(np.float32)
    return x, random.integers(0, 3, count)


def train(model, data, loss, **settings):
    settings = {"optimizer": optax.sgd(0.1), "batch_size": 8, "epochs": 2} | settings
    return jaxonnx.train(model, data, loss=loss, **settings)


@pytest.mark.parametrize(
    ("loss", "weight", "mean", "total"),
    [
        (cross_entropy, None, 1.7132426, 10.2794561),
        (cross_entropy, WEIGHT, 1.9261502, 13.4830513),
        (negative_log_likelihood, None, 0.2777778, 1.6666666),
        (negative_log_likelihood, WEIGHT, 0.4285714, 3.0),
    ],
)
def test_values(loss, weight, mean, total):
    for reduction, expected in (("mean", mean), ("sum", total)):
        function = loss(weight=weight, ignore_index=-1, reduction=reduction)
        np.testing.assert_allclose(function(SCORES, TARGETS), expected, rtol=1e-6)
        # in training an example of weight 0 is as if it were not there
        filled = np.concatenate([SCORES, SCORES[:1]]), np.concatenate([TARGETS, TARGETS[:1]])
        summed, count = losses.find(function).totals(*filled, jnp.array([1.0, 1.0, 0.0]))
        np.testing.assert_allclose(summed / count, expected, rtol=1e-6)
    each = loss(weight=weight, ignore_index=-1, reduction="none")(SCORES, TARGETS)
    assert each.shape == TARGETS.shape
    np.testing.assert_allclose(each.sum(), total, rtol=1e-6)


@pytest.mark.parametrize("loss", ["squared_error", "huber_loss", lambda y, t: jnp.abs(y - t)])
@pytest.mark.parametrize("several", [False, True])
def test_missing_targets_of_weight_0(loss, several):
    """They are as if they were not there: NaN times 0 is NaN, also in the gradient."""
    body = "y = MatMul(x, w)" + " z = MatMul(x, v)" * several
    model = network(body, "float[n, 3] y" + ", float[n, 1] z" * several)
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 2)).astype(np.float32)
    targets = [random.normal(size=(12, n)).astype(np.float32) for n in (3, 1)]
    weight = np.ones(12, np.float32)
    targets[0][2], targets[0][7, 1], targets[1][2], weight[[2, 7]] = np.nan, np.inf, -np.inf, 0
    kept = weight > 0

    def data(rows):
        each = dict(zip("yz", (t[rows] for t in targets), strict=True))
        return x[rows], each if several else each["y"]

    losses_of = {"y": loss, "z": loss} if several else loss
    whole = data(slice(None))
    settings = {"loss": losses_of, "batch_size": 12, "accumulate": 2}
    result = train(model, (*whole, weight), **settings)
    expected = train(model, data(kept), **settings)
    for name, value in expected.model.params.items():
        np.testing.assert_allclose(result.model.params[name], value, rtol=1e-5, atol=1e-6)
    metrics = {"y": ["r2", "mae"]} if several else ["r2", "mae", "mse"]
    row = jaxonnx.evaluate(model, (*whole, weight), metrics=metrics, loss=losses_of)
    alone = jaxonnx.evaluate(model, data(kept), metrics=metrics, loss=losses_of)
    np.testing.assert_allclose([*row.values()], [*alone.values()], rtol=1e-5)
    # of an example that counts it is an error of the data
    with pytest.warns(UserWarning, match="not finite at step 1"):
        train(model, (*whole, np.ones(12, np.float32)), **settings)


def test_gradient():
    gradient = jax.grad(cross_entropy(weight=WEIGHT, ignore_index=-1))(SCORES, TARGETS)
    expected = [
        [-0.1282571, 0.1105497, 0.00730005, 0.0],
        [0.107881, -0.2648342, 0.0539405, 0.0],
        [0.0203761, 0.1542845, -0.0612405, 0.0],
    ]
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-5)


@pytest.mark.parametrize("loss", [LABELS, cross_entropy()])
def test_half_precision_is_summed_in_single(loss):
    scores = np.tile(np.float16([0, 40]), (4096, 1))
    total, count = losses.find(loss).totals(
        jnp.asarray(scores), jnp.zeros(4096, int), jnp.ones(4096)
    )
    value = total / count
    assert value == 40


def test_a_batch_without_labels_that_count_changes_nothing():
    loss = losses.find(cross_entropy(ignore_index=-1))
    arguments = SCORES, TARGETS * 0 - 1, jnp.ones(2)
    (total, count), pull = jax.vjp(lambda scores: loss.totals(scores, *arguments[1:]), SCORES)
    (gradient,) = pull((jnp.ones_like(total), jnp.zeros_like(count)))
    assert total == count == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "ending"),
    [
        (LABELS, "Softmax <axis = -1>"),
        (optax.softmax_cross_entropy_with_integer_labels, "LogSoftmax"),
        ("SoftmaxCrossEntropyLoss", "Softmax <axis = 1>"),
    ],
)
def test_a_loss_takes_the_logits_before_the_ending(name, ending):
    plain = network("y = MatMul(x, w)")
    ended = network(f"logits = MatMul(x, w) p = {ending}(logits) y = Identity(p)")
    data = examples()
    expected = train(plain, data, name, validation=data)
    found = train(ended, data, name, validation=data)
    assert not expected.history.notes
    (note,) = found.history.notes
    assert "'logits'" in note
    assert note in str(found)
    assert found.history.losses == expected.history.losses
    np.testing.assert_array_equal(found.model.params["w"], expected.model.params["w"])
    for key in ("validation_loss", "validation_accuracy"):
        assert found.history.epochs[-1][key] == expected.history.epochs[-1][key]
    probabilities = jax.nn.softmax(expected.model(data[0]))
    outputs = found.model(data[0])
    outputs = jnp.exp(outputs) if ending == "LogSoftmax" else outputs
    np.testing.assert_allclose(outputs, probabilities, rtol=1e-5)


def test_metrics_see_the_outputs_of_the_file():
    seen = []

    def confidence(outputs, targets):
        seen.append(outputs.shape)
        return outputs.sum(-1)

    data = examples()
    model = network("logits = MatMul(x, w) y = Softmax(logits)")
    history = train(model, data, LABELS, validation=data, metrics=["f1", confidence]).history
    assert history.epochs[-1]["validation_confidence"] == pytest.approx(1)
    binary = network("z = MatMul(x, v) y = Sigmoid(z)", "float[n, 1] y")
    x, y = examples()
    y = (y > 0).astype(np.float32)[:, None]
    result = train(binary, (x, y), "sigmoid_binary_cross_entropy", validation=(x, y), metrics="f1")
    assert "Sigmoid" in result.history.notes[0]
    assert str(result.model.proto.graph.node[-1].op_type) == "Sigmoid"


@pytest.mark.parametrize(
    ("loss", "body", "opset"),
    [
        ("squared_error", "z = MatMul(x, w) y = Sigmoid(z)", 17),
        ("kl_divergence", "z = MatMul(x, w) y = LogSoftmax(z)", 17),
        (lambda o, t: jnp.abs(o - t).sum(1), "z = MatMul(x, w) y = Softmax(z)", 17),
        (LABELS, "z = MatMul(x, w) y = Softmax <axis = 0>(z)", 17),
        (LABELS, "z = MatMul(x, w) y = Softmax <axis = 0>(z)", 11),
        ("sigmoid_binary_cross_entropy", "z = MatMul(x, w) y = Softmax(z)", 17),
        (negative_log_likelihood(), "z = MatMul(x, w) y = LogSoftmax(z)", 17),
    ],
)
def test_other_losses_take_the_outputs(loss, body, opset):
    goal = find_objective(network(body, opset=opset), loss, None)
    assert not goal.notes
    assert goal.model.graph.outputs == ("y",)


TWO = "z = MatMul(x, w) y = Softmax(z) r = MatMul(x, v)"
OUTPUTS = "float[n, 3] y, float[n, 1] r"


@pytest.mark.deep
def test_several_outputs():
    net = network(TWO, OUTPUTS)
    x, y = examples()
    targets = {"y": y, "r": x[:, :1]}
    both = {"y": LABELS, "r": ("squared_error", 0.5)}
    metrics = {"y": ["accuracy", "top_2"], "r": "mae"}
    data = (x, targets)
    history = train(net, data, both, validation=data, metrics=metrics, batch_size=12).history
    probabilities, r = net(x)
    first = optax.softmax_cross_entropy_with_integer_labels(jnp.log(probabilities), y).mean()
    second = ((r - targets["r"]) ** 2).mean()
    np.testing.assert_allclose(history.losses[0], first + 0.5 * second, rtol=1e-5)
    row = history.epochs[-1]
    names = ("y_loss", "r_loss", "y_accuracy", "y_top_2", "r_mae")
    assert {f"validation_{name}" for name in names} <= row.keys()
    expected = row["validation_y_loss"] + 0.5 * row["validation_r_loss"]
    assert row["validation_loss"] == pytest.approx(expected)
    # the targets may stand beside the inputs
    named = {"x": x, **targets}
    assert train(net, named, both, batch_size=12).history.losses == history.losses
    # one loss by output needs no dict of targets
    assert len(train(net, (x, y), {"y": LABELS}, validation=(x, y)).history.losses) == 4
    # and a callable takes all outputs and all targets

    def loss(outputs, targets):
        return jnp.square(outputs[1] - targets["r"]).mean(1)

    (value, _) = train(net, data, loss, batch_size=12).history.losses
    np.testing.assert_allclose(value, second, rtol=1e-5)


def pixels():
    text = """<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 2, h, w] x) => (float[n, 3, h, w] y)
        <float[3, 2, 1, 1] k = {0.5, -1, 2, 1, 0.25, -0.5}> { y = Conv(x, k) }"""
    return jaxonnx.load(onnx.parser.parse_model(text))


def tags():
    text = """<ir_version: 8, opset_import: ["": 17]>
        net (float[n, l, 2] x) => (float[n, l, 3] y)
        <float[2, 3] w = {0.5, -1, 2, 1, 0.25, -0.5}> { y = MatMul(x, w) }"""
    return jaxonnx.load(onnx.parser.parse_model(text))


IMAGES = np.random.default_rng(0).random((12, 2, 4, 5), np.float32)
TOKENS = np.random.default_rng(0).random((12, 4, 2), np.float32)
X, Y = examples()
ONE = "y = MatMul(x, w)"
BAD = {
    "reduction": (lambda: cross_entropy(reduction="max"), "'sum' or 'none', got 'max'"),
    "ignore_index": (lambda: cross_entropy(ignore_index=0.5), "must be an integer, got 0.5"),
    "weight": (lambda: cross_entropy(weight=[[1, 2]]), r"\(classes,\), got int64\[1, 2\]"),
    "negative": (lambda: cross_entropy(weight=[1, -2]), "negative or not finite"),
    "weights": (
        lambda: train(network(ONE), (X, Y), cross_entropy(weight=[1, 2])),
        "weights of 2 classes; the outputs have 3",
    ),
    "ignored": (
        lambda: train(network(ONE), (X, Y - 1), cross_entropy(ignore_index=-2)),
        "data has 1 label outside of 0 ... 2, the first is -1 .*; with ignore_index=-1 the loss",
    ),
    "axis": (
        lambda: train(network(ONE), (X, np.zeros((12, 3), int)), cross_entropy()),
        r"targets of shape \(8,\)",
    ),
    "output": (
        lambda: train(network(ONE), (X, Y), {"z": LABELS}),
        "a dict with the keys 'z'; its keys must be outputs of the model, which are 'y'",
    ),
    "nothing": (lambda: train(network(ONE), (X, Y), {}), "the keys none"),
    "share": (
        lambda: train(network(ONE), (X, Y), {"y": (LABELS, "2")}),
        "a loss or a pair",
    ),
    "targets": (
        lambda: train(network(TWO, OUTPUTS), (X, Y), {"y": LABELS, "r": "squared_error"}),
        "by output name, with 'y'; they are an array",
    ),
    "targets of metrics": (
        lambda: train(
            network(TWO, OUTPUTS),
            (X, {"y": Y}),
            {"y": LABELS},
            metrics={"r": "mae"},
            validation=(X, {"y": Y}),
        ),
        r"by output name, with 'r'; they are \['y'\]",
    ),
    "missing": (
        lambda: train(network(TWO, OUTPUTS), (X, {"y": Y}), {"y": LABELS, "r": "squared_error"}),
        r"with 'r'; they are \['y'\]",
    ),
    "several": (lambda: train(network(TWO, OUTPUTS), (X, Y), LABELS), "a dict of losses by output"),
    "columns": (
        lambda: train(network(ONE), {"x": X, "label": Y, "index": Y}, LABELS),
        "beside the inputs the data has 'index', 'label': leave out those that are not targets",
    ),
    "list": (lambda: train(network(ONE), (X, Y), [LABELS]), r"no loss \['softmax_"),
    "unknown": (lambda: train(network(ONE), (X, Y), {"y": "mse"}), "no loss 'mse'"),
    "label of images": (
        lambda: train(pixels(), (IMAGES, IMAGES[:, 0].astype(int)), LABELS),
        r"they have \(8, 4, 5\); jaxonnx.losses.cross_entropy\(\) has the classes on axis 1",
    ),
    "ignored label": (
        lambda: train(network(ONE), (X, np.where(Y > 1, 255, Y)), LABELS),
        r"the first is 255 .*cross_entropy\(ignore_index=255\) leaves these out",
    ),
    "mask of one output": (
        lambda: train(
            pixels().with_head(1), (IMAGES, (IMAGES[:, 0] > 0.5).astype(int)), cross_entropy()
        ),
        r"one output says yes or no: .* and targets of shape \(12, 1, 4, 5\)",
    ),
    "labels from 1": (
        lambda: train(network(ONE), (X, Y + 1), LABELS),
        "the first is 3 .*; classes are counted from 0: subtract 1 from labels 1 ... 3",
    ),
    "labels of tokens": (
        lambda: train(tags(), (TOKENS, TOKENS[..., 0].astype(int)), cross_entropy()),
        r"they have \(8, 4\); jaxonnx.losses.cross_entropy\(axis=-1\) has the classes on the last",
    ),
    "mixtures": (  # tsai#791: mixup makes them of labels
        lambda: train(network(ONE), (X, np.eye(3)[Y] * 0.9 + 0.05), LABELS),
        "needs integer labels.* for mixtures of classes use loss='softmax_cross_entropy'",
    ),
    "signs": (
        lambda: train(network(ONE), (X, np.eye(3)[Y]), "hinge_loss"),
        "targets from 0.0 to 1.0; the loss 'hinge_loss' takes -1 or 1 .* 2 \\* y - 1",
    ),
}


@pytest.mark.parametrize("label", [-100, 255])
@pytest.mark.parametrize(
    ("model", "x", "loss"),
    [(pixels, IMAGES, "SoftmaxCrossEntropyLoss"), (tags, TOKENS, LABELS)],
    ids=["images", "tokens"],
)
def test_the_loss_that_an_error_names_leaves_labels_out(model, x, loss, label):
    """OpenNMT#570: it has the classes on the axis of the loss that refused the labels."""
    labels = np.where((x[:, 0] if model is pixels else x[..., 0]) > 0.5, label, 1)
    with pytest.raises(jaxonnx.TrainingError, match="leaves these out") as refused:
        jaxonnx.evaluate(model(), (x, labels), loss=loss, metrics=[])
    axis, number = re.search(
        r"losses\.cross_entropy\((axis=-1, )?ignore_index=(-?\d+)\)", str(refused.value)
    ).groups()
    loss = cross_entropy(axis=-1 if axis else 1, ignore_index=int(number))
    value = jaxonnx.evaluate(model(), (x, labels), loss=loss, metrics=[])["loss"]
    scores = np.moveaxis(model()(x), 1, -1) if model is pixels else model()(x)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, np.ones_like(labels))
    np.testing.assert_allclose(value, each[labels == 1].mean(), rtol=1e-6)


@pytest.mark.parametrize("axis", [1, -1])
def test_narrow_labels_are_no_others(axis):
    """In uint8, -100 is 156 and -1 is 255: classes like any other, which are not ignored."""
    scores = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    labels = np.array([156, 255])
    for ignored in (-100, -1, None):
        loss = cross_entropy(axis=axis, ignore_index=ignored)
        expected = optax.softmax_cross_entropy_with_integer_labels(scores, labels).sum()
        total, count = loss.totals(scores, labels, jnp.ones(2))
        np.testing.assert_allclose([total, count], [expected, 2], rtol=1e-6)
        narrow = loss(scores, jnp.asarray(labels, jnp.uint8))
        np.testing.assert_allclose(narrow, expected / 2, rtol=1e-6)
    data = scores, labels.astype(np.uint8)
    text = """<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 256] x) => (float[n, 256] y) <float[1] w = {0}> { y = Add(x, w) }"""
    model = jaxonnx.load(onnx.parser.parse_model(text), trainable="w")
    value = jaxonnx.evaluate(model, data, loss=cross_entropy(axis=axis), metrics=[])["loss"]
    np.testing.assert_allclose(value, expected / 2, rtol=1e-6)
    first = train(model, data, cross_entropy(axis=axis, ignore_index=-100)).history.losses[0]
    np.testing.assert_allclose(first, expected / 2, rtol=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid_focal_loss", "sigmoid_binary_cross_entropy"])
@pytest.mark.parametrize("label", [255, -1])
def test_labels_that_are_neither_0_nor_1(loss, label):
    """kornia#839: a void label of masks, or a mask of 0 and 255, trains for numbers without sense.

    PyTorch's sum of both terms is negative without bound for labels above 1.
    """
    targets = np.eye(3, dtype=np.float32)[Y]
    targets[:3, 1] = label
    words = r"targets from .* takes 0 or 1 for each output. y / 255 .*ignore_index"
    with pytest.raises(jaxonnx.TrainingError, match=words):
        train(network(ONE), (X, targets), loss)
    with pytest.raises(jaxonnx.TrainingError, match=words):
        jaxonnx.evaluate(network(ONE), (X, targets), loss=loss)
    targets[:3, 1] = 0.5
    value = jaxonnx.evaluate(network(ONE), (X, targets), loss=loss)["loss"]
    expected = getattr(optax.losses, loss)(network(ONE)(X), targets).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    targets[:3] = np.nan  # missing ones, of examples that do not count
    weight = np.r_[np.zeros(3), np.ones(9)]
    assert np.isfinite(jaxonnx.evaluate(network(ONE), (X, targets, weight), loss=loss)["loss"])


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "dice_loss", "kl_divergence"])
def test_classes_of_images_are_on_axis_1(loss):
    """optax has them on the last axis, which of images is the width."""
    labels = np.random.default_rng(0).integers(0, 3, (12, 4, 5))
    masks = np.moveaxis(np.eye(3, dtype=np.float32)[labels], -1, 1)
    with pytest.raises(jaxonnx.TrainingError, match="distributions along axis 1, and the loss"):
        train(pixels(), (IMAGES, masks), loss)
    function = getattr(optax.losses, loss)

    def moved(o, t):  # what the message says
        return function(jnp.moveaxis(o, 1, -1), jnp.moveaxis(t, 1, -1))

    value = jaxonnx.evaluate(pixels(), (IMAGES, masks), loss=moved)["loss"]
    if loss == "softmax_cross_entropy":
        other = jaxonnx.evaluate(pixels(), (IMAGES, labels), loss=cross_entropy())["loss"]
        np.testing.assert_allclose(value, other, rtol=1e-5)


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    call, message = BAD[case]
    with pytest.raises(jaxonnx.TrainingError, match=message):
        call()


@pytest.mark.parametrize("smoothing", [None, 0.1])
@pytest.mark.parametrize("loss", [LABELS, cross_entropy()])
def test_weights_of_unknown_classes_are_refused(loss, smoothing):
    settings = {"class_weights": {3: 2.0}, "label_smoothing": smoothing}
    step = jaxonnx.training.step(network("y = MatMul(x, w)"), loss, optax.sgd(0.1), **settings)
    with pytest.raises(
        jaxonnx.TrainingError, match=r"class_weights has 3; the classes .* 0 \.\.\. 2"
    ):
        step.check(examples())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        (
            "CrossEntropyLoss",
            r"SoftmaxCrossEntropyLoss \(ONNX's; classes on axis 1, integer labels",
        ),
        (
            "sparse_categorical_crossentropy",
            rf"try {LABELS} \(integer labels: the index of the class\)",
        ),
        ("categorical_crossentropy", r"try softmax_cross_entropy \(a probability for each class\)"),
        ("softmax_cross_entropy_with_integer_label", f"try {LABELS} "),
        ("NLLLoss", "try NegativeLogLikelihoodLoss "),
        ("BCEWithLogitsLoss", r"try sigmoid_binary_cross_entropy \(0 or 1 for each output\)"),
        ("MSELoss", r"try squared_error \(targets of the shape of the outputs\)"),
        ("hinge", r"hinge_loss \(-1 or 1 for each output\)"),
        ("?", "absolute_error, .*squared_error"),
    ],
)
def test_losses_are_suggested_with_what_they_take(name, near):
    with pytest.raises(jaxonnx.TrainingError, match=near):
        losses.find(name)


def test_a_loss_of_optax_that_takes_more_is_written_as_a_function():
    """The error names the call, which is that of optax."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(1, 3, (len(TOKENS), 2))
    targets = {"labels": labels, "label_paddings": np.zeros(labels.shape, np.float32)}
    targets["logit_paddings"] = np.zeros(TOKENS.shape[:2], np.float32)
    for name in ("ctc_loss", "CTCLoss", "ctc"):
        with pytest.raises(jaxonnx.TrainingError, match="try loss=lambda") as refused:
            jaxonnx.evaluate(tags(), (TOKENS, targets), loss=name)
        call = re.search(r"loss=(lambda .*?\))(,|$)", str(refused.value).split(", or pass")[0])[1]
    loss = eval(call, {"optax": optax})
    value = jaxonnx.evaluate(tags(), (TOKENS, targets), loss=loss, metrics=[])["loss"]
    padding = targets["logit_paddings"], labels, targets["label_paddings"]
    expected = optax.losses.ctc_loss(tags()(TOKENS), *padding).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("triplet", r"optax.losses.triplet_margin_loss\(outputs, targets\['positives'\], "),
        ("ntxent", r"try loss=lambda outputs, targets: optax.losses.ntxent\(outputs, targets\)"),
        ("distill", r"try jaxonnx.losses.distill\(...\), or pass a function \(outputs, targets\)"),
        ("cross_entropy", r"labels \(integer labels.*, jaxonnx.losses.cross_entropy\(...\), or"),
        ("smooth_labels", "is no loss: it changes labels, as label_smoothing= does"),
        # it was minimized, so that outputs became as unlike their targets as they could
        ("cosine_similarity", "is greater where outputs fit better; 'cosine_distance' is 1 minus"),
        ("huberr", "try huber_loss"),
        (
            "xyz",
            r"there are NegativeLogLikelihoodLoss, .*, squared_error, (.*, )?or pass a function",
        ),
        ({"y": ["mse"]}, r"no loss \['mse'\] of .*; try squared_error"),
    ],
)
def test_what_to_write_instead_of_an_unknown_name(loss, words):
    with pytest.raises(jaxonnx.TrainingError, match=words):
        jaxonnx.evaluate(network(ONE), (X, Y), loss=loss)
