"""`Model.predict`: any number of examples, in any form, in their order."""

import io

import numpy as np
import onnx
import pytest
from rich.console import Console

import jaxonnx
from jaxonnx import _display as display
from tests.support.lazy_cases import Module
from tests.support.tiny_networks import examples, mlp

datasets = Module("datasets")


@pytest.fixture(scope="module")
def model():
    return jaxonnx.load(mlp())


def two():
    """Two inputs, and outputs with one row for each example, in other axes, and for all."""
    return jaxonnx.load(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 17]>
        net (float[n, 3] a, float[n, 3] b) => (float[n, 3] sum, float[n, 3] product, float all) {
            sum = Add(a, b)
            product = Mul(a, b)
            all = ReduceMax <keepdims = 0> (sum)
        }""")
    )


def test_data_in_every_form(model, tmp_path):
    x, y = examples(21)
    expected = np.asarray(model(x))
    np.savez(tmp_path / "data.npz", x=x, y=y, name=np.array(["a"] * 21))
    batches = [x[i : i + 8] for i in range(0, 21, 8)]
    forms = [
        x,
        (x,),
        (x, y),
        {"x": x},
        {"x": x, "any": y, "text": np.array(["a"] * 21)},
        tmp_path / "data.npz",
        datasets.Dataset.from_dict({"x": x, "label": y}),
        batches,
        iter(batches),
        lambda epoch: batches,
        [[part] for part in batches],
        [(part, None) for part in batches],
        [{"x": part} for part in batches],
    ]
    for number, data in enumerate(forms):
        size = 8 if number < 7 else None
        outputs = model.predict(data, batch_size=size)
        assert type(outputs) is np.ndarray
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6, err_msg=str(number))
    np.testing.assert_allclose(model.predict(x[:3]), expected[:3], rtol=1e-5, atol=1e-6)


def test_several_inputs_and_outputs():
    model = two()
    a, b = np.arange(30.0, dtype=np.float32).reshape(2, 5, 3)
    pair = model.with_outputs(["product", "sum"])
    for data in ((a, b), ((a, b), np.ones(5)), {"b": b, "a": a}, [(a, b)], [[a[:3], b[:3]]]):
        outputs = pair.predict(data, batch_size=None if isinstance(data, list) else 2)
        assert [*outputs] == ["product", "sum"]
        count = len(outputs["sum"])
        np.testing.assert_array_equal(outputs["sum"], (a + b)[:count])
        np.testing.assert_array_equal(outputs["product"], (a * b)[:count])
    with pytest.raises(jaxonnx.InputError, match=r"output 'all' has shape \(\) for a batch of 2"):
        model.predict((a, b), batch_size=2)
    with pytest.raises(jaxonnx.TrainingError, match=r"has the inputs .*'a'"):
        model.predict({"a": a})
    with pytest.raises(jaxonnx.TrainingError, match="has 3 inputs; the model has 2"):
        model.predict((a, b, a))


def test_a_fixed_batch(model):
    proto = mlp()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    x, _ = examples(21)
    outputs = jaxonnx.load(proto).predict(x)
    np.testing.assert_allclose(outputs, model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(jaxonnx.TrainingError, match="fixed to batches of 8"):
        jaxonnx.load(proto).predict(x, batch_size=4)


ROWS = [np.zeros(8, np.float32), np.ones(8, np.float32), np.ones(8, np.float32)]


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (ROWS[:2], r"shape \[8\].*pass rows as one array, np.stack\(rows\)"),
        (ROWS, "np.stack"),
        (iter(ROWS), "np.stack"),
        ([x.tolist() for x in ROWS], "np.stack"),
        (ROWS[0], "np.stack"),
        (tuple(ROWS), "3 inputs; the model has 1: .*np.stack makes one of rows"),
    ],
)
def test_rows_where_batches_are_due(model, rows, remedy):
    with pytest.raises(jaxonnx.TrainingError, match=remedy):
        model.predict(rows)


def flat():
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 17]>
    flat (float[n,2,2] x) => (float[n,1] y) <float[4,1] w = {1, 2, 3, 4}> {
      f = Flatten(x)
      y = MatMul(f, w)
    }""")
    return jaxonnx.load(proto)


@pytest.mark.parametrize(
    "call",
    [
        # it took each row for a batch, as the first node of the network flattens
        lambda model: jaxonnx.quantize(flat(), [np.ones((2, 2), np.float32)] * 3),
        lambda model: jaxonnx.evaluate(model, [(ROWS[0], 1)] * 3, metrics=["accuracy"]),
        lambda model: jaxonnx.train(model, [(ROWS[0], 1)] * 3),
        lambda model: jaxonnx.train(model, [(np.stack(ROWS), 1)] * 3),
    ],
    ids=["quantize", "evaluate", "train", "targets"],
)
def test_rows_are_no_batches_elsewhere(model, call):
    message = r"read as batches: make batches, or pass rows as .*np\.stack"
    with pytest.raises(jaxonnx.TrainingError, match=message):
        call(model)


