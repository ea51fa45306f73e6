"""Accumulated batches are one batch of all their rows: sums of gradients by sums of what counts."""

import os
import subprocess
import sys
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx.training import step
from tests.support.sweeps import sweep
from tests.support.tiny_networks import LABELS, examples, mlp, same, train, weights

WORDS, WIDTH, IGNORED, RATE = 11, 6, -100, 0.5


def parameters(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"table": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def words(second=""):
    """Logits of each token by a table and a matrix, and a second output of other scores."""
    params = parameters()
    stored = [
        f"float{[*x.shape]} {name} = {{{', '.join(map(repr, x.ravel().tolist()))}}}"
        for name, x in params.items()
    ]
    more = ", float[n, t, 6] hidden" if second else ""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        words (int64[n, t] input_ids) => (float[n, t, {WORDS}] logits{more})
        <{", ".join(stored)}> {{
            hidden = Gather(table, input_ids)
            logits = MatMul(hidden, head)
        }}""")


def tokens(counted=((14, 2), (9, 5)), width=15, seed=1):
    """Two updates of two batches of a row each, whose labels count at so many places."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, WORDS, (4, width))
    labels = ids.copy()
    for row, count in zip(labels, np.ravel(counted), strict=True):
        row[1 + count :] = IGNORED
    return ids, labels


def update(params, ids, labels, weight, rate=RATE):
    """A step of gradient descent by NumPy in float64, and the loss before it.

    Args:
      ids, labels, weight: of the places whose logits are scored.
    """
    table, head = params["table"], params["head"]
    hidden = table[ids]
    logits = hidden @ head
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    right = np.eye(WORDS)[labels]
    loss = -(np.log((shares * right).sum(-1)) * weight).sum() / weight.sum()
    slope = (shares - right) * weight[..., None] / weight.sum()
    new = {"head": head - rate * np.einsum("nth,ntw->hw", hidden, slope), "table": table.copy()}
    np.add.at(new["table"], ids, -rate * (slope @ head.T))
    return new, loss


CLASSES = np.arange(1, WORDS + 1) / 4
OF_EXAMPLES = np.array([1, 5, 0.25, 2], np.float32)


def causal(ids, labels, _):
    return ids[:, :-1], labels[:, 1:], (labels[:, 1:] != IGNORED) * 1.0


def places(ids, labels, examples):
    return ids, labels, (labels != IGNORED) * 1.0


def of_classes(ids, labels, _):
    return ids, labels, (labels != IGNORED) * CLASSES[labels.clip(0)]


def of_examples(ids, labels, weight):
    return ids, labels, (labels != IGNORED) * weight[:, None]


def by_name(ids, labels, weight):
    return ids, ids, weight[:, None] * CLASSES[ids]


LOSS = jaxonnx.losses.cross_entropy(axis=-1, ignore_index=IGNORED)
OF_CLASSES = jaxonnx.losses.cross_entropy(axis=-1, ignore_index=IGNORED, weight=CLASSES)
WEIGHED = {"class_weights": dict(enumerate(CLASSES.tolist()))}
CASES = {
    "tokens": ("causal_lm", causal, {}),
    "labels": (LOSS, places, {}),
    "weights of classes": (OF_CLASSES, of_classes, {}),
    "weights of examples": (LOSS, of_examples, {}),
    "seq2seq": ("seq2seq_lm", places, {}),
    "class_weights": (LABELS, by_name, WEIGHED),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_of_unequal_batches_are_those_of_numpy(case):
    loss, view, settings = CASES[case]
    ids, labels = tokens()
    if loss == LABELS:
        labels = ids
    weighed = view in (of_examples, by_name)
    weight = OF_EXAMPLES if weighed else np.ones(4, np.float32)
    rows = [slice(i, i + 1) for i in range(4)]
    data = [({"input_ids": ids[r]}, labels[r], weight[r]) for r in rows]
    result = jaxonnx.train(
        words(), data, loss=loss, optimizer=optax.sgd(RATE), accumulate=2, **settings
    )
    wanted = {name: x.astype(np.float64) for name, x in parameters().items()}
    sums = np.zeros(2)
    for rows in (slice(0, 2), slice(2, 4)):
        arrays = view(ids[rows], labels[rows], weight[rows])
        wanted, mean = update(wanted, arrays[0], arrays[1].clip(0), arrays[2])
        sums += mean * arrays[2].sum(), arrays[2].sum()
    for name, value in wanted.items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=1e-5, atol=1e-6)
    (row,) = result.history.epochs
    np.testing.assert_allclose(row["loss"], sums[0] / sums[1], rtol=1e-6)


def both(model, data, size, **settings):
    """Train with two batches an update, and with one of all rows."""
    whole = size * 2
    parts = train(model, data, accumulate=2, batch_size=size, **settings)
    return parts, train(model, data, batch_size=whole, **settings)


def close(parts, whole, rtol=1e-5, atol=1e-6):
    before = {**parts.model.params}
    assert any(parts.changes.values())
    for name in before:
        np.testing.assert_allclose(
            weights(parts)[name], weights(whole)[name], rtol=rtol, atol=atol, err_msg=name
        )
    ends = [[row["loss"] for row in x.history.epochs] for x in (parts, whole)]
    np.testing.assert_allclose(*ends, rtol=max(rtol, 1e-5))


UNEQUAL = np.array([1, 5, 0.25, 2, 7, 1, 0, 3], np.float32)
SETTINGS = {
    "lora": {"lora": jaxonnx.LoRA(rank=2)},
    "quantize": {"quantize": "int8", "statistics": "frozen"},
    "pruned": {"sparsity": {"method": "one_shot"}},
    "average": {"ema": 0.5},
    "fp16": {"precision": "fp16"},
    "clipped": {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))},
}


