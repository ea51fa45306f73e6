"""Several texts in one row: losses and gradients are those of separate rows."""

import itertools
import json
import shutil

import jax
import numpy as np
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.llm._text_examples import fit_rows
from jaxonnx.llm._texts import take_packed_rows
from jaxonnx.training._loop import memory
from tests.support.paths import DATA

LLM = DATA / "llm"
TEXTS = ["a list", "a tuple is immutable", "of", "the dict has keys", "x", "one more text of some"]


@pytest.fixture(params=["qwen3-genai", pytest.param("pairs", marks=pytest.mark.deep)])
def folder(request, tmp_path):
    """A folder of onnxruntime-genai, and an export of PyTorch with a mask of queries and keys."""
    if request.param == "qwen3-genai":
        return LLM / request.param
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLM / "qwen3-genai" / name, tmp_path)
    shutil.copy(LLM / "pairs.onnx", tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return tmp_path


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_nearly_full_and_have_each_text_once(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 200)
    rows = fit_rows(lengths, 64)
    assert sorted(i for row in rows for i in row) == [*range(200)]
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert max(sums) <= 64
    assert len(rows) <= np.ceil(sum(lengths) / 64 * 11 / 9 + 1)


def test_losses_and_updates_are_those_of_separate_rows(folder):
    """One step of SGD over all texts, whose change of weights is the gradient."""
    data = [{"text": text} for text in TEXTS]
    wanted = {"loss": "causal_lm", "optimizer": optax.sgd(1.0), "seed": 0}
    if folder.name != "qwen3-genai":  # the file needs a mask of queries and keys: texts one by one
        model = jaxonnx.load(folder)
        losses, gradients = _one_by_one(model, data)
    else:
        run = jaxonnx.train(folder, data, batch_size=len(data), **wanted)
        (losses,) = run.history.losses
        before, after = jaxonnx.load(folder).params, run.model.params
        gradients = {name: before[name] - after[name] for name in before}
    pack = {"pack": True, "max_length": 40}
    packed = jaxonnx.train(folder, data, batch_size=4, preprocess=pack, **wanted)
    (note,) = (n for n in packed.history.notes if "rows" in n)
    count = int(note.split()[-2])
    assert 1 < count < 4
    assert packed.history.losses == [pytest.approx(losses, rel=1e-5)]
    before, after = jaxonnx.load(folder).params, packed.model.params
    for name, expected in gradients.items():
        found = before[name] - after[name]
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=max(2e-5 * scale, 2e-7))
    names = [[v.name for v in m.inputs] for m in (jaxonnx.load(folder), packed.model)]
    assert names[0] == names[1]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_mask_that_numbers_the_texts_of_a_row_is_refused(ragged):
    """GroupQueryAttention takes its sum as the length, and onnxruntime refuses the file then."""
    data = {"input_ids": np.full((2, 8), 5), "attention_mask": np.ones((2, 8), int)}
    data["attention_mask"][1, 3:6] = 2
    if ragged:
        data = {name: [rows[0][:4], rows[1]] for name, rows in data.items()}
    message = r"example 1 has 2 at place 3 of input 'attention_mask'.*preprocess=\{'pack': True\}"
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.evaluate(LLM / "qwen3-genai", data, loss="causal_lm", batch_size=2)
    # a mask that the file casts to bool says only where there are tokens, whatever its numbers
    other = jaxonnx.load(LLM / "qwen3-optimum")
    values = [jaxonnx.evaluate(other, data, loss="causal_lm", batch_size=2)["loss"]]
    data["attention_mask"] = [np.minimum(row, 1) for row in data["attention_mask"]]
    values.append(jaxonnx.evaluate(other, data, loss="causal_lm", batch_size=2)["loss"])
    assert values[0] == values[1]


