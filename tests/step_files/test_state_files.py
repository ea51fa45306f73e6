"""The state of an exported step on its way home: flat files, and the mean of several clients."""

import json

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxonnx
from tests.support.adapter_files import two_layers
from tests.support.exported_steps import run, trained
from tests.support.tiny_networks import LABELS, examples, mlp


def write_flat(path, manifest, state, names=None):
    """Write a state as the programs of other languages do."""
    arrays = [state[name] for name in names or manifest["state"]]
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    return path


def clients(folder, model, count=2, loss=LABELS, **settings):
    """States of clients that trained on other examples each, and the manifest."""
    manifest = jaxonnx.export_step(model, folder, examples(8), loss, check=False, **settings)
    states = []
    for seed in range(count):
        x, y = examples(8, seed)
        batch = x, y.astype(np.int32), np.ones(8, np.float32)
        states.append(trained(folder, batch, 3)[1])
    return states, manifest


def test_a_flat_file_comes_back(tmp_path):
    (state,), manifest = clients(tmp_path, mlp(), 1, optimizer="adamw", learning_rate=0.01)
    step = onnx.load(tmp_path / "step.onnx").graph
    declared = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in step.input}
    offset = 0
    for name, place in manifest["state"].items():
        assert place["shape"] == declared[name] == [*state[name].shape]
        assert (place["offset"], place["bytes"]) == (offset, state[name].nbytes)
        assert place["dtype"] == str(state[name].dtype)
        offset += place["bytes"]
    roles = {name: place["role"] for name, place in manifest["state"].items()}
    assert [n for n, role in roles.items() if role == "parameter"] == manifest["params"]
    assert {role for name, role in roles.items() if ".mu." in name} == {"optimizer"}
    assert roles["count"] == "progress"
    assert {*manifest["state"]} == {*manifest["step"]["state"]}
    path = write_flat(tmp_path / "state.bin", manifest, state)
    for back in (
        jaxonnx.import_step(mlp(), tmp_path),  # the file in the folder
        jaxonnx.import_step(
            mlp(), tmp_path, write_flat(tmp_path / "t.bin", manifest, state, manifest["params"])
        ),
    ):
        for name in manifest["params"]:
            assert_array_equal(back.params[name], state[name])
    for size in (0, 1, offset - 1, offset + 4):
        path.write_bytes(bytes(size))
        words = rf"has {size:,} bytes, and the state of '.*' {offset:,} \(848 without"
        with pytest.raises(jaxonnx.InputError, match=words):
            jaxonnx.import_step(mlp(), tmp_path, path)
    path.write_bytes(bytes(offset))
    for damage in (None, {}, {"w1": 1}, {n: {} for n in roles}):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"state": damage}))
        with pytest.raises(jaxonnx.InputError, match=r"manifest\.json' is damaged: 'state'"):
            jaxonnx.import_step(mlp(), tmp_path, path)


@pytest.mark.parametrize("settings", [{"ema": 0.5}, {"lora": jaxonnx.LoRA(rank=2)}])
def test_the_weights_that_are_evaluated_come_first(settings, tmp_path):
    (state,), manifest = clients(tmp_path, mlp(), 1, optimizer="adam", **settings)
    needed = manifest["weights"]["state"]
    assert [*manifest["state"]][: len(needed)] == needed
    wanted = jaxonnx.import_step(mlp(), tmp_path, state)
    path = write_flat(tmp_path / "t.bin", manifest, state, needed)
    back = jaxonnx.import_step(mlp(), tmp_path, path)
    for name, value in wanted.params.items():
        assert_array_equal(back.params[name], value)


def test_the_mean_of_clients(tmp_path):
    (one, two), manifest = clients(tmp_path, mlp(), optimizer="adam", ema=0.5)
    path = write_flat(tmp_path / "two.bin", manifest, two)
    mean = jaxonnx.average_states(tmp_path, [one, path], [96, 32])
    assert {*mean} == {*manifest["weights"]["state"]}  # the moving average, in place of the weights
    back = jaxonnx.import_step(mlp(), tmp_path, mean)
    for name in ("w1", "b1", "w2", "b2"):
        wanted = 0.75 * one[f"average.{name}"] + 0.25 * two[f"average.{name}"]
        assert_allclose(back.params[name], wanted, rtol=1e-6)
    for wrong in ([1], [0, 0], [1, -1], [1, np.nan], [np.inf, 1], ["a", 1]):
        with pytest.raises(jaxonnx.InputError, match="weights must be a number of at least 0"):
            jaxonnx.average_states(tmp_path, [one, two], wrong)
    with pytest.raises(jaxonnx.InputError, match="states must be a list"):
        jaxonnx.average_states(tmp_path, [])
    two["average.w1"][0, 0] = np.nan
    with pytest.raises(jaxonnx.InputError, match=r"client 1 has numbers in 'average\.w1'"):
        jaxonnx.average_states(tmp_path, [one, two])
    two["average.w1"] = np.zeros((2, 2), np.float32)
    with pytest.raises(jaxonnx.InputError, match=r"'average\.w1' is \[8, 16\] and \[2, 2\]"):
        jaxonnx.average_states(tmp_path, [one, two])