@pytest.mark.parametrize("case", sweep(SETTINGS, "lora", "average", "fp16"))
def test_settings_see_one_batch(case):
    data, model = (*examples(8), UNEQUAL), jaxonnx.load(mlp())
    if case == "pruned":  # else the first batch is computed with dense weights
        model = model.replace(params=jaxonnx.sparse.prune(model.params))
    parts, whole = both(model, data, 4, **{"optimizer": optax.sgd(0.5)} | SETTINGS[case])
    close(parts, whole, **({"rtol": 2e-3, "atol": 1e-3} if case == "fp16" else {}))


def two_outputs():
    """Logits of each token, and what the first of them stand for."""
    return jaxonnx.load(words("hidden"))


def teacher(ids):
    return np.random.default_rng(3).normal(size=(*ids.shape, WORDS)).astype(np.float32)


def scalar(outputs, labels):
    return jnp.square(outputs).mean() + outputs[..., 0].max()


def losses():
    ids, labels = tokens()
    targets = {"logits": labels, "hidden": np.full((4, 15, WIDTH), 0.5, np.float32)}
    total = jaxonnx.losses.causal_lm(reduction="sum")
    return {
        "two denominators": ({"logits": "causal_lm", "hidden": ("squared_error", 0.5)}, targets),
        "a sum": (total, labels),
        "a sum and a mean": ({"logits": total, "hidden": "squared_error"}, targets),
        "distill": (jaxonnx.losses.distill(soft=0.5), (teacher(ids), labels)),
        "none": (jaxonnx.losses.cross_entropy(axis=-1, reduction="none"), ids),
    }


@pytest.mark.parametrize("case", losses())
def test_losses_of_several_kinds_are_those_of_one_batch(case):
    loss, targets = losses()[case]
    model = two_outputs() if isinstance(loss, dict) else words()
    weight = None if "sum" in case else OF_EXAMPLES
    data = ({"input_ids": tokens()[0]}, targets, *([] if weight is None else [weight]))
    settings = {"loss": loss, "optimizer": optax.sgd(0.01 if "sum" in case else RATE)}
    parts, whole = both(model, data, 2, **settings)
    if "sum" in case:  # an epoch has the mean of the sums of its batches, as validation has it
        parts.history.epochs = whole.history.epochs
    close(parts, whole)


