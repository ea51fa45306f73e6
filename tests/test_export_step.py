"""A training step as plain ONNX: stock onnxruntime trains as jaxonnx does."""

import json

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.train import step
from tests.tiny import LABELS, examples, mlp

STEPS = 20


def sessions(folder):
    """The graphs of a folder, after ONNX's own check."""
    for name in ("step", "evaluate", "init"):
        onnx.checker.check_model(folder / f"{name}.onnx", full_check=True)
        model = onnx.load(folder / f"{name}.onnx")
        assert {entry.domain for entry in model.opset_import} == {""}
        yield onnxruntime.InferenceSession(folder / f"{name}.onnx")


def run(session, feeds):
    """The outputs of a graph by name, of feeds that may be more than its inputs."""
    feeds = {value.name: np.asarray(feeds[value.name]) for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def trained(folder, batch, steps=STEPS):
    """Train with nothing but the folder; return the losses, the state and the sums of a batch."""
    manifest = json.loads((folder / "manifest.json").read_text())
    one, evaluate, init = sessions(folder)
    values = run(init, {})
    arrays = dict(zip(manifest["step"]["batch"], batch, strict=True))
    losses = []
    for _ in range(steps):
        found = run(one, values | arrays)
        losses.append(found[manifest["step"]["loss"]])
        assert found[manifest["step"]["finite"]]
        values = {name: found[new] for name, new in manifest["step"]["state"].items()}
    return losses, values, run(evaluate, values | arrays), manifest


def agree(folder, model, data, tolerance=1e-4, **settings):
    """Train the same steps here and there."""
    x, y = data
    settings = {"optimizer": optax.adamw(1e-2), **settings}
    jaxonnx.export_step(model, folder, data, LABELS, **settings)
    batch = x, y.astype(np.int32), np.ones(len(x), np.float32)
    losses, values, sums, manifest = trained(folder, batch)
    here = step(model, LABELS, **settings)
    update, state = jax.jit(here.update), here.init()
    for loss in losses:
        state, (wanted, _) = update(state, data)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-6)
    for value, wanted in zip(values.values(), jax.tree.leaves(here.to_file(state)), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=1e-5)
    row = here.row(here.evaluate(here.sums(data), state, data))
    total, count = (sums[name] for name in manifest["evaluate"]["sums"]["loss"])
    np.testing.assert_allclose(total / count, row["validation_loss"], rtol=1e-5)
    return values, manifest, here, state


def test_onnxruntime_trains_the_same(tmp_path):
    model, data = jaxonnx.load(mlp(dropout=True)), examples(16)
    values, manifest, here, state = agree(tmp_path, model, data)
    weights = {name: values[name] for name in manifest["params"]}
    path = tmp_path / "net.onnx"
    model.save(path)
    back = jaxonnx.load(path, weights=weights)
    for name, value in here.view(state).items():
        np.testing.assert_allclose(back.params[name], value, rtol=1e-4, atol=1e-5)


SETTINGS = {
    "momentum, schedule": {
        "optimizer": optax.sgd(optax.warmup_cosine_decay_schedule(0, 0.1, 5, 20), momentum=0.9)
    },
    "clipped lion": {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-3))},
    "adafactor": {"optimizer": optax.adafactor(1e-2, min_dim_size_to_factor=4)},
    "accumulate": {"accumulate": 3},
    "ema": {"ema": 0.9},
    "lora": {"lora": jaxonnx.LoRA(rank=2)},
    "frozen": {"trainable": "w2|b2"},
    "sparse": {"sparsity": "2:4", "epochs": STEPS},
    "skip": {"nan": "skip"},
    "own momentum": {"optimizer": jaxonnx.optim.momentum(1e-2)},
}


@pytest.mark.deep
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, tmp_path):
    agree(tmp_path, jaxonnx.load(mlp(dropout=True)), examples(16), **SETTINGS[name])


@pytest.mark.deep
def test_a_network_with_convolutions_and_statistics(tmp_path):
    from jaxonnx import demo

    random = np.random.default_rng(0)
    data = random.random((8, 1, 8, 8)).astype(np.float32), np.arange(8)
    _, manifest, _, _ = agree(tmp_path, demo.model(), data)
    assert "1.running_mean" in manifest["statistics"]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "net.onnx")
    x, y = examples(40)
    np.savez("data.npz", x=x, y=y)
    command = "export-step net.onnx data.npz -o step --optimizer sgd --rate 0.1 --batch-size 8"
    assert main(command.split()) == 0
    assert "wrote step/manifest.json" in capsys.readouterr().out
    batch = x[:8], y[:8].astype(np.int32), np.ones(8, np.float32)
    losses, *_ = trained(tmp_path / "step", batch)
    assert losses[-1] < losses[0] / 2


def test_what_does_not_fit_is_refused(tmp_path):
    x, y = examples(8)
    with pytest.raises(jaxonnx.TrainingError, match="no metric 'nothing'"):
        jaxonnx.export_step(mlp(), tmp_path, (x, y), LABELS, optax.sgd(0.1), metrics="nothing")
    with pytest.raises(jaxonnx.Error, match="x"):
        jaxonnx.export_step(mlp(), tmp_path, (x[:, :3], y), LABELS, optax.sgd(0.1))
    with pytest.raises(TypeError, match="momentun"):
        jaxonnx.export_step(mlp(), tmp_path, (x, y), LABELS, optax.sgd(0.1), momentun=0.9)
    assert not [*tmp_path.iterdir()]
