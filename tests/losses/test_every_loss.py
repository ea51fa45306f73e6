"""Every loss by name, over batches in all ways, against one computation of all rows with optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx.losses import cross_entropy

ROWS, FEATURES, CLASSES = 7, 4, 5
RATE = 0.25
WEIGHTS = np.float32([0.5, 2, 1, 0, 3, 1, 0.25])
SHARES = {0: 3.0, 3: 0.5}
"""Weights of classes; 1 for the others."""
LABELS = (
    "softmax_cross_entropy_with_integer_labels",
    *(f"multiclass_{kind}_loss" for kind in ("hinge", "perceptron", "sparsemax")),
)
MIXTURES = ("softmax_cross_entropy", "safe_softmax_cross_entropy", "poly_loss_cross_entropy")
MASKS = ("dice_loss", "multiclass_generalized_dice_loss")
BINARY = (
    "binary_dice_loss",
    "sigmoid_binary_cross_entropy",
    "sigmoid_focal_loss",
    "sparsemax_loss",
)
SIGNED = ("hinge_loss", "perceptron_loss")
POSITIVE = (
    "kl_divergence",
    "convex_kl_divergence",
    "generalized_kl_divergence",
    "ranking_softmax_loss",
)
REAL = (
    "absolute_error",
    "squared_error",
    "l2_loss",
    "huber_loss",
    "log_cosh",
    "cosine_distance",
    "kl_divergence_with_log_targets",
)


def network(shape):
    """Outputs (rows, *shape) of a matrix."""
    size = int(np.prod(shape))
    numbers = np.random.default_rng(5).normal(0, 0.5, FEATURES * size)
    last = ", ".join(map(str, shape))
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        net (float[n, {FEATURES}] x) => (float[n, {last}] y)
        <float[{FEATURES}, {size}] w = {{{", ".join(f"{v:.4f}" for v in numbers)}}},
         int64[{1 + len(shape)}] s = {{-1, {last}}}> {{
            h = MatMul(x, w)
            y = Reshape(h, s)
        }}""")


