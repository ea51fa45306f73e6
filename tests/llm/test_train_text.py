"""Sequences of unequal length: buckets, padding, masks, and losses over tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxonnx
from jaxonnx import demo
from jaxonnx._data.ragged import Padding
from jaxonnx.losses import causal_lm, cross_entropy
from jaxonnx.training._objective.needs import find_needs
from jaxonnx.training._step.gradient import GradientStep
from tests.support import tiny_networks
from tests.support.lazy_cases import Module
from tests.support.paths import DATA
from tests.support.sources import make_source

datasets = Module("datasets")
LLAMA = DATA / "text" / "llama"
LABELS = "softmax_cross_entropy_with_integer_labels"
TOKENS = 7
LENGTHS = [3, 9, 1, 4, 12, 6, 2, 9, 17, 5]


def network(**wanted):
    return jaxonnx.load(tiny_networks.text(TOKENS, **wanted))


@pytest.fixture(scope="module")
def net():
    return network()


def texts(lengths=LENGTHS, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, TOKENS, length) for length in lengths]


def alone(net, text):
    """What the network computes of one text, without any padding."""
    embedded = np.asarray(net.params["table"])[text]
    mean = embedded.mean(0)
    seen = embedded + mean if net.outputs[0].name == "logits" else mean
    return seen @ np.asarray(net.params["head"])


def train(net, data, **wanted):
    wanted = {"loss": "causal_lm", "optimizer": optax.adam(0.01), "batch_size": 4} | wanted
    return jaxonnx.train(net, data, **wanted)


@pytest.mark.deep
def test_the_loss_is_that_of_each_text_alone(net):
    """Whatever form they come in, and however they are filled up."""
    data = texts()
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(alone(net, text)[:-1], text[1:])
        for text in data
    ]
    expected = float(np.concatenate(losses).mean())
    found = jaxonnx.evaluate(
        net, {"input_ids": data}, loss="causal_lm", metrics="accuracy", batch_size=4
    )
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    chosen = [alone(net, text).argmax(-1)[:-1] for text in data]
    right = np.concatenate([guess == text[1:] for guess, text in zip(chosen, data, strict=True)])
    assert found["accuracy"] == pytest.approx(right.mean())

    run = train(net, {"input_ids": data}, validation=0.2, length_buckets=20, epochs=2)
    assert len(run.history.losses) == 4
    assert run.history.losses[-1] < run.history.losses[0]


def test_forms():
    data = texts()
    expected, _ = batches_of({"input_ids": data}, epoch=1)
    lists = [text.tolist() for text in data]
    masks = [[1] * len(text) for text in data]
    objects = np.empty(len(data), object)
    objects[:] = data
    for form in (
        {"input_ids": lists, "labels": lists},
        {"input_ids": lists, "attention_mask": masks},
        {"input_ids": objects, "attention_mask": masks, "labels": objects},
        (lists, lists),
        ({"input_ids": data}, data),
        ((data, masks), data),
        datasets.Dataset.from_dict({"input_ids": lists}),
        datasets.Dataset.from_dict({"input_ids": lists, "attention_mask": masks}),
    ):
        jax.tree.map(np.testing.assert_array_equal, batches_of(form, epoch=1)[0], expected)


def batches_of(data, epoch=0, start=0, **wanted):
    names = ("input_ids", "attention_mask")
    inputs = [jaxonnx.Value(name, np.dtype(np.int64), ("n", "t")) for name in names]
    loss, seed = wanted.pop("loss", "causal_lm"), wanted.pop("seed", 0)
    pad, buckets = wanted.pop("pad", None), wanted.pop("length_buckets", None)
    needs, _ = find_needs(demo.model(), loss)
    padding = Padding.of(pad, buckets, needs=needs)
    examples = make_source(data, inputs, wanted.pop("batch_size", 4), seed, padding)
    return [*examples.batches(epoch, start)], examples.steps


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    size=st.integers(1, 9),
    seed=st.none() | st.integers(0, 9),
    buckets=st.none() | st.just((70,)) | st.just([20, 5, 70]),
    cut=st.integers(0, 5),
)
def test_every_text_counts_once_in_a_batch_of_its_width(lengths, size, seed, buckets, cut):
    data = {"input_ids": [np.full(n, i) for i, n in enumerate(lengths, 1)]}
    wanted = {"batch_size": size, "seed": seed, "length_buckets": buckets}
    batches, steps = batches_of(data, 3, **wanted)
    longest = max(lengths)
    allowed = {8, 16, 32, 64, longest} if buckets is None else {*buckets}
    assert len(batches) == steps == -(-len(lengths) // size)
    seen = []
    for (ids, mask), labels, weight in batches:
        assert ids.shape == mask.shape == labels.shape == (size, ids.shape[1])
        width = ids.shape[1]
        assert width in allowed
        assert width <= longest or buckets is not None
        assert not [w for w in allowed if mask.sum(1).max() <= w < width]
        np.testing.assert_array_equal(ids > 0, mask == 1)
        np.testing.assert_array_equal(labels, np.where(mask, ids, -100))
        seen += [(row[0], row.astype(bool).sum()) for row in ids[weight > 0]]
    order = [*enumerate(lengths, 1)]
    assert sorted(seen) == order
    assert seed is not None or seen == order
    rest, _ = batches_of(data, 3, cut, **wanted)
    jax.tree.map(np.testing.assert_array_equal, rest, batches[cut:])


def test_batches_have_few_widths_in_an_order_of_each_epoch():
    data = {"input_ids": texts([*range(1, 41)] * 5)}
    epochs = [batches_of(data, epoch)[0] for epoch in (0, 1)]
    one, two = ([batch.inputs[0].shape[1] for batch in batches] for batches in epochs)
    assert {*one} == {8, 16, 32, 40}
    assert sorted(one) == sorted(two)
    assert one != sorted(one)
    assert one != two
    padding = sum((batch.inputs[1] == 0).sum() for batch in epochs[0])
    together = sum(batch.inputs[1].size for batch in batches_of(data, seed=None)[0])
    assert padding < 0.35 * together


@pytest.mark.deep
def test_labels_of_texts_are_checked_once(net, monkeypatch):
    checked = []
    check = GradientStep.check_labels
    monkeypatch.setattr(
        GradientStep, "check_labels", lambda *args: (checked.append(args[3]), check(*args))
    )
    train(net, {"input_ids": texts()}, epochs=3, validation=0.2)
    assert (checked.count("data"), checked.count("validation")) == (2, 1)
    assert len(checked) == 3


def test_what_fills_up():
    data = {
        "input_ids": [[1, 2], [3]],
        "labels": [[1, 0], [1]],
        "attention_mask": [[1, 1], [1]],
    }
    wanted = {"batch_size": 2, "seed": None, "length_buckets": 4}
    (((ids, mask), labels, _),), _ = batches_of(data, **wanted, pad={"input_ids": 9, "labels": -1})
    np.testing.assert_array_equal(ids, [[1, 2, 9, 9], [3, 9, 9, 9]])
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(labels, [[1, 0, -1, -1], [1, -1, -1, -1]])
    # labels have what the loss leaves out, also by output
    loss = cross_entropy(axis=-1, ignore_index=-5)
    ((_, labels, _),), _ = batches_of(data, **wanted, loss=loss)
    assert labels[0, -1] == -5
    several = {**data, "tags": [[5, 6], [7]]}
    losses = {"tags": (loss, 0.5), "labels": LABELS}
    ((_, labels, _),), _ = batches_of(several, **wanted, loss=losses)
    assert (labels["tags"][0, -1], labels["labels"][0, -1]) == (-5, -100)
    # arrays are filled up where buckets are asked for
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    ((inputs, labels, _),), _ = batches_of({"input_ids": ids, "labels": ids}, **wanted)
    assert [x.shape for x in (*inputs, labels)] == [(2, 4)] * 3
    ((inputs, labels, _),), _ = batches_of({"input_ids": ids}, batch_size=2, seed=None)
    assert [x.shape for x in (*inputs, labels)] == [(2, 3)] * 3


@pytest.mark.deep
def test_a_run_resumes_bit_for_bit(net, tmp_path):
    data = {"input_ids": texts(LENGTHS * 2)}
    wanted = {"epochs": 3, "batch_size": 3, "validation": 0.25, "checkpoint_every": 2}
    wanted["length_buckets"] = (8, 20)
    whole = train(net, data, **wanted, checkpoint_dir=tmp_path / "whole")

    def cut(step, metrics):
        if step == 8:
            raise ConnectionError

    wanted["checkpoint_dir"] = tmp_path / "cut"
    with pytest.raises(ConnectionError):
        train(net, data, **wanted, on_log=cut)
    with pytest.raises(jaxonnx.TrainingError, match=r"length_buckets=\[32\] would not"):
        train(net, data, **wanted | {"length_buckets": 32}, resume=True)
    rest = train(net, data, **wanted, resume=True)
    assert rest.history.losses == whole.history.losses
    for name, value in whole.model.params.items():
        assert np.asarray(value).tobytes() == np.asarray(rest.model.params[name]).tobytes()


def test_predictions_have_the_length_of_their_text(net):
    data = texts()
    for form in ({"input_ids": data}, (data,), {"input_ids": data, "labels": data}):
        outputs = net.predict(form, batch_size=4)
        assert [len(x) for x in outputs] == LENGTHS
        for output, text in zip(outputs, data, strict=True):
            np.testing.assert_allclose(output, alone(net, text), rtol=1e-5, atol=1e-6)
    whole = network(outputs=f"float[n, {TOKENS}] scores")
    scores = whole.predict({"input_ids": data}, batch_size=4, length_buckets=20)
    expected = np.stack([alone(whole, text) for text in data])
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    labels = np.arange(len(data)) % TOKENS
    found = jaxonnx.evaluate(whole, {"input_ids": data, "labels": labels}, metrics=["accuracy"])
    assert found == {"accuracy": pytest.approx((expected.argmax(1) == labels).mean())}


@pytest.mark.deep
def test_weights_of_texts_and_of_their_classes():
    whole = network(outputs=f"float[n, {TOKENS}] scores")
    data, labels = texts(), np.arange(len(LENGTHS)) % TOKENS
    losses = optax.softmax_cross_entropy_with_integer_labels(
        np.stack([alone(whole, text) for text in data]), labels
    )
    counts = np.bincount(labels)[labels]
    wanted = {"loss": LABELS, "batch_size": len(data), "optimizer": optax.sgd(0.0)}
    (found,) = train(
        whole, {"input_ids": data, "y": labels, "weight": 1 / counts}, **wanted
    ).history.losses
    assert found == pytest.approx(np.average(losses, weights=1 / counts), rel=1e-5)
    (same,) = train(
        whole, {"input_ids": data, "y": labels}, class_weights="balanced", **wanted
    ).history.losses
    assert same == pytest.approx(found, rel=1e-5)


@pytest.mark.deep
def test_streams_of_a_few_widths(net):
    """Batches that come padded, or ragged; a short one of each width is filled up."""
    widths = [(4, 5), (2, 9), (4, 5), (3, 5), (2, 9), (1, 9)]
    data = [np.stack(texts([w] * n, i)) for i, (n, w) in enumerate(widths)]
    stream = [{"input_ids": ids, "labels": ids} for ids in data]
    rows = [row for ids in data for row in ids]
    batches, _ = batches_of(stream, batch_size=None)
    shapes = [batch.inputs[0].shape for batch in batches]
    assert shapes == [(4, 5), (2, 9), (4, 5), (4, 5), (2, 9), (2, 9)]
    assert [batch.weight.sum() for batch in batches] == [n for n, _ in widths]
    rest, _ = batches_of(stream, start=3, batch_size=None)
    jax.tree.map(np.testing.assert_array_equal, rest, batches[3:])
    expected = jaxonnx.evaluate(net, {"input_ids": rows}, loss="causal_lm")
    assert jaxonnx.evaluate(net, stream, loss="causal_lm") == pytest.approx(expected, rel=1e-5)
    row = train(net, stream, batch_size=None, validation=stream, optimizer=optax.sgd(0.0))
    value = row.history.epochs[-1]["validation_loss"]
    assert value == pytest.approx(expected["loss"], rel=1e-5)
    outputs = net.predict([{"input_ids": ids} for ids in data])
    assert [len(x) for x in outputs] == [len(row) for row in rows]
    # ragged ones become as wide as a power of two, or as a bucket
    ragged = [{"input_ids": [[1, 2], [3]]}, {"input_ids": [[1] * 9, [2], [3]]}]
    for buckets, expected in ((None, [8, 16]), ((4, 12), [4, 12])):
        batches, _ = batches_of(ragged, batch_size=None, length_buckets=buckets)
        assert [batch.inputs[0].shape[1] for batch in batches] == expected
    many = [{"input_ids": np.ones((2, n), int)} for n in range(1, 19)]
    with pytest.warns(UserWarning, match="more than 16 shapes.*length_buckets"):
        batches_of(many, batch_size=None)


@pytest.mark.deep
def test_a_file_of_transformers():
    """The loss and a gradient are those of Hugging Face's own code, of text without padding."""
    golden = dict(np.load(LLAMA.with_suffix(".npz")))
    model = jaxonnx.load(LLAMA.with_suffix(".onnx"))
    lengths = golden["attention_mask"].sum(1)
    data = [row[:n].tolist() for row, n in zip(golden["input_ids"], lengths, strict=True)]
    run = train(model, {"input_ids": data}, batch_size=3, optimizer=optax.sgd(1.0))
    assert run.history.losses == [pytest.approx(float(golden["loss"]), rel=1e-5)]
    moves = [
        (before - run.model.params[name]).T
        for name, before in model.params.items()
        if before.shape == golden["grad"].shape[::-1]
    ]
    errors = [np.abs(move - golden["grad"]).max() for move in moves]
    assert min(errors) < 1e-5 * np.abs(golden["grad"]).max()


