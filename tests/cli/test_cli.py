"""The command line, in this process; the installed command is the same function."""

import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import onnx
import onnxruntime
import pytest
from matplotlib import pyplot
from PIL import Image

import jaxonnx
from jaxonnx import demo
from jaxonnx._data import images
from jaxonnx._step_files.web import RUNTIME
from jaxonnx.cli import main
from jaxonnx.cli._parser import COMMANDS
from tests.support import tiny_networks
from tests.support.paths import DATA

NET = str(DATA / "lenet_bn.legacy.onnx")


@pytest.fixture
def data(tmp_path):
    random = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    x = random.random((16, 1, 28, 28), np.float32)
    np.savez(path, x=x, y=random.integers(0, 10, 16))
    return path


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A network of one layer and data for it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    text = '<ir_version: 8, opset_import: ["" : 17]> net (float[n, 4] x) => (float[n, 3] y) '
    proto = onnx.parser.parse_model(text + "{ y = MatMul(x, w) }")
    random = np.random.default_rng(0)
    weight = random.normal(size=(4, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, "net.onnx")
    x = random.normal(size=(8, 4)).astype(np.float32)
    np.savez("data.npz", x=x, y=np.arange(8) % 3)


def command(line):
    return main(line.split())


def result(capsys):
    """What `--json` printed: the only thing on stdout."""
    return json.loads(capsys.readouterr().out)


def test_info(capsys):
    assert main(["info", NET]) == 0
    assert "logits" in capsys.readouterr().out
    assert main(["info", NET, "--json"]) == 0
    said = result(capsys)
    assert said["outputs"] == [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}]
    assert said["operators"]["Conv"] == 2
    assert said["params"]["classifier.0.bias"] == {"dtype": "float32", "shape": [32]}
    assert main(["info", NET, "--layers"]) == 0
    assert "12,678 parameters trained" in capsys.readouterr().out


def test_verify(tmp_path, capsys):
    model = jaxonnx.load(NET)
    choice = model.sparsity_options()
    pruned = model.replace(params=jaxonnx.sparse.prune(model.params, **choice))
    path = str(tmp_path / "sparse.onnx")
    jaxonnx.sparse.record(pruned).save(path)
    assert main(["verify", path]) == 0
    assert "2:4 transposable" in capsys.readouterr().out
    assert main(["verify", path, "--json"]) == 0
    said = result(capsys)
    assert said["pattern"] == "2:4 transposable"
    assert {p["part"] for p in said["products"] if p["ok"]} == {"forward", "backward"}
    assert main(["verify", NET]) != 0
    assert "no weight has the zeros of 2:4 transposable" in capsys.readouterr().err


def test_run(data, tmp_path, capsys):
    output = tmp_path / "out.npz"
    assert main(["run", NET, str(data), "-o", str(output), "--json"]) == 0
    assert result(capsys)["outputs"] == {"logits": {"dtype": "float32", "shape": [16, 10]}}
    expected = jaxonnx.load(NET)(np.load(data)["x"])
    np.testing.assert_allclose(np.load(output)["logits"], expected, rtol=1e-5, atol=1e-6)


def test_run_in_batches(small, capsys):
    for size in ("", " --batch-size 3", " --batch-size 100"):
        assert command(f"run net.onnx data.npz -o out.npz{size}") == 0
        outputs = np.load("out.npz")["y"]
        np.testing.assert_allclose(
            outputs, jaxonnx.load("net.onnx")(np.load("data.npz")["x"]), 1e-5
        )
    assert command("run net.onnx data.npz -o out.npz --batch-size 0") == 2
    assert "batch_size must be an integer of at least 1" in capsys.readouterr().err


def test_devices_are_written_to_and_not_replaced(small, capsys):
    null = Path("null")
    null.symlink_to("/dev/null")  # so that nothing is lost if it were replaced
    assert command("run net.onnx data.npz -o null") == 0
    assert null.is_symlink()
    assert null.is_char_device()


def test_run_gives_inner_values(small, capsys):
    assert command("run net.onnx data.npz -o out.npz --outputs y") == 0
    assert command("run net.onnx data.npz -o out.npz --outputs z") == 2
    assert "no value" in capsys.readouterr().err


def test_quantize(small, capsys):
    line = "quantize net.onnx data.npz -o q.onnx --weights int4 --activations none"
    assert command(f"{line} --json") == 0
    assert result(capsys)["bytes"] == Path("q.onnx").stat().st_size
    types = {tensor.data_type for tensor in onnx.load("q.onnx").graph.initializer}
    assert onnx.TensorProto.INT4 in types
    assert command("quantize q.onnx data.npz -o again.onnx") == 2
    assert "quantized already" in capsys.readouterr().err


def show_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_fields_of_a_scheme_are_flags_of_quantize(capsys):
    """With the choices that their types have, as they are read without importing them."""
    choices = dict(re.findall(r"^  --([\w-]+) \{(.*?)\}", show_help("quantize", capsys), re.M))
    found = 0
    for name, kind in get_type_hints(jaxonnx.Quantization).items():
        values = [v for part in get_args(kind) for v in get_args(part) if get_origin(part)]
        if get_origin(kind) is Literal:
            values = [*get_args(kind)]
        default = jaxonnx.Quantization.__dataclass_fields__[name].default
        if values and all(isinstance(v, str) for v in values) and name in choices:
            optional = type(None) in get_args(kind) and default is not None
            assert choices[name].split(",") == [*values, *["none"] * optional], name
            found += 1
    assert found == 4


