"""Prompts for an encoder and completions for its decoder: data, samples and `Model.generate`."""

import json
import shutil

import numpy as np
import onnxruntime
import optax
import pytest
import tokenizers

import jaxonnx
from tests.support.paths import DATA
from tests.support.sources import read_texts

T5 = DATA / "transformers" / "t5"
WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    *("translate", ":", "one", "two", "three", "four"),
    *("un", "deux", "trois", "quatre"),
]
ROWS = [
    {"prompt": "translate : one two", "completion": "un deux"},
    {"prompt": "translate : three", "completion": "trois"},
    {"prompt": "translate : four three two", "completion": "quatre trois deux"},
    {"prompt": "translate : one", "completion": "un"},
]


def write_tokenizer(folder, ends=True):
    """Write a tokenizer of a few words, which ends texts as T5's does."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if ends:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(T5, tmp_path / "t5")
    write_tokenizer(tmp_path / "t5")
    return tmp_path / "t5"


@pytest.fixture
def lines(tmp_path):
    def write(*rows):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        return path

    return write


def read(folder, data, **preprocess):
    return read_texts(jaxonnx.load(folder), data, preprocess)


def tokens(text):
    return [*map(WORDS.index, text.split()), 1]


def test_prompts_are_read_and_completions_are_labels(folder, lines):
    columns, padding, notes = read(folder, lines(*ROWS))
    assert [*columns] == ["input_ids", "labels"]
    for row, ids, labels in zip(ROWS, *columns.values(), strict=True):
        assert (ids.tolist(), labels.tolist()) == (
            tokens(row["prompt"]),
            tokens(row["completion"]),
        )
    assert padding.buckets == (8,)
    assert not notes
    transformers = pytest.importorskip("transformers")
    # AutoTokenizer of transformers 5 takes it for a Unigram, as those of T5 are
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs(ROWS[0]["prompt"], text_target=ROWS[0]["completion"])
    assert expected["input_ids"] == columns["input_ids"][0].tolist()
    assert expected["labels"] == columns["labels"][0].tolist()


def test_completions_end_also_by_tokenizers_that_end_nothing(folder, lines):
    write_tokenizer(folder, ends=False)
    columns, *_ = read(folder, lines(ROWS[0]))
    assert columns["input_ids"][0].tolist() == tokens(ROWS[0]["prompt"])[:-1]
    assert columns["labels"][0].tolist() == tokens(ROWS[0]["completion"])


def test_long_pairs_are_cut_and_counted(folder, lines):
    path = lines(*ROWS)
    columns, _, notes = read(folder, path, max_length=4)
    assert [*map(len, columns["input_ids"])] == [4, 4, 4, 4]
    # as transformers cuts them, before the end token
    assert columns["input_ids"][0].tolist() == tokens("translate : one")
    assert columns["labels"][2].tolist() == tokens(ROWS[2]["completion"])
    assert notes[0].startswith("texts of more than 4 tokens: 2 cut")
    with pytest.raises(jaxonnx.TrainingError, match=r"line 1 of .* has 5 tokens, more than 4"):
        read(folder, path, max_length=4, long="refuse")


LANGUAGES = {
    # where the tokenizer marks the language, and what transformers makes of a prompt and of a
    # completion (`text_target`): MBartTokenizer, MBart50Tokenizer and NllbTokenizer
    "$A </s> en_XX": ([5, 6, 1, 14], [9, 10, 1, 13]),
    "en_XX $A </s>": ([14, 5, 6, 1], [13, 9, 10, 1]),
}


@pytest.mark.parametrize("template", LANGUAGES)
@pytest.mark.parametrize("where", ["tgt_lang", "forced_bos_token_id"])
def test_completions_have_the_mark_of_their_language(folder, lines, template, where):
    """And prompts that of `src_lang`, whichever the file of the tokenizer has."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["fr_XX", "en_XX", "de_DE"])
    marks = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "en_XX")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template.replace("en_XX", "de_DE"),
        special_tokens=[marks[0], ("de_DE", tokenizer.token_to_id("de_DE"))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "src_lang": "en_XX", "tgt_lang": "fr_XX"}
    if where != "tgt_lang":
        settings["tgt_lang"] = None
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"forced_bos_token_id": 13}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    columns, *_ = read(folder, lines(ROWS[0] | {"prompt": "one two"}))
    pair = [columns[name][0].tolist() for name in ("input_ids", "labels")]
    assert tuple(pair) == LANGUAGES[template]
    columns, *_ = read(folder, lines(ROWS[0] | {"prompt": "one two three four"}), max_length=4)
    assert columns["input_ids"][0].tolist() == LANGUAGES[template][0]
    assert jaxonnx.load(folder).tokenizer.encode("one two").tolist() == LANGUAGES[template][0]


