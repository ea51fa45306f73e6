"""Rows of texts as data sets have them: shapes, files, splits, streams, new names of columns."""

import csv
import json
from itertools import islice

import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx._data.batches import Portions
from jaxonnx._data.datasets import RowStream
from jaxonnx.llm._shapes import SHAPES
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.training import Settings, open_data, read_data
from tests.support.paths import DATA
from tests.support.sources import read_texts

GENAI = DATA / "llm" / "qwen3-genai"
SETTINGS = {"loss": "causal_lm", "optimizer": optax.sgd(0.0), "progress": False, "seed": 0}
SETTINGS["trainable"] = "*layers.1.mlp*"  # a program with half of the kernels


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(GENAI)


def read(model, data, names=None, group=1, **preprocess):
    """Return the texts of rows, as [text, text that counts], and the notes."""
    made = read_texts(model, data, preprocess, names, group)
    decode = Tokenizer(model.folder).decode
    pairs = zip(made.data["input_ids"], made.data["labels"], strict=True)
    return [[decode(ids), decode(labels[labels >= 0])] for ids, labels in pairs], made.notes


def chat(*contents, system=None):
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}, *messages] if system else messages


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "b"},
]
SHARE_GPT = [
    {"from": "human", "value": "a"},
    {"from": "function", "value": json.dumps(CALL)},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "b"},
]
SAME = {
    "conversations": (
        {"conversations": SHARE_GPT[::3], "system": "s"},
        {"messages": chat("a", "b", system="s")},
    ),
    "from and value as messages": (
        {"messages": SHARE_GPT[::3]},
        {"messages": chat("a", "b")},
    ),
    "calls of tools": (
        {"conversations": SHARE_GPT, "tools": json.dumps(TOOLS)},
        {"messages": CALLED, "tools": TOOLS},
    ),
    "instruction": (
        {"instruction": "a", "input": "c", "output": "b", "system": "s"},
        {"messages": chat("a\n\nc", "b", system="s")},
    ),
    "instruction alone": (
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt": chat("a"), "completion": chat("a", "b")[1:]},
    ),
    "completion beside messages": (
        {"prompt": chat("a"), "completion": "b"},
        {"messages": chat("a", "b")},
    ),
    "JSON text": ({"messages": json.dumps(chat("a", "b"))}, {"messages": chat("a", "b")}),
    "Arrow's None": (
        {"messages": [{**m, "tool_calls": None, "name": None} for m in chat("a", "b")]},
        {"messages": chat("a", "b")},
    ),
    "arguments as text": (
        {
            "messages": [
                CALLED[0],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
                    ],
                },
                *CALLED[2:],
            ]
        },
        {"messages": CALLED},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_each_shape_is_read_as_messages(model, case):
    first, second = SAME[case]
    assert read(model, [first]) == read(model, [second])


def test_every_shape_has_an_example_that_fits_it():
    for shape in SHAPES:
        text = shape.example.partition(" (")[0]
        assert shape.fits(json.loads(text)), shape.example


def to_numpy(value):
    """Convert lists of objects and numbers as pandas reads them from a .parquet file."""
    if isinstance(value, dict):
        return {name: to_numpy(x) for name, x in value.items()}
    if isinstance(value, list):
        array = np.empty(len(value), object)
        array[:] = [to_numpy(x) for x in value]
        return array
    return value if isinstance(value, str) else np.asarray(value)[()]


def test_values_of_numpy_are_read_as_those_of_python(model):
    """As `to_dict("records")` of pandas and `with_format("numpy")` of a Dataset have them."""
    row = {"messages": CALLED, "tools": TOOLS, "weight": 0.5}
    numpy = to_numpy(row)
    assert isinstance(numpy["messages"], np.ndarray)
    assert isinstance(numpy["messages"][1]["tool_calls"][0]["function"]["arguments"]["x"], np.int64)
    assert read(model, [numpy]) == read(model, [row])
    judged = [{"prompt": "a", "completion": c, "label": c == "b"} for c in "bc"]
    pairs = [[{**r, "label": kind(r["label"])} for r in judged] for kind in (np.int64, np.array)]
    assert [len(read_texts(model, rows, {}, None, 2).data["input_ids"]) for rows in pairs] == [4, 4]
    write = model.tokenizer.apply_chat_template
    assert (write(to_numpy(chat("a", "b"))) == write(chat("a", "b"))).all()