def test_a_last_batch_that_is_filled_up_counts_what_it_has():
    close(*both(mlp(), examples(6), 4, optimizer=optax.sgd(0.5)))
    settings = {"batch_size": 4, "optimizer": optax.sgd(0.0)}
    result = train(data=examples(6), validation=examples(6), **settings)
    (row,) = result.history.epochs
    np.testing.assert_allclose(row["loss"], row["validation_loss"], rtol=1e-6)


def test_the_optimizer_gets_loss_and_gradient_of_all_rows():
    """Not those of the last batch: a rate that depends on the loss, say."""

    def rule(updates, state, params=None, *, value, grad, **_):
        return jax.tree.map(lambda g, h: -value * (g + h), updates, grad), state

    rule = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), rule)
    close(*both(mlp(), (*examples(8), UNEQUAL), 4, optimizer=rule))


def test_a_loop_of_ones_own_accumulates():
    (x, y), rows = examples(8), (slice(0, 3), slice(3, 8))
    ends = []
    for parts, count in ((rows, 2), ([slice(0, 8)], 1)):
        own = step(mlp(), LABELS, optax.adam(1e-2), accumulate=count)
        state, run = own.init(), jax.jit(own.update)
        for _ in range(3):
            for part in parts:
                state, (_, finite) = run(state, (x[part], y[part], UNEQUAL[part]))
                assert finite
        ends.append(own.view(state))
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-4, atol=1e-6)


def test_a_skipped_batch_leaves_its_place_to_the_next():
    x, y = examples(24)
    x[8:16] *= 1e6  # infinite in float16
    rows = [slice(i, i + 8) for i in (0, 8, 16)]
    data = [(x[r], y[r], np.resize(UNEQUAL, 24)[r]) for r in rows]
    settings = {"precision": "fp16", "accumulate": 2, "nan": "skip"}
    result = train(data=data, **settings)
    wanted = train(data=[data[0], data[2]], **settings)
    for name, value in weights(wanted).items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_in_which_nothing_counts_make_no_update(accumulate):
    """Neither moments, nor decay, nor the loss of the epoch: as if they were not there."""
    ids, labels = tokens()
    empty = np.full_like(labels, IGNORED)
    rows = [slice(i, i + 1) for i in range(4)]
    full = [({"input_ids": ids[r]}, labels[r]) for r in rows]
    none = [({"input_ids": ids[r]}, empty[r]) for r in rows]
    if accumulate == 1:
        data, wanted = [full[0], none[0], full[1], none[1]], full[:2]
    else:  # an empty batch has its place among those of an update
        data = [full[0], none[0], none[1], none[2], none[3], full[1]]
        wanted = [({"input_ids": ids[:1]}, labels[:1]), ({"input_ids": ids[1:2]}, labels[1:2])]
    settings = {"loss": "causal_lm", "optimizer": optax.adamw(0.1, weight_decay=0.1)}
    result = jaxonnx.train(words(), data, accumulate=accumulate, nan="stop", **settings)
    alone = jaxonnx.train(words(), wanted, **settings)
    for name, value in weights(alone).items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=1e-6, atol=1e-7)
    loss = [x.history.epochs[0]["loss"] for x in (result, alone)]
    np.testing.assert_allclose(*loss, rtol=1e-6)
    steps = {1: [2, 4], 2: [2, 3, 4, 5]}[accumulate]
    event = {"event": "skipped", "why": "no example or label of the batch counts"}
    assert result.history.events == [{"step": n, **event} for n in steps]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_in_which_nothing_counts_says_so(accumulate):
    ids, labels = tokens()
    with pytest.warns(UserWarning, match="no example or label of the batch counts at step 4"):
        result = jaxonnx.train(
            words(),
            ({"input_ids": ids}, np.full_like(labels, IGNORED)),
            loss="causal_lm",
            optimizer=optax.adamw(0.1),
            batch_size=1,
            accumulate=accumulate,
        )
    assert not any(result.changes.values())


