"""A training step as plain ONNX: stock onnxruntime trains as jaxonnx does."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import optax.contrib
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS
from benchmarks.speed.agreement import Trainer, difference
from benchmarks.speed.doubles import doubled
from jaxonnx import docs
from jaxonnx._step_files.web import RUNTIME
from jaxonnx.cli import main
from jaxonnx.onnx_out._export import reads
from jaxonnx.training import step
from jaxonnx.training._step.optimizers import find_groups, fit_to_step
from tests.support.adapter_files import two_layers
from tests.support.exported_steps import STEPS, match, run, sessions, trained
from tests.support.tiny_networks import LABELS, examples, mlp


def agree(folder, model, data, tolerance=1e-4, steps=STEPS, **settings):
    """Train the same steps here and there."""
    x, y = data
    settings = {"optimizer": optax.adamw(1e-2), **settings}
    jaxonnx.export_step(model, folder, data, LABELS, **settings)
    batch = x, y.astype(np.int32), np.ones(len(x), np.float32)
    losses, values, sums, manifest = trained(folder, batch, steps)
    here = step(model, LABELS, **settings)
    update, state = jax.jit(here.update), here.init()
    for loss in losses:
        state, (wanted, _) = update(state, data)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-6)
    for value, wanted in match(values, here.to_file(state)):
        np.testing.assert_allclose(value.ravel(), wanted.ravel(), rtol=tolerance, atol=1e-5)
    row = here.row(jax.jit(here.evaluate)(here.sums(data), state, data))
    total, count = (sums[name] for name in manifest["evaluate"]["sums"]["loss"])
    np.testing.assert_allclose(total / count, row["validation_loss"], rtol=1e-5, atol=1e-6)
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
    "schedule-free": {"optimizer": optax.contrib.schedule_free_adamw(1e-2)},
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


def test_accumulated_batches_are_weighed_by_what_counts_in_them(tmp_path):
    """As one batch of both, which the training here takes."""
    (x, y), weight = examples(16), np.array([*[0.25] * 8, *[4] * 8], np.float32)
    settings = {"optimizer": optax.sgd(0.5), "accumulate": 2}
    manifest = jaxonnx.export_step(mlp(), tmp_path, (x[:8], y[:8]), LABELS, **settings)
    session, _, init = sessions(tmp_path)
    values = run(init, {})
    for rows in (slice(0, 8), slice(8, 16)):
        arrays = x[rows], y[rows].astype(np.int32), weight[rows]
        found = run(session, values | dict(zip(manifest["step"]["batch"], arrays, strict=True)))
        values = {name: found[new] for name, new in manifest["step"]["state"].items()}
    whole = jaxonnx.train(mlp(), (x, y, weight), loss=LABELS, optimizer=optax.sgd(0.5))
    for name, value in whole.model.params.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)


def test_a_file_exports_the_step_that_it_carries(tmp_path):
    """The trajectory of `train`, and a model from which training goes on."""
    rule = jaxonnx.optim.adam(1e-2)
    file = jaxonnx.add_training(mlp(), loss=LABELS, optimizer=rule)
    x, y = examples(16)
    manifest = jaxonnx.export_step(file, tmp_path, (x, y))
    session, evaluation, init = sessions(tmp_path)
    values, losses = run(init, {}), []
    batch = dict(
        zip(
            manifest["step"]["batch"], (x, y.astype(np.int32), np.ones(16, np.float32)), strict=True
        )
    )
    for _ in range(4):
        found = run(session, values | batch)
        values = {name: found[new] for name, new in manifest["step"]["state"].items()}
        losses.append(found[manifest["step"]["loss"]])
    result = jaxonnx.train(file, (x, y), epochs=4, batch_size=16)
    np.testing.assert_allclose(losses, result.history.losses, rtol=1e-5)
    for name, value in result.model.training.state.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-6)
    names = {name: values[name] for name in manifest["evaluate"]["state"]}
    sums = run(evaluation, names | batch)
    total, count = (sums[name] for name in manifest["evaluate"]["sums"]["loss"])
    np.testing.assert_allclose(
        total / count, jaxonnx.evaluate(result.model, (x, y), loss=LABELS)["loss"], rtol=1e-4
    )
    back = jaxonnx.import_step(file, tmp_path, values)
    for name, value in back.training.state.items():
        np.testing.assert_array_equal(value, values[name])


def test_an_algorithm_that_somebody_wrote_is_exported_with_its_loss(tmp_path):
    """By plain gradient descent; its evaluation has the loss before the update."""
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    g (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }""")
    info = proto.training_info.add()
    info.algorithm.CopyFrom(
        onnx.parser.parse_graph("""algorithm (float[n, 1] t) => (float[2, 1] new, float loss)
        <float rate = {0.1}> { d = Sub(y, t) s = Mul(d, d) loss = ReduceMean<keepdims = 0>(s)
        dw = ai.onnx.preview.training.Gradient<xs = ["w"], y = "loss", zs = ["x"]>(w, x)
        u = Mul(dw, rate) new = Sub(w, u) }""")
    )
    info.update_binding.add(key="w", value="new")
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    t = np.zeros((4, 1), np.float32)
    manifest = jaxonnx.export_step(proto, tmp_path, (x, t))
    losses, values, sums, _ = trained(tmp_path, (x, t, np.ones(4, np.float32)), 2)
    w = np.array([[1], [2]])
    for loss in losses:
        np.testing.assert_allclose(loss, np.mean((x @ w) ** 2), rtol=1e-5)
        w = w - 0.1 * 2 * x.T @ (x @ w) / 4
    np.testing.assert_allclose(values["w"], w, rtol=1e-5)
    total, count = (sums[name] for name in manifest["evaluate"]["sums"]["loss"])
    np.testing.assert_allclose(total / count, np.mean((x @ w) ** 2), rtol=1e-5)
    del info.algorithm.output[1]
    with pytest.raises(jaxonnx.TrainingError, match=r"no scalar output .*an output of the algor"):
        jaxonnx.export_step(proto, tmp_path / "other", (x, t))
    assert not (tmp_path / "other").exists()


