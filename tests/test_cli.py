"""The command line, in this process; the installed command is the same function."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import jaxonnx
from jaxonnx.cli import main

NET = str(Path(__file__).parent / "data" / "lenet_bn.legacy.onnx")


@pytest.fixture
def data(tmp_path):
    random = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    x = random.random((16, 1, 28, 28), np.float32)
    np.savez(path, x=x, y=random.integers(0, 10, 16))
    return path


def test_info(capsys):
    assert main(["info", NET]) == 0
    assert "logits" in capsys.readouterr().out


def test_run(data, tmp_path):
    output = tmp_path / "out.npz"
    assert main(["run", NET, str(data), "-o", str(output)]) == 0
    expected = jaxonnx.load(NET)(np.load(data)["x"])
    np.testing.assert_allclose(np.load(output)["logits"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["train", "sparsify"])
def test_train(verb, data, tmp_path, capsys):
    output = tmp_path / "out.onnx"
    settings = ["--epochs", "3", "--batch-size", "8", "--validation", str(data)]
    assert main([verb, NET, str(data), "-o", str(output), *settings]) == 0
    assert "3 epochs, 6 steps" in capsys.readouterr().out
    before, after = jaxonnx.load(NET).params, jaxonnx.load(output).params
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    kept = np.count_nonzero(after["classifier.0.weight"]) / after["classifier.0.weight"].size
    assert kept <= 0.5 if verb == "sparsify" else kept > 0.9
    onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])


def test_train_follows_the_algorithm_of_the_file(data, tmp_path, capsys):
    loss, optimizer = "softmax_cross_entropy_with_integer_labels", jaxonnx.optim.adam(1e-3)
    onnx.save(jaxonnx.add_training(NET, loss=loss, optimizer=optimizer), tmp_path / "net.onnx")
    output = tmp_path / "out.onnx"
    settings = ["--epochs", "2", "--batch-size", "8"]
    assert main(["train", str(tmp_path / "net.onnx"), str(data), "-o", str(output), *settings]) == 0
    state = jaxonnx.load(output).training.state
    assert 4 in [int(value) for value in state.values() if value.size == 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"net": "nothing.onnx"}, "nothing.onnx"),
        ({"data": NET}, "no .npz"),
        ({"output": "/dev/null/out.onnx"}, "Not a directory"),
        ({"output": "/"}, "Is a directory"),
        ({"more": ["--loss", "hinge"]}, "hinge_loss"),
    ],
)
def test_what_is_wrong_is_said_before_training(change, message, data, tmp_path, capsys):
    given = {"net": NET, "data": str(data), "output": str(tmp_path / "out.onnx"), "more": []}
    given |= change
    assert main(["train", given["net"], given["data"], "-o", given["output"], *given["more"]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