def test_pairs_of_answers_follow_one_another(model):
    """For a loss of groups of two; whole conversations share what they begin with."""
    expected = read(model, [{"messages": chat("a", "yes")}, {"messages": chat("a", "no")}])[0]
    for row in (
        {"prompt": chat("a"), "chosen": "yes", "rejected": "no"},
        {"prompt": chat("a"), "chosen": chat("a", "yes")[1:], "rejected": chat("a", "no")[1:]},
        {"prompt": "a", "chosen": chat("a", "yes"), "rejected": chat("a", "no")},
        {"prompt": "a", "chosen": chat("a", "yes")[1:], "rejected": chat("a", "no")[1:]},
        {"chosen": chat("a", "yes"), "rejected": chat("a", "no"), "messages": chat("a", "yes")},
    ):
        assert read(model, [row], group=2)[0] == expected
    same = {"chosen": chat("a", "yes"), "rejected": chat("a", "yes")}
    assert read(model, [same], group=2)[0] == read(model, [{"messages": chat("a", "yes")}] * 2)[0]
    texts = {"prompt": "a ", "chosen": "list", "rejected": "tuple"}
    completions = [{"prompt": "a ", "completion": x} for x in ("list", "tuple")]
    assert read(model, [texts], group=2)[0] == read(model, completions)[0]
    # neither without the other
    long = {**texts, "rejected": "tuple " * 20}
    rows, notes = read(model, [long, texts], group=2, max_length=16, long="skip")
    assert rows == read(model, completions)[0]
    assert notes[0].startswith("texts of more than 16 tokens: 1 skipped (")
    with pytest.raises(jaxonnx.TrainingError, match=r"example 0 of data has answers .*losses.dpo"):
        read(model, [texts])
    with pytest.raises(jaxonnx.TrainingError, match="splits texts, but not pairs of answers"):
        read(model, [texts], group=2, long="split")
    result = read(model, [texts], {"chosen": "completion"})
    assert result[0] == read(model, completions[:1])[0]
    assert result[1] == ["columns that nothing reads: 'rejected'"]


def test_long_texts_are_skipped(model):
    rows = [{"text": "a list of lists " * 10}, {"text": "short"}]
    texts, notes = read(model, rows, max_length=16, long="skip")
    assert [text for text, _ in texts] == ["short<|im_end|>"]
    assert notes == [
        "texts of more than 16 tokens: 1 skipped (preprocess={'max_length': ..., 'long': 'cut', "
        "'split', 'skip' or 'refuse'})"
    ]


def test_columns_and_roles_are_renamed(model):
    dialog = [{"speaker": "client", "says": "a"}, {"speaker": "agent", "says": "b"}]
    names = {"dialog": "messages", "speaker": "role", "says": "content"}
    names |= {"client": "user", "agent": "assistant"}
    expected = read(model, [{"messages": chat("a", "b")}])
    assert read(model, [{"dialog": dialog}], names) == expected
    result = jaxonnx.train(GENAI, [{"dialog": dialog}], columns=names, **SETTINGS)
    same = jaxonnx.train(GENAI, [{"messages": chat("a", "b")}], **SETTINGS)
    assert result.history.losses == same.history.losses
    data = [{"q": "a ", "a": "list"}]
    loss = jaxonnx.evaluate(
        GENAI, data, loss="causal_lm", columns={"q": "prompt", "a": "completion"}
    )
    assert loss == jaxonnx.evaluate(
        GENAI, [{"prompt": "a ", "completion": "list"}], loss="causal_lm"
    )


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        (
            {"q": "why", "a": "so"},
            r"columns=\{'q': 'prompt', 'a': 'completion'\} reads this row as",
        ),
        ({"body": "x" * 99, "id": 1}, r"columns=\{'body': 'text'\} .* \{'text': 'x{60}\.\.\.'\}"),
        (
            {"dialog": [{"speaker": "user", "says": "hello there"}]},
            r"columns=\{'dialog': 'messages', 'speaker': 'role', 'says': 'content'\}",
        ),
    ],
)
def test_an_unknown_shape_is_refused_with_its_conversion(row, hint):
    with pytest.raises(jaxonnx.TrainingError, match="data has rows of an unknown shape") as caught:
        jaxonnx.train(GENAI, [row], **SETTINGS)
    assert caught.match(hint)
    for shape in SHAPES:
        assert shape.example in str(caught.value)
    with pytest.raises(jaxonnx.TrainingError, match="data has rows of an unknown shape"):
        jaxonnx.train(GENAI, iter([row]), **SETTINGS)