def test_quantize_by_fields(small, capsys):
    fields = "--no-per-channel --calibration percentile --symmetric --dialect qnn --batches 2"
    assert command(f"quantize net.onnx data.npz -o q.onnx {fields}") == 0
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("q.onnx").graph.initializer}
    assert stored["w_scale"].ndim == 0
    assert stored["x_zero_point"] == 128
    assert command("quantize net.onnx data.npz -o q.onnx --weights int2") == 2
    assert "activations=None" in capsys.readouterr().err
    assert command("quantize net.onnx data.npz -o q.onnx --skip w --where w") == 2
    assert "there is no float32 weight" in capsys.readouterr().err


def test_pictures_calibrate(tmp_path, monkeypatch):
    """A folder, and pixels of 8 bits, are prepared as the network takes them."""
    monkeypatch.chdir(tmp_path)
    demo.mlp().save("net.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8), np.uint8)
    np.savez("images.npz", x=pixels)
    for number, picture in enumerate(pixels):
        path = Path("photos", str(number % 2), f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    scales = []
    for data in ("images.npz", "photos"):
        line = f"quantize net.onnx {data} -o q.onnx --mean 0.5 --std 0.5 --calibration minmax"
        assert command(line) == 0
        stored = {t.name: t for t in onnx.load("q.onnx").graph.initializer}
        scales.append(float(onnx.numpy_helper.to_array(stored["x_scale"])))
        assert images.preparation(jaxonnx.load("q.onnx")).mean == (0.5,)
    x = (pixels / 255 - 0.5) / 0.5
    np.testing.assert_allclose(scales, (x.max() - x.min()) / 255, rtol=1e-5)


@pytest.mark.parametrize(
    ("said", "configured", "fields"),
    [
        ("int8", "'int8'", 'quantize="int8"'),
        (
            "weights=int4,block=2,activations=none,symmetric=true",
            '{weights = "int4", block = 2, activations = "none", symmetric = true}',
            'Quantization(weights="int4", block=2, activations=None, symmetric=True)',
        ),
        (
            "skip=a,b,start=0.5",
            '{skip = ["a", "b"], start = 0.5}',
            'Quantization(skip=["a", "b"], start=0.5)',
        ),
    ],
)
def test_schemes_of_training(said, configured, fields, small, capsys):
    Path("run.toml").write_text(f"quantize = {configured}")
    for flags in (f"--quantize {said}", "--config run.toml"):
        assert command(f"train net.onnx data.npz -o out.onnx --explain {flags}") == 0
        assert fields in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("dialect=coreml", "dialect=coreml is none of onnxruntime, tensorrt, qnn"),
        ("wieghts=int4", "'wieghts' is none of weights, "),
        ("weights=int4,uint8", "'uint8' is none of weights, "),
        ("symmetric=yes", "symmetric=yes is neither true nor false"),
        ("block=x", "block=x"),
    ],
)
def test_schemes_that_are_mistyped(said, message, small, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "net.onnx", "data.npz", "-o", "out.onnx", "--quantize", said])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_training_through_a_scheme(small, capsys):
    line = "train net.onnx data.npz -o out.onnx --quantize weights=int4,block=2,learn=none"
    assert command(f"{line} --explain") == 0
    scheme = 'quantize=jaxonnx.Quantization(weights="int4", block=2, learn=None)'
    assert scheme in capsys.readouterr().out
    assert command(line) == 0
    stored = {t.name: t for t in onnx.load("out.onnx").graph.initializer}
    assert stored["w_quantized"].data_type == onnx.TensorProto.INT4
    assert [*stored["w_scale"].dims] == [2, 3]
    assert command(line.replace("block=2", "block=1")) == 2
    assert "block must be a number of inputs" in capsys.readouterr().err


def test_sensitivity(small, capsys):
    line = "sensitivity net.onnx data.npz --types int4 --types 2:4 --batch-size 4 --batches 1"
    assert command(f"{line} --json --plot found.png") == 0
    pyplot.close("all")
    x = np.load("data.npz")["x"]
    found = jaxonnx.sensitivity("net.onnx", x, ("int4", "2:4"), batch_size=4, batches=1)
    said = result(capsys)
    assert said["sizes"] == {"w": 12}
    np.testing.assert_allclose(said["errors"]["w"]["int4"], found.errors["w"]["int4"], rtol=1e-5)
    assert said["errors"]["w"]["2:4"] is None  # three outputs
    assert Path("found.png").read_bytes().startswith(b"\x89PNG")
    assert command(line) == 0
    assert "weight  size  int4" in capsys.readouterr().out


def test_export_safetensors(tmp_path, capsys):
    import safetensors.numpy as tensors

    model, folder = DATA / "llm" / "qwen3-genai", tmp_path / "hf"
    line = f"export-safetensors {model} {folder} --original {DATA / 'llm' / 'qwen3-optimum'}"
    assert command(f"{line} --dtype bfloat16 --json") == 0
    assert result(capsys) == {"output": str(folder)}
    types = {str(x.dtype) for x in tensors.load_file(folder / "model.safetensors").values()}
    assert types == {"bfloat16"}


