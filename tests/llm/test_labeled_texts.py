"""Texts and pairs of texts with labels: tokens and segments of transformers, labels of any kind."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
import tokenizers

import jaxonnx
from jaxonnx import losses
from jaxonnx.cli import main
from tests.support.lazy_cases import Module
from tests.support.sources import read_texts
from tests.support.sweeps import sweep

datasets = Module("datasets")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "fast", "who", "is", "it"]
WHO, MAT = "who sat", "the cat sat on a mat"
# of transformers 5: PreTrainedTokenizerFast(tokenizer_object=...)(first, second, truncation=True)
SINGLE = [2, 14, 7, 3]
PAIR = [2, 14, 7, 3, 5, 6, 7, 8, 9, 10, 3], [0] * 4 + [1] * 7
CUT = {
    ("right", 9): ([2, 14, 7, 3, 5, 6, 7, 8, 3], [0] * 4 + [1] * 5),
    ("right", 6): ([2, 14, 3, 5, 6, 3], [0] * 3 + [1] * 3),
    ("left", 9): ([2, 14, 7, 3, 7, 8, 9, 10, 3], [0] * 4 + [1] * 5),
    ("left", 6): ([2, 7, 3, 9, 10, 3], [0] * 3 + [1] * 3),
}


def write(folder, classes=3, config=(), **settings):
    """Write a classifier of the sum of its tokens and segments, with BERT's tokenizer."""
    random = np.random.default_rng(0)

    def numbers(*shape):
        return ", ".join(f"{x:.3f}" for x in random.normal(size=np.prod(shape)))

    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    classifier (int64[n, t] input_ids, int64[n, t] attention_mask, int64[n, t] token_type_ids)
        => (float[n, {classes}] logits)
    <float[17, 4] words = {{{numbers(17, 4)}}}, float[2, 4] segments = {{{numbers(2, 4)}}},
     float[4, {classes}] head = {{{numbers(4, classes)}}}, float[{classes}] bias = {{
     {numbers(classes)}}}, int64[1] one = {{1}}, int64[1] two = {{2}}> {{
        word = Gather(words, input_ids)
        segment = Gather(segments, token_type_ids)
        both = Mul(word, segment)
        real = Cast <to = 1> (attention_mask)
        mask = Unsqueeze(real, two)
        masked = Mul(both, mask)
        sum = ReduceSum <keepdims = 0> (masked, one)
        logits = Gemm(sum, head, bias)
    }}""")
    onnx.save(proto, folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"pad_token_id": 0, **dict(config)}))
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{word.strip('[]').lower()}_token": word for word in WORDS[:5]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return jaxonnx.load(folder)


NAMES = {"id2label": {"0": "Entailment", "1": "neutral", "2": "contradiction"}}


def read(model, data, **preprocess):
    columns, _, notes = read_texts(model, data, preprocess)
    return columns, notes


@pytest.mark.parametrize(
    "columns",
    [
        ("text", "text_pair"),
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question1", "question2"),
        ("question", "sentence"),
        ("question", "answer"),
        ("query", "passage"),
        ("query", "document"),
        ("text1", "text2"),
    ],
)
def test_pairs_have_the_tokens_and_segments_of_transformers(tmp_path, columns):
    rows = [dict(zip(columns, (WHO, MAT), strict=True)) | {"label": 1}]
    found, notes = read(write(tmp_path), rows)
    assert [*found] == ["input_ids", "token_type_ids", "label"]
    ids, segments, labels = (column[0] for column in found.values())
    assert (ids.tolist(), segments.tolist(), labels, notes) == (*PAIR, 1, [])


@pytest.mark.parametrize("name", ["text", "sentence"])
def test_single_texts_may_be_empty(tmp_path, name):
    found, _ = read(write(tmp_path), [{name: WHO, "labels": 2}, {name: "", "labels": 0}])
    assert [x.tolist() for x in found["input_ids"]] == [SINGLE, [2, 3]]
    assert found["label"] == [2, 0]


@pytest.mark.parametrize(("side", "limit"), CUT)
def test_long_pairs_are_cut_as_by_transformers(tmp_path, side, limit):
    model = write(tmp_path, truncation_side=side)
    found, notes = read(model, [{"text": WHO, "text_pair": MAT}], max_length=limit)
    assert (found["input_ids"][0].tolist(), found["token_type_ids"][0].tolist()) == CUT[side, limit]
    assert notes[0].startswith(f"texts of more than {limit} tokens: 1 cut")


def test_the_length_of_the_tokenizer_is_the_default(tmp_path):
    found, _ = read(write(tmp_path, model_max_length=9), [{"text": WHO, "text_pair": MAT}])
    assert found["input_ids"][0].tolist() == CUT["right", 9][0]


@pytest.mark.parametrize(
    ("kind", "fill", "limit"),
    [("roberta", 1, 10), ("xlm-roberta", 0, 11), ("mpnet", None, 10), ("bert", 0, 12)],
)
def test_positions_that_begin_behind_the_padding_are_fewer(tmp_path, kind, fill, limit):
    """transformers' RoBERTa counts them from pad_token_id + 1: a table of 12 has 10 for tokens."""
    config = {"model_type": kind, "pad_token_id": fill, "max_position_embeddings": 12}
    model = write(tmp_path, config=config, model_max_length=10**30)
    found, _ = read(model, [{"text": "the cat " * 9, "label": 1}])
    assert len(found["input_ids"][0]) == limit
    with pytest.raises(jaxonnx.TrainingError, match=f"the model has positions for {limit} tokens"):
        read(model, [{"text": "the cat", "label": 1}], max_length=limit + 1)