ROWS = [{"prompt": "a ", "completion": "list"}, {"prompt": 'of "x",\n', "completion": "ü 7"}]


def write_file(path):
    """Write `ROWS` in the format and encoding that a name says."""
    encoding = "utf-16" if "16" in path.name else "utf-8-sig" if "bom" in path.name else "utf-8"
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, ROWS)), encoding)
        case ".json":
            path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding)
        case ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case suffix:
            with path.open("w", encoding=encoding, newline="") as file:
                writer = csv.DictWriter(
                    file, [*ROWS[0]], delimiter="\t" if suffix == ".tsv" else ","
                )
                writer.writeheader()
                writer.writerows(ROWS)
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "bom.jsonl", "16.jsonl", "a.json", "bom.json", "16.json"),
        *("a.csv", "bom.csv", "16.csv", "a.tsv", "16.tsv", "a.parquet"),
    ],
)
def test_files_are_read_as_lists(model, name, tmp_path):
    assert read(model, write_file(tmp_path / name)) == read(model, ROWS)


def test_a_list_in_a_jsonl_file_is_read(model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS))
    assert read(model, path) == read(model, ROWS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "prompt,completion\na,b\nc\n",
            "line 3 of .* it has 1 cells, and the header has 2",
        ),
        ("a.csv", "text,text\na,b\n", "two columns have one name"),
        ("a.csv", "text\n", "it is empty"),
        ("a.json", '{"text": "a"}', "must be a list of objects, got a dict"),
        ("a.json", "[" * 100000, "cannot be read"),
        ("a.json", "[1]", "example 0 of .* must be an object with columns"),
        ("a.parquet", "text", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.train(GENAI, tmp_path / name, **SETTINGS)


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(jaxonnx.TrainingError, match="it needs pyarrow: pip install pyarrow"):
        jaxonnx.train(GENAI, tmp_path / "a.parquet", **SETTINGS)


MANY = [{"text": f"{'a list ' * (n % 3)}of {n}"} for n in range(3000)]


class Streamed:
    """As a `datasets.IterableDataset`: rows, the names of columns, and no length."""

    column_names = None

    def __init__(self, rows):
        self._rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(self._rows)


def numbers_of(batches):
    """Return the tokens of each example of batches, in order."""
    return [
        tuple(ids[mask > 0].tolist())
        for batch in batches
        for ids, mask, weight in zip(*batch.inputs, batch.weight, strict=True)
        if weight
    ]


def read_source(data, **arguments):
    settings = Settings(loss="causal_lm", optimizer=optax.sgd(0.0), batch_size=32, **arguments)
    opened = open_data(data, settings)
    model = jaxonnx.load(GENAI).without_cache()
    return read_data(model, settings, opened).examples


@pytest.mark.parametrize("form", [Streamed, iter])
def test_a_stream_is_shuffled_through_a_buffer(form):
    """Each row once, near its place, in an order of seed and epoch; resumed where it stopped."""
    source = read_source(form(MANY))
    assert isinstance(source, RowStream)
    assert source.steps is None
    whole = numbers_of(read_source(MANY).batches(0))
    batches = [*source.batches(0)]
    first = numbers_of(batches)
    assert sorted(first) == sorted(whole)
    order = {row: i for i, row in enumerate(numbers_of(read_source(MANY, seed=1).batches(0)))}
    assert len(order) > 1
    assert first != sorted(first)
    assert {len(batch.weight) for batch in batches} == {32}
    assert len({batch.inputs[0].shape for batch in batches}) <= 2
    if form is iter:
        with pytest.raises(jaxonnx.TrainingError, match="in epoch 2; an iterator serves one epoch"):
            next(source.batches(1))
        return
    assert numbers_of(source.batches(0, 5)) == numbers_of(batches[5:])
    assert sorted(numbers_of(source.batches(1))) == sorted(whole)
    assert numbers_of(source.batches(1)) != first


def test_epochs_of_some_steps_go_on_and_on():
    source = read_source(Streamed(MANY[:100]), steps_per_epoch=3)
    assert isinstance(source, Portions)
    assert source.steps == 3
    plain = read_source(Streamed(MANY[:100]))  # four batches an epoch
    expected = [numbers_of([x]) for epoch in (0, 1) for x in plain.batches(epoch)]
    seen = [numbers_of([x]) for epoch in (0, 1) for x in source.batches(epoch)]
    assert seen == expected[:6]
    assert [numbers_of([x]) for x in source.batches(1, 1)] == expected[4:6]


@pytest.mark.deep
def test_streams_train(tmp_path):
    """To the losses of the rows in a list, where the order is the same: one batch."""
    rows = MANY[:24]
    settings = {**SETTINGS, "optimizer": optax.sgd(0.1), "batch_size": 24}
    whole = jaxonnx.train(GENAI, rows, epochs=2, **settings)
    stream = jaxonnx.train(GENAI, Streamed(rows), epochs=2, **settings)
    np.testing.assert_allclose(stream.history.losses, whole.history.losses, rtol=1e-5)
    endless = ({"text": "a list"} for _ in iter(int, 1))
    result = jaxonnx.train(
        GENAI, endless, epochs=2, steps_per_epoch=2, batch_size=4, validation=rows, **SETTINGS
    )
    assert len(result.history.losses) == 4
    more = jaxonnx.train(GENAI, iter(rows), batch_size=8, **SETTINGS)
    assert len(more.history.losses) == 3
    packed = {"preprocess": {"pack": True, "max_length": 64}}
    few = jaxonnx.train(GENAI, Streamed(rows), batch_size=2, **packed, **SETTINGS)
    assert any(note.startswith("data: 24 texts in ") for note in few.history.notes)


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (Streamed, {"epochs": 2}),
        pytest.param(Streamed, {"epochs": 2, "steps_per_epoch": 3}, marks=pytest.mark.deep),
        pytest.param(iter, {}, marks=pytest.mark.deep),
        pytest.param(iter, {"epochs": 2, "steps_per_epoch": 2}, marks=pytest.mark.deep),
    ],
)
def test_a_stream_resumes_where_it_stopped(form, settings, tmp_path):
    """An iterator must be a new one from the first row on: what was trained on is passed over."""
    settings = {**SETTINGS, "optimizer": optax.sgd(0.1), "batch_size": 20, **settings}
    whole = jaxonnx.train(GENAI, form(MANY[:90]), **settings)
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    jaxonnx.train(GENAI, form(MANY[:90]), max_steps=3, **settings, **kept)
    resumed = jaxonnx.train(GENAI, form(MANY[:90]), resume=True, **settings, **kept)
    assert resumed.history.losses == whole.history.losses
    for name, value in whole.model.params.items():
        np.testing.assert_array_equal(resumed.model.params[name], value)