def test_evaluate(small, capsys):
    line = "evaluate net.onnx data.npz --batch-size 3"
    assert command(f"{line} --json") == 0
    assert [*result(capsys)] == ["loss", "accuracy"]
    names = ("accuracy", "confusion_matrix", "roc_curve")
    line += "".join(f" --metrics {name}" for name in names)
    assert command(f"{line} --json --plots plots/new") == 0
    pyplot.close("all")
    said = result(capsys)
    assert [*said] == [*names]
    assert np.sum(said["confusion_matrix"]["counts"]) == 8
    assert said["roc_curve"]["points"][0]["thresholds"][0] is None  # infinite
    written = {path.name for path in Path("plots/new").iterdir()}
    assert written == {"confusion_matrix.png", "roc_curve.png"}
    assert command(line) == 0
    assert "true \\ predicted" in capsys.readouterr().out
    assert command("evaluate net.onnx data.npz --metrics mse") == 2
    assert "shape of the outputs" in capsys.readouterr().err


def test_second_models_of_losses(small, capsys):
    proto = onnx.load("net.onnx")
    student = onnx.numpy_helper.to_array(proto.graph.initializer[0]).astype(float)
    teacher = np.random.default_rng(1).normal(size=(4, 3))
    tensor = onnx.numpy_helper.from_array(teacher.astype(np.float32), "w")
    proto.graph.initializer[0].CopyFrom(tensor)
    onnx.save(proto, "teacher.onnx")
    line = "net.onnx data.npz --loss distill --reference teacher.onnx"
    assert command(f"evaluate {line} --json") == 0
    x = np.load("data.npz")["x"].astype(float)
    soft, logs = (x @ weight / 2 for weight in (teacher, student))  # the temperature is 2
    soft, logs = (z - np.log(np.exp(z).sum(1, keepdims=True)) for z in (soft, logs))
    expected = 4 * (np.exp(soft) * (soft - logs)).sum(1).mean()
    assert result(capsys)["loss"] == pytest.approx(expected, rel=1e-5)
    assert command(f"train {line} -o out.onnx --explain") == 0
    assert 'loss=jaxonnx.losses.distill(teacher="teacher.onnx"),' in capsys.readouterr().out
    assert command(f"train {line} -o out.onnx --json") == 0
    assert result(capsys)["history"]["losses"] == pytest.approx([expected], rel=1e-5)
    assert command("train net.onnx data.npz -o out.onnx --reference teacher.onnx") == 2
    assert "--reference goes with --loss distill, dpo or kto" in capsys.readouterr().err


def test_references_of_preferences(small, capsys):
    """Of a model that equals the reference the loss is log 2."""
    onnx.save(tiny_networks.text(), "text.onnx")
    onnx.save(tiny_networks.text(), "same.onnx")
    ids = np.random.default_rng(0).integers(0, 7, (4, 6))
    np.savez("pairs.npz", input_ids=ids, labels=np.where(np.arange(6) < 2, -100, ids))
    line = "evaluate text.onnx pairs.npz --loss dpo --json"
    assert command(f"{line} --reference same.onnx") == 0
    assert result(capsys)["loss"] == pytest.approx(np.log(2), rel=1e-6)


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


