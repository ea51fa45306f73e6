"""The token that pads texts, and the proof that padding changes nothing."""

import json

import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.training._quantize import read_examples
from tests.support.paths import DATA

PAD = 7
TEXTS = [[1, 2, 3], [4, 5, 6, 1, 2], [2, 2], [6, 5, 4, 3, 2, 1, 1, 2, 3], [5]]
LABELS = np.array([0, 1, 2, 0, 1])
LOSS = "softmax_cross_entropy_with_integer_labels"


def write(folder, find_last, **files):
    """Write a classifier that reads one place of a text, as transformers exports those of decoders.

    Args:
      find_last: nodes that compute `last` [n, 1], that place, from input_ids and `places` [t].
    """
    random = np.random.default_rng(0)
    table, head = (
        ", ".join(f"{x:.3f}" for x in random.normal(size=size)) for size in (8 * 4, 4 * 3)
    )
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    classifier (int64[n, t] input_ids) => (float[n, 3] logits)
    <float[8, 4] table = {{{table}}}, float[4, 3] head = {{{head}}}, int64 pad = {{{PAD}}},
     int64 zero = {{0}}, int64 one = {{1}}> {{
        embedded = Gather(table, input_ids)
        scores = MatMul(embedded, head)
        sizes = Shape(input_ids)
        length = Gather <axis = 0> (sizes, one)
        places = Range(zero, length, one)
        {find_last}
        logits = GatherND <batch_dims = 1> (scores, last)
    }}""")
    onnx.save(proto, folder / "model.onnx")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


BY_TOKEN = """same = Equal(input_ids, pad)
        other = Not(same)
        real = Cast <to = 7> (other)
        numbered = Mul(places, real)
        last = ReduceMax <axes = [1], keepdims = 1> (numbered)"""
LAST_PLACE = """first = Constant <value_ints = [0]> ()
        row = Unsqueeze(places, first)
        whole = Expand(row, sizes)
        last = ReduceMax <axes = [1], keepdims = 1> (whole)"""


def of_each_text(folder):
    """What onnxruntime computes of each text alone."""
    path, providers = folder / "model.onnx", ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, providers=providers)
    return np.concatenate([session.run(None, {"input_ids": [text]})[0] for text in TEXTS])


SOURCES = {
    "config": {"config": {"pad_token_id": PAD}},
    "nested": {"config": {"pad_token_id": None, "text_config": {"pad_token_id": PAD}}},
    "generation_config": {"config": {}, "generation_config": {"pad_token_id": PAD}},
    "genai_config": {
        "genai_config": {"model": {"decoder": {"filename": "model.onnx"}, "pad_token_id": PAD}}
    },
    "tokenizer": {
        "config": {},
        "tokenizer_config": {"pad_token": {"content": "<pad>"}},
        "tokenizer": {"added_tokens": [{"id": PAD, "content": "<pad>"}]},
    },
    "vocabulary": {
        "config": {},
        "tokenizer_config": {"pad_token": "<pad>"},
        "tokenizer": {"model": {"vocab": {"<pad>": PAD}}},
    },
}


@pytest.mark.parametrize("files", SOURCES.values(), ids=[*SOURCES])
def test_texts_are_padded_by_the_token_of_the_folder(tmp_path, files):
    model = jaxonnx.load(write(tmp_path, BY_TOKEN, **files))
    np.testing.assert_allclose(
        model.predict({"input_ids": TEXTS}, batch_size=5), of_each_text(tmp_path), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("config", "is_described"),
    [
        ({"model_type": "llama", "pad_token_id": PAD}, True),
        ({"pad_token_id": PAD}, False),  # of something else
    ],
)
def test_the_path_of_a_file_is_that_of_its_folder(tmp_path, config, is_described):
    """Where a configuration beside it is that of a language model."""
    path = write(tmp_path, BY_TOKEN, config=config) / "model.onnx"
    model = jaxonnx.load(path)
    assert (model.folder == jaxonnx.load(tmp_path).folder) == is_described
    if is_described:
        found = model.predict({"input_ids": TEXTS}, batch_size=5)
        np.testing.assert_allclose(found, of_each_text(tmp_path), rtol=1e-5)
    (tmp_path / "config.json").write_text("[1]")
    assert jaxonnx.load(path).folder is None


def test_losses_and_calibration_see_the_same_padding(tmp_path):
    model = jaxonnx.load(write(tmp_path, BY_TOKEN, config={"pad_token_id": PAD}))
    scores = of_each_text(tmp_path)
    right = float(optax.softmax_cross_entropy_with_integer_labels(scores, LABELS).mean())
    data = {"input_ids": TEXTS, "y": LABELS}
    found = jaxonnx.evaluate(model, data, loss=LOSS, batch_size=5)
    assert found["loss"] == pytest.approx(right, rel=1e-5)
    result = jaxonnx.train(model, data, optimizer=optax.sgd(0.0), batch_size=5, validation=data)
    (epoch,) = result.history.epochs
    assert (epoch["loss"], epoch["validation_loss"]) == pytest.approx((right, right), rel=1e-5)
    _, examples = read_examples(model, data, 5, None)
    (batch,) = examples.batches(0)
    assert batch.inputs[0][4].tolist() == [5, *[PAD] * 8]


def test_padding_that_changes_the_outputs_is_refused(tmp_path):
    model = jaxonnx.load(write(tmp_path, BY_TOKEN) / "model.onnx")
    data = {"input_ids": TEXTS, "y": LABELS}
    message = (
        r"example 4: its outputs change by .* with padding \(0\) .*pad=\{'input_ids': \.\.\.\}"
    )
    for call in (
        lambda: model.predict(data),
        lambda: jaxonnx.evaluate(model, data, loss=LOSS),
        lambda: jaxonnx.train(model, data, batch_size=5),
        lambda: jaxonnx.quantize(model, data),
    ):
        with pytest.raises(jaxonnx.TrainingError, match=message):
            call()
    np.testing.assert_allclose(
        model.predict(data, pad={"input_ids": PAD}), of_each_text(tmp_path), rtol=1e-5
    )
    with pytest.warns(UserWarning, match=r"padding \(3\) behind it, as pad= says"):
        model.predict(data, pad={"input_ids": 3})


def test_a_file_that_reads_the_last_place_takes_texts_of_one_length(tmp_path):
    model = jaxonnx.load(write(tmp_path, LAST_PLACE, config={"pad_token_id": PAD}))
    with pytest.raises(jaxonnx.TrainingError, match="an iterable of batches, each of texts of one"):
        model.predict({"input_ids": TEXTS})
    found = model.predict([{"input_ids": [text]} for text in TEXTS])
    np.testing.assert_allclose(found, of_each_text(tmp_path), rtol=1e-5)


def test_batches_of_an_iterable_are_checked_when_they_need_padding(tmp_path):
    model = jaxonnx.load(write(tmp_path, BY_TOKEN) / "model.onnx")
    batches = [{"input_ids": [TEXTS[0]] * 2}, {"input_ids": TEXTS[:2]}]
    with pytest.raises(jaxonnx.TrainingError, match=r"batch 2 of data .*: example 0"):
        model.predict(batches)


def test_padding_of_a_fixed_length_must_not_count_unless_its_token_is_known(tmp_path):
    path = write(tmp_path, BY_TOKEN) / "model.onnx"
    proto = onnx.load(path)
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 12
    onnx.save(proto, path)
    with pytest.raises(jaxonnx.TrainingError, match="its outputs change"):
        jaxonnx.load(path).predict({"input_ids": TEXTS})
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": PAD}))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    padded = np.array([text + [PAD] * (12 - len(text)) for text in TEXTS])
    np.testing.assert_allclose(
        jaxonnx.load(tmp_path).predict({"input_ids": TEXTS}),
        session.run(None, {"input_ids": padded})[0],
        rtol=1e-5,
    )


TAGGER = """<ir_version: 8, opset_import: ["": 17]>
tagger (int64[n, t] input_ids) => (float[n, t, 3] logits) <float[8, 3] table = {%s}> {
    logits = Gather(table, input_ids)
}"""


@pytest.mark.parametrize("change", [-1, 1], ids=["fewer", "more"])
def test_labels_are_as_many_as_tokens(change):
    """Else -100 would be added to them, or tokens of padding would have labels."""
    table = ", ".join(f"{x:.3f}" for x in np.random.default_rng(0).normal(size=24))
    tagger = jaxonnx.load(onnx.parser.parse_model(TAGGER % table))
    loss = jaxonnx.losses.cross_entropy(axis=-1, ignore_index=-100)
    labels = [[1] * len(text) for text in TEXTS]
    jaxonnx.evaluate(tagger, {"input_ids": TEXTS, "labels": labels}, loss=loss)
    labels[3] = [1] * (len(TEXTS[3]) + change)
    message = rf"example 3 has 9 tokens \('input_ids'\) and {9 + change} labels: pass one for each"
    for name in ("labels", "logits"):
        with pytest.raises(jaxonnx.TrainingError, match=message):
            jaxonnx.evaluate(tagger, {"input_ids": TEXTS, name: labels}, loss=loss)


def test_labels_of_next_tokens_are_as_many():
    model = jaxonnx.load(DATA / "llm" / "qwen3-genai")
    rows, labels = [[5, 6, 7, 8], [9, 10, 11]], [[5, 6, 7, 8], [9, 10]]
    with pytest.raises(jaxonnx.TrainingError, match=r"example 1 has 3 tokens .* and 2 labels"):
        jaxonnx.evaluate(model, {"input_ids": rows, "labels": labels}, loss="causal_lm")
    with pytest.raises(jaxonnx.TrainingError, match=r"example 1 has 3 tokens .* and 2 labels"):
        jaxonnx.train(model, {"input_ids": rows, "labels": labels}, loss="dpo", epochs=1)
