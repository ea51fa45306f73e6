"""What `preview` tells before a run is what the run does."""

import json
from dataclasses import asdict

import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.training import preview
from tests.support import tiny_networks
from tests.support.paths import DATA

GENAI = DATA / "llm" / "qwen3-genai"
ROWS = [{"prompt": "a list", "completion": " of lists"}] * 5
ROWS += [{"prompt": "is it", "completion": " a list of lists" * 8}] * 2
SETTINGS = {"loss": "causal_lm", "optimizer": optax.sgd(0.1), "batch_size": 4}
SETTINGS["trainable"] = "*layers.1.mlp*"  # a program with half of the kernels
LOSS = "softmax_cross_entropy_with_integer_labels"


@pytest.fixture(scope="module")
def seen():
    preprocess = {"max_length": 32, "long": "cut"}
    return preview(GENAI, ROWS, epochs=3, preprocess=preprocess, **SETTINGS)


def test_numbers_are_those_of_the_run(seen):
    model = jaxonnx.load(GENAI)
    encode = model.tokenizer.encode
    lengths = [min(32, len(encode(row["prompt"] + row["completion"])) + 1) for row in ROWS]
    before = [len(encode(row["prompt"])) for row in ROWS]
    assert seen.rows == 7
    assert seen.tokens == sum(lengths)
    assert seen.trained_tokens == sum(lengths) - sum(before)
    assert seen.steps == 6
    assert seen.long == {"cut": 2}
    assert sum(seen.widths.values()) == 7
    assert max(seen.widths) == 32
    assert seen.shapes["input_ids"] == "int64[4, 32]"
    assert seen.notes[0].startswith("texts of more than 32 tokens: 2 cut")
    assert min(seen.memory, seen.seconds) > 0
    preprocess = {"max_length": 32}
    result = jaxonnx.train(GENAI, ROWS, epochs=3, preprocess=preprocess, **SETTINGS)
    assert len(result.history.losses) == seen.steps


def test_examples_are_decoded_in_parts_that_count(seen):
    (first, second), model = seen.examples, jaxonnx.load(GENAI)
    assert first == second == (("a list", False), (" of lists<|im_end|>", True))
    assert "a list⟦ of lists<|im_end|>⟧" in str(seen)
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "yes"}]
    again = preview(model, [{"messages": [*chat, *chat]}], **SETTINGS)
    texts = [text for text, counts in again.examples[0] if counts]
    assert texts == ["yes<|im_end|>\n"] * 2
    packed = preview(model, ROWS, preprocess={"pack": True, "max_length": 128}, **SETTINGS)
    assert sum(text == " of lists<|im_end|>" for text, _ in packed.examples[0]) >= 2


def test_pairs_of_answers_are_shown_one_behind_the_other():
    """With what the model says of them before the training, as the loss takes it."""
    rows = [{"prompt": "a list", "chosen": " of lists", "rejected": " it"}] * 2
    seen = preview(GENAI, rows, loss="dpo", optimizer=optax.sgd(0.1), batch_size=4)
    texts = [part for example in seen.examples for part, counts in example if counts]
    assert texts == [" of lists<|im_end|>", " it<|im_end|>"]
    assert seen.captions == ["chosen", "rejected"]
    assert "chosen: a list⟦ of lists<|im_end|>⟧" in str(seen)
    assert seen.rows == 4
    assert seen.loss == pytest.approx(np.log(2), rel=1e-5)
    assert "targets['reference']" in seen.shapes


@pytest.mark.deep
def test_the_widest_batch_has_whole_pairs():
    """Its loss is that of `train` on it."""
    rows = [{"prompt": "a list", "chosen": " of lists" * n, "rejected": " it"} for n in (1, 2, 6)]
    settings = {"loss": "orpo", "optimizer": optax.sgd(0.0), "batch_size": 2}
    result = jaxonnx.train(GENAI, rows, progress=False, **settings)
    seen = preview(GENAI, rows, **settings)
    (longest,) = jaxonnx.train(GENAI, rows[2:], progress=False, **settings).history.losses
    assert seen.loss == pytest.approx(longest, rel=1e-5)
    assert any(abs(seen.loss - loss) > 0.01 for loss in result.history.losses)