def test_a_run_resumes_in_the_middle_of_an_update_and_of_an_epoch(tmp_path):
    """Bit for bit, and with the loss of the whole epoch."""
    ids, labels = tokens(((14, 2), (9, 5)))
    weight = OF_EXAMPLES
    stops = []

    def data(epoch):
        for i in range(4):
            if stops == [epoch, i]:
                raise ConnectionError
            row = slice(i, i + 1)
            yield {"input_ids": ids[row]}, labels[row], weight[row]

    settings = {
        "loss": "causal_lm",
        "optimizer": optax.adam(0.05),
        "accumulate": 3,
        "epochs": 3,
    }
    whole = jaxonnx.train(words(), data, **settings)
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "resume": True}
    stops[:] = 1, 2
    with pytest.raises(ConnectionError):
        jaxonnx.train(words(), data, **settings, **kept)
    latest = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert latest == 5  # an epoch, and one of the three batches of an update
    stops.clear()
    again = jaxonnx.train(words(), data, **settings, **kept)
    assert same(whole, again)
    assert again.history.losses == whole.history.losses
    ends = [[row["loss"] for row in x.history.epochs] for x in (whole, again)]
    assert ends[0] == ends[1]


def test_batches_that_are_left_make_an_update_at_the_end_of_an_epoch():
    """Five batches: groups of two, two and one in each epoch, as of batches of these rows."""
    x, y = examples(20)
    weight = np.resize(UNEQUAL, 20)

    def batches(size):
        ends = [*range(0, 20, size), 20]
        rows = [slice(a, b) for a, b in pairwise(ends)]
        return [(x[r], y[r], weight[r]) for r in rows]

    settings = {"optimizer": optax.adam(0.05), "epochs": 2}
    parts = train(data=batches(4), accumulate=2, **settings)
    whole = train(data=batches(8), **settings)
    close(parts, whole)
    assert len(parts.history.losses) == 10


@pytest.mark.parametrize(
    ("batches", "group", "settings", "updates"),
    sweep(
        [
            (3, 4, {}, 1),
            (7, 4, {"epochs": 2}, 4),
            (7, 4, {"max_steps": 9}, 3),
            (4, 2, {"max_steps": 3}, 2),
            (1, 8, {"epochs": 3}, 3),
            (5, 3, {"epochs": 2, "sparsity": {"dense": 1, "dynamic": 1}}, 4),
        ],
        *(2, 5),
    ),
)
def test_a_schedule_has_a_rate_for_each_update(batches, group, settings, updates):
    """The last update of a line to zero has the last of its rates."""
    settings = {"optimizer": "sgd", "learning_rate": 0.4, "schedule": "linear"} | settings
    result = train(data=[examples(8)] * batches, accumulate=group, **settings)
    rates = list(dict.fromkeys(result.history.rates))
    np.testing.assert_allclose(rates, 0.4 * (1 - np.arange(len(rates)) / updates), rtol=1e-5)
    assert len(rates) == updates
    assert all(result.changes.values())
    for row in result.history.epochs:
        if "phase" in row:
            assert row["phase"] == {1: 2, 2: 3}[row["epoch"]]