def draw(name, shape, seed=0):
    """Return inputs and targets of all rows."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    whole = (ROWS, *shape)
    if name in LABELS:
        return x, random.integers(0, CLASSES, whole[:-1])
    y = random.normal(size=whole).astype(np.float32)
    if name in (*MIXTURES, *POSITIVE):
        y = np.exp(y) / np.exp(y).sum(-1, keepdims=True)
    elif name in (*MASKS, *BINARY):
        y = (y > 0).astype(np.float32)
    elif name in SIGNED:
        y = np.sign(y)
    return x, y


def of_optax(name, outputs, targets, weight, classes=None):
    """Return the loss of all rows, as a user would write it with optax."""
    if name == "absolute_error":
        values = jnp.abs(outputs - targets)
    elif name == "softmax_cross_entropy" and classes is not None:
        values = -(targets * classes * jax.nn.log_softmax(outputs)).sum(-1)
    else:
        values = getattr(optax.losses, name)(outputs, targets)
        if classes is not None:
            values = values * (classes[targets] if name in LABELS else targets @ classes)
    if not values.ndim:
        return values
    values = values.reshape(ROWS, -1).mean(1)
    shares = jnp.ones(ROWS)
    if classes is not None:
        shares = (classes[targets] if name in LABELS else targets @ classes).reshape(ROWS, -1)
        shares = shares.mean(1)
    return (values * weight).sum() / (shares * weight).sum()


def of_classes(axis, ignored, shares, smoothing, outputs, targets, weight):
    """Return the cross entropy of all labels that count, as PyTorch defines it."""
    scores = jax.nn.log_softmax(jnp.moveaxis(outputs, axis, -1))
    counts = (targets != ignored) * weight.reshape(-1, *(1,) * (targets.ndim - 1))
    chosen = jnp.where(targets == ignored, 0, targets)
    values = -shares[chosen] * jnp.take_along_axis(scores, chosen[..., None], -1)[..., 0]
    even = -(shares * scores).mean(-1)
    values = (1 - smoothing) * values + smoothing * even
    return (values * counts).sum() / (shares[chosen] * counts).sum()


WAYS = (
    {"batch_size": 8},  # filled up
    {"batch_size": 4, "accumulate": 2},  # so is the second of two
    {"batch_size": 3, "accumulate": 5},  # three batches, one of them short, where five make a step
)


def check(network, loss, data, plain, weight=None, ways=WAYS, **settings):
    """Compare weights, and losses of all kinds, with a step of gradient descent on all rows."""
    model = jaxonnx.load(network)
    x, y = data
    counts = np.ones(len(x), np.float32) if weight is None else weight

    def objective(params):
        return plain(model.apply(params, x), y, counts)

    before, gradient = jax.value_and_grad(objective)(model.params)
    after = jax.tree.map(lambda w, g: w - RATE * g, model.params, gradient)
    expected = float(before), float(objective(after))
    rows = (x,) if y is None else (x, y)
    rows = rows if weight is None else (*rows, weight)
    if y is None:
        rows = {model.inputs[0].name: x}
    still = {"loss": loss, "optimizer": optax.sgd(RATE), "validation": rows, "metrics": []}
    for way in ways:
        result = jaxonnx.train(model, rows, progress=False, **still, **way, **settings)
        row = result.history.epochs[-1]
        losses = row["loss"], row["validation_loss"]
        np.testing.assert_allclose(losses, expected, rtol=2e-5, atol=1e-6, err_msg=str(way))
        for name, value in result.model.params.items():
            np.testing.assert_allclose(value, after[name], rtol=1e-4, atol=1e-5, err_msg=str(way))
    if not settings:
        row = jaxonnx.evaluate(result.model, rows, loss=loss, batch_size=ways[-1]["batch_size"])
        np.testing.assert_allclose(row["loss"], expected[1], rtol=2e-5, atol=1e-6)


NAMES = (*LABELS, *MIXTURES, *MASKS, *BINARY, *SIGNED, *POSITIVE, *REAL)
OF_BATCHES = ("multiclass_generalized_dice_loss",)
"""Losses whose weights of classes are those of a batch."""
MEANS = (*OF_BATCHES, "ranking_softmax_loss")
"""Losses that are a scalar."""


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The function convex_kl_divergence")
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_optax(name):
    data = draw(name, (CLASSES,))
    ways = WAYS[:1] if name in OF_BATCHES else WAYS
    check(network((CLASSES,)), name, data, partial(of_optax, name), ways=ways)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The function convex_kl_divergence")
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_optax_at_several_places_with_weights_of_examples(name):
    """What is not measured is NaN, where the weight is 0."""
    shape = 3, CLASSES
    x, y = draw(name, shape)
    if name in MEANS or name == "multiclass_sparsemax_loss":
        words = (
            "weights cannot be applied" if name in MEANS else r"takes no outputs of shape \(.*3, 5"
        )
        with pytest.raises(jaxonnx.TrainingError, match=words):
            jaxonnx.train(network(shape), (x, y, WEIGHTS), loss=name, optimizer=optax.sgd(RATE))
        return
    plain = partial(of_optax, name)
    check(network(shape), name, (x, y), plain, WEIGHTS)
    if y.dtype.kind == "f":
        missing = np.where(WEIGHTS[:, None, None] > 0, y, np.nan)
        model = jaxonnx.load(network(shape))
        row = jaxonnx.evaluate(model, (x, missing, WEIGHTS), loss=name, batch_size=3)
        np.testing.assert_allclose(row["loss"], plain(model(x), y, WEIGHTS), rtol=2e-5, atol=1e-6)


@pytest.mark.deep
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("name", [*LABELS, *MIXTURES])
def test_weights_of_classes(name, weight):
    shares = jnp.ones(CLASSES).at[jnp.array([*SHARES])].set(jnp.array([*SHARES.values()]))
    data = draw(name, (CLASSES,))

    def plain(outputs, targets, weight):
        return of_optax(name, outputs, targets, weight, shares)

    check(network((CLASSES,)), name, data, plain, weight, class_weights=SHARES)


IGNORED = -1
OWN = [1.0, 0.25, 2.0, 1.0, 3.0]


@pytest.mark.deep
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("kind", ["plain", "weight", "class_weights", "smoothed"])
def test_cross_entropy_of_labels_some_of_which_are_missing(kind, weight, axis):
    shape = (CLASSES, 3) if axis == 1 else (3, CLASSES)
    x, _ = draw("l2_loss", shape)
    labels = np.random.default_rng(2).integers(IGNORED, CLASSES, (ROWS, 3))
    labels[1] = IGNORED  # nothing of an example counts
    settings = {"class_weights": {"class_weights": SHARES}, "smoothed": {"label_smoothing": 0.1}}
    shares = np.ones(CLASSES, np.float32)
    if kind == "class_weights":
        shares[[*SHARES]] = [*SHARES.values()]
    elif kind == "weight":
        shares = np.float32(OWN)
    loss = cross_entropy(axis=axis, ignore_index=IGNORED, weight=OWN if kind == "weight" else None)
    smoothing = 0.1 if kind == "smoothed" else 0.0
    plain = partial(of_classes, axis, IGNORED, jnp.asarray(shares), smoothing)
    check(network(shape), loss, (x, labels), plain, weight, **settings.get(kind, {}))


def bigrams():
    """Logits of tokens by a table of the token before."""
    numbers = np.random.default_rng(4).normal(size=CLASSES * CLASSES)
    values = ", ".join(f"{v:.4f}" for v in numbers)
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        net (int64[n, t] input_ids) => (float[n, t, {CLASSES}] logits)
        <float[{CLASSES}, {CLASSES}] table = {{{values}}}> {{ logits = Gather(table, input_ids) }}
    """)