@pytest.mark.deep
def test_losses_over_tokens():
    random = np.random.default_rng(0)
    scores = jnp.asarray(random.normal(size=(2, 5, 3)), jnp.float32)
    labels = jnp.array([[0, 1, 2, -100, -100], [2, 2, 0, 1, -100]])
    for reduction, weight in itertools.product(("mean", "sum", "none"), (None, [1.0, 2.0, 0.5])):
        wanted = {"reduction": reduction, "weight": weight, "ignore_index": -100}
        last = cross_entropy(**wanted, axis=-1)(scores, labels)
        first = cross_entropy(**wanted)(jnp.moveaxis(scores, -1, 1), labels)
        np.testing.assert_allclose(last, first, rtol=1e-6)
    each = optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], labels[:, 1:] % 3)
    expected = each[labels[:, 1:] >= 0].mean()
    np.testing.assert_allclose(causal_lm()(scores, labels), expected, rtol=1e-6)


IDS = texts()
BAD = {
    "labels": (
        {"input_ids": IDS, "labels": IDS},
        {"loss": LABELS},
        r"labels outside of 0 ... 6, the first is -100.*ignore_index=-100\) leaves",
    ),
    "wrong label": ({"input_ids": IDS, "labels": [x + 1 for x in IDS]}, {}, "the first is 7"),
    "values": (
        {"input_ids": IDS, "labels": [x / 2 for x in IDS]},
        {"loss": "squared_error"},
        r"the targets have unequal lengths and are not labels: .* pad=\{'y': \.\.\.\}",
    ),
    "longer": ({"input_ids": IDS}, {"length_buckets": (8, 16)}, "example 8 has the length 17"),
    "no pad": ({"input_ids": IDS}, {"pad": {"input_id": 0}}, "pad has 'input_id'; there are 'inp"),
    "pad": ({"input_ids": IDS}, {"pad": 0}, "pad must be a dict or None, got 0"),
    "half": ({"input_ids": IDS}, {"pad": {"input_ids": 0.5}}, "0.5 pads .* is not a valid int64"),
    "buckets": (
        {"input_ids": IDS},
        {"length_buckets": (0, 8)},
        "length_buckets must be a width",
    ),
    "lengths": (
        {"input_ids": IDS, "attention_mask": IDS[1:], "labels": IDS},
        {},
        "different numbers of examples",
    ),
    "mask": (
        {"input_ids": IDS, "attention_mask": IDS[::-1]},
        {},
        "lengths of 'input_ids' are not those of its mask",
    ),
    "inner": (
        {"input_ids": [np.ones((2, 2)), np.ones((3, 1))]},
        {},
        "arrays of numbers whose shapes differ only",
    ),
    "words": ({"input_ids": [["a"], ["b", "c"]], "labels": IDS[:2]}, {}, "must be numbers, got"),
    "number": ({"input_ids": [1, [2, 3]]}, {}, "input 'input_ids' must be arrays of numbers"),
    "tokens": ({"attention_mask": IDS}, {}, "it lacks the model's input 'input_ids'"),
    "size": (
        [(np.ones((2, 3), int),) * 2, (np.ones((3, 3), int),) * 2],
        {"batch_size": None},
        "has 3 examples, more than the 2 before it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(net, case):
    data, wanted, message = BAD[case]
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(net, data, **wanted)


def test_tokens_beside_a_mask_of_cross_attention():
    """Labels come of the tokens' own mask; Mllama's image token is beyond its output layer."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (int64[n, m] input_ids, int64[n, k] attention_mask, int64[n, m, 1] cross_attention_mask)
        => (float[n, m, 5] logits) <int64[1] last = {-1}> {
        e = Gather(E, input_ids) c = Cast <to = 1> (cross_attention_mask)
        a = Cast <to = 1> (attention_mask) u = Unsqueeze(a, last) v = Add(c, u) logits = Add(e, v)
    }"""
    proto, table = onnx.parser.parse_model(text), np.arange(30, dtype=np.float32).reshape(6, 5) % 7
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "E"))
    ids, mask = np.array([[5, 2, 0, 1], [5, 4, 3, 3]]), np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    data = {"input_ids": ids, "attention_mask": mask, "cross_attention_mask": mask[..., None]}
    model, run = jaxonnx.load(proto), {"optimizer": optax.sgd(0.0), "epochs": 1, "batch_size": 2}
    result = jaxonnx.train(model, data, loss=causal_lm(ignore_index=5), **run)
    each = optax.softmax_cross_entropy_with_integer_labels(table[ids[:, :-1]], ids[:, 1:])
    np.testing.assert_allclose(result.history.losses[0], each[mask[:, 1:] > 0].mean(), rtol=1e-5)
    labels = {"labels": np.where(mask > 0, ids, -100)}
    for added, words in [
        ({}, "labels in the data with -100 in their place"),
        (labels, "labels in the data with -100 in their place, .* leave these out"),
        ({"attention_mask": mask | 1}, "with ignore_index=5 the loss leaves these out"),
        ({"attention_mask": mask[:, :2]}, "not those of its mask, 'attention_mask'"),
    ]:
        with pytest.raises(jaxonnx.TrainingError, match=words):
            jaxonnx.train(model, data | added, loss="causal_lm", **run)