def test_several_labels_of_a_text_are_learned_by_sigmoids(tmp_path):
    """Where the file's network is of such, as transformers does; else they may be shares."""
    rows = [{"text": WHO, "labels": [1, 0, 1]}, {"text": MAT, "labels": [0, 0, 0]}]
    with pytest.raises(jaxonnx.TrainingError, match="pass loss=: a text with a list of numbers"):
        jaxonnx.train(write(tmp_path), rows)
    model = write(tmp_path, config={"problem_type": "multi_label_classification"})
    result = jaxonnx.train(model, rows, optimizer=optax.sgd(0.0), batch_size=2, progress=False)
    assert "loss: sigmoid_binary_cross_entropy (default for several labels)" in (
        result.history.notes
    )
    texts = SINGLE, [2, 5, 6, 7, 8, 9, 10, 3]
    scores = np.concatenate([model.predict({"input_ids": [ids]}) for ids in texts])
    targets = np.array([row["labels"] for row in rows])
    losses = np.log1p(np.exp(scores)) - targets * scores
    assert result.history.losses[0] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("label", "expected"),
    [(2, 2), (True, 1), (1.0, 1), ("2", 2), ("Neutral", 1), ("ENTAILMENT", 0), (np.int8(1), 1)],
)
def test_labels_are_numbers_or_names_of_classes(tmp_path, label, expected):
    found, _ = read(write(tmp_path, config=NAMES), [{"text": WHO, "label": label}])
    assert found["label"] == [expected]


def test_labels_of_one_output_are_numbers(tmp_path):
    found, _ = read(write(tmp_path, 1), [{"text": WHO, "label": x} for x in (0.25, 3, "1.5")])
    np.testing.assert_array_equal(found["label"], [[0.25], [3], [1.5]])


def test_labels_of_several_at_once_are_lists(tmp_path):
    rows = [{"text": WHO, "label": [1, 0, 1]}, {"text": MAT, "label": [0.0, 0.5, 0.5]}]
    found, _ = read(write(tmp_path), rows)
    np.testing.assert_array_equal(found["label"], [[1, 0, 1], [0, 0.5, 0.5]])