@pytest.mark.deep
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("loss", ["causal_lm", "seq2seq_lm"])
def test_tokens_some_of_which_are_missing(loss, weight):
    random = np.random.default_rng(3)
    tokens = random.integers(0, CLASSES, (ROWS, 4))
    labels = np.where(random.random(tokens.shape) < 0.3, -100, tokens)
    of_labels = partial(of_classes, -1, -100, jnp.ones(CLASSES), 0.0)

    def plain(outputs, targets, weight):
        shift = 1 if loss == "causal_lm" else 0
        return of_labels(outputs[:, : 4 - shift], targets[:, shift:], weight)

    check(bigrams(), loss, (tokens, labels), plain, weight)


def pairs(outputs, _, weight):
    x = outputs / jnp.linalg.norm(outputs, axis=1, keepdims=True)
    scores = 20 * x[::2] @ x[1::2].T
    return -jnp.diag(jax.nn.log_softmax(scores)).mean()


@pytest.mark.deep
def test_pairs_of_a_batch_that_is_filled_up():
    x, _ = draw("l2_loss", (CLASSES,))
    check(network((CLASSES,)), "in_batch_negatives", (x[:6], None), pairs, ways=WAYS[:1])


ANSWERS = np.random.default_rng(3).integers(0, CLASSES, (6, 4))
SCORED = np.where(np.arange(4) < [[1], [2], [1], [1], [2], [1]], -100, ANSWERS)
"""Labels of three pairs of rows."""


def likelihoods(outputs):
    """Return the log-likelihood of each row of answers, and the number of its tokens."""
    scores = jax.nn.log_softmax(outputs[:, :-1])
    chosen = jnp.where(SCORED[:, 1:] < 0, 0, SCORED[:, 1:])
    values = jnp.take_along_axis(scores, chosen[..., None], -1)[..., 0]
    return jnp.where(SCORED[:, 1:] < 0, 0, values).sum(1), (SCORED[:, 1:] >= 0).sum(1)


def of_dpo(outputs, start, weight):
    gain = likelihoods(outputs)[0] - start
    return -jax.nn.log_sigmoid(0.5 * (gain[::2] - gain[1::2]))