def test_a_language_of_completions_that_nothing_names_is_refused(folder, lines):
    text = (folder / "tokenizer.json").read_text()
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.add_special_tokens(["en_XX"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="en_XX $A </s>",
        special_tokens=[("</s>", 1), ("en_XX", tokenizer.token_to_id("en_XX"))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "src_lang": "en_XX", "tgt_lang": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        jaxonnx.TrainingError, match=r'like \'en_XX\', .*"tgt_lang" in tokenizer_conf'
    ):
        read(folder, lines(ROWS[0]))


@pytest.mark.parametrize("named", ["tokenizer_config.json", "config.json"])
def test_completions_for_the_two_vocabularies_of_marian_are_refused(folder, lines, named):
    """tokenizer.json has the pieces of prompts; transformers splits targets by target.spm."""
    key = {"tokenizer_class": "MarianTokenizer"} if named != "config.json" else {}
    key = key or {"model_type": "marian"}
    settings = json.loads((folder / named).read_text())
    (folder / named).write_text(json.dumps(settings | key))
    (folder / "source.spm").write_bytes(b"pieces of English")
    (folder / "target.spm").write_bytes(b"pieces of French")
    with pytest.raises(jaxonnx.TrainingError, match=r"'labels' .* the argument text_target of"):
        read(folder, lines(*ROWS))
    (folder / "target.spm").write_bytes(b"pieces of English")
    columns, *_ = read(folder, lines(*ROWS))
    assert columns["labels"][1].tolist() == tokens("trois")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "one", "completion": ""}, "line 2 of .* has an empty completion"),
        ({"prompt": "", "completion": "un"}, "line 2 of .* has an empty prompt"),
        ({"prompt": "one"}, "line 2 of .* must have 'prompt' and 'completion'"),
        ({"prompt": [{"role": "user"}], "completion": []}, "line 2 of .*which the encoder reads"),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(folder, lines, row, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        read(folder, lines(ROWS[0], row))


def test_other_texts_and_settings_are_refused(folder, lines):
    with pytest.raises(jaxonnx.TrainingError, match=r"line 1 of .*which the encoder reads, and"):
        read(folder, lines({"text": "one"}))
    for setting in ({"loss": "all"}, {"long": "split"}):
        with pytest.raises(jaxonnx.TrainingError, match="is for decoders alone"):
            read(folder, lines(*ROWS), **setting)
    with pytest.raises(jaxonnx.TrainingError, match="the encoder does not read tokens"):
        read(DATA / "transformers" / "whisper", lines(*ROWS))
    text = (folder / "tokenizer.json").read_text().replace('"quatre": 12', '"quatre": 60')
    text = text.replace('"quatre":12', '"quatre":60')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        jaxonnx.TrainingError, match=r"completion of line 3 .* is 60, and the model"
    ):
        read(folder, lines(*ROWS))


