"""Plots of a history, and the page about a run."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import jax
import numpy as np
import onnx.parser
import optax
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.training import History
from jaxonnx.training._report import confusion
from tests.support.paths import DATA
from tests.support.tiny_networks import examples, mlp, train

X, Y = examples(24)


def row(epoch, **numbers):
    return {"epoch": epoch, "step": 5 * epoch, "loss": 1 / epoch, "seconds": 1.0, **numbers}


def curves(axes):
    """The curves of all axes of a figure by their labels."""
    return {line.get_label(): line for one in axes.figure.axes for line in one.get_lines()}


def test_every_metric_is_drawn_and_the_legend_lies_outside():
    rows = [
        row(
            e,
            validation_loss=2 / e,
            validation_accuracy=0.2 * e,
            validation_mae=30.0,
            validation_f1=0.1 * e,
        )
        for e in (1, 2, 3)
    ]
    history = History(losses=[1.0] * 15, epochs=rows, best=2, best_step=10)
    figure = Figure(layout="constrained")
    axes = history.plot(figure.subplots())
    found = curves(axes)
    assert {"loss", "loss, mean of an epoch", "validation loss", "validation accuracy"} < {*found}
    np.testing.assert_allclose(found["validation f1"].get_ydata(), [0.1, 0.2, 0.3])
    assert found["validation mae"].axes is not found["validation accuracy"].axes
    assert found["validation f1"].axes is found["validation accuracy"].axes
    assert found["validation f1"].axes.get_ylim() == (0, 1)
    labels = [one.get_ylabel() for one in figure.axes]
    assert labels == ["loss", "validation accuracy, f1", "validation mae"]
    assert list(found["best epoch (2 of 3)"].get_xdata()) == [10, 10]
    assert found["validation loss"].get_marker() == "o"
    colors = [to_hex(line.get_color()) for name, line in found.items() if "valid" in name]
    assert len({*colors}) == len(colors)
    figure.draw_without_rendering()
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y0 >= inside.y1
    assert figure.bbox.y1 >= legend.y1
    long = History(losses=[1.0] * 50, epochs=[row(e) for e in range(1, 26)])
    assert {line.get_marker() for line in curves(long.plot(Figure().subplots())).values()} == {
        "None"
    }


def test_phases_are_those_of_the_steps_before_a_row():
    rows = [row(e, phase=p, flip_rate=0.1) for e, p in ((1, 2), (2, 2), (3, 3), (4, 3))]
    history = History(losses=[1.0] * 20, epochs=rows, phase=1)
    assert history.phases == [1, 2, 2, 3]
    axes = history.plot(Figure().subplots())
    assert [text.get_text() for text in axes.texts] == ["dense", "dynamic mask", "fixed mask"]
    assert [text.get_position()[0] for text in axes.texts] == [2.5, 10, 17.5]
    assert History(losses=[1.0], epochs=[row(1)]).phases == []


class Page(HTMLParser):
    """Texts of cells and headings, and sources of pictures."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.texts, self.pictures = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link")
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self.pictures += [value for name, value in attrs if name == "src"]

    def handle_data(self, data):
        if self.rows and self.rows[-1] and self.lasttag == "td":
            self.rows[-1][-1] += data.rstrip("\n")
        self.texts.append(data)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A run with names, sparse weights and a share held out, and its page."""
    model = jaxonnx.load(mlp()).with_head(["ant", "bee", "<cat>", "dog"])
    result = train(
        model, (X, Y), validation=0.5, epochs=3, sparsity={"dense": 1, "dynamic": 1},
        trainable=["w.*", "b1"],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("report") / "run.html"
    result.report(path)
    return result, path.read_text("utf-8")


@pytest.mark.deep
def test_a_page_has_curves_layers_matrix_settings_and_versions(sparse):
    result, text = sparse
    page = Page(text)
    assert "http" not in re.sub("data:[^']*", "", text)
    for source in page.pictures:
        kind, data = source.split(",")
        assert kind == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(data))
    assert len(page.pictures) == 2
    status = {row[2]: row[5] for row in page.rows if len(row) == 8}
    assert status == {
        "w1": "sparse 2:4 transposable",
        "w2": "sparse 2:4 transposable",
        "b1": "trained",
        "b2": "frozen",
    }
    zeros = {row[2]: row[7] for row in page.rows if len(row) == 8}
    assert zeros["w1"] == "50%"
    assert any(line.startswith("true \\ predicted") and "<cat>" in line for line in page.texts)
    settings = dict(row for row in page.rows if len(row) == 2)
    assert settings["epochs"] == "3"
    assert settings["loss"] == "softmax_cross_entropy_with_integer_labels"
    assert settings["jax"] == jax.__version__
    assert result.history.phases == [1, 2, 3]


@pytest.mark.deep
def test_the_matrix_is_that_of_the_validation_data(sparse):
    result, _ = sparse
    rows = result.run.held_out.rows
    found = confusion(result).counts
    expected = jaxonnx.evaluate(result.model, (X[rows], Y[rows]), metrics="confusion_matrix")
    assert (found == expected["confusion_matrix"].counts).all()
    assert found.sum() == 12


def test_the_matrix_of_a_loss_by_output():
    two = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,8] x) => (float[n,1] size, float[n,4] kind) {
      kind = MatMul(x, w) size = MatMul(x, v) }""")
    for name, width in (("w", 4), ("v", 1)):
        value = np.eye(8, width, dtype=np.float32)
        two.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    targets = {"kind": Y}
    loss = {"kind": "softmax_cross_entropy_with_integer_labels"}
    result = train(two, (X, targets), loss=loss, validation=(X[:12], {"kind": Y[:12]}))
    assert confusion(result).counts.sum() == 12