@pytest.mark.deep
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
        ({"data": NET}, "is not a file of data"),
        ({"data": "nowhere"}, "no file or folder 'nowhere'"),
        ({"output": "/dev/null/out.onnx"}, "Not a directory"),
        ({"output": "/"}, "Is a directory"),
        ({"more": ["--loss", "hinge"]}, "hinge_loss"),
        ({"more": ["--data", "twice.npz"]}, "give the data once"),
    ],
)
def test_what_is_wrong_is_said_before_training(change, message, data, tmp_path, capsys):
    given = {"net": NET, "data": str(data), "output": str(tmp_path / "out.onnx"), "more": []}
    given |= change
    assert main(["train", given["net"], given["data"], "-o", given["output"], *given["more"]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_a_configuration_gives_what_flags_do_not(small, capsys):
    Path("run.toml").write_text(
        'model = "net.onnx"\ndata = "data.npz"\noutput = "out.onnx"\nepochs = 2\n'
        'batch-size = 4\njson = true\ntrainable = ["w"]\nrate = 0.1\n'
    )
    assert main(["train", "--config", "run.toml"]) == 0
    assert result(capsys)["history"]["epochs"][-1]["step"] == 4
    assert main(["train", "--config", "run.toml", "--epochs", "1", "--batch-size", "8"]) == 0
    assert result(capsys)["history"]["epochs"][-1]["step"] == 1
    assert main(["train", "--config", "run.toml", "--trainable", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


FLAGS = {
    **{"learning_rate": "rate", "checkpoint_dir": "checkpoints", "on_log": "log"},
    **{"preprocess": "size", "sparsity": "pattern"},  # one of several flags
    **{"rank": "lora", "where": "lora-where", "alpha": "lora-alpha", "loss": "loss-on"},
}
"""Flags of arguments, keys and fields that have another name."""


def test_the_shell_reaches_what_python_does(capsys):
    """Each argument of train, each key of preprocess, each field of LoRA."""
    shown = {name: show_help(name, capsys) for name in ("train", "sparsify")}
    flags = {flag for text in shown.values() for flag in re.findall(r"--([\w-]+)", text)}
    arguments = inspect.signature(jaxonnx.train).parameters.keys() - {"model", "data"}
    assert len(arguments) > 45
    assert {"loss", *(FLAGS.get(x, x.replace("_", "-")) for x in arguments)} <= flags
    text = re.search(r"^  preprocess: .*?^  \w", jaxonnx.train.__doc__, re.M | re.S)[0]
    heads = re.findall(r'^    \* ("[^:]*"):', text, re.M)
    keys = {name for head in heads for name in re.findall(r"\w+", head)}
    assert len(keys) == 16
    fields = {
        f"lora-{name}" if name == "dropout" else name for name in get_type_hints(jaxonnx.LoRA)
    }
    assert {FLAGS.get(x, x.replace("_", "-")) for x in keys | fields} <= flags


def test_a_configuration_reaches_what_flags_do(small, capsys):
    Path("run.toml").write_text(
        'model = "net.onnx"\ndata = "data.npz"\noutput = "o.onnx"\nmaster = false\n'
        'progress = false\nlora = 4\nlora-alpha = 8.0\ndora = true\nbatching = ["nodes"]\n'
        'log = ["wandb:digits", "log.csv"]\nexplain = true\n'
        '[preprocess]\nmax_length = 12\nlong = "skip"\nloss = "all"\npack = true\n'
    )
    assert command("train --config run.toml") == 0
    shown = capsys.readouterr().out
    for argument in (
        *("master=False", "progress=False", 'batching={"nodes": None}'),
        "lora=jaxonnx.LoRA(4, alpha=8.0, dora=True)",
        'preprocess={"max_length": 12, "long": "skip", "loss": "all", "pack": True}',
        'on_log=[jaxonnx.loggers.wandb("digits", folder=None), jaxonnx.loggers.csv("log.csv")]',
    ):
        assert f"    {argument},\n" in shown
    line = "train net.onnx data.npz -o out.onnx --lora 2 --lora-alpha 3 --explain --no-progress"
    assert command(f"{line} --log mlflow:digits --checkpoints run") == 0
    shown = capsys.readouterr().out
    assert "jaxonnx.LoRA(2, alpha=3.0)" in shown
    assert "progress=False" in shown
    assert "loggers.mlflow('digits', folder='run')" in shown.replace('"', "'")
    assert command("train net.onnx data.npz -o out.onnx --dora") == 2
    assert "go with --lora RANK" in capsys.readouterr().err


def test_defaults_are_those_of_python(small, capsys):
    assert command("train net.onnx data.npz -o out.onnx --explain") == 0
    passed = re.findall(r"^    (.*),$", capsys.readouterr().out, re.M)
    assert passed == ["model", "data", 'loss="softmax_cross_entropy_with_integer_labels"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown 'epoch'; try epochs or "),
        ("lr = 0.1", "unknown 'lr'; try rate or "),
        ("config = 'other.toml'", "unknown 'config'"),
        ("epochs = 'three'", "epochs = 'three' does not fit"),
        ("epochs = true", "must be a number or a text"),
        ("resume = 1", "must be true or false"),
        ("class-weights = 2", "has no name before 2"),
        ("mean = {red = 1}", "must be a number or a text"),
        ("head = 'cat'", "'cat' is not a number"),
        ("quantize = {weights = 'int3'}", "weights=int3 is none of int8"),
        ("optimizer = 'adamm'", "none of adam"),
        ("[train]\nepochs = 1", "unknown 'train'"),
        ("epochs =", "run.toml"),
        (None, "No such file"),
    ],
)
def test_configurations_that_are_refused(text, message, small, capsys):
    if text is not None:
        Path("run.toml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["train", "net.onnx", "data.npz", "-o", "out.onnx", "--config", "run.toml"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_that_stops_says_so_in_its_status(small, capsys):
    x = np.load("data.npz")["x"]
    x[5] = np.inf
    np.savez("data.npz", x=x, y=np.arange(8) % 3)
    assert command("train net.onnx data.npz -o out.onnx --batch-size 4 --epochs 1 --json") == 1
    captured = capsys.readouterr()
    assert "not finite" in captured.err
    history = json.loads(captured.out)["history"]
    assert "not finite" in history["stopped"]
    assert history["losses"][-1] is None


@pytest.mark.deep
def test_settings_of_train(small, capsys):
    line = "train net.onnx data.npz -o out.onnx --epochs 40 --batch-size 2 --json --rate 0.5"
    more = "--validation 0.25 --metrics f1 --metrics top_2 --patience 1 --monitor validation_f1"
    more += " --remat --ema 0.9 --accumulate 2 --checkpoints kept --log l.csv"
    assert command(f"{line} {more}") == 0
    history = result(capsys)["history"]
    assert history["early"]
    assert "validation_f1" in history["stopped"]
    assert {"validation_f1", "validation_top_2"} <= history["epochs"][0].keys()
    assert Path("kept").is_dir()
    assert len(Path("l.csv").read_text().splitlines()) == 1 + len(history["epochs"])
    assert command(f"{line} --dropout 0.1") == 2
    assert "no Dropout node" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(f"{line} --dropout 0.1 --dropout x=0.2")
    assert "argument --dropout: takes X|NAME=X: one for all, or by name" in capsys.readouterr().err
    assert command(f"{line} --adapters out.npz") == 2
    assert command(f"{line} --log out.txt") == 2


@pytest.mark.deep
def test_adapters(small, capsys):
    line = "train net.onnx data.npz -o out.onnx --epochs 1 --lora 1 --lora-where w"
    assert command(f"{line} --adapters adapters.npz") == 0
    with_adapters = jaxonnx.Adapters.load("adapters.npz").apply(jaxonnx.load("net.onnx"))
    np.testing.assert_allclose(with_adapters.params["w"], jaxonnx.load("out.onnx").params["w"])


def test_a_fixed_batch_is_opened(small, capsys):
    proto = onnx.load("net.onnx")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(proto, "fixed.onnx")
    assert command("run fixed.onnx data.npz -o out.npz") == 2
    assert command("run fixed.onnx data.npz -o out.npz --any-batch") == 0
    assert np.load("out.npz")["y"].shape == (8, 3)
    assert command("info net.onnx --dequantize") == 2
    assert "dequantize" in capsys.readouterr().err


def fail(*_, **__):
    raise OSError(28, "No space left on device")


def test_outputs_are_whole_or_as_they_were(small, monkeypatch, capsys):
    Path("out.npz").write_bytes(b"before")
    monkeypatch.setattr(np, "savez", fail)
    assert command("run net.onnx data.npz -o out.npz") == 1
    assert "No space left" in capsys.readouterr().err
    assert Path("out.npz").read_bytes() == b"before"
    assert sorted(p.name for p in Path().iterdir()) == ["data.npz", "net.onnx", "out.npz"]


def test_a_trained_model_that_cannot_be_written_is_kept_elsewhere(small, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", ".")
    save = jaxonnx.Model.save
    monkeypatch.setattr(
        jaxonnx.Model, "save", lambda m, path: fail() if path == Path("out.onnx") else save(m, path)
    )
    assert command("train net.onnx data.npz -o out.onnx --epochs 1") == 1
    said = capsys.readouterr().err
    assert "No space left" in said
    kept = jaxonnx.load(said.split(" is in ")[1].strip())
    assert not np.array_equal(kept.params["w"], jaxonnx.load("net.onnx").params["w"])


def test_a_trained_model_that_is_not_valid_is_written_with_an_error(small, monkeypatch, capsys):
    def refuse(*_):
        raise jaxonnx.ModelError("not valid")

    monkeypatch.setattr("jaxonnx.model._save.check_valid", refuse)
    assert command("train net.onnx data.npz -o out.onnx --epochs 1 --quantize int8") == 1
    assert "not valid. The trained model is in out.onnx nevertheless" in capsys.readouterr().err
    assert jaxonnx.quantization.is_quantized(jaxonnx.load("out.onnx"))


def test_interruption(small, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxonnx.cli._inputs.load", stop)
    assert main(["info", "net.onnx"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == jaxonnx.__version__


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_has_examples(verb, capsys):
    said = show_help(verb, capsys)
    assert f"jaxonnx {verb} " in said
    assert "exit status" in said


def test_the_optimizer_of_flags_and_of_a_file(small, capsys):
    line = "train net.onnx data.npz -o out.onnx --batch-size 2 --epochs 2 --json"
    more = "--optimizer sgd --rate 0.5 --schedule linear --warmup 0.25 --clip 1 --weight-decay 0.1"
    assert command(f"{line} {more}") == 0
    said = result(capsys)
    rates = 0.5 * np.array([0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    np.testing.assert_allclose(said["history"]["rates"], rates, rtol=1e-5)
    assert said["written"] == ["out.onnx"]
    trained = jaxonnx.load("out.onnx").params["w"]
    Path("run.toml").write_text(
        'optimizer = "sgd"\nrate = 0.5\nschedule = "linear"\nwarmup = 0.25\nclip = 1\n'
        "weight-decay = 0.1\n"
    )
    assert command(f"{line} --config run.toml") == 0
    np.testing.assert_array_equal(jaxonnx.load("out.onnx").params["w"], trained)


@pytest.mark.deep
@pytest.mark.parametrize(
    "flags",
    [
        "train --epochs 2 --schedule cosine --warmup 0.2 --clip 0.5 --optimizer adamw --ema 0.9",
        "train --lora 1 --lora-where w --adapters adapters.npz --log log.csv --accumulate 2",
        "train --head 4 --validation 0.25 --metrics top_2",
        "train --class-weights 2=0.5 --class-weights 0=3",
        "train --mesh data=1,model=1 --sharding fsdp",
        "sparsify --select w --dense 1 --dynamic 1 --validation data.npz",
    ],
)
def test_the_python_that_explain_prints_gives_the_same_weights(flags, small, capsys):
    verb, flags = flags.split(" ", 1)
    if verb == "sparsify":
        proto = onnx.load("net.onnx")
        weight = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
        proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
        proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
        onnx.save(proto, "net.onnx")
    line = f"{verb} net.onnx data.npz -o out.onnx --batch-size 2 --seed 3 {flags}"
    assert command(f"{line} --explain") == 0
    assert not Path("out.onnx").exists()
    program = capsys.readouterr().out
    exec(compile(program, "explained", "exec"), {})
    explained = jaxonnx.load("out.onnx").params
    Path("out.onnx").unlink()
    assert command(line) == 0
    trained = jaxonnx.load("out.onnx").params
    assert explained.keys() == trained.keys()
    for name, value in trained.items():
        np.testing.assert_array_equal(value, explained[name])


def test_a_language_model_is_a_folder_before_and_after(tmp_path, monkeypatch, capsys):
    """As `result.model.save("tuned/")` writes it; roles choose what is adapted."""
    monkeypatch.chdir(tmp_path)
    home = DATA / "llm" / "qwen3-genai"
    chat = [{"role": "user", "content": "a list"}, {"role": "assistant", "content": "mutable"}]
    Path("chat.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 4)
    line = f"train {home} chat.jsonl --loss causal_lm --lora 4 --batch-size 4 --epochs 1 --seed 1"
    assert command(f"{line} --lora-where mlp -o explained/ --explain") == 0
    program = capsys.readouterr().out
    assert 'lora=jaxonnx.LoRA(4, where="mlp")' in program
    assert 'result.save("explained")' in program
    assert command(f"{line} --lora-where mlp --output tuned/ --samples list") == 0
    assert r"epoch 1: '<|im_start|>user\nlist<|im_end|>" in capsys.readouterr().out
    names = {p.name for p in home.iterdir()} | {"README.md"}
    assert {p.name for p in Path("tuned").iterdir()} == names
    card = Path("tuned/README.md").read_text()
    assert "| data | chat.jsonl, 4 examples |" in card
    assert 'pipeline_tag: "text-generation"' in card
    assert len({p.stat().st_mode for p in Path("tuned").glob("model.onnx*")}) == 1
    before, after = (jaxonnx.load(path).params for path in (home, "tuned"))
    changed = {n for n in before if not np.array_equal(before[n], after[n])}
    assert changed
    assert all(".mlp." in name for name in changed)
    Path("tuned/README.md").write_text("Mine.\n")
    assert command(f"{line} --lora-where mlp --output tuned/") == 0
    assert "README.md of 'tuned' stays: jaxonnx did not write it" in capsys.readouterr().err
    assert Path("tuned/README.md").read_text() == "Mine.\n"


@pytest.mark.parametrize("form", ["flags", pytest.param("toml", marks=pytest.mark.deep)])
def test_settings_of_texts_are_those_of_python(form, tmp_path, monkeypatch, capsys):
    """Each argument of texts has a flag, and a key in a TOML file."""
    monkeypatch.chdir(tmp_path)
    home = DATA / "llm" / "qwen3-genai"
    Path("rows.csv").write_text('q,a\nis it,"a list, of"\nof,lists\n')
    wanted = {
        "preprocess": {"max_length": 64, "long": "skip", "loss": "all", "pack": True},
        "columns": {"q": "prompt", "a": "completion"},
        "steps_per_epoch": 2,
    }
    line = f"train {home} rows.csv -o tuned/ --loss causal_lm --batch-size 2 --seed 1"
    if form == "flags":
        line += " --max-length 64 --long skip --loss-on all --pack --steps-per-epoch 2"
        line += " --columns q=prompt --columns a=completion"
    else:
        text = "steps_per_epoch = 2\n[preprocess]\nmax_length = 64\nlong = 'skip'\nloss = 'all'\n"
        text += "pack = true\n[columns]\nq = 'prompt'\na = 'completion'\n"
        Path("run.toml").write_text(text)
        line += " --config run.toml"
    calls, train = [], jaxonnx.training.train

    def record(model, data, **arguments):
        calls.append(arguments)
        return train(model, data, **arguments)

    monkeypatch.setattr(jaxonnx, "train", record)
    monkeypatch.setattr(jaxonnx.training, "train", record)
    assert command(line) == 0
    assert {name: calls[0][name] for name in wanted} == wanted
    capsys.readouterr()
    assert command(f"{line} --explain") == 0
    program = capsys.readouterr().out
    exec(compile(program, "explained", "exec"), {})
    assert {name: calls[1][name] for name in wanted} == wanted
    evaluated = f"evaluate {home} rows.csv --loss causal_lm --long skip --columns q=prompt"
    assert command(f"{evaluated} --columns a=completion") == 0


def test_meshes(small, capsys):
    line = "train net.onnx data.npz -o out.onnx --batch-size 2"
    calls = {'"all"': '"all"', "{data = 1}": 'jax.make_mesh((1,), ("data",))'}
    for text, call in calls.items():
        Path("run.toml").write_text(f'mesh = {text}\nsharding = "data"\n')
        assert command(f"{line} --config run.toml --explain") == 0
        assert f"mesh={call}," in capsys.readouterr().out
    assert command(f"{line} --mesh data=64") == 2
    assert "--mesh has 64 devices, and there are" in capsys.readouterr().err
    assert command(f"{line} --sharding fsdp") == 2
    assert "there is none: pass mesh='all'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(f"{line} --mesh 4x2")
    assert command(f"{line} --distributed host:1234,2,0 --explain") == 0
    explained = capsys.readouterr().out
    assert "jax.distributed.initialize('host:1234', 2, 0)" in explained
    assert 'mesh="all"' in explained
    assert command(f"{line} --distributed --explain") == 0
    assert "jax.distributed.initialize()" in capsys.readouterr().out


def test_the_folder_of_a_page_is_optional(small, capsys, monkeypatch):
    """`--web` alone took a folder of the name 'auto', since argparse parses this default, too."""
    monkeypatch.setenv("PATH", "")  # without npm
    line = "export-step net.onnx data.npz -o step --web"
    assert command(line) == 2
    assert "the page needs the files of onnxruntime-web" in capsys.readouterr().err
    assert command(f"{line} files") == 2
    assert "'files' is not a folder of onnxruntime-web" in capsys.readouterr().err
    package = Path("node_modules", "onnxruntime-web", "dist")
    package.mkdir(parents=True)
    for name in RUNTIME:
        (package / name).write_text(name)
    assert command(line) == 0
    assert Path("step", "index.html").is_file()


def test_what_explain_cannot_say(small, capsys):
    assert command("train net.onnx data.npz -o out.onnx --scale 2 --explain") == 2
    assert "not pictures in 'data.npz' or, beside it, flags for" in capsys.readouterr().err


def test_targets_are_called_y_or_are_all_else(small, capsys):
    x, y = (np.load("data.npz")[name] for name in "xy")
    np.savez("labels.npz", x=x, labels=y)
    np.savez("more.npz", x=x, y=y, index=np.arange(8))
    weights = []
    for name in ("data", "labels", "more"):
        assert command(f"train net.onnx {name}.npz -o out.onnx") == 0
        assert "1 epoch, 1 step" in capsys.readouterr().out
        weights.append(jaxonnx.load("out.onnx").params["w"])
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])
    np.savez("none.npz", x=x)
    assert command("train net.onnx none.npz -o out.onnx") == 2
    assert "needs the targets, as 'y'" in capsys.readouterr().err


def test_names_of_classes_without_a_file(small, capsys):
    assert command("train net.onnx data.npz -o out.onnx --labels red,green,blue,none") == 0
    assert jaxonnx.load("out.onnx").outputs[0].shape == ("n", 4)
    weights = []
    for name in ("blue", "2"):
        flags = f"--labels red,green,blue --class-weights {name}=6"
        assert command(f"train net.onnx data.npz -o out.onnx {flags}") == 0
        weights.append(np.asarray(jaxonnx.load("out.onnx").params["w"]))
        assert "red" in onnx.load("out.onnx").metadata_props[-1].value
    np.testing.assert_array_equal(*weights)


def test_every_file_that_is_written_is_named(small, capsys):
    more = "--checkpoints kept --log log.csv --lora 1 --lora-where w --adapters a.npz"
    assert command(f"train net.onnx data.npz -o out.onnx {more}") == 0
    said = capsys.readouterr().out
    for path in ("out.onnx", "kept", "log.csv", "a.npz"):
        assert Path(path).exists()
        assert f"wrote {path}\n" in said
    assert command("run net.onnx data.npz -o out.npz") == 0
    assert "wrote out.npz\n" in capsys.readouterr().out


def test_a_rate_for_a_file_with_its_own_is_refused(small, capsys):
    loss, optimizer = "softmax_cross_entropy_with_integer_labels", jaxonnx.optim.adam(1e-3)
    onnx.save(jaxonnx.add_training("net.onnx", loss=loss, optimizer=optimizer), "own.onnx")
    assert command("train own.onnx data.npz -o out.onnx --weight-decay 0.1") == 2
    assert "--weight-decay goes with --optimizer" in capsys.readouterr().err


def test_no_epochs_are_refused_with_what_evaluates(small, capsys):
    assert command("train net.onnx data.npz -o out.onnx --epochs 0") == 2
    assert "evaluate" in capsys.readouterr().err


@pytest.mark.deep
def test_weights_of_examples_and_of_classes(small, capsys):
    """In the file, as flags and in a configuration they come to the same."""
    x, y = (np.load("data.npz")[name] for name in "xy")
    np.savez("weighed.npz", x=x, labels=y, weight=np.where(y == 1, 2.0, 0.5))
    Path("run.toml").write_text("[class-weights]\n1 = 2\n0 = 0.5\n2 = 0.5\n")
    flags = "--class-weights 1=2 --class-weights 0=0.5 --class-weights 2=0.5"
    weights = []
    for data in ("weighed.npz", f"data.npz {flags}", "data.npz --config run.toml", "data.npz"):
        assert command(f"train net.onnx {data} -o out.onnx") == 0
        weights.append(np.asarray(jaxonnx.load("out.onnx").params["w"]))
    for other in weights[1:3]:
        np.testing.assert_allclose(weights[0], other, rtol=1e-6)
    assert not np.allclose(weights[0], weights[3], rtol=1e-5)
    capsys.readouterr()
    assert command("evaluate net.onnx weighed.npz --json") == 0
    data = x, y, np.load("weighed.npz")["weight"]
    loss = "softmax_cross_entropy_with_integer_labels"
    expected = jaxonnx.evaluate(jaxonnx.load("net.onnx"), data, loss=loss)["loss"]
    assert result(capsys)["loss"] == pytest.approx(expected, rel=1e-6)
    assert command("train net.onnx weighed.npz -o out.onnx --explain") == 0
    assert 'arrays["labels"], arrays["weight"]\n' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command(f"train net.onnx data.npz -o out.onnx {flags} --class-weights balanced")
    assert "one for all, or by name" in capsys.readouterr().err


def test_weights_need_no_targets(small, capsys):
    """The loss of tokens makes targets of them: of four rows the first counts."""
    onnx.save(tiny_networks.text(), "text.onnx")
    ids = np.array([[1, 2, 3], [4, 5, 6], [3, 3, 1], [6, 5, 2]])
    losses = []
    for rows, columns in ((4, {"weight": np.array([1.0, 0, 0, 0])}), (1, {})):
        np.savez("tokens.npz", input_ids=ids[:rows], **columns)
        assert command("evaluate text.onnx tokens.npz --loss causal_lm --json") == 0
        losses.append(result(capsys)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.deep
def test_texts_of_unequal_length(small, capsys):
    onnx.save(tiny_networks.text(), "text.onnx")
    texts = [[1, 2, 3], [4, 5, 6, 1, 2], [3], [6, 5]]
    Path("texts.jsonl").write_text("".join(f'{{"input_ids": {ids}}}\n' for ids in texts))
    lengths = "--pad input_ids=1 --length-buckets 4,8"
    line = f"train text.onnx texts.jsonl -o out.onnx --loss causal_lm --batch-size 2 {lengths}"
    assert command(f"{line} --explain") == 0
    exec(compile(capsys.readouterr().out, "explained", "exec"), {})
    explained = jaxonnx.load("out.onnx").params
    Path("run.toml").write_text("pad = {input_ids = 1}\nlength-buckets = [4, 8]\n")
    assert command(f"{line.removesuffix(lengths)}--config run.toml") == 0
    trained = jaxonnx.load("out.onnx")
    for name, value in trained.params.items():
        np.testing.assert_array_equal(value, explained[name])
    assert command(f"run out.onnx texts.jsonl -o out.npz {lengths}") == 0
    saved = dict(np.load("out.npz"))
    rows = np.split(saved["logits"], np.cumsum(saved["logits.lengths"])[:-1])
    for row, ids in zip(rows, texts, strict=True):
        alone = trained(np.array([ids]), np.ones((1, len(ids)), int))[0]
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)
    capsys.readouterr()
    assert command(f"evaluate out.onnx texts.jsonl --loss causal_lm {lengths} --json") == 0
    data = {"input_ids": texts}
    expected = jaxonnx.evaluate(trained, data, loss="causal_lm")["loss"]
    assert result(capsys)["loss"] == pytest.approx(expected, rel=1e-5)
    line = f"export-step text.onnx texts.jsonl -o step --loss causal_lm --batch-size 2 {lengths}"
    assert command(line) == 0
    batch = json.loads(Path("step/manifest.json").read_text())["step"]["batch"]
    assert batch["input_ids"]["shape"] in ([2, 4], [2, 8])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--pad 1", "argument --pad"),
        ("--class-weights 2", "argument --class-weights"),
        ("--length-buckets wide", "argument --length-buckets"),
    ],
)
def test_values_of_flags_that_are_refused(line, message, small, capsys):
    with pytest.raises(SystemExit):
        command(f"train net.onnx data.npz -o out.onnx {line}")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("info a\0b", "invalid path value"),
        ("train net.onnx data.npz -o o.onnx --labels net.onnx", "is not UTF-8 text"),
        ("train net.onnx data.npz -o o.onnx --validation nan", "validation=nan must be a share"),
        (f"train net.onnx data.npz -o o.onnx --seed {2**70}", "seed must be an integer"),
        ("classify net.onnx picture.png --top 0", "invalid positive value: '0'"),
        ("classify net.onnx picture.png --top 1099511627776", "invalid positive value"),
        ("validate net.onnx --dim n=-1", "invalid dimension value"),
        ("train net.onnx data.npz -o o.onnx --rate inf", "finite number above 0, got inf"),
    ],
)
def test_numbers_and_files_that_do_not_fit_are_refused(small, line, message, capsys):
    try:
        status = command(line)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not Path("o.onnx").exists()


def test_resume_anyway_is_resume(small, capsys):
    line = "train net.onnx data.npz -o o.onnx --checkpoints kept --explain"
    assert command(f"{line} --resume-anyway") == 0
    assert 'resume="anyway"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--epoch", "jaxonnx train: unknown flag --epoch; try --epochs or "),
        ("--lr=0.1", "unknown flag --lr; try --rate or "),
        ("--no-rematt", "unknown flag --no-rematt; try --"),
    ],
)
def test_flags_that_are_mistyped(flag, message, capsys):
    """As a configuration says it, without the usage of all sixty flags."""
    with pytest.raises(SystemExit) as end:
        main(["train", "net.onnx", "data.npz", "-o", "out.onnx", flag])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1


def test_the_help_of_each_flag_is_in_words_of_the_command_line():
    for name, verb in COMMANDS.items():
        for flag in (flag for flags in verb.list_flags().values() for flag in flags):
            said = f"{name} {flag.names}: {flag.help}"
            assert len(flag.help.split()) > 1, said
            assert not re.search(r"jaxonnx\.|optax\.\w|function|like --|\(step,|\{|None", said), (
                said
            )


@pytest.mark.parametrize("suffix", ["tflite", "mlpackage", "ORT", "engine", "pt"])
def test_foreign_suffixes_are_refused_before_the_training(suffix, small, capsys):
    arguments = ["train", "net.onnx", "data.npz", "-o", f"out.{suffix}"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"jaxonnx writes .onnx, .npz and .safetensors files, not .{suffix.lower()}; " in said
    assert "convert" in said or "onnx2torch" in said
    with pytest.raises(jaxonnx.InputError, match="jaxonnx writes"):
        jaxonnx.load("net.onnx").save(f"out.{suffix}")
    assert not Path(f"out.{suffix}").exists()