def test_results_whose_shape_depends_on_values():
    text = '<ir_version: 10, opset_import: ["" : 17]> net (float[n] x) => (int64[1, m] y) '
    model = jaxonnx.load(onnx.parser.parse_model(text + "{ y = NonZero(x) }"))
    with pytest.raises(jaxonnx.InputError, match=r"output 'y' has shape \(1, 21\) .*model itself"):
        model.predict(np.array([1, 0, 1], np.float32))


def test_what_does_not_fit(model, tmp_path):
    x, _ = examples()
    with pytest.raises(jaxonnx.InputError, match="not a square of pixels"):
        model.predict(tmp_path, preprocess={"scale": 1})
    with pytest.raises(
        jaxonnx.TrainingError, match="batch_size=8 cannot be combined with an iterable"
    ):
        model.predict([x], batch_size=8)
    with pytest.raises(jaxonnx.TrainingError, match="has no examples"):
        model.predict(x[:0])
    with pytest.raises(jaxonnx.TrainingError, match="must be numbers"):
        model.predict(np.array(["a", "b"]))
    with pytest.raises(jaxonnx.InputError):
        model.predict(x[:, :3])
    with pytest.raises(jaxonnx.TrainingError, match="it is an int"):
        model.predict(3)


@pytest.mark.parametrize("later", [0.0, 1e9])
def test_progress_is_shown_when_it_takes_long(model, monkeypatch, later):
    file = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda: Console(file=file, force_terminal=True))
    monkeypatch.setattr(display, "_LATER", later)
    x, _ = examples()
    model.predict(x, batch_size=8)
    assert ("5/5" in file.getvalue()) == (later == 0)
    assert file.getvalue() == "" or not later
    model.predict(x, batch_size=8, progress=False)


def test_progress_in_a_notebook(model, monkeypatch):
    drawn = []
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    monkeypatch.setattr(display, "Console", lambda: notebook)
    monkeypatch.setattr(display, "_LATER", 0.0)
    monkeypatch.setattr(display.Cell, "draw", lambda self, *numbers: drawn.append(numbers))
    x, _ = examples()
    model.predict([x[:8]] * 5)
    assert (drawn[0], drawn[-1]) == ((0, 5), (5, 5))


STRINGS = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
net (string[n, 1] city, float[n, 2] rest) => (float[n, 3] y)
<float[5, 3] w = {0.3, -1, 2, 0.5, 1, -2, 0, 1, 1, 3, -1, 0.5, 1, 2, -3}, float[3] b = {0, 1, 2}> {
  one_hot = ai.onnx.ml.OneHotEncoder <cats_strings: strings = ["a", "b", "long name"]> (city)
  flat = Flatten (one_hot)
  row = Concat <axis = 1> (flat, rest)
  y = Gemm (row, w, b)
}"""


def test_strings_are_inputs():
    """A pipeline of scikit-learn: predict and evaluate, and the part behind them trains."""
    ort = pytest.importorskip("onnxruntime")
    proto = onnx.parser.parse_model(STRINGS)
    model = jaxonnx.load(proto)
    random = np.random.default_rng(0)
    city = random.choice(["a", "b", "long name", "unknown"], (21, 1))
    rest = random.normal(size=(21, 2)).astype(np.float32)
    labels = random.integers(0, 3, 21)
    session = ort.InferenceSession(proto.SerializeToString())
    (expected,) = session.run(None, {"city": city.astype(object), "rest": rest})
    for strings in (city, city.astype(object), city.tolist()):
        found = model.predict({"city": strings, "rest": rest}, batch_size=8)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    data = {"city": city, "rest": rest, "label": labels}
    row = jaxonnx.evaluate(model, data, metrics=["accuracy"], batch_size=8)
    np.testing.assert_allclose(row["accuracy"], (expected.argmax(1) == labels).mean(), rtol=1e-6)
    with pytest.raises(jaxonnx.InputError, match=r"city: string.* takes strings, and was given"):
        model.predict({"city": labels[:, None], "rest": rest})
    for call in (jaxonnx.train, jaxonnx.quantize):
        with pytest.raises(jaxonnx.TrainingError, match=r"city: string.*model\.split"):
            call(model, data)
    first, second = model.split("row")
    rows = first.predict(data)
    trained = jaxonnx.train(second, (rows, labels), epochs=1, batch_size=8).model
    assert np.abs(np.asarray(trained.params["w"]) - np.asarray(model.params["w"])).max() > 0
