"""Inference and the training step as serialised StableHLO that runs without jaxonnx."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxonnx
from jaxonnx import optim

DATA = Path(__file__).parent / "data"

RUN = """
import sys
import jax
import numpy as np
from jax import export

folder, n = sys.argv[1:]
data = dict(np.load(f"{folder}/data.npz"))
load = lambda name: export.deserialize(open(f"{folder}/{name}", "rb").read())
step, inference = load("step").call, load("inference").call
state = {name[6:]: value for name, value in data.items() if name.startswith("state:")}
for i in range(3):
    state, outputs = step(state, {"x": data["x"], "target": data["target"]})
logits = inference(state, {"x": data["x"]})["logits"]
assert not any(name.split(".")[0] in ("jaxonnx", "onnx", "optax") for name in sys.modules)
np.savez(f"{folder}/result.npz", logits=logits, loss=outputs["loss"], **state)
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("file", "sizes"),
    [("lenet.dynamo.onnx", (3, 5)), ("transformer.dynamo.onnx", (4,))],
)
def test_exported_step_runs_without_jaxonnx(tmp_path, file, sizes):
    """Exported once with a symbolic batch size and called with 3 and with 5 examples.

    The transformer computes shapes with Shape nodes, whose results must be numbers: a fixed size.
    """
    model = jaxonnx.load(DATA / file)
    written = jaxonnx.add_training(
        model, loss="softmax_cross_entropy_with_integer_labels", optimizer=optim.adam(1e-3, T=1)
    )
    training = jaxonnx.load(written).training
    (image,) = model.inputs
    n = jax.export.symbolic_shape("n")[0] if len(sizes) > 1 else sizes[0]
    dtype = jax.dtypes.canonicalize_dtype(image.dtype)
    x = jax.ShapeDtypeStruct((n, *image.shape[1:]), dtype)
    target = jax.ShapeDtypeStruct((n,), jnp.int32)
    state = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), training.state)
    for name, function, batch in (
        ("step", training.step, {"x": x, "target": target}),
        ("inference", training.inference, {"x": x}),
    ):
        exported = jax.export.export(jax.jit(function))(state, batch)
        (tmp_path / name).write_bytes(exported.serialize())
    for size in sizes:
        x = np.arange(size * np.prod(image.shape[1:])).reshape(size, *image.shape[1:]) % 13
        batch = {"x": x.astype(dtype), "target": np.arange(size, dtype=np.int32)}
        start = {f"state:{name}": np.asarray(v) for name, v in training.state.items()}
        np.savez(tmp_path / "data.npz", **batch, **start)
        subprocess.run([sys.executable, "-c", RUN, tmp_path, str(size)], check=True, cwd=tmp_path)
        got = np.load(tmp_path / "result.npz")
        state = training.state
        for _ in range(3):
            state, outputs = training.step(state, batch)
        logits = training.inference(state, {"x": batch["x"]})["logits"]
        np.testing.assert_allclose(got["loss"], outputs["loss"], rtol=1e-5)
        np.testing.assert_allclose(got["logits"], logits, rtol=1e-4, atol=1e-5)
        for name, value in state.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)