@pytest.mark.deep
def test_texts_train_as_their_tokens_do(folder, lines, capsys):
    """And samples show what the decoder makes of a prompt, from its first token on."""
    settings = {"loss": "seq2seq_lm", "optimizer": optax.adam(2e-2), "epochs": 80, "batch_size": 4}
    prompts = [row["prompt"] for row in ROWS]
    result = jaxonnx.train(folder, lines(*ROWS), samples=prompts, progress=False, **settings)
    said = capsys.readouterr().out.splitlines()[-4:]
    assert said == [
        f"epoch 80: {r['prompt'] + ' </s>'!r} -> {r['completion'] + ' </s>'!r}" for r in ROWS
    ]
    data = {"input_ids": [tokens(p) for p in prompts]}
    data["labels"] = [tokens(row["completion"]) for row in ROWS]
    told = jaxonnx.evaluate(folder, data, loss="seq2seq_lm", batch_size=4, metrics=[])
    assert result.history.losses[0] == pytest.approx(told["loss"], rel=1e-5)


@pytest.mark.deep
def test_samples_of_features_have_no_more_tokens_than_positions(capsys):
    """Whisper's decoder here has 16 positions, one of them for the start token."""
    features = np.random.default_rng(0).normal(size=(2, 8, 20)).astype(np.float32)
    data = {"input_features": features, "labels": [[3, 4, 5], [6, 7]]}
    settings = {"loss": "seq2seq_lm", "optimizer": optax.sgd(0.0), "batch_size": 2, "epochs": 1}
    folder = DATA / "transformers" / "whisper"
    jaxonnx.train(folder, data, samples=[features[0]], progress=False, **settings)
    written = jaxonnx.load(folder).generate(features[0], max_new_tokens=15)
    told = f"epoch 1: features [8, 20] -> {written[1:].tolist()}"
    assert capsys.readouterr().out.splitlines()[-1] == told


def greedy(folder, prompt, count):
    """What onnxruntime writes by the two files of a folder."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{part}_model.onnx")
        for part in ("encoder", "decoder")
    )
    ids = np.array([prompt])
    mask, written = np.ones_like(ids), np.zeros((1, 1), np.int64)
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    for _ in range(count):
        feed = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        (logits,) = decoder.run(["logits"], feed | {"input_ids": written})
        written = np.concatenate([written, logits[:, -1:].argmax(-1)], 1)
    return written[0]


def test_generation_is_that_of_onnxruntime(folder, tmp_path):
    prompts = [tokens(row["prompt"]) for row in ROWS]
    model = jaxonnx.load(folder)
    random = np.random.default_rng(3)
    moved = {n: x + random.normal(size=x.shape, scale=0.5) for n, x in model.params.items()}
    model = model.replace(params={n: x.astype(np.float32) for n, x in moved.items()})
    model.save(f"{tmp_path}/tuned/")
    found = model.generate(prompts, max_new_tokens=7, stop=[])
    expected = [greedy(tmp_path / "tuned", prompt, 7) for prompt in prompts]
    np.testing.assert_array_equal(found, expected)
    assert len({*map(tuple, expected)}) > 2
    ended = model.generate(prompts, max_new_tokens=7, stop=expected[0][3])
    np.testing.assert_array_equal(ended[0], expected[0][:4])
    model.save(tmp_path / "one.onnx")
    with pytest.raises(jaxonnx.InputError, match="decoder_start_token_id"):
        jaxonnx.load(tmp_path / "one.onnx").generate(prompts[0], max_new_tokens=2)
    with pytest.raises(jaxonnx.InputError, match="from 0 to 47"):
        model.generate([48], max_new_tokens=2)


def test_the_loss_of_an_encoder_and_decoder_is_seq2seq_lm_by_default(folder, lines):
    settings = {"optimizer": optax.sgd(0.0), "batch_size": 4}
    result = jaxonnx.train(folder, lines(*ROWS), **settings)
    named = jaxonnx.train(folder, lines(*ROWS), loss="seq2seq_lm", **settings)
    assert result.history.losses == named.history.losses
    assert "loss: seq2seq_lm (default for texts)" in result.history.notes
