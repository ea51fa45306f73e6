"""Writes what fifty steps of onnxruntime-training's AdamW do to a network.

    python -m venv ort
    ort/bin/pip install onnxruntime-training==1.19.2 onnx==1.16.2 'numpy<2' torch
    ort/bin/python tests/data/make_ort_trajectories.py

The last release with the training API is 1.19.2. The files and examples are those of
make_trajectories.py, which is run first; `<name>.ort.npz` has the same layout without them. No
evaluation model is loaded: that of a file with BatchNormalization in training mode is not valid.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer

HERE = Path(__file__).parent
STEPS = 50
RUNS = {
    # name: (ending of the file, learning rate, weight decay)
    "transformer": ("legacy", 1e-3, 0.05),
    "digits": ("training", 2e-3, 0.05),
}


def run(name: str, folder: Path) -> None:
    ending, rate, decay = RUNS[name]
    golden = np.load(HERE / f"{name}.adamw.npz")
    size, scale = int(golden["batch"]), int(golden["scale"])
    x, y = golden["x"], golden["y"].astype(np.int64)
    x = x.astype(np.float32) / scale if scale > 1 else x
    ends = [k.removeprefix("end:") for k in golden.files if k.startswith("end:")]
    model = onnx.load(HERE / f"{name}.{ending}.onnx")
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":  # its gradient needs the optional outputs
            node.output.extend([f"{node.output[0]}.mean", f"{node.output[0]}.inverse"])
    artifacts.generate_artifacts(
        model,
        requires_grad=[k for k in ends if "running" not in k],
        frozen_params=[k for k in ends if "running" in k],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(weight_decay=decay),
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    losses = []
    module.train()
    for step in range(STEPS):
        first = step * size % len(x)
        losses.append(float(module(x[first : first + size], y[first : first + size])))
        optimizer.step()
        module.lazy_reset_grad()
    print(name, [round(loss, 3) for loss in losses[::7]])
    np.savez_compressed(
        HERE / f"{name}.ort.npz",
        lr=rate,
        weight_decay=decay,
        losses=np.float32(losses),
        **{f"end:{k}": state.parameters[k].data for k in ends},
    )


if __name__ == "__main__":
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            run(name, Path(folder))