def test_a_length_that_the_file_fixes():
    fixed = network(dims="n, 20", outputs=f"float[n, 20, {TOKENS}] logits")
    outputs = fixed.predict({"input_ids": IDS}, batch_size=5)
    assert outputs.shape == (10, 20, TOKENS)
    with pytest.raises(jaxonnx.TrainingError, match="more than 16, what the file is fixed to"):
        network(dims="n, 16").predict({"input_ids": IDS})


@pytest.mark.parametrize("devices", [None, pytest.param(1, marks=pytest.mark.deep)])
def test_a_step_of_next_tokens_takes_batches_without_targets(devices):
    """Masks may be missing as well; other losses say that there are no targets."""
    model = jaxonnx.load(DATA / "text" / "llama.onnx")
    mesh = devices and jax.make_mesh((devices,), ("data",))
    step = jaxonnx.training.step(
        model, loss="causal_lm", optimizer=optax.sgd(0.1), **({"mesh": mesh} if mesh else {})
    )
    tokens = np.arange(24).reshape(2, 12) % 50
    mask = np.ones_like(tokens)
    update = jax.jit(step.update)
    _, wanted = update(step.init(), ((tokens, mask), tokens))
    for batch in ({"input_ids": tokens, "attention_mask": mask}, {"input_ids": tokens}):
        np.testing.assert_array_equal(update(step.init(), batch)[1], wanted)
    mask[1, 8:] = 0
    _, padded = update(step.init(), {"input_ids": tokens, "attention_mask": mask})
    labels = np.where(mask > 0, tokens, -100)
    np.testing.assert_array_equal(padded, update(step.init(), ((tokens, mask), labels))[1])
    other = jaxonnx.training.step(
        model,
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.sgd(0.1),
    )
    with pytest.raises(jaxonnx.TrainingError, match="no targets"):
        other.update(other.init(), {"input_ids": tokens, "attention_mask": mask})