GOLD = np.float32([[1, 0, 1], [0, 0, 0], [0, 1, 0]])


def test_several_labels_of_a_text_are_names_of_classes(tmp_path):
    """As in go_emotions, whose labels are lists of ClassLabel."""
    model = write(tmp_path, config=NAMES)
    lists = [["contradiction", "ENTAILMENT"], [], ("Neutral",)]
    rows = [{"text": WHO, "labels": x} for x in lists]
    named, _ = read(model, rows)
    np.testing.assert_array_equal(named["label"], GOLD)
    names = ["neutral", "contradiction", "entailment"]
    classes = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features({"text": datasets.Value("string"), "labels": classes})
    numbers = [[1, 2], [], [0]]
    columns = {"text": [WHO] * 3, "labels": numbers}
    indexed, notes = read(model, datasets.Dataset.from_dict(columns, features=features))
    np.testing.assert_array_equal(indexed["label"], GOLD)
    assert any("classes by name" in note for note in notes)
    settings = {"optimizer": optax.sgd(0.0), "batch_size": 3, "progress": False}
    result = jaxonnx.train(model, rows, **settings)
    assert "loss: sigmoid_binary_cross_entropy (default for several labels)" in (
        result.history.notes
    )
    numbers = [{"text": WHO, "labels": x.tolist()} for x in GOLD]
    other = jaxonnx.train(model, numbers, loss=BINARY, **settings)
    assert result.history.losses == other.history.losses
    with pytest.raises(jaxonnx.TrainingError, match="'bad' is no class of the model, whose 3"):
        read(model, [{"text": WHO, "label": ["neutral", "bad"]}])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            "bad",
            "label 'bad' is no class of the model, whose 3 classes are 'Entailment', 'neutral'",
        ),
        (None, "example 1 of data: label is None"),
        (float("nan"), "example 1 of data: label is nan"),
        (0.5, "label is 0.5, and the model has 3 classes, 0 ... 2: head=1 gives it one output"),
        ([1, 0], r"label has \(2,\) numbers, and the model has \(3,\) outputs"),
    ],
)
def test_other_labels_are_refused_with_their_row(tmp_path, label, message):
    rows = [{"text": WHO, "label": 0}, {"text": MAT, "label": label}]
    with pytest.raises(jaxonnx.TrainingError, match=message):
        read(write(tmp_path, config=NAMES), rows)


@pytest.mark.parametrize("setting", [{"pack": True}, {"long": "split"}, {"loss": "all"}])
def test_settings_of_language_models_are_refused(tmp_path, setting):
    with pytest.raises(jaxonnx.TrainingError, match="is for language models"):
        read(write(tmp_path), [{"text": WHO, "label": 0}], **setting)


def test_classes_of_a_dataset_are_those_of_the_model_by_their_names(tmp_path):
    names = ["contradiction", "entailment", "neutral"]
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    features["idx"] = datasets.Value("int32")
    columns = {"text": [WHO] * 3, "label": [0, 1, 2], "idx": [5, 6, 7]}
    data = datasets.Dataset.from_dict(columns, datasets.Features(features))
    found, notes = read(write(tmp_path, config=NAMES), data)
    assert found["label"] == [2, 0, 1]
    assert notes[0].startswith("data: classes by name, as the model has them in the order 'Ent")
    assert notes[1] == "columns that nothing reads: 'idx'"


ROWS = [
    {"text": WHO, "text_pair": MAT, "label": 0},
    {"text": "it ran", "text_pair": "the dog ran fast", "label": 2},
    {"text": "who is it", "text_pair": "a cat", "label": 1},
]
TOKENS = [PAIR[0], [2, 16, 12, 3, 5, 11, 12, 13, 3], [2, 14, 15, 16, 3, 9, 6, 3]]
SEGMENTS = [PAIR[1], [0] * 4 + [1] * 5, [0] * 5 + [1] * 3]