def test_the_mean_of_a_file_that_carries_its_step(tmp_path):
    """Clients keep moments and the number of updates, which may differ."""
    model = jaxonnx.add_training(mlp(), loss=LABELS, optimizer=jaxonnx.optim.adam(1e-2))
    manifest = jaxonnx.export_step(model, tmp_path, examples(8))
    states = []
    for seed in range(2):
        x, y = examples(8, seed)
        batch = x, y.astype(np.int32), np.ones(8, np.float32)
        states.append(trained(tmp_path, batch, 2 + seed)[1])
    weights = {"w1", "b1", "w2", "b2"}
    roles = {name: place["role"] for name, place in manifest["state"].items()}
    assert {name for name, role in roles.items() if role == "parameter"} == weights
    assert {*manifest["params"]} == weights
    assert roles["T"] == roles["V.w1"] == roles["H.b2"] == "optimizer"
    assert [int(state["T"]) for state in states] == [2, 3]
    mean = jaxonnx.average_states(tmp_path, states, [3, 1])
    assert {*mean} == weights
    for name in weights:
        expected = 0.75 * states[0][name].astype(np.float64) + 0.25 * states[1][name]
        assert_allclose(mean[name], expected, rtol=1e-6)
    start = jaxonnx.load(model).training.state
    alone = jaxonnx.import_step(model, tmp_path, mean).training.state
    both = jaxonnx.import_step(model, tmp_path, states[1] | mean).training.state
    flat = write_flat(tmp_path / "mean.bin", manifest, states[1] | mean)
    short = write_flat(tmp_path / "short.bin", manifest, mean, manifest["params"])
    for path, expected in ((flat, both), (short, alone)):
        found = jaxonnx.import_step(model, tmp_path, path).training.state
        for name, value in expected.items():
            assert_array_equal(found[name], value)
    for name, value in start.items():
        assert_array_equal(alone[name], mean.get(name, value))
        assert_array_equal(both[name], mean.get(name, states[1][name]))


@pytest.mark.parametrize("dora", [False, True])
def test_the_mean_of_factors_is_refused(dora, tmp_path):
    lora = jaxonnx.LoRA(rank=2, dora=dora)
    states, manifest = clients(tmp_path, mlp(), optimizer="sgd", learning_rate=0.1, lora=lora)
    with pytest.raises(jaxonnx.InputError, match=r"'w.': the mean .* not factors .*import_step"):
        jaxonnx.average_states(tmp_path, states)
    if dora:
        return
    shared = [{n: states[0][n] if "lora_A" in n else x for n, x in s.items()} for s in states]
    mean = jaxonnx.import_step(mlp(), tmp_path, jaxonnx.average_states(tmp_path, shared))
    models = [jaxonnx.import_step(mlp(), tmp_path, state) for state in shared]
    for name in ("w1", "w2"):
        wanted = sum(np.asarray(model.params[name], np.float64) for model in models) / 2
        assert_allclose(mean.params[name], wanted, rtol=1e-5, atol=1e-7)
    assert {*manifest["weights"]["state"]} == {*manifest["params"]}


def test_the_mean_of_adapters_of_a_base_in_few_bits(tmp_path):
    """`Adapters.combine` has the mean of the changes, which that of the factors is not."""
    model, random = jaxonnx.load(two_layers(96)), np.random.default_rng(0)
    lora = jaxonnx.LoRA(rank=2, where="*_proj*")
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "lora": lora, "check": False}
    x, y = (random.normal(size=(4, 96)).astype(np.float32) for _ in range(2))
    manifest = jaxonnx.export_step(model, tmp_path, (x, y), "squared_error", **settings)
    names, start = manifest["params"], run_init(tmp_path)
    states = [
        {n: start[n] + random.normal(0, 0.1, start[n].shape).astype(np.float32) for n in names}
        for _ in range(2)
    ]
    with pytest.raises(jaxonnx.InputError, match=r"not factors.*Adapters\.combine"):
        jaxonnx.average_states(tmp_path, states)
    models = [jaxonnx.import_step(model, tmp_path, state) for state in states]
    adapters = [jaxonnx.Adapters.of(each) for each in models]
    mean = jaxonnx.Adapters.combine(adapters, [0.5, 0.5]).attach(model)
    name = next(name for name in names if "lora_A" in name).removesuffix(".lora_A")
    a, b = (np.asarray(mean.params[f"{name}.lora_{end}"]) for end in "AB")
    products = [s[f"{name}.lora_B"] @ s[f"{name}.lora_A"] for s in states]
    scale = lora.alpha / lora.rank if lora.alpha else 1
    assert_allclose(b @ a, scale * (products[0] + products[1]) / 2, rtol=1e-4, atol=1e-5)
    shared = [{n: states[0][n] if "lora_B" in n else x for n, x in s.items()} for s in states]
    found = jaxonnx.average_states(tmp_path, shared)
    assert_allclose(found[f"{name}.lora_A"], sum(s[f"{name}.lora_A"] for s in shared) / 2, 1e-6)


def run_init(folder):
    import onnxruntime

    return run(onnxruntime.InferenceSession(folder / "init.onnx"), {})


def test_masks_of_clients_must_be_equal(tmp_path):
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "sparsity": "2:4", "epochs": 3}
    (one, two), manifest = clients(tmp_path, mlp(), **settings)
    assert any(".masks.w1" in name for name in manifest["state"])
    for state in (one, two):
        state["w1"][::2] = 0
    jaxonnx.average_states(tmp_path, [one, two])
    two["w1"] = np.roll(two["w1"], 1, 0)
    with pytest.raises(jaxonnx.InputError, match="different masks of 'w1'"):
        jaxonnx.average_states(tmp_path, [one, two])