def test_answers_of_a_stream_are_compared_with_those_before():
    """Also across the buffers in which rows are read, of which the last one has a single row."""
    rows = [{"prompt": "a", "completion": f" {n % 90}", "label": n % 2 == 0} for n in range(1025)]
    settings = Settings(loss="kto", optimizer=optax.sgd(0.0), batch_size=50)
    sources = []
    for data in (rows, Streamed(rows)):
        opened = open_data(data, settings)
        model = jaxonnx.load(GENAI).without_cache()
        sources.append(read_data(model, settings, opened).examples)
    whole, streamed = (sorted(numbers_of(source.batches(0))) for source in sources)
    assert len(whole) == 2050
    assert streamed == whole


def test_splits_are_taken_by_name():
    import datasets

    rows = datasets.Dataset.from_list([{"text": "a list"}] * 4)
    splits = datasets.DatasetDict(train=rows, validation=rows, test=rows)
    result = jaxonnx.train(GENAI, splits, **SETTINGS)
    assert "validation_loss" in result.history.epochs[0]
    assert "validation is the split 'validation' of the data" in result.history.notes
    assert "splits of the data that nothing reads: 'test'" in result.history.notes
    result = jaxonnx.train(GENAI, splits, validate_first=True, validate_every=1, **SETTINGS)
    assert [row["step"] for row in result.history.epochs][:2] == [0, 1]
    result = jaxonnx.train(GENAI, splits, validation=0.25, **SETTINGS)
    assert "splits of the data that nothing reads: 'validation', 'test'" in result.history.notes
    with pytest.raises(jaxonnx.TrainingError, match=r"the splits 'a', .* like data\['a'\]"):
        jaxonnx.train(GENAI, datasets.DatasetDict(a=rows), **SETTINGS)
    with pytest.raises(jaxonnx.TrainingError, match=r"pass one of its splits"):
        jaxonnx.evaluate(GENAI, splits, loss="causal_lm")


