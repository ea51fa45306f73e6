"""What one device trains with, two processes train with: their one run of all settings."""

import pytest

from tests.support import run_processes

pytestmark = pytest.mark.deep

# both processes train together, cut and resumed where a case says so; then the first one alone
SETTINGS = """
import tracemalloc
import onnx, optax
from pathlib import Path
folder = Path(sys.argv[4])
MOMENTUM = optax.sgd(0.05, momentum=0.9)
x, y = tiny.examples()
bad = [(x[i:i + 8], y[i:i + 8]) for i in range(0, 40, 8)]
bad[1] = bad[1][0] * np.nan, bad[1][1]
part = lambda batch: tuple(a[4 * index:4 * index + 4] for a in batch)
carried = jaxonnx.add_training(
    tiny.mlp(), loss=tiny.LABELS, optimizer=jaxonnx.optim.adam(1e-2)
)
CUT = ("lora",)
CASES = {
    "lora": dict(
        lora=jaxonnx.LoRA(rank=2), sharding=RULES | {"w1.lora_A": P(None, "data")},
        ema=0.9, accumulate=2, optimizer=optax.adafactor(1e-2), remat=True,
    ),
    "sparse": dict(sparsity={"pattern": "2:4", "dense": 1, "dynamic": 1}),
    "skip": dict(nan="skip", data=bad),
    "rollback": dict(nan="rollback", data=bad),
    "carried": dict(model=carried, loss=None, optimizer=None),
}


def trained(case, together=False, **changes):
    settings = dict(epochs=4, optimizer=MOMENTUM) | CASES[case] | changes
    model, data = settings.pop("model", None), settings.pop("data", None)
    sharding = settings.pop("sharding", {} if case == "carried" else RULES)
    if case == "carried":
        settings["metrics"] = ["accuracy"]
    if data is None or not together:
        settings["validation"] = tiny.examples(16, seed=2)
    if together:
        data = data and [*map(part, data)]
        settings |= dict(mesh=mesh, sharding=sharding)
    return tiny.train(model, data, progress=False, **settings)


def timeless(history):
    kept = ("loss", "validation_loss", "validation_accuracy", "phase", "sparsity")
    return [[row[name] for name in kept if name in row] for row in history.epochs]


def compare(case, both, alone):
    np.testing.assert_allclose(both.history.losses, alone.history.losses, rtol=1e-5)
    assert both.history.events == alone.history.events, case
    if "nan" not in CASES[case]:
        for one, other in zip(timeless(both.history), timeless(alone.history), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=case)
    weights, expected = tiny.weights(both), tiny.weights(alone)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=case)
        assert case != "sparse" or ((weights[name] == 0) == (value == 0)).all()
    if case == "lora":
        for name, value in alone.lora.values.items():
            np.testing.assert_allclose(both.lora.values[name], value, rtol=1e-4, atol=1e-6)


runs = {}
for case in CASES:
    kept = {}
    if case in CUT:
        kept = dict(checkpoint_dir=folder / case, checkpoint_every=7, resume=True)
        trained(case, True, **kept, epochs=2)
    both = runs[case] = trained(case, True, **kept)
    for x in jax.tree.leaves((both.model.params, both.model.state)):
        assert x.is_fully_addressable  # whole in each process
        assert {d.platform for d in x.devices()} == {"cpu"}

# of a file of 4 MB each process reads its half, and nothing of it lies whole on a device
path = folder / f"{index}.onnx"
proto = tiny.mlp()
large = np.ones((4096, 256), np.float32)
proto.graph.initializer.append(onnx.numpy_helper.from_array(large, "w3"))
proto.graph.node.append(onnx.helper.make_node("MatMul", ["wide", "w3"], ["z"]))
wide = onnx.helper.make_tensor_value_info("wide", onnx.TensorProto.FLOAT, ["n", 4096])
proto.graph.input.append(wide)
proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
onnx.save(proto, path, save_as_external_data=True, location=f"{index}.data")
tracemalloc.start()
model = jaxonnx.load(path, mesh=mesh, sharding="fsdp")
_, peak = tracemalloc.get_traced_memory()
assert peak < 0.6 * large.nbytes, peak
for shard in model.params["w3"].addressable_shards:
    assert shard.data.nbytes == large.nbytes / 4
if index == 0:
    for case, both in runs.items():
        compare(case, both, trained(case))
print("ended")
"""


def test_all_settings(tmp_path):
    results = run_processes.run(SETTINGS, 2, tmp_path)
    assert all(result.out.splitlines()[-1] == "ended" for result in results)
