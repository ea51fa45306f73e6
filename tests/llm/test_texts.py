"""Texts as tokens and labels, against transformers' tokenizers and chat templates."""

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.llm._tokenizer import Tokenizer
from tests.support.paths import DATA
from tests.support.sources import read_texts

GENAI = DATA / "llm" / "qwen3-genai"
CHAT = [
    {"role": "user", "content": "what is a list"},
    {"role": "assistant", "content": "a mutable sequence"},
    {"role": "user", "content": "and a tuple"},
    {"role": "assistant", "content": "an immutable one"},
]


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(GENAI)


@pytest.fixture
def lines(tmp_path):
    def write(*rows):
        path = tmp_path / "data.jsonl"
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text(text + "\n", "utf-8")
        return path

    return write


def read(model, data, **preprocess):
    return read_texts(model, data, preprocess)


def said(model, ids, labels):
    """The text of all tokens, and of those that count."""
    tokenizer = Tokenizer(model.folder)
    return tokenizer.decode(ids), tokenizer.decode(labels[labels >= 0])


def test_plain_texts_end_with_the_end(model, lines):
    columns, *_ = read(model, lines({"text": "a list"}, {"text": "a tuple<|im_end|>"}))
    found = [said(model, *pair) for pair in zip(*columns.values(), strict=True)]
    assert found == [("a list<|im_end|>",) * 2, ("a tuple<|im_end|>",) * 2]


def test_completions_count_and_prompts_do_not(model, lines):
    path = lines({"prompt": "2 + 2 =", "completion": " 4"})
    columns, *_ = read(model, path)
    assert said(model, columns["input_ids"][0], columns["labels"][0]) == (
        "2 + 2 = 4<|im_end|>",
        " 4<|im_end|>",
    )
    columns, *_ = read(model, path, loss="all")
    np.testing.assert_array_equal(columns["input_ids"][0], columns["labels"][0])


def test_chats_are_those_of_transformers(model, lines):
    columns, *_ = read(model, lines({"messages": CHAT}))
    (ids,), (labels,) = columns.values()
    text, counted = said(model, ids, labels)
    assert counted == "a mutable sequence<|im_end|>\nan immutable one<|im_end|>\n"
    transformers = pytest.importorskip("transformers", minversion="5")  # wrote the tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(GENAI)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    assert tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"] == ids.tolist()