def test_an_average_counts_the_update_of_what_is_left():
    batches = [examples(8, seed) for seed in range(3)]
    settings = {"data": batches, "optimizer": optax.sgd(0.5), "accumulate": 2}
    trail = [weights(train(max_steps=n, **settings)) for n in (2, 3)]
    average = weights(train(ema=0.5, **settings))
    for name, x in jaxonnx.load(mlp()).params.items():
        expected = x / 4 + trail[0][name] / 4 + trail[1][name] / 2
        np.testing.assert_allclose(average[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_row_has_the_weights_after_the_last_update(stream):
    """Also where a row within the epoch was due after its last batch."""
    batches = [examples(8, seed) for seed in range(3)]
    settings = {"optimizer": optax.sgd(0.5), "accumulate": 2, "validation": examples()}
    data = (lambda epoch: iter(batches)) if stream else batches
    result = train(data=data, validate_every=3, epochs=2, **settings)
    loss = jaxonnx.evaluate(result.model, examples(), loss=LABELS)["loss"]
    np.testing.assert_allclose(result.history.epochs[-1]["validation_loss"], loss, rtol=1e-6)
    assert same(result, train(data=data, epochs=2, **settings))


def test_a_loop_of_ones_own_flushes():
    own = step(mlp(), LABELS, optax.sgd(0.5), accumulate=4)
    alone = step(mlp(), LABELS, optax.sgd(0.5))
    state, _ = jax.jit(own.update)(own.init(), examples(8))
    flush = jax.jit(own.flush)
    flushed, finite = flush(state)
    expected, _ = jax.jit(alone.update)(alone.init(), examples(8))
    assert finite
    for name, value in alone.view(expected).items():
        np.testing.assert_allclose(own.view(flushed)[name], value, rtol=1e-5, atol=1e-7)
    again, _ = flush(flushed)
    jax.tree.map(np.testing.assert_array_equal, again, flushed)
    jax.tree.map(np.testing.assert_array_equal, alone.flush(expected)[0], expected)


@pytest.mark.parametrize("nan", ["stop", "skip", "rollback"])
def test_a_last_update_that_is_not_finite_is_treated_as_a_step(nan):
    """The second update of each epoch has an infinite rate."""
    rule = optax.sgd(lambda count: jnp.where(count % 2 == 1, jnp.inf, 0.1))
    settings = {"data": [examples(8)] * 3, "optimizer": rule, "accumulate": 2}
    one = train(**settings | {"data": [examples(8)] * 2})
    if nan == "skip":
        result = train(**settings, nan=nan)
        (event,) = result.history.events
        assert event["why"] == "the update of the last batches is not finite"
    else:
        with pytest.warns(UserWarning, match="the update of the last batches is not finite"):
            result = train(**settings, nan=nan, epochs=5)
    if nan != "rollback":  # which goes back to the weights of the start
        assert same(result, one)


MESH = """
import sys
import numpy as np, optax, jax
import jaxonnx
from tests.training.test_accumulation import OF_EXAMPLES, tokens, weights, words, two_outputs
assert len(jax.devices()) == 4
ids, labels = tokens()
one = {"input_ids": ids}, labels, OF_EXAMPLES
targets = {"logits": labels, "hidden": np.full((4, 15, 6), 0.5, np.float32)}
two = {"input_ids": ids}, targets, OF_EXAMPLES
both = {"logits": "causal_lm", "hidden": "squared_error"}
many = {"input_ids": np.tile(ids, (3, 1))}, np.tile(labels, (3, 1)), np.tile(OF_EXAMPLES, 3)
rest = [(jax.tree.map(lambda x: x[i : i + 4], many)) for i in (0, 4, 8)]
for settings in ({"accumulate": 2, "mesh": jax.make_mesh((4,), ("data",))}, {"accumulate": 2}):
    left = jaxonnx.train(words(), rest, loss="causal_lm", optimizer=optax.adam(0.05), **settings)
    whole = left if "mesh" in settings else whole
for name, value in weights(whole).items():
    np.testing.assert_allclose(weights(left)[name], value, rtol=1e-4, atol=1e-5)
for sharding in ("data", "fsdp"):
    for make, data, loss in ((words, one, "causal_lm"), (two_outputs, two, both)):
        settings = {"loss": loss, "optimizer": optax.adam(0.05), "epochs": 2}
        parts = jaxonnx.train(
            make(), data, batch_size=2, accumulate=2,
            mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]),
            sharding=sharding, **settings)
        whole = jaxonnx.train(make(), data, batch_size=4, **settings)
        for name, value in weights(whole).items():
            np.testing.assert_allclose(weights(parts)[name], value, rtol=1e-4, atol=1e-5)
        ends = [[row["loss"] for row in x.history.epochs] for x in (parts, whole)]
        np.testing.assert_allclose(*ends, rtol=1e-5)
"""


@pytest.mark.deep
def test_several_devices_sum_over_all_of_them():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", MESH], check=True, env=environment)