@pytest.mark.parametrize("ragged", [False, True])
def test_padding_before_tokens_is_refused_where_the_mask_is_counted(ragged):
    """As transformers' tokenizers of decoders pad; onnxruntime takes padding for the text then."""
    tokens, padding = [5, 17, 33, 60, 8], [0, 0, 0]
    data = {
        "input_ids": [[*tokens, *padding], [*padding, *tokens]],
        "attention_mask": [[1] * 5 + [0] * 3, [0] * 3 + [1] * 5],
    }
    if ragged:
        data = {name: [rows[0][:5], rows[1]] for name, rows in data.items()}
    message = "example 1 has a token behind padding, at place 3 of input 'attention_mask'"
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.evaluate(LLM / "qwen3-genai", data, loss="causal_lm", batch_size=2)
    # other masks hide padding wherever it is
    rows = {name: np.array([data[name][-1]]) for name in data}
    rows["labels"] = np.where(rows["attention_mask"] > 0, rows["input_ids"], -100)
    rows["labels"][0, 3] = -100  # the first token, which padding would predict
    other, alone = jaxonnx.load(LLM / "qwen3-optimum"), {"input_ids": np.array([tokens])}
    losses = [jaxonnx.evaluate(other, x, loss="causal_lm")["loss"] for x in (rows, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _one_by_one(model, data):
    """Return the mean loss of the texts' tokens, and its gradient, by the file's own inputs."""
    from jaxonnx.llm._tokenizer import Tokenizer

    rows = [model.tokenizer.encode(row["text"]) for row in data]
    rows = [np.append(ids, Tokenizer(model.folder).ends[0]) for ids in rows]

    width = max(map(len, rows))
    ids = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    real = np.arange(width) < np.array([[len(row)] for row in rows])
    mask = np.tril(np.ones((len(rows), 1, width, width), bool))
    places = np.tile(np.arange(width), (len(rows), 1))

    def loss(params):
        logits = model.apply(params, ids, mask, places)
        scores = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        return (scores * real[:, 1:]).sum() / real[:, 1:].sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(model.params)
    return float(value), gradients


def test_onnxruntime_computes_the_same_of_a_packed_row():
    """By the mask that the file takes: what is trained is what the file computes."""
    model = jaxonnx.losses.causal_lm().prepare(jaxonnx.load(LLM / "pairs.onnx").without_cache())
    packed = take_packed_rows(model)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3]])
    ids = np.random.default_rng(0).integers(3, 192, (1, 7))
    texts = np.cumsum(positions == 0)
    mask = np.tril(texts[:, None] == texts)[None, None]
    session = onnxruntime.InferenceSession(LLM / "pairs.onnx")
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    logits = session.run(["logits"], given)[0]
    np.testing.assert_allclose(packed(ids, positions), logits, atol=2e-5)


@pytest.mark.deep
def test_validation_is_packed_too_and_one_program_is_compiled(monkeypatch):
    compiled = []
    check = memory._check
    monkeypatch.setattr(memory, "_check", lambda *a: compiled.append(a) or check(*a))
    data = [{"text": text} for text in TEXTS * 8]
    wanted = {"loss": "causal_lm", "batch_size": 2, "epochs": 1, "metrics": "perplexity"}
    folder = LLM / "qwen3-genai"
    run = jaxonnx.train(
        folder, data, validation=data, preprocess={"pack": True, "max_length": 64}, **wanted
    )
    assert len(compiled) == 1
    found = jaxonnx.evaluate(run.model, data, loss="causal_lm", metrics="perplexity", batch_size=4)
    last = run.history.epochs[-1]
    assert last["validation_loss"] == pytest.approx(found["loss"], rel=1e-4)
    assert last["validation_perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)


def test_a_share_for_validation_has_whole_documents():
    """Its loss is that of some of the documents, whose parts are several examples or rows."""
    rows = [{"text": f"{text} " * 30} for text in ("a list", "the dict", "one tuple")]
    model, settings = jaxonnx.load(LLM / "qwen3-genai"), {"loss": "causal_lm", "batch_size": 2}
    lengths = {"max_length": 40}
    losses = [
        jaxonnx.evaluate(model, [*pair], preprocess=lengths, **settings)["loss"]
        for pair in itertools.combinations(rows, 2)
    ]
    settings |= {"validation": 2 / 3, "optimizer": optax.sgd(0.0), "epochs": 1}
    settings["trainable"] = "*layers.1.mlp*"
    for pack in (False, True):
        run = jaxonnx.train(model, rows, preprocess={**lengths, "pack": pack}, **settings)
        distances = np.abs(np.array(losses) - run.history.epochs[0]["validation_loss"])
        assert (distances < 1e-4).sum() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-optimum", "neither GroupQueryAttention, nor positions beside a mask of queries"),
        ("builder/lfm2.onnx", "logits of one text differ by .* behind another one"),
    ],
)
def test_what_cannot_tell_texts_apart_is_refused(name, message):
    """A mask of tokens alone; convolutions over tokens beside attention."""
    model = jaxonnx.losses.causal_lm().prepare(jaxonnx.load(LLM / name).without_cache())
    with pytest.raises(jaxonnx.TrainingError, match=message):
        take_packed_rows(model)