def test_hugging_face_streams_train():
    import datasets

    rows = datasets.Dataset.from_list(MANY[:24])
    settings = {**SETTINGS, "batch_size": 24}
    whole = jaxonnx.train(GENAI, rows, **settings).history.losses
    stream = datasets.IterableDatasetDict(train=rows.to_iterable_dataset())
    result = jaxonnx.train(GENAI, stream, **settings)
    np.testing.assert_allclose(result.history.losses, whole, rtol=1e-5)
    chats = datasets.Dataset.from_list([{"messages": CALLED}] * 2)
    assert chats[0]["messages"][0]["tool_calls"] is None
    texts, _ = read(jaxonnx.load(GENAI), chats)
    assert texts[0] == read(jaxonnx.load(GENAI), [{"messages": CALLED}])[0][0]
    assert [*islice(rows.to_iterable_dataset(), 1)]


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
JUDGED = {"prompt": "a", "completion": "b", "label": True}


@pytest.mark.parametrize(
    ("loss", "row", "more", "message"),
    [
        ("dpo", {"text": "a list"}, {}, "rows with 'text', and the loss 'dpo' .*'?chosen"),
        ("orpo", {"prompt": "a", "completion": "b"}, {}, "rows with 'prompt', .*'orpo' .*chosen"),
        ("dpo", JUDGED, {}, "'completion', 'label', and the loss 'dpo' .*chosen"),
        ("kto", PAIR, {}, "'rejected', and the loss 'kto' takes rows like .*label"),
        ("kto", {**JUDGED, "label": "yes"}, {}, "the loss 'kto' takes rows like .*label"),
        ("dpo", PAIR, {"preprocess": {"pack": True}}, "the loss 'dpo' compares rows"),
        ("causal_lm", {"text": None}, {}, "data begins with {'text': None}, and rows are like"),
    ],
)
def test_losses_of_answers_refuse_other_rows(loss, row, more, message):
    """Two rows that are no pair have a loss, too, and several texts in a row."""
    with pytest.raises(jaxonnx.TrainingError, match=message):
        jaxonnx.train(GENAI, [row] * 4, loss=loss, batch_size=4, progress=False, **more)
