"""A kind of data that nobody here has seen is one class: its arrays, errors, notes and loss."""

import jax
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx import training
from jaxonnx.cli import main

LINEAR = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 1] y) <float[3, 1] w = {1, -0.5, 0.25}>
    { y = MatMul(x, w) }"""
ROWS = np.random.default_rng(0).integers(-9, 9, (12, 4))
X, Y = ROWS[:, :3].astype(np.float32), ROWS[:, 3:].astype(np.float32)
SETTINGS = {"optimizer": optax.sgd(0.01), "epochs": 2, "batch_size": 4, "progress": False}


@training.register_data
class Ledger(training.Data):
    """Entries like "1 2 3 = 4", a file of such lines or one text; what is "void" is left out."""

    form = "a ledger of lines like '1 2 3 = 4'"
    takes = ("preprocess",)

    @classmethod
    def accepts(cls, data, labels):
        return isinstance(data, LedgerText) or str(data).endswith(".ledger")

    @classmethod
    def prepare(cls, parts, reading):
        for name, part in parts.items():
            table = part.arrays
            if part.void:
                reading.notes.append([f"{name}: {part.void} of {len(table['x']) + 1} are void"])
        if reading.preprocess is not None:  # a change of the model
            reading.model = reading.model.with_fixed_inputs(reading.preprocess)

    def load(self):
        text = self.data if isinstance(self.data, LedgerText) else self.data.read_text()
        lines = text.splitlines()
        entries = [line for line in lines if "void" not in line]
        self.void = len(lines) - len(entries)
        rows = []
        for number, line in enumerate(entries, 1):
            numbers, equal, total = line.partition("=")
            if not equal:
                raise jaxonnx.TrainingError(f"{self.name}: entry {number} has no total: {line!r}")
            rows.append([*map(float, numbers.split()), float(total)])
        table = np.array(rows, np.float32)
        return {"x": table[:, :-1], "total": table[:, -1:]}

    def choose_loss(self, model):
        return "squared_error", "ledgers"

    @property
    def title(self):
        return "a ledger"


class LedgerText(str):
    """A ledger in memory."""


def write(rows, *more):
    return "\n".join([*(f"{a} {b} {c} = {d}" for a, b, c, d in rows), *more])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sums.ledger"
    path.write_text(write(ROWS, "1 2 3 = void"))
    return path


def load():
    return jaxonnx.load(onnx.parser.parse_model(LINEAR))


def test_a_new_kind_of_data_trains_to_what_its_arrays_do(path):
    result = training.train(load(), path, validation=LedgerText(write(ROWS[:4])), **SETTINGS)
    data = {"x": X, "total": Y}
    expected = jaxonnx.train(
        load(), data, loss="squared_error", validation=(X[:4], Y[:4]), **SETTINGS
    )
    assert result.history.losses == expected.history.losses
    rows = [row["validation_loss"] for row in expected.history.epochs]
    assert [row["validation_loss"] for row in result.history.epochs] == rows
    np.testing.assert_array_equal(result.model.params["w"], expected.model.params["w"])
    assert "data: 1 of 13 are void" in result.history.notes
    assert "loss: squared_error (default for ledgers)" in result.history.notes
    share = jaxonnx.train(load(), path, validation=0.25, **SETTINGS)
    assert len(share.history.losses) == 6  # nine examples for three steps in each epoch
    assert training.preview(load(), path, **SETTINGS).rows == 12
    assert result.run.data == "a ledger, 12 examples"


def test_a_new_kind_of_data_is_evaluated_predicted_and_calibrated_on(path):
    outputs = load().predict(path, batch_size=5)
    np.testing.assert_allclose(outputs, X @ np.array([[1], [-0.5], [0.25]]), rtol=1e-6)
    found = jaxonnx.evaluate(load(), path, loss="squared_error")
    assert found["loss"] == pytest.approx(((outputs - Y) ** 2).mean(), rel=1e-5)
    jax.tree.map(
        np.testing.assert_array_equal,
        jaxonnx.quantize(load(), path, check=False).params,
        jaxonnx.quantize(load(), X, check=False).params,
    )
    curve = jaxonnx.find_rate(load(), path, steps=3, least=1e-6, most=1e-5, batch_size=4)
    assert np.isfinite(curve.losses).all()


def test_a_new_kind_of_data_changes_the_model(path):
    graph = LINEAR.replace("x)", "x, float shift)").replace(
        "y = MatMul(x, w)", "s = MatMul(x, w) y = Add(s, shift)"
    )
    model, shift = jaxonnx.load(onnx.parser.parse_model(graph)), {"shift": np.float32(1)}
    result = jaxonnx.train(model, path, preprocess=shift, **SETTINGS)
    settings = {"loss": "squared_error", "fixed": shift, **SETTINGS}
    expected = jaxonnx.train(model, {"x": X, "total": Y}, **settings)
    assert result.history.losses == expected.history.losses
    assert [value.name for value in result.model.inputs] == ["x", "shift"]
    with pytest.raises(jaxonnx.TrainingError, match="preprocess goes with"):
        jaxonnx.train(model, {"x": X, "total": Y}, **settings, preprocess=shift)


def test_a_path_of_a_new_kind_of_data_is_an_argument_of_commands(path, tmp_path, capsys):
    net, tuned, outputs = (str(tmp_path / name) for name in ("net.onnx", "tuned.onnx", "y.npz"))
    load().save(net)
    flags = ["--loss", "squared_error", "--optimizer", "sgd", "--rate", "0.01"]
    flags += ["--epochs", "2", "--batch-size", "4"]
    assert main(["train", net, str(path), "--output", tuned, *flags]) == 0
    trained = jaxonnx.train(load(), path, **SETTINGS).model.params["w"]
    np.testing.assert_allclose(jaxonnx.load(tuned).params["w"], trained, rtol=1e-6)
    assert main(["evaluate", net, str(path), "--loss", "squared_error"]) == 0
    assert "loss: " in capsys.readouterr().out
    assert main(["run", net, str(path), "--output", outputs]) == 0
    np.testing.assert_array_equal(np.load(outputs)["y"], load().predict(path))


def test_a_new_kind_of_data_has_its_own_errors(path):
    wrong = LedgerText("1 2 3 = 4\n5 6 7")
    for function in (jaxonnx.train, jaxonnx.evaluate):
        with pytest.raises(jaxonnx.TrainingError, match="data: entry 2 has no total: '5 6 7'"):
            function(load(), wrong, loss="squared_error")
    with pytest.raises(jaxonnx.TrainingError, match="validation: entry 1 has no total: 'x'"):
        jaxonnx.train(load(), path, validation=LedgerText("x"), **SETTINGS)
    with pytest.raises(jaxonnx.TrainingError, match=r"data must be .*a ledger of lines like"):
        jaxonnx.train(load(), 3, loss="squared_error")
    with pytest.raises(jaxonnx.TrainingError, match=r"a subclass of jaxonnx\.training\.Data"):
        training.register_data(LedgerText)


def test_what_a_kind_of_data_must_have():
    class Nothing(training.Data):
        pass

    class Unread(training.Data):
        @classmethod
        def accepts(cls, data, labels):
            return False

    with pytest.raises(jaxonnx.TrainingError, match="Nothing has no class method accepts"):
        training.register_data(Nothing)
    with pytest.raises(jaxonnx.TrainingError, match=r"Unread has neither load, .*, nor read"):
        training.register_data(Unread)


def test_columns_of_a_new_kind_of_data_have_new_names(path):
    found = jaxonnx.evaluate(load(), path, loss="squared_error", columns={"total": "sum"})
    assert found == jaxonnx.evaluate(load(), path, loss="squared_error")
    with pytest.raises(jaxonnx.TrainingError, match="columns has 'sums', and data has the columns"):
        jaxonnx.evaluate(load(), path, loss="squared_error", columns={"sums": "y"})