def scores(folder):
    """What onnxruntime computes of each row alone."""
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    names = "input_ids", "attention_mask", "token_type_ids"
    rows = [(ids, [1] * len(ids), kinds) for ids, kinds in zip(TOKENS, SEGMENTS, strict=True)]
    feeds = [{n: [x] for n, x in zip(names, row, strict=True)} for row in rows]
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


@pytest.mark.parametrize("form", ["rows", "csv", "jsonl", "stream"])
def test_a_classifier_is_trained_evaluated_and_run_on_rows(tmp_path, form):
    model = write(tmp_path)
    data, path = ROWS, tmp_path / f"data.{form}"
    if form == "csv":
        lines = [",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]
        path.write_text("\n".join(lines))
        data = path
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
        data = path
    expected = scores(tmp_path)
    labels = np.array([row["label"] for row in ROWS])
    right = float(optax.softmax_cross_entropy_with_integer_labels(expected, labels).mean())
    source = iter(ROWS) if form == "stream" else data
    result = jaxonnx.train(model, source, optimizer=optax.sgd(0.0), batch_size=3)
    assert result.history.losses[0] == pytest.approx(right, rel=1e-5)
    if form == "stream":
        return
    found = jaxonnx.evaluate(model, data, metrics=["accuracy"])
    assert found["accuracy"] == pytest.approx((expected.argmax(1) == labels).mean())
    np.testing.assert_allclose(model.predict(data), expected, rtol=1e-5)
    unlabeled = [{k: v for k, v in row.items() if k != "label"} for row in ROWS]
    np.testing.assert_allclose(model.predict(unlabeled), expected, rtol=1e-5)


def test_the_command_run_takes_rows(tmp_path, capsys):
    model, path = write(tmp_path), tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    line = ["run", str(tmp_path), str(path), "-o", str(tmp_path / "out.npz"), "--batch-size", "2"]
    assert main(line) == 0, capsys.readouterr().err
    outputs = np.load(tmp_path / "out.npz")[model.outputs[0].name]
    np.testing.assert_allclose(outputs, scores(tmp_path), rtol=1e-5, atol=1e-6)


def test_new_classes_by_name_go_into_the_saved_configuration(tmp_path):
    (tmp_path / "base").mkdir()
    model = write(tmp_path / "base", config=NAMES | {"problem_type": "regression"})
    names = ["sports", "politics"]
    rows = [{"text": WHO, "label": "politics"}, {"text": MAT, "label": "Sports"}]
    result = jaxonnx.train(model, rows, head=names, batch_size=2)
    result.save(f"{tmp_path}/tuned/")
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config == {
        "pad_token_id": 0,
        "id2label": {"0": "sports", "1": "politics"},
        "label2id": {"sports": 0, "politics": 1},
        "num_labels": 2,
        "problem_type": None,
    }
    fresh = jaxonnx.load(tmp_path / "tuned").with_head(4)
    for changed in (fresh, jaxonnx.convert(fresh, opset=21)):
        changed.save(f"{tmp_path}/again/")
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert config["id2label"] == {str(i): f"LABEL_{i}" for i in range(4)}
        assert config["label2id"] == {f"LABEL_{i}": i for i in range(4)}
    model.save(f"{tmp_path}/same/")
    config = (tmp_path / "base" / "config.json").read_text()
    assert (tmp_path / "same" / "config.json").read_text() == config


ONE, SEVERAL = "single_label_classification", "multi_label_classification"
BINARY, NUMBERS = "sigmoid_binary_cross_entropy", "squared_error"


@pytest.mark.parametrize(
    ("before", "head", "label", "loss", "after"),
    sweep(
        [
            (None, ["a", "b"], [1, 0], BINARY, SEVERAL),
            (ONE, ["a", "b"], [1, 0], BINARY, SEVERAL),
            (ONE, None, [1, 0, 1], BINARY, SEVERAL),
            (SEVERAL, None, [1, 0, 1], None, SEVERAL),
            (SEVERAL, None, 1, "softmax_cross_entropy_with_integer_labels", None),
            (SEVERAL, ["a", "b"], 1, None, None),
            (ONE, None, 1, None, ONE),
            (None, 1, 0.5, NUMBERS, "regression"),
            ("regression", 1, 0.5, BINARY, SEVERAL),
            (ONE, None, [1.0, 0.5, 2.0], NUMBERS, "regression"),
            (ONE, None, 1, losses.cross_entropy(axis=-1), ONE),
        ],
        *(1, 3, 5, 7, 10),
    ),
)
def test_the_saved_configuration_has_the_kind_of_problem(
    tmp_path, before, head, label, loss, after
):
    # by which transformers' pipelines take Softmax, Sigmoid or scores as they are
    (tmp_path / "base").mkdir()
    architectures = ["BertForSequenceClassification"]
    config = NAMES | {"architectures": architectures, "problem_type": before}
    model = write(tmp_path / "base", config=config)
    lora = jaxonnx.LoRA(rank=1, where=["words"])
    settings = {"head": head, "loss": loss, "batch_size": 1, "epochs": 1}
    for arguments in (settings, settings | {"lora": lora})[: 2 if loss == BINARY else 1]:
        result = jaxonnx.train(model, [{"text": WHO, "label": label}], **arguments)
        result.save(f"{tmp_path}/tuned/")
        config = json.loads((tmp_path / "tuned" / "config.json").read_text())
        assert config["problem_type"] == after
        assert config["architectures"] == architectures
        names = {name: f"{name}.weight" for name in result.model.params}
        original = tmp_path / "base"
        jaxonnx.export_safetensors(result.model, tmp_path / "hf", original=original, names=names)
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["problem_type"] == after
        if isinstance(head, list):
            assert config["id2label"] == {"0": "a", "1": "b"}
    if after == SEVERAL and loss == BINARY and isinstance(label, list):
        again = jaxonnx.load(tmp_path / "tuned")
        result = jaxonnx.train(again, [{"text": WHO, "label": label}], epochs=1)
        assert f"loss: {BINARY} (default for several labels)" in result.history.notes
        again.with_head(5).save(f"{tmp_path}/other/")
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        assert (config["num_labels"], config["problem_type"]) == (5, None)


TEXTS = [WHO, "who is it", "a mat", MAT, "the cat", "a dog ran", "it ran fast", "a dog", "the mat"]


def contrast(model, group):
    """Return the loss of texts, each evaluated alone, as Sentence Transformers defines it."""
    texts = TEXTS[: len(TEXTS) // group * group]
    x = np.concatenate([model.predict([{"text": text}]) for text in texts])
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).reshape(-1, group, x.shape[1])
    scores = 20 * x[:, 0] @ x[:, 1:].reshape(-1, x.shape[2]).T
    right = scores[np.arange(len(x)), np.arange(len(x)) * (group - 1)]
    return np.mean(np.log(np.exp(scores).sum(1)) - right)


@pytest.mark.parametrize(
    "columns",
    [("sentence1", "sentence2"), ("anchor", "positive", "negative"), ("text",)],
)
def test_texts_that_a_loss_compares_are_read_apart(tmp_path, columns):
    model, group = write(tmp_path, classes=6), max(2, len(columns))
    loss = losses.in_batch_negatives(negatives=group - 2)
    texts = TEXTS[: len(TEXTS) // group * group]
    parts = (texts[i : i + len(columns)] for i in range(0, len(texts), len(columns)))
    rows = [dict(zip(columns, part, strict=True)) for part in parts]
    settings = {"optimizer": optax.sgd(0.0), "epochs": 1, "batch_size": len(texts)}
    expected = contrast(model, group)
    value = jaxonnx.evaluate(model, rows, loss=loss, batch_size=len(texts))["loss"]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for data in (rows, iter(rows)):
        result = jaxonnx.train(model, data, loss=loss, **settings)
        np.testing.assert_allclose(result.history.losses, [expected], rtol=1e-5)
    labeled = [row | {"label": 0} for row in rows]
    result = jaxonnx.train(model, labeled, loss=loss, **settings)
    np.testing.assert_allclose(result.history.losses, [expected], rtol=1e-5)
    assert "columns that nothing reads: 'label'" in result.history.notes
    settings["preprocess"] = {"max_length": 7, "long": "skip"}
    if columns == ("text",):
        with pytest.raises(jaxonnx.TrainingError, match="leaves out single ones"):
            jaxonnx.train(model, rows, loss=loss, **settings)
        return
    notes = jaxonnx.train(model, rows, loss=loss, **settings).history.notes
    assert any(note.startswith("texts of more than 7 tokens: 1 skipped") for note in notes)


@pytest.mark.parametrize(
    "columns",
    [
        ("question", "answer"),
        ("query", "answer"),
        ("anchor", "positive"),
        ("query", "positive"),
        ("query", "positive", "negative"),
    ],
)
def test_columns_of_compared_texts_have_several_names(tmp_path, columns):
    model = write(tmp_path, classes=6)
    texts = TEXTS[: len(TEXTS) // len(columns) * len(columns)]
    parts = (texts[i : i + len(columns)] for i in range(0, len(texts), len(columns)))
    rows = [dict(zip(columns, part, strict=True)) for part in parts]
    loss = losses.in_batch_negatives(negatives=len(columns) - 2)
    value = jaxonnx.evaluate(model, rows, loss=loss, batch_size=len(texts))["loss"]
    np.testing.assert_allclose(value, contrast(model, len(columns)), rtol=1e-5)


def test_triplets_are_compared_by_a_loss_of_ones_own(tmp_path):
    """The distances are not those of normalized vectors, as in TripletLoss of PyTorch."""

    def triplet(x, targets, weight):
        anchor, near, far = x.reshape(-1, 3, x.shape[-1]).swapaxes(0, 1)
        near, far = (jnp.linalg.norm(anchor - other, axis=1) for other in (near, far))
        return jnp.repeat(jnp.maximum(near - far + 5, 0), 3)

    model, texts = write(tmp_path, classes=6), TEXTS[:3] + TEXTS[2::-1]
    names = ("anchor", "positive", "negative")
    rows = [dict(zip(names, texts[i : i + 3], strict=True)) for i in (0, 3)]
    loss = losses.GroupLoss(function=triplet, group=3, takes_targets=False, apart=True)
    x = np.asarray(model.predict([{"text": text} for text in texts]), np.float64).reshape(2, 3, 6)
    distances = np.linalg.norm(x[:, :1] - x[:, 1:], axis=2)
    expected = np.maximum(distances[:, 0] - distances[:, 1] + 5, 0).mean()
    value = jaxonnx.evaluate(model, rows, loss=loss, batch_size=3)["loss"]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    result = jaxonnx.train(model, rows, loss=loss, optimizer="sgd", batch_size=6)
    np.testing.assert_allclose(result.history.losses, [expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("columns", "loss", "message"),
    [
        (
            3,
            "in_batch_negatives",
            r"in_batch_negatives\(negatives=1\) compares these, or leave one",
        ),
        (2, losses.in_batch_negatives(negatives=1), r"negatives=0\) compares these$"),
        (3, BINARY, r"in_batch_negatives\(negatives=1\), or your own .* of group=3"),
        (2, BINARY, r"in_batch_negatives\(negatives=0\), or your own .* of group=2"),
    ],
)
def test_rows_of_another_number_of_texts_are_refused(tmp_path, columns, loss, message):
    names = ("anchor", "positive", "negative")[:columns]
    rows = [dict(zip(names, TEXTS, strict=False)) | {"label": 1.0}] * 3
    with pytest.raises(jaxonnx.Error, match=message):
        jaxonnx.train(write(tmp_path, classes=1), rows, loss=loss)
    if loss == BINARY:
        with pytest.raises(jaxonnx.Error, match=message):
            write(tmp_path, classes=6).predict(rows)
    elif columns == 3:
        jaxonnx.train(write(tmp_path), rows, loss=loss, columns={"negative": "unused"})


PAIR_ROW = {"prompt": "who", "chosen": "the cat sat", "rejected": "a dog ran"}


@pytest.mark.parametrize("loss", [None, "dpo", "squared_error"])
@pytest.mark.parametrize(
    "row",
    [
        PAIR_ROW,
        {"messages": [{"role": "user", "content": "who sat"}], "label": 1.0},
        {"prompt": "who", "completion": "the cat", "label": 1},
        {"instruction": "who", "output": "the cat", "label": 1.0},
    ],
    ids=lambda row: next(iter(row)),
)
def test_rows_of_language_models_are_refused_with_a_way_out(row, loss, tmp_path):
    with pytest.raises(jaxonnx.TrainingError, match=r"one row for each text.*GroupLoss"):
        jaxonnx.train(write(tmp_path, 1), [row] * 4, loss=loss, progress=False)


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_reward_model_learns_from_pairs_of_texts(share, tmp_path):
    """The way out of that error: Bradley and Terry's loss of two texts, which stay together."""
    model = write(tmp_path, 1)

    def ranking(outputs, targets, weight):
        margins = outputs[0::2, 0] - outputs[1::2, 0]
        return jnp.repeat(jax.nn.softplus(-margins), 2)

    loss = jaxonnx.losses.GroupLoss(name="ranking", function=ranking, group=2, takes_targets=False)
    pairs = ["the cat sat", "a dog ran"], ["it is a mat", "who"], ["a cat", "the dog"], ["it", "is"]
    rows = [{"text": text} for pair in pairs for text in pair]
    settings = {"optimizer": optax.sgd(0.0), "batch_size": 8, "progress": False}
    run = jaxonnx.train(model, rows, loss=loss, validation=share, **settings)
    scores = np.asarray(model.predict(rows, progress=False))[:, 0].reshape(-1, 2)
    losses = np.log1p(np.exp(scores[:, 1] - scores[:, 0]))
    if share is None:
        np.testing.assert_allclose(run.history.losses, [losses.mean()], rtol=1e-4)
        return
    held_out = run.history.epochs[0]["validation_loss"]
    halves = [np.mean(half) for half in itertools.combinations(losses, 2)]
    assert np.abs(np.array(halves) - held_out).min() < 1e-4


def test_a_model_of_embeddings_reads_each_text_alone_without_a_loss_too(tmp_path):
    """Pairs were joined to one text by `predict` and `quantize`, and read apart in training."""
    write(tmp_path, classes=6)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    model = jaxonnx.load(tmp_path)
    pairs = [{"sentence1": a, "sentence2": b, "score": 0.5} for a, b in itertools.pairwise(TEXTS)]
    texts = [{"text": row[name]} for row in pairs for name in ("sentence1", "sentence2")]
    found, expected = (
        jaxonnx.quantize(model, rows, batch_size=16, check=False) for rows in (pairs, texts)
    )
    assert found.to_onnx().graph == expected.to_onnx().graph
    with pytest.raises(jaxonnx.Error, match=r"an embedding of each text, .*pass a row for each"):
        model.predict(pairs)
    assert model.predict(texts[:3]).shape == (3, 6)
    for label in ("cats", 0.5):  # a new head is no embedding
        words = rf"label is {label!r}, and the model computes an embedding .*\(outputs, targets\)"
        with pytest.raises(jaxonnx.TrainingError, match=words) as caught:
            read(model, [{"text": WHO, "label": label}])
        assert "head=" not in str(caught.value)
    scored = model.with_head(2)  # which scores pairs
    assert scored.predict(pairs).shape == (len(pairs), 2)