@pytest.mark.parametrize("inputs", ["float[n, 8] x, float[1] scale", "float[8] x"])
def test_the_matrix_of_a_file_with_a_fixed_input_or_for_one_example(inputs, tmp_path):
    """The validation data lacks the fixed input; the file lacks the batch axis of the data."""
    axes = "n, 4" if "n, 8" in inputs else "4"
    body = "h = MatMul(x, w)  y = Mul(h, scale)" if "scale" in inputs else "y = MatMul(x, w)"
    numbers = ", ".join(f"{v:.3f}" for v in np.random.default_rng(0).normal(size=32))
    net = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net ({inputs}) => (float[{axes}] y) <float[8, 4] w = {{{numbers}}}> {{ {body} }}"""
    )
    fixed = {"scale": np.float32([2])} if "scale" in inputs else None
    result = train(net, (X, Y), validation=(X, Y), fixed=fixed)
    result.report(tmp_path / "run.html")
    scores = X @ np.asarray(result.model.params["w"])
    expected = np.zeros((4, 4), int)
    np.add.at(expected, (Y, scores.argmax(1)), 1)
    np.testing.assert_array_equal(confusion(result).counts, expected)


@pytest.mark.deep
def test_a_page_of_a_decoder_in_few_bits(tmp_path):
    """The file has caches and no packed rows, the validation data the reverse."""
    texts = [{"text": text} for text in ("a list", "of", "the dict has keys")]
    result = jaxonnx.train(
        DATA / "llm" / "qwen3-genai", texts, validation=texts, loss="causal_lm", batch_size=2,
        learning_rate=1e-3, preprocess={"pack": True, "max_length": 40},
    )  # fmt: skip
    result.report(tmp_path / "run.html")
    assert "weights only" not in (tmp_path / "run.html").read_text("utf-8")


def test_a_page_of_a_run_without_validation_and_with_adapters(tmp_path):
    result = train(data=(X, Y), lora=jaxonnx.LoRA(rank=2, where="w1"), optimizer=optax.sgd(0.1))
    result.report(tmp_path / "run.html", {"rate": 0.1, "where": None})
    page = Page((tmp_path / "run.html").read_text("utf-8"))
    assert len(page.pictures) == 1
    status = {row[2]: row[5] for row in page.rows if len(row) == 8}
    assert status == {"w1": "adapters", "w2": "frozen", "b1": "frozen", "b2": "frozen"}
    assert ["rate", "0.1"] in page.rows


@pytest.mark.deep
def test_a_page_of_a_quantized_run_has_ranges(tmp_path):
    """Those of the file that it saves, and the share of weights beyond them."""
    result = train(data=(X, Y), validation=(X[:8], Y[:8]), quantize="int8")
    result.report(tmp_path / "run.html")
    page = Page((tmp_path / "run.html").read_text("utf-8"))
    rows = {row[2]: row for row in page.rows if len(row) == 9}
    assert len(page.pictures) == 3
    stored = {
        tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in result.model.to_onnx().graph.initializer
    }
    scale, point = stored["x_scale"], stored["x_zero_point"]
    assert rows["x"][1:5] == ["Gemm", "x", "uint8", "1"]
    assert rows["x"][7] == f"{-point * scale:.4g} to {(255 - point) * scale:.4g}"
    outside = (X[:8] < (-point - 0.5) * scale) | (X[:8] > (255.5 - point) * scale)
    assert rows["x"][8] == f"{outside.mean():.2%}"
    scales = stored["w1_scale"]
    assert rows["w1"][3:7] == ["int8", "16", f"{scales.min():.5g}", f"{scales.max():.5g}"]
    numbers = result.model.params["w1"] / scales
    outside = (numbers < -128.5) | (numbers > 127.5)
    assert rows["w1"][8] == f"{outside.mean():.2%}"
    assert outside.any()


@pytest.mark.deep
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jaxonnx.load(mlp()).save("net.onnx")
    np.savez("data.npz", x=X, y=Y)
    line = "train net.onnx data.npz -o out.onnx --validation 0.25 --report run.html --rate 0.01"
    assert main(line.split()) == 0
    page = Page((tmp_path / "run.html").read_text("utf-8"))
    settings = dict(row for row in page.rows if len(row) == 2)
    assert settings["learning_rate"] == "0.01"
    assert len(page.pictures) == 2
    assert "run.html" in capsys.readouterr().out