def test_answers_with_judgements_are_shown_without_those_of_other_rows():
    rows = [("a list", " of lists", True), ("is", " it", False), ("a", " mutable list", True)]
    rows = [{"prompt": p, "completion": c, "label": good} for p, c, good in rows]
    seen = preview(GENAI, rows, loss="kto", optimizer=optax.sgd(0.1), batch_size=4)
    assert seen.captions == ["desirable", "undesirable"]
    assert seen.examples[0] == (("a list", False), (" of lists<|im_end|>", True))
    assert seen.examples[1] == (("is", False), (" it<|im_end|>", True))
    assert "undesirable: is⟦ it<|im_end|>⟧" in str(seen)
    encode = jaxonnx.load(GENAI).tokenizer.encode
    assert seen.trained_tokens == sum(len(encode(row["completion"])) + 1 for row in rows)
    before = sum(len(encode(row["prompt"])) for row in rows)
    assert seen.tokens is not None
    assert seen.tokens - before == seen.trained_tokens


def test_classes_that_a_teacher_has_are_counted_and_not_tokens():
    loss = jaxonnx.losses.distill(teacher=tiny_networks.mlp(hidden=8), soft=0.5)
    x, labels = tiny_networks.examples()
    found = preview(tiny_networks.mlp(), (x, labels), loss=loss, optimizer=optax.sgd(0.1), epochs=1)
    assert found.classes == dict(enumerate(np.bincount(labels)))
    assert found.tokens is None


@pytest.mark.deep
def test_weights_of_examples_count_in_the_first_loss():
    rows = [{"text": "a list of lists", "weight": 0.0}, {"text": "is a list", "weight": 2.0}]
    settings = {"loss": "causal_lm", "optimizer": optax.sgd(0.0), "batch_size": 2}
    (first,) = jaxonnx.train(GENAI, rows, progress=False, **settings).history.losses
    assert preview(GENAI, rows, **settings).loss == pytest.approx(first, rel=1e-5)


def test_nothing_changes_and_nothing_is_written(tmp_path):
    model = jaxonnx.load(tiny_networks.mlp())
    before = {name: np.array(x) for name, x in model.params.items()}
    arguments = {"loss": LOSS, "optimizer": optax.adam(0.1), "batch_size": 8}
    x, y = tiny_networks.examples()
    seen = preview(model, (x, y), checkpoint_dir=tmp_path / "kept", **arguments)
    assert not [*tmp_path.iterdir()]
    for name, value in model.params.items():
        np.testing.assert_array_equal(value, before[name])
    result = jaxonnx.train(model, (x, y), seed=0, progress=False, **arguments)
    assert seen.loss == pytest.approx(result.history.losses[0], rel=1e-5)
    assert (seen.rows, seen.steps, seen.tokens) == (40, 5, None)
    assert seen.classes == dict(enumerate(np.bincount(y).tolist()))
    assert seen.shapes == {"x": "float32[8, 8]", "targets": "int64[8]"}
    assert preview(model, (x, y), epochs=3, max_steps=7, **arguments).steps == 7
    stream = preview(model, iter([(x[:8], y[:8])]), loss=LOSS, optimizer=optax.adam(0.1))
    assert (stream.rows, stream.steps) == (None, None)
    with pytest.raises(jaxonnx.TrainingError, match="label"):
        preview(model, (x, y + 100), **arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        preview(model, (x, y), epoch=1)


def test_the_command_shows_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    line = ["train", str(GENAI), "rows.json", "-o", "tuned/", "--loss", "causal_lm"]
    line += ["--batch-size", "4", "--epochs", "3", "--max-length", "32", "--log", "log.csv"]
    assert main([*line, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.json"}
    settings = {"loss": "causal_lm", "batch_size": 4, "epochs": 3}
    wanted = preview(GENAI, ROWS, preprocess={"max_length": 32}, **settings)
    for name, value in json.loads(json.dumps(asdict(wanted))).items():
        if name not in ("seconds", "compilation", "notes"):
            assert told[name] == value, name
    at = line.index("-o")
    assert main([*line[:at], *line[at + 2 :], "--dry-run"]) == 0
    assert "⟦ of lists<|im_end|>⟧" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # a run writes its model
        main([*line[:at], *line[at + 2 :]])
    assert "required: -o" in capsys.readouterr().err