@pytest.mark.deep
@pytest.mark.parametrize("setting", [{}, {"lora": jaxonnx.LoRA(rank=2)}], ids=["", "lora"])
def test_a_network_with_convolutions_and_statistics(setting, tmp_path):
    from jaxonnx import demo

    random = np.random.default_rng(0)
    data = random.random((8, 1, 8, 8)).astype(np.float32), np.arange(8)
    _, manifest, _, _ = agree(tmp_path, demo.model(), data, **setting)
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
    assert main([*command.split(), "--any-batch"]) == 0
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert manifest["step"]["batch"]["x"]["shape"][0] == "batch"


def test_what_does_not_fit_is_refused(tmp_path):
    x, y = examples(8)
    with pytest.raises(jaxonnx.TrainingError, match="no metric 'nothing'"):
        jaxonnx.export_step(mlp(), tmp_path, (x, y), LABELS, optax.sgd(0.1), metrics="nothing")
    with pytest.raises(jaxonnx.TrainingError, match="quantize: an exported step keeps the scales"):
        jaxonnx.export_step(mlp(), tmp_path, (x, y), LABELS, optax.sgd(0.1), quantize="int8")
    with pytest.raises(jaxonnx.Error, match="x"):
        jaxonnx.export_step(mlp(), tmp_path, (x[:, :3], y), LABELS, optax.sgd(0.1))
    with pytest.raises(TypeError, match="momentun"):
        jaxonnx.export_step(mlp(), tmp_path, (x, y), LABELS, optax.sgd(0.1), momentun=0.9)
    assert not [*tmp_path.iterdir()]


@pytest.mark.deep
def test_a_step_takes_batches_of_any_size(tmp_path):
    (n,) = jax.export.symbolic_shape("n")
    x, y = examples(16)
    like = [jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype) for a in (x, y)]
    manifest = jaxonnx.export_step(mlp(), tmp_path, tuple(like), LABELS, optax.adam(1e-2))
    assert [b["shape"][0] for b in manifest["step"]["batch"].values()] == ["n"] * 3
    graphs, here = [*sessions(tmp_path)], step(mlp(), LABELS, optax.adam(1e-2))
    update, state, values = jax.jit(here.update), here.init(), run(graphs[2], {})
    for size in (16, 3):
        arrays = x[:size], y[:size].astype(np.int32), np.ones(size, np.float32)
        feeds = dict(zip(manifest["step"]["batch"], arrays, strict=True))
        found = run(graphs[0], values | feeds)
        state, (loss, _) = update(state, (x[:size], y[:size]))
        np.testing.assert_allclose(found[manifest["step"]["loss"]], loss, rtol=1e-5)
        values = {name: found[new] for name, new in manifest["step"]["state"].items()}