def of_orpo(outputs, start, weight):
    total, count = likelihoods(outputs)
    odds = total / count - jnp.log1p(-jnp.exp(total / count))
    return -(total / count)[::2] - 0.5 * jax.nn.log_sigmoid(odds[::2] - odds[1::2])


DESIRABLE = np.array([1, 0, 1])


def of_kto(outputs, start, weight):
    gain = likelihoods(outputs)[0] - start
    counts = weight[1::2] > 0
    z = jax.lax.stop_gradient(jnp.maximum((gain[1::2] * counts).sum() / counts.sum(), 0))
    signs = 2 * DESIRABLE - 1
    shares = jnp.where(DESIRABLE, 1.5, 0.5)
    return shares * (1 - jax.nn.sigmoid(0.5 * signs * (gain[::2] - z)))


PREFERENCES = {
    "dpo": (jaxonnx.losses.dpo(beta=0.5), of_dpo),
    "orpo": (jaxonnx.losses.orpo(beta=0.5), of_orpo),
    "kto": (
        jaxonnx.losses.kto(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
        of_kto,
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("weight", [None, np.repeat(WEIGHTS[1:4], 2)], ids=["plain", "weights"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name, weight):
    loss, of_pairs = PREFERENCES[name]
    start = likelihoods(jaxonnx.load(bigrams())(ANSWERS))[0]

    def plain(outputs, targets, weight):
        values = of_pairs(outputs, start, weight)
        return (values * weight[::2]).sum() / weight[::2].sum()

    ways = (
        {"batch_size": 8},
        {"batch_size": 4, "accumulate": 2},
        {"batch_size": 2, "accumulate": 5},
    )
    targets = SCORED
    if name == "kto":  # mismatched rows are those of a batch
        ways, targets = ways[:1], {"labels": SCORED, "label": np.repeat(DESIRABLE, 2)}
    check(bigrams(), loss, (ANSWERS, targets), plain, weight, ways=ways, seed=1)


def of_teacher(axis, soft, scores, outputs, targets, weight):
    """Return the loss of `distill` at a temperature of 2, of all places that count."""
    outputs, scores = (jnp.moveaxis(x, axis, -1) for x in (outputs, scores))
    logs = (jax.nn.log_softmax(x / 2) for x in (outputs, scores))
    values = 4 * optax.losses.kl_divergence_with_log_targets(*logs)
    counts = jnp.ones(values.shape) if targets is None else targets != IGNORED
    if soft < 1:
        chosen = jnp.where(counts, targets, 0)
        learned = optax.losses.softmax_cross_entropy_with_integer_labels(outputs, chosen)
        values = soft * values + (1 - soft) * learned
    counts = counts * weight.reshape(-1, *(1,) * (values.ndim - 1))
    return (values * counts).sum() / counts.sum()


@pytest.mark.deep
@pytest.mark.parametrize("shape", [(CLASSES,), (3, CLASSES), (CLASSES, 3)])
@pytest.mark.parametrize(
    ("form", "soft", "weight"),
    [
        ("teacher", 1.0, None),
        ("teacher", 0.7, WEIGHTS),
        ("top", 0.7, WEIGHTS),
        ("logits", 1.0, WEIGHTS),
        ("logits and labels", 0.7, WEIGHTS),
    ],
    ids=lambda x: "" if x is None or isinstance(x, np.ndarray) else str(x),
)
def test_another_model(form, soft, weight, shape):
    axis = 1 + shape.index(CLASSES)
    x, _ = draw("l2_loss", shape)
    model = jaxonnx.load(network(shape))
    teacher = model.replace(params={name: -2 * w for name, w in model.params.items()})
    places = [size for size in shape if size != CLASSES]
    labels = np.random.default_rng(2).integers(IGNORED, CLASSES, (ROWS, *places))
    scores, settings = teacher(x), {"soft": soft, "ignore_index": IGNORED}
    if form in ("teacher", "top"):  # classes beyond the greatest count as one: there is only one
        settings |= {"teacher": teacher, "top": CLASSES - 1 if form == "top" else None}
    if form == "logits":
        settings["axis"] = 1 if axis == 1 else -1
    targets = {"logits": scores, "logits and labels": (scores, labels)}.get(form, labels)

    def plain(outputs, _, weight):
        known = None if form == "logits" else labels
        return of_teacher(axis, soft, scores, outputs, known, weight)

    loss = jaxonnx.losses.distill(**settings)
    check(network(shape), loss, (x, targets), plain, weight)


@pytest.mark.deep
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weights"])
def test_tokens_that_are_hidden(weight):
    """The draws of a batch are those of its number, whatever fills it and however it is summed."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, CLASSES, (ROWS, 4))
    labels = np.where(random.random(tokens.shape) < 0.2, -100, tokens)
    shares = np.ones(ROWS, np.float32) if weight is None else weight
    loss = jaxonnx.losses.masked_lm(probability=0.6, mask_token=0, special_tokens=[1])
    model = jaxonnx.load(bigrams())
    hide = loss.draw(model)

    def hidden(seed, purpose, size):
        """Return all rows as the batches of this size have them, and their labels that count."""
        inputs, targets = [], []
        for number, start in enumerate(range(0, ROWS, size)):
            rows = np.arange(start, start + size) % ROWS  # the draws do not depend on the fill
            batch = jaxonnx.training.Batch((tokens[rows],), labels[rows], shares[rows])
            batch = hide(np.random.default_rng([seed, purpose, 0, number]), batch)
            inputs.append(batch.inputs[0])
            targets.append(batch.targets)
        return np.concatenate(inputs)[:ROWS], np.concatenate(targets)[:ROWS]

    def measure(params, purpose, size, seed=0):
        inputs, targets = hidden(seed, purpose, size)
        outputs = model.apply(params, inputs)
        return of_classes(-1, -100, jnp.ones(CLASSES), 0.0, outputs, targets, shares)

    for size in (7, 4, 3):
        before, gradient = jax.value_and_grad(measure)(model.params, 0, size, 1)
        after = jax.tree.map(lambda w, g: w - RATE * g, model.params, gradient)
        parts = [slice(i, i + size) for i in range(0, ROWS, size)]
        result = jaxonnx.train(
            model,
            [(tokens[rows], labels[rows], shares[rows]) for rows in parts],
            **{"loss": loss, "optimizer": optax.sgd(RATE), "accumulate": len(parts), "seed": 1},
            **{"validation": (tokens, labels, shares), "metrics": [], "progress": False},
        )
        row = result.history.epochs[-1]
        np.testing.assert_allclose(row["loss"], before, rtol=2e-5)
        expected = measure(after, 1, 32, 1)  # of batches of the default size
        np.testing.assert_allclose(row["validation_loss"], expected, rtol=2e-5)
        for name, value in result.model.params.items():
            np.testing.assert_allclose(value, after[name], rtol=1e-4, atol=1e-5)
        row = jaxonnx.evaluate(model, (tokens, labels, shares), loss=loss, batch_size=size)
        np.testing.assert_allclose(row["loss"], measure(model.params, 1, size), rtol=2e-5)


@pytest.mark.deep
def test_scores_of_a_batch_with_itself_that_is_filled_up():
    numbers = ", ".join(f"{v:.4f}" for v in np.random.default_rng(6).normal(size=12))
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        net (float[n, {FEATURES}] x) => (float[n, n] y) <float[{FEATURES}, 3] w = {{{numbers}}}> {{
            h = MatMul(x, w)
            t = Transpose(x)
            u = Slice(t, zero, three)
            y = MatMul(h, u)
        }}""".replace("<float[4", "<int64[1] zero = {0}, int64[1] three = {3}, float[4")
    )
    x, _ = draw("l2_loss", (CLASSES,))

    def plain(outputs, _, weight):
        rows, columns = (jnp.diag(jax.nn.log_softmax(outputs, axis)) for axis in (0, 1))
        return -(rows + columns).mean() / 2

    check(proto, "contrastive", (x, None), plain, ways=WAYS[:1])