def test_generation_blocks_say_what_counts(lines, tmp_path):
    shutil.copytree(GENAI, tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    model = jaxonnx.load(tmp_path / "model")
    columns, *_ = read(model, lines({"messages": CHAT}))
    (ids,), (labels,) = columns.values()
    # " a" is one token, which reaches into what counts
    assert said(model, ids, labels)[1] == " a mutable sequence<|im_end|> an immutable one<|im_end|>"
    transformers = pytest.importorskip("transformers", minversion="5")  # wrote the tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    found = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    np.testing.assert_array_equal(labels >= 0, np.array(found["assistant_masks"]) > 0)


def test_prompts_of_messages_do_not_count(model, lines):
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    columns, *_ = read(model, lines(row))
    (ids,), (labels,) = columns.values()
    assert said(model, ids, labels)[1] == "an immutable one<|im_end|>\n"


def test_long_texts_are_split_or_cut_and_counted(model, lines):
    path = lines({"text": "a list of lists " * 10}, {"text": "short"})
    columns, _, notes = read(model, path, max_length=16)
    lengths = [*map(len, columns["input_ids"])]
    assert max(lengths) == 16
    assert len(lengths) > 3
    assert notes == [
        "texts of more than 16 tokens: 1 split (preprocess={'max_length': ..., 'long': 'cut', "
        "'split', 'skip' or 'refuse'})"
    ]
    columns, _, notes = read(model, path, max_length=16, long="cut")
    assert [*map(len, columns["input_ids"])] == [16, *lengths[-1:]]
    with pytest.raises(jaxonnx.TrainingError, match=r"line 1 of .* has \d+ tokens, more than 16"):
        read(model, path, max_length=16, long="refuse")
    with pytest.raises(jaxonnx.TrainingError, match="max_length is 500, and the model has posit"):
        read(model, path, max_length=500)
    # without max_length it is the table of positions, 128
    columns, *_ = read(model, lines({"text": "a list of lists " * 100}))
    assert max(map(len, columns["input_ids"])) == 128


def test_data_whose_texts_are_all_skipped_are_refused(model, lines):
    path = lines({"text": "a list of lists " * 10})
    with pytest.raises(jaxonnx.TrainingError, match=r"leaves no example of data: pass a larger"):
        read(model, path, max_length=16, long="skip")


def test_parts_of_which_no_token_counts_make_no_step(model, lines):
    """Nor do they change the loss, which is NumPy's in float64 of onnxruntime's logits."""
    chats = [
        [{"role": "user", "content": "abc def " * count}, {"role": "assistant", "content": answer}]
        for count, answer in ((9, "yes"), (1, "no no"), (5, "ok " * 12))
    ]
    path = lines(*({"messages": chat} for chat in chats))
    columns, *_ = read(model, path)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    empty = np.zeros((1, 1, 0, 16), np.float32)
    total, counted, parts, kept = 0.0, 0, 0, 0
    for ids, labels in zip(*columns.values(), strict=True):
        for start in range(0, len(ids) - 1, 16):
            tokens, wanted = ids[None, start : start + 16], labels[start + 1 : start + 16]
            feeds = {v.name: empty for v in session.get_inputs()}
            feeds |= {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
            scores = session.run(["logits"], feeds)[0][0].astype(np.float64)
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            places = np.flatnonzero(wanted >= 0)
            total -= scores[places, wanted[places]].sum()
            counted, parts, kept = counted + len(places), parts + 1, kept + bool(len(places))
    assert 3 <= kept < parts
    settings = {"loss": "causal_lm", "preprocess": {"max_length": 16, "long": "split"}}
    still = jaxonnx.train(model, path, **settings, optimizer=optax.sgd(0.0), batch_size=1)
    assert len(still.history.losses) == kept
    assert min(still.history.losses) > 0
    np.testing.assert_allclose(still.history.epochs[0]["loss"], total / counted, rtol=1e-4)
    note = f"examples left out, of which the loss counts no token: {parts - kept}"
    assert note in still.history.notes


def test_texts_without_any_token_that_counts_are_refused(lines, tmp_path):
    shutil.copytree(GENAI, tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    for name in ("genai_config.json", "tokenizer_config.json"):  # no end token, which counts
        path = tmp_path / "model" / name
        path.write_text(path.read_text().replace('"eos_token', '"no_token'))
    silent = lines({"messages": [CHAT[0], {"role": "assistant", "content": ""}]})
    with pytest.raises(jaxonnx.TrainingError, match="the loss counts no token of any example"):
        read(jaxonnx.load(tmp_path / "model"), silent)


def test_two_widths_at_most(model, lines):
    short, long = {"text": "a b c"}, {"text": "a list of lists " * 6}
    _, padding, _ = read(model, lines(*[short] * 20, long))
    narrow, wide = padding.buckets
    assert narrow % 8 == wide % 8 == 0
    _, padding, _ = read(model, lines(short, short))
    assert len(padding.buckets) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (({"text": "a"}, {"text": ""}), "line 2 of .* has an empty text"),
        (({"text": "a"}, "{"), r"line 2 of .* cannot be read \(JSONDecodeError"),
        (({"text": "a"}, {"prompt": "a"}), "line 2 of .* must have 'text', as those before it"),
        (({"prompt": "a", "completion": ""},), "line 1 of .* has an empty completion"),
        (({"messages": CHAT[:1]},), "line 1 of .* has no message of the assistant"),
        (({"messages": [{"content": "a"}]},), "line 1 .* objects with a role"),
        (
            ({"prompt": "list " * 150, "completion": "a"},),
            r"line 1 .* 449 tokens before .* limit is 128",
        ),
    ],
)
def test_what_is_no_example_is_named_with_its_line(model, lines, rows, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        read(model, lines(*rows))


def test_a_tokenizer_of_another_model_is_refused(lines, tmp_path):
    shutil.copytree(GENAI, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    settings["model"]["vocab"]["list"] = 500
    settings["model"]["merges"] += [["l", "ist"], ["i", "st"]]
    settings["model"]["vocab"] |= {"ist": 501, "st": 502}
    settings["model"]["merges"] = [["s", "t"], ["i", "st"], ["l", "ist"]]
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(settings))
    model = jaxonnx.load(tmp_path / "model")
    with pytest.raises(
        jaxonnx.TrainingError, match=r"line 1 .* is 500, and the model scores 192.*input_ids"
    ):
        read(model, lines({"text": "list"}))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(jaxonnx.TrainingError, match=r"tokenizer.json' is not a tokenizer"):
        read(model, lines({"text": "list"}))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(jaxonnx.TrainingError, match=r"has no tokenizer.json.*is_fast; of others"):
        read(model, lines({"text": "list"}))


def test_a_template_that_fails_is_refused(lines, tmp_path):
    shutil.copytree(GENAI, tmp_path / "model")
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(jaxonnx.TrainingError, match=r"line 1 .* fails \(roles must alternate\)"):
        read(jaxonnx.load(tmp_path / "model"), lines({"messages": CHAT}))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(jaxonnx.TrainingError, match="has no chat template"):
        read(jaxonnx.load(tmp_path / "model"), lines({"messages": CHAT}))


def test_texts_need_a_folder(lines):
    model = jaxonnx.load(onnx.load(GENAI / "model.onnx"))
    with pytest.raises(jaxonnx.TrainingError, match="was not loaded from a folder"):
        read(model, lines({"text": "a"}))


@pytest.mark.deep
def test_a_chat_trains_with_two_programs(lines, tmp_path, monkeypatch, capsys):
    from jaxonnx.training._loop import memory

    compiled = []
    check = memory._check
    monkeypatch.setattr(memory, "_check", lambda *a: compiled.append(a) or check(*a))
    short = {"messages": CHAT[:2]}
    path = lines(*[short] * 12, *[{"messages": CHAT}] * 4)
    result = jaxonnx.train(
        GENAI,
        path,
        loss="causal_lm",
        optimizer=optax.adam(1e-2),
        epochs=2,
        batch_size=4,
        validation=path,
        lora=jaxonnx.LoRA(rank=4),
        samples=["a list", "a"],
    )
    assert len(compiled) == 2
    said = [line for line in capsys.readouterr().out.splitlines() if line[6:8] in ("1:", "2:")]
    assert [line[:8] for line in said[::2]] == ["epoch 1:", "epoch 2:"]
    # as messages of the user, because the data are chats
    assert said[0][10:].startswith(
        repr("<|im_start|>user\na list<|im_end|>\n<|im_start|>ass")[1:-1]
    )
    assert len(said) == 4
    losses = [row["validation_loss"] for row in result.history.epochs]
    assert losses[-1] < losses[0]
    result.model.save(f"{tmp_path}/tuned/")
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
    found = jaxonnx.evaluate(tmp_path / "tuned", path, loss="causal_lm", batch_size=4)
    assert found["loss"] == pytest.approx(losses[-1], abs=1e-4)


def test_the_loss_of_texts_is_that_of_the_next_token_by_default(model, lines):
    """The value is optax's, of the logits of each text and the tokens behind it."""
    path = lines({"text": "a list"}, {"text": "a b c"})
    found = jaxonnx.evaluate(model, path, metrics=["accuracy"])
    texts = [model.tokenizer.encode(text) for text in ("a list", "a b c")]
    texts = [np.append(ids, model.tokenizer.ends[:1]) for ids in texts]
    logits = model.without_cache().predict({"input_ids": texts})
    logits = logits["logits"] if isinstance(logits, dict) else logits
    pairs = [(x[:-1], ids[1:]) for x, ids in zip(logits, texts, strict=True)]
    scores, labels = (np.concatenate(x) for x in zip(*pairs, strict=True))
    right = float(optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean())
    assert found["loss"] == pytest.approx(right, rel=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(-1) == labels).mean())
    result = jaxonnx.train(model, path, optimizer=optax.sgd(0.0), batch_size=2)
    assert result.history.losses == pytest.approx([right], rel=1e-5)
    assert "loss: causal_lm (default for texts)" in result.history.notes


def test_answers_that_are_judged_need_a_loss_by_name(model, lines):
    path = lines({"prompt": "a", "completion": "b", "label": True})
    with pytest.raises(jaxonnx.TrainingError, match="compare answers, as the loss 'kto' does"):
        jaxonnx.train(model, path)
    path = lines({"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(jaxonnx.TrainingError, match="compare answers, as the loss 'dpo' does"):
        jaxonnx.train(model, path)


def test_labels_of_tokens_need_a_loss_that_says_whether_they_are_shifted(model):
    tokens = np.array([[5, 6, 7, 8]])
    with pytest.raises(jaxonnx.TrainingError, match="'causal_lm' takes the tokens as labels"):
        jaxonnx.train(model, {"input_ids": tokens, "labels": tokens})


def test_pairs_of_texts_are_no_rows_of_a_language_model(model, lines):
    path = lines({"sentence1": "a", "sentence2": "b", "label": 1})
    with pytest.raises(jaxonnx.TrainingError, match=r"(?s)unknown shape.*columns=\{'sentence1'"):
        jaxonnx.train(model, path)


@pytest.mark.parametrize("labels", [("True", "False"), ("true", "false"), ("1", "0")])
def test_judgements_in_cells_are_texts(model, labels, tmp_path):
    lines = ["prompt,completion,label", *(f"one, two,{label}" for label in labels)]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    columns, *_ = read_texts(model, tmp_path / "rows.csv", group=2)
    assert columns["label"] == [1, 1, 0, 0]


def test_texts_for_a_network_with_recurrent_states(tmp_path):
    """Its states are zeros at the start of each text; the losses are those of each text alone."""
    folder, rng = shutil.copytree(GENAI, tmp_path / "folder"), np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        g (int64[n, t] input_ids, float[1, n, 8] h) => (float[n, t, 192] logits, float[1, n, 8] k) {
            embedded = Gather(table, input_ids)
            x = Transpose<perm = [1, 0, 2]>(embedded)
            steps, k = GRU<hidden_size = 8, linear_before_reset = 1>(x, w, r, , , h)
            one = Constant<value_ints = [1]>()
            squeezed = Squeeze(steps, one)
            y = Transpose<perm = [1, 0, 2]>(squeezed)
            logits = MatMul(y, out)
        }"""
    )
    shapes = {"table": (192, 8), "w": (1, 24, 8), "r": (1, 24, 8), "out": (8, 192)}
    for name, shape in shapes.items():
        value = 0.3 * rng.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(proto, folder / "model.onnx")
    model = jaxonnx.load(folder)
    texts = ["a list of lists", "a tuple", "an immutable one"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    losses = []
    for text in texts:
        ids = np.array([[*model.tokenizer.encode(text), 2]])
        feeds = {"input_ids": ids, "h": np.zeros((1, 1, 8), np.float32)}
        logits = session.run(["logits"], feeds)[0][0, :-1]
        losses += [
            *optax.losses.softmax_cross_entropy_with_integer_labels(logits, ids[0, 1:]).tolist()
        ]
    rows = [{"text": text} for text in texts]
    found = jaxonnx.evaluate(model, rows, loss="causal_lm", batch_size=2)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    settings = {"optimizer": optax.sgd(0.0), "batch_size": 3, "epochs": 1}
    result = jaxonnx.train(model, rows, loss="causal_lm", **settings)
    assert result.history.losses == pytest.approx([np.mean(losses)], rel=1e-5)
    assert any("the data lacks the states h" in note for note in result.history.notes)
    assert [value.name for value in result.model.inputs] == ["input_ids", "h"]