@pytest.mark.deep
@pytest.mark.parametrize("setting", [{}, {"lora": jaxonnx.LoRA(rank=2)}, {"ema": 0.5}])
def test_weights_come_back(setting, tmp_path, monkeypatch):
    model, (x, y) = jaxonnx.load(mlp()), examples(16)
    settings = {"optimizer": optax.adam(1e-2), **setting}
    jaxonnx.export_step(model, tmp_path / "step", (x, y), LABELS, **settings)
    batch = x, y.astype(np.int32), np.ones(16, np.float32)
    _, values, *_ = trained(tmp_path / "step", batch, 3)
    here = step(model, LABELS, **settings)
    update, state = jax.jit(here.update), here.init()
    for _ in range(3):
        state, _ = update(state, (x, y))
    wanted = here.to_model(here.view(state), state.state)
    back = jaxonnx.import_step(model, tmp_path / "step", values)
    np.testing.assert_allclose(back(x), wanted(x), rtol=1e-4, atol=1e-5)
    if setting:
        return
    monkeypatch.chdir(tmp_path)
    model.save("net.onnx")
    command = ["import-step", "net.onnx", "step", "-o", "trained.onnx"]
    assert main(command) == 2
    np.savez("step/state.npz", **values)
    assert main(command) == 0
    (again,) = onnxruntime.InferenceSession("trained.onnx").run(None, {"x": x})
    np.testing.assert_allclose(again, wanted(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(jaxonnx.InputError, match="has no"):
        jaxonnx.import_step(model, "step", {"w1": values["w1"]})
    swapped = ["import-step", "step", "net.onnx", "-o", "trained.onnx"]
    assert main(swapped) == 2
    with pytest.raises(jaxonnx.InputError, match=r"'net\.onnx' and 'step' are swapped"):
        jaxonnx.import_step("step", "net.onnx")
    with pytest.raises(jaxonnx.InputError, match="manifest"):
        jaxonnx.import_step(model, tmp_path, values)


DAMAGES = [
    ({"params": None}, "'params'"),
    ({"params": {"w1": 1}}, "'params'"),
    ({"params": [1]}, "'params'"),
    ({"statistics": ...}, "'statistics'"),
    ({"weights": []}, "'state'"),
    ({"weights": {"state": ["w1"]}}, "'tensors'"),
    ({"weights": {"state": ["w1"], "tensors": ["w1"]}}, "'tensors'"),
    ({"weights": {"state": ["w1"], "tensors": {"w1": 1}}}, "'tensors'"),
    ({"weights": {"state": ["w1"], "tensors": {"w1": "y"}}}, "'file'"),
    ({"weights": {"state": ["w1"], "tensors": {"w1": "y"}, "file": "../net.onnx"}}, "'file'"),
    ({"weights": {"state": [], "tensors": {"w1": "v"}, "file": "net.onnx"}}, "no output 'v'"),
]


def test_manifests_that_are_damaged(tmp_path):
    onnx.save(mlp(), tmp_path / "net.onnx")
    path, model = tmp_path / "manifest.json", jaxonnx.load(mlp())
    whole = {"format": "jaxonnx training step 1", "params": ["w1"], "statistics": []}
    values = {"w1": 2 * np.asarray(model.params["w1"])}
    for change, words in DAMAGES:
        damaged = {key: x for key, x in (whole | change).items() if x is not ...}
        path.write_text(json.dumps(damaged))
        with pytest.raises(jaxonnx.InputError, match=rf"manifest\.json' is damaged: .*{words}"):
            jaxonnx.import_step(model, tmp_path, values)
    for text in (b"[]", b"{", b"[" * 100_000, b"\xff", b"3"):
        path.write_bytes(text)
        with pytest.raises(jaxonnx.InputError, match="not a manifest of export_step"):
            jaxonnx.import_step(model, tmp_path, values)
    path.write_text(json.dumps(whole))
    taken = jaxonnx.import_step(model, tmp_path, values)
    np.testing.assert_array_equal(taken.params["w1"], values["w1"])
    for wrong in (None, "a", [[1.0], [2.0, 3.0]], np.array(["a"], object)):
        with pytest.raises(jaxonnx.InputError, match="'w1'"):
            jaxonnx.import_step(model, tmp_path, {"w1": wrong})


def test_values_to_start_from(tmp_path):
    batch, large = examples(4), mlp(hidden=300)
    jaxonnx.export_step(large, tmp_path, batch, LABELS, optax.sgd(0.1), external_data=True)
    _, _, init = sessions(tmp_path)
    assert [*tmp_path.glob("init.onnx.*.data")]
    manifest = jaxonnx.export_step(
        large, tmp_path / "other", batch, LABELS, optax.sgd(0.1), init="safetensors"
    )
    assert manifest["init"]["file"] == "init.safetensors"
    found = load_file(tmp_path / "other" / "init.safetensors")
    step_of = partial(jaxonnx.export_step, large, tmp_path / "other", batch, LABELS)
    assert step_of(optax.sgd(0.1), init="npz")["init"]["file"] == "init.npz"
    with np.load(tmp_path / "other" / "init.npz") as arrays:
        for name, value in run(init, {}).items():
            np.testing.assert_array_equal(found[name], value)
            np.testing.assert_array_equal(arrays[name], value)
    with pytest.raises(jaxonnx.InputError, match="init must be"):
        step_of(optax.sgd(0.1), init="txt")


def test_graphs_share_the_weights_of_the_network(tmp_path):
    """Runtimes find them in the file of the network, and train as with graphs on their own."""
    model, (x, y) = jaxonnx.load(mlp(hidden=300)), examples(4)
    model.save(tmp_path / "net.onnx")
    settings = {"optimizer": optax.adam(1e-2), "lora": jaxonnx.LoRA(rank=2)}
    batch, losses = (x, y.astype(np.int32), np.ones(4, np.float32)), {}
    for kind in (False, "shared"):
        folder = tmp_path / str(kind)
        jaxonnx.export_step(model, folder, (x, y), LABELS, external_data=kind, **settings)
        losses[kind], values, _, manifest = trained(folder, batch, 3)
    assert losses[False] == losses["shared"]
    # it is the very file that an application has
    base = (tmp_path / "net.onnx").read_bytes()
    assert (folder / "model.onnx").read_bytes() == base
    assert "model.onnx" in manifest["step"]["data"]
    for name in ("step", "evaluate", "init", "weights"):
        sizes = [(tmp_path / kind / f"{name}.onnx").stat().st_size for kind in ("False", "shared")]
        assert sizes[1] < (sizes[0] if name == "init" else sizes[0] - len(base) / 2)
        assert {*manifest[name].get("data", [])} <= {p.name for p in folder.glob("*.*")}
    back = jaxonnx.import_step(model, folder, values)
    np.testing.assert_allclose(back.params["w1"], model.params["w1"], atol=0.1)
    assert not np.array_equal(back.params["w1"], model.params["w1"])
    with pytest.raises(jaxonnx.InputError, match="external_data must be"):
        jaxonnx.export_step(model, folder, (x, y), LABELS, external_data="alone", **settings)


def test_graphs_that_share_compute_what_they_can(tmp_path):
    """Transposed weights, and tables of small integers for the gradients of depthwise kernels."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4, 8, 8] x) => (float[n, 10] y) {
        p = Conv(x, q) c = Conv<group = 4, pads = [1, 1, 1, 1]>(p, k) f = Flatten(c)
        y = Gemm<transB = 1>(f, w) }""")
    random = np.random.default_rng(0)
    for name, shape in {"q": (4, 4, 1, 1), "k": (4, 1, 3, 3), "w": (10, 256)}.items():
        value = random.normal(0, 0.2, shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    x, y = random.normal(size=(16, 4, 8, 8)).astype(np.float32), np.arange(16) % 10
    settings = {"loss": LABELS, "optimizer": optax.adam(1e-2), "lora": jaxonnx.LoRA(rank=2)}
    losses = {}
    for kind in (False, "shared"):
        folder = tmp_path / str(kind)
        jaxonnx.export_step(proto, folder, (x, y), external_data=kind, **settings)
        batch = x, y.astype(np.int32), np.ones(16, np.float32)
        losses[kind], *_ = trained(folder, batch, 3)
    assert losses[False] == losses["shared"]
    step = onnx.load(folder / "step.onnx", load_external_data=False).graph
    stored = {"model.onnx": {}, "shared.data": {}}
    for tensor in step.initializer:
        if place := {entry.key: entry.value for entry in tensor.external_data}:
            stored[place["location"]][tensor.name] = int(place["length"])
    first = {node.input[0]: node.op_type for node in reversed(step.node) if node.input}
    assert "Transpose" in {first.get(name) for name in stored["model.onnx"]}
    assert {first.get(name) for name in stored["shared.data"]} == {"Cast"}
    names = {name.removesuffix(".stored") for name in stored["shared.data"]}
    whole = onnx.load(tmp_path / "False" / "step.onnx").graph.initializer
    size = sum(len(tensor.raw_data) for tensor in whole if tensor.name in names)
    assert sum(stored["shared.data"].values()) == size / 4


def test_a_file_that_no_export_wrote_is_not_overwritten(tmp_path, monkeypatch):
    """The network has the name of the source in its folder, and is another one with a new head."""
    monkeypatch.chdir(tmp_path)
    model, (x, y) = jaxonnx.load(mlp(hidden=300)), examples(4)
    model.save("model.onnx")
    source = Path("model.onnx").read_bytes()
    settings = {"loss": LABELS, "optimizer": optax.sgd(0.1), "check": False}
    export = partial(jaxonnx.export_step, batch=(x, y), **settings)
    headed = jaxonnx.load("model.onnx").with_head(2)
    pair = {"batch": (x, y % 2), "external_data": "shared"}
    with pytest.raises(jaxonnx.InputError, match=r"'model\.onnx' would be .* another folder"):
        export(headed, ".", **pair)
    assert [path.name for path in Path().iterdir()] == ["model.onnx"]
    # unchanged it may lie in the folder, where it stays the user's
    for _ in range(2):
        assert export("model.onnx", ".", external_data="shared")["preserved"] == ["model.onnx"]
    files = {path: path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(jaxonnx.InputError, match=r"'model\.onnx' would be overwritten"):
        export(headed, ".", **pair)
    assert {path: path.read_bytes() for path in Path().iterdir()} == files
    assert files[Path("model.onnx")] == source
    # what an export wrote, the next one may replace
    for net in (model.with_head(3), headed):
        assert "preserved" not in export(net, "step", **{**pair, "batch": (x, y % 2)})
    package = Path("onnxruntime-web")
    package.mkdir()
    for name in RUNTIME:
        (package / name).touch()
    for name in ("weights.onnx", "manifest.json", "index.html"):
        folder = Path(f"of {name}")
        folder.mkdir()
        (folder / name).write_bytes(source)
        settings = {"web": (x, y)} if name == "index.html" else {"init": "npz"}
        with pytest.raises(jaxonnx.InputError, match=f"of {name}/{name}' would be overwritten"):
            export("model.onnx", folder, lora=2, runtime=package, **settings)
        assert [path.read_bytes() for path in folder.iterdir()] == [source]


def test_a_state_of_zeros_takes_no_bytes(tmp_path):
    jaxonnx.export_step(mlp(hidden=300), tmp_path, examples(4), LABELS, optax.adam(1e-2))
    values = run(onnxruntime.InferenceSession(tmp_path / "init.onnx"), {})
    moments = sum(x.nbytes for x in values.values() if x.size > 99 and not x.any())
    assert moments > 30_000
    whole = sum(x.nbytes for x in values.values())
    assert (tmp_path / "init.onnx").stat().st_size < whole - moments + 8_000


def test_small_arrays_are_updated_as_one(tmp_path):
    """Where the update is elementwise and the same for all of them; by a norm of each it is not."""
    model, data = jaxonnx.load(mlp()), examples(8)
    spared = {"w1": True, "w2": True, "b1": False, "b2": False}
    cases = {
        "adam": (optax.adam(1e-2), [{"b1", "b2", "w1", "w2"}]),
        "decay": (
            optax.adamw(1e-2, mask=lambda p: {n: spared[n] for n in p}),
            [{"b1", "b2"}, {"w1", "w2"}],
        ),
        "tree": (optax.adamw(1e-2, mask=spared), []),
        "norms": (optax.lamb(1e-2), []),
        "of two axes": (optax.contrib.muon(1e-2), [{"b1", "b2"}]),
        "norm of all": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), []),
    }
    for name, (rule, wanted) in cases.items():
        groups = find_groups(fit_to_step(rule, model.params, False), model.params)
        assert sorted(map(set, groups.values()), key=sorted) == wanted, name
    rate = optax.inject_hyperparams(optax.adam)(1e-2)  # has a number named "b2" as well
    agree(tmp_path, model, data, steps=3, optimizer=rate)


@pytest.mark.parametrize("nan", ["stop", "skip"])
def test_an_update_that_is_not_finite(nan, tmp_path):
    """Of a small array it stops the step, of a large one the number stays; as in `train`."""
    model, (x, y) = jaxonnx.load(mlp(hidden=300)), examples(8)
    rates = optax.piecewise_constant_schedule(1e-2, {1: np.inf, 2: 0.0})
    for name, rule in {"rate": optax.sgd(rates), "root": optax.adam(1e-2, eps=0.0)}.items():
        settings = {"optimizer": rule, "nan": nan}
        manifest = jaxonnx.export_step(model, tmp_path / name, (x, y), LABELS, **settings)["step"]
        one, _, init = sessions(tmp_path / name)
        here, values = step(model, LABELS, **settings), run(init, {})
        update, state = jax.jit(here.update), here.init()
        arrays = x.copy(), y.astype(np.int32), np.ones(8, np.float32)
        arrays[0][:, 0] = 0  # no gradient
        for _ in range(3):
            results = run(one, values | dict(zip(manifest["batch"], arrays, strict=True)))
            values = {n: results[new] for n, new in manifest["state"].items()}
            state, (_, good) = update(state, (arrays[0], y))
            assert bool(results[manifest["finite"]]) == bool(good)
        for value, wanted in match(values, here.to_file(state)):
            np.testing.assert_allclose(value.ravel(), wanted, rtol=1e-5, atol=1e-7)


OPTIMIZERS = [
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd"),
    *("novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "polyak_sgd", "radam"),
    *("rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
    *("contrib.acprop", "contrib.ademamix", "contrib.adopt", "contrib.cocob"),
    *("contrib.dadapt_adamw", "contrib.dog", "contrib.dowg", "contrib.madgrad"),
    *("contrib.momo", "contrib.momo_adam", "contrib.muon", "contrib.prodigy"),
    *("contrib.schedule_free_adamw", "contrib.schedule_free_sgd", "contrib.simplified_ademamix"),
]
"""The optimizers of optax that a rate makes, as the page "Back to ONNX" lists them."""

SCHEDULES = {
    "constant_schedule": optax.constant_schedule(0.1),
    "cosine_decay_schedule": optax.cosine_decay_schedule(0.1, 20, 0.1),
    "cosine_onecycle_schedule": optax.cosine_onecycle_schedule(20, 0.1),
    "exponential_decay": optax.exponential_decay(0.1, 5, 0.5, 3, staircase=True),
    "join_schedules": optax.join_schedules(
        [optax.linear_schedule(0, 1, 9), lambda n: 1 / (n + 1)], [9]
    ),
    "linear_onecycle_schedule": optax.linear_onecycle_schedule(20, 0.1),
    "linear_schedule": optax.linear_schedule(0.1, 0.01, 20, 3),
    "piecewise_constant_schedule": optax.piecewise_constant_schedule(0.1, {5: 0.5, 12: 0.1}),
    "piecewise_interpolate_schedule": optax.piecewise_interpolate_schedule(
        "cosine", 0.1, {5: 0.5, 12: 0.1}
    ),
    "polynomial_schedule": optax.polynomial_schedule(0.1, 0.01, 2, 20, 3),
    "sgdr_schedule": optax.sgdr_schedule(
        [
            {
                "init_value": 0.0,
                "peak_value": p,
                "decay_steps": 9,
                "warmup_steps": 3,
                "end_value": 0.0,
            }
            for p in (0.1, 0.05)
        ]
    ),
    "warmup_constant_schedule": optax.warmup_constant_schedule(0, 0.1, 9),
    "warmup_cosine_decay_schedule": optax.warmup_cosine_decay_schedule(0, 0.1, 5, 20),
    "warmup_exponential_decay_schedule": optax.warmup_exponential_decay_schedule(0, 0.1, 5, 3, 0.5),
}


@pytest.mark.deep
def test_schedules_of_optax():
    """Each at the counts of thirty steps."""
    counts = np.arange(30, dtype=np.int32)
    rates = jax.vmap(lambda n: {name: schedule(n) for name, schedule in SCHEDULES.items()})
    proto = jaxonnx.to_onnx(rates, counts, inputs=["n"])
    results = run(onnxruntime.InferenceSession(proto.SerializeToString()), {"n": counts})
    for name, wanted in jax.jit(rates)(counts).items():
        np.testing.assert_allclose(results[f"output.{name}"], wanted, rtol=1e-5, atol=1e-8)


def test_the_page_lists_what_trains_the_same():
    page = (Path(docs.__file__).with_name("back_to_onnx.md")).read_text()
    rows = dict(re.findall(r"^\| (optimizers of .*|schedules) \| (.*) \|$", page, re.MULTILINE))
    names = {kind: re.findall(r"`(\w+)`", row) for kind, row in rows.items()}
    contrib = [name[8:] for name in OPTIMIZERS if name.startswith("contrib.")]
    assert names == {
        "optimizers of `optax`": [n for n in OPTIMIZERS if not n.startswith("contrib.")],
        "optimizers of `optax.contrib`": contrib,
        "schedules": [*SCHEDULES],
    }


def test_an_optimizer_that_asks_for_more_is_refused(tmp_path):
    def update(updates, state, params=None, *, teacher, **others):
        return updates, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(jaxonnx.Error, match="'teacher'"):
        jaxonnx.export_step(mlp(), tmp_path, examples(8), LABELS, optimizer)


@pytest.mark.deep
def test_a_line_search_is_exported(tmp_path):
    """L-BFGS evaluates the loss several times within a step, in a Loop."""
    batch = x, y = examples(8)
    names = jaxonnx.export_step(mlp(), tmp_path, batch, LABELS, optax.lbfgs())["step"]
    one, _, init = sessions(tmp_path)
    here, values = step(mlp(), LABELS, optax.lbfgs()), run(init, {})
    update, state = jax.jit(here.update), here.init()
    arrays = dict(zip(names["batch"], (x, y.astype(np.int32), np.ones(8, np.float32)), strict=True))
    for _ in range(2):
        results = run(one, values | arrays)
        values = {name: results[new] for name, new in names["state"].items()}
        state, (loss, _) = update(state, batch)
        np.testing.assert_allclose(results[names["loss"]], loss, rtol=1e-4)
    for name, expected in jax.device_get(here.view(state)).items():
        np.testing.assert_allclose(values[name], expected, rtol=1e-3, atol=1e-4)


def make_optimizer(name):
    """Return an optimizer of the table, or None where this release of optax does not have it."""
    module = optax.contrib if name.startswith("contrib.") else optax
    settings = {"key": jax.random.key(0)} if name == "noisy_sgd" else {}
    make = getattr(module, name.removeprefix("contrib."), None)
    return make and make(1e-3, **settings)


def branches(names):
    """The sum of several networks 8 -> 16 -> 4, whose weights have names before theirs."""
    random, nodes, weights = np.random.default_rng(0), [], []
    for name in names:
        w1, b1, w2, b2 = (f"{name}:{tensor}" for tensor in ("w1", "b1", "w2", "b2"))
        for tensor, shape in ((w1, (8, 16)), (b1, 16), (w2, (16, 4)), (b2, 4)):
            value = random.normal(0, 0.3, shape).astype(np.float32)
            weights.append(numpy_helper.from_array(value, tensor))
        nodes += [
            helper.make_node("Gemm", ["x", w1, b1], [f"{name}:h"]),
            helper.make_node("Relu", [f"{name}:h"], [f"{name}:a"]),
            helper.make_node("Gemm", [f"{name}:a", w2, b2], [f"{name}:y"]),
        ]
    nodes.append(helper.make_node("Sum", [f"{name}:y" for name in names], ["y"]))
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 8), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "branches", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def owner(tensor):
    return tensor.partition(":")[0]


GROUPS = 4


@pytest.mark.deep
@pytest.mark.parametrize("group", range(GROUPS))
def test_optimizers_of_optax(group, tmp_path):
    """Each trains its branch of a network, and the loss shows what all of them do."""
    optimizers = {name: make_optimizer(name) for name in OPTIMIZERS[group::GROUPS]}
    optimizers = {name: optimizer for name, optimizer in optimizers.items() if optimizer}
    optimizer = optax.multi_transform(optimizers, lambda params: {n: owner(n) for n in params})
    model, (x, y) = branches(optimizers), examples(16)
    manifest = jaxonnx.export_step(model, tmp_path, (x, y), LABELS, optimizer)
    assert {owner(tensor) for tensor in manifest["params"]} == {*optimizers}
    one, _, init = sessions(tmp_path)
    here, values = step(model, LABELS, optimizer), run(init, {})
    update, state = jax.jit(here.update), here.init()
    arrays = x, y.astype(np.int32), np.ones(16, np.float32)
    batch = dict(zip(manifest["step"]["batch"], arrays, strict=True))
    for i in range(3):
        found = run(one, values | batch)
        assert found[manifest["step"]["finite"]]
        values = {name: found[new] for name, new in manifest["step"]["state"].items()}
        state, (loss, _) = update(state, (x, y))
        wanted = jax.device_get(state.params)  # the file has those of training
        close = {n: np.allclose(values[n], w, rtol=1e-4, atol=1e-5) for n, w in wanted.items()}
        different = sorted({owner(tensor) for tensor, same in close.items() if not same})
        assert not different, f"optimizers that differ after step {i + 1}"
        np.testing.assert_allclose(found[manifest["step"]["loss"]], loss, rtol=1e-5)


@pytest.mark.deep
def test_a_hundred_steps_are_the_same_training(tmp_path):
    """In float64, where rounding stays small; the benchmark has all networks, and float32."""
    network = NETWORKS["lenet"]
    write(network, tmp_path / "net.onnx")
    trainer = Trainer(tmp_path / "net.onnx", network, 4, 100, optax.adam(1e-3))
    with jax.enable_x64(True):
        here = trainer.here(np.float64)
        found = difference(trainer.there(np.float64), here)
    assert here.losses[-10:].mean() < here.losses[:10].mean() / 2
    assert found.worst < 1e-10
    assert found.weights < 1e-8


@pytest.mark.deep
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_hundred_steps_with_dropout(optimizer, tmp_path):
    data = [examples(16, seed) for seed in range(10)]
    settings = {"optimizer": {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, 0.9)}[optimizer]}
    with jax.enable_x64(True):
        model = jaxonnx.load(doubled(mlp(dropout=True)))
        data = [(x.astype(np.float64), y.astype(np.int32)) for x, y in data]
        manifest = jaxonnx.export_step(model, tmp_path, data[0], LABELS, **settings)["step"]
        one, _, init = sessions(tmp_path)
        here, values = step(model, LABELS, **settings), run(init, {})
        update, state = jax.jit(here.update), here.init()
        for i in range(100):
            x, y = data[i % 10]
            batch = dict(zip(manifest["batch"], (x, y, np.ones(16, np.float32)), strict=True))
            results = run(one, values | batch)
            values = {name: results[new] for name, new in manifest["state"].items()}
            state, (wanted, _) = update(state, (x, y))
            np.testing.assert_allclose(results[manifest["loss"]], wanted, rtol=1e-11)
        for value, leaf in match(values, here.to_file(state)):
            np.testing.assert_allclose(value.ravel(), leaf, rtol=1e-9, atol=1e-12)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_reference_of_onnx_agrees(name, tmp_path):
    """ONNX's own evaluator, which computes each operator in NumPy, trains the same."""
    from jaxonnx import demo

    random = np.random.default_rng(0)
    if name == "mlp":
        model, (x, y) = jaxonnx.load(mlp(dropout=True)), examples(8)
    else:
        x, y = random.random((1, 1, 8, 8)).astype(np.float32), np.arange(1)
        model = demo.model()
    optimizer = optax.adam(1e-3)
    manifest = jaxonnx.export_step(model, tmp_path, (x, y), LABELS, optimizer)["step"]
    one = ReferenceEvaluator(str(tmp_path / "step.onnx"))
    values = run(onnxruntime.InferenceSession(tmp_path / "init.onnx"), {})
    arrays = x, y.astype(np.int32), np.ones(len(x), np.float32)
    batch = dict(zip(manifest["batch"], arrays, strict=True))
    here = step(model, LABELS, optimizer)
    update, state = jax.jit(here.update), here.init()
    for _ in range(2):
        results = dict(zip(one.output_names, one.run(None, values | batch), strict=True))
        values = {name: results[new] for name, new in manifest["state"].items()}
        state, (wanted, _) = update(state, (x, y))
        np.testing.assert_allclose(results[manifest["loss"]], wanted, rtol=1e-5)
    for value, wanted in match(values, here.to_file(state)):
        np.testing.assert_allclose(value.ravel(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_an_update_is_one_scan(eps, tmp_path):
    """By Adam: of a large array nothing else is computed but a sum, which shows what is finite.

    Without epsilon, numbers whose gradient is zero have no finite update, and stay.
    """
    large = jaxonnx.load(mlp(hidden=2**15))
    large = large.replace(params={**large.params, "w2": large.params["w2"] / 300})
    adam = optax.adam(1e-3, eps=eps)
    values, *_ = agree(tmp_path, large, examples(4), steps=2, optimizer=adam)
    (choice,) = (n for n in onnx.load(tmp_path / "step.onnx").graph.node if n.op_type == "If")
    update = helper.get_node_attr_value(choice, "then_branch")
    (scan, *_) = (node for node in update.node if node.op_type == "Scan")
    within = [node.op_type for node in scan.attribute[0].g.node]
    assert "Sqrt" in within
    assert not {"And", "Where"} & {*within}
    assert len(scan.output) == 3  # an update, and moments, which are results as they are
    (change,) = {*scan.output} - {value.name for value in update.output}
    (back,) = (node for node in update.node if change in reads(node))
    readers = [node.op_type for node in update.node if back.output[0] in reads(node)]
    assert sorted(readers) == ["If", "Reshape"]  # the sum of its squares
    assert np.isfinite(values["w1"]).all()


def test_a_step_of_an_older_opset(tmp_path):
    jaxonnx.export_step(mlp(), tmp_path, examples(8), LABELS, optax.adam(1e-3), opset=17)
    for session in sessions(tmp_path):
        assert session.get_outputs()
    assert onnx.load(tmp_path / "step.onnx").opset_import[0].version == 17
    model = mlp(dropout=True)
    with pytest.raises(jaxonnx.UnsupportedError, match="from opset 18 on"):
        jaxonnx.export_step(model, tmp_path, examples(8), LABELS, optax.sgd(1.0), opset=17)


def test_the_learning_rate_of_an_exported_step_is_in_its_state(tmp_path):
    """Steps of plain gradient descent are as long as the rate that is put there says."""
    manifest = jaxonnx.export_step(
        mlp(), tmp_path, examples(8), LABELS, optimizer="sgd", learning_rate=0.5
    )
    step, init = (
        onnxruntime.InferenceSession(tmp_path / f"{n}.onnx", providers=["CPUExecutionProvider"])
        for n in ("step", "init")
    )
    state = dict(zip([o.name for o in init.get_outputs()], init.run(None, {}), strict=True))
    (rate,) = (name for name in state if name.endswith("learning_rate"))
    assert state[rate] == 0.5
    x, y = examples(8)
    batch = [x, y.astype(np.int32), np.ones(8, np.float32)]
    batch = dict(zip(manifest["step"]["batch"], batch, strict=True))
    moves = []
    for value in (0.5, 0.125, 0.0):
        feeds = state | batch | {rate: np.array(value, np.float32)}
        (new,) = step.run([manifest["step"]["state"]["w1"]], feeds)
        moves.append(new - state["w1"])
    assert np.abs(moves[0]).max() > 1e-3
    np.testing.assert_allclose(moves[1], moves[0] / 4, rtol=1e-3, atol=1e-7)
    assert not moves[2].any()


@pytest.mark.deep
def test_adapters_of_a_base_in_few_bits(tmp_path):
    """The state is the adapters alone; the step has the base in the bytes of the file."""
    proto, size = two_layers(96), 96
    model = jaxonnx.load(proto)
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(16, size)).astype(np.float32) for _ in range(2))
    lora = jaxonnx.LoRA(rank=2, alpha=6.0, where="*_proj*")
    settings = {"optimizer": optax.adam(1e-2), "lora": lora, "ema": 0.9}
    jaxonnx.export_step(model, tmp_path, (x, y), "squared_error", **settings)
    losses, values, _, manifest = trained(tmp_path, (x, y, np.ones(16, np.float32)), 5)
    assert {name.rpartition(".")[2] for name in manifest["params"]} == {"lora_A", "lora_B"}
    assert not manifest["statistics"]
    here = step(model, "squared_error", **settings)
    update, state = jax.jit(here.update), here.init()
    for loss in losses:
        state, (wanted, _) = update(state, (x, y))
        np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-6)
    stored = {
        numpy_helper.to_array(t).tobytes()
        for t in proto.graph.initializer
        if t.data_type == onnx.TensorProto.UINT8
    }
    arrays = [*map(numpy_helper.to_array, onnx.load(tmp_path / "step.onnx").graph.initializer)]
    assert stored <= {array.tobytes() for array in arrays}
    assert max(array.size for array in arrays if array.dtype == np.float32) < size**2 / 4
    wanted = here.to_model(here.view(state), state.state)
    back = jaxonnx.import_step(model, tmp_path, values)
    np.testing.assert_allclose(back(x), wanted(x), rtol=1e-4, atol=1e-3)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"layouts"', '"places"'))
    with pytest.raises(jaxonnx.InputError, match="'adapters' are none"):
        jaxonnx.import_step(model, tmp_path, values)


@pytest.mark.parametrize(("dropout", "least"), [(False, 16), (True, 18)])
def test_the_least_opset_is_in_the_manifest(dropout, least, tmp_path):
    model, (x, y) = mlp(dropout=dropout), examples(8)
    export = partial(jaxonnx.export_step, model, tmp_path, (x, y), LABELS, optax.sgd(0.1))
    assert export()["least_opset"] == least
    manifest = export(opset=least)
    assert manifest["opset"] == manifest["least_opset"] == least
    batch = x, y.astype(np.int32), np.ones(8, np.float32)
    losses, *_ = trained(tmp_path, batch, 3)
    assert losses[-1] < losses[0]
    for opset in (13, least - 1):
        with pytest.raises(jaxonnx.UnsupportedError, match=rf"pass opset=(16|{least})"):
            export(opset=opset)
    assert manifest["step"]["batch"]["targets"]["narrowed_from"] == "int64"
    assert "narrowed_from" not in manifest["step"]["batch"]["x"]
    session, _, init = sessions(tmp_path)
    short = {"x": x[:3], "targets": batch[1][:3], "weight": batch[2][:3]}
    with pytest.raises(Exception, match="Got invalid dimensions for input"):  # the page names it
        session.run(None, run(init, {}) | short)


def test_the_command_says_what_is_folded(tmp_path, monkeypatch, capsys):
    """As `print(model)` does: a step without BatchNormalization trains as another network does."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    arrays = {
        "onnx::Conv_12": random.normal(0, 0.3, (4, 1, 3, 3)),
        "onnx::Conv_13": np.zeros(4),
        "w": random.normal(0, 0.3, (144, 10)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "onnx::Conv_12", "onnx::Conv_13"], ["c"]),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    values = [helper.make_tensor_value_info("x", 1, ["n", 1, 8, 8])]
    values += [helper.make_tensor_value_info("y", 1, ["n", 10])]
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "net.onnx")
    x = random.normal(size=(8, 1, 8, 8)).astype(np.float32)
    np.savez("data.npz", x=x, y=np.arange(8))
    command = "export-step net.onnx data.npz -o step --optimizer sgd --rate 0.1"
    assert main(command.split()) == 0
    assert "note: BatchNormalization seems to be folded into 1" in capsys.readouterr().out
