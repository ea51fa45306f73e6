"""Writes checkpoints of onnxruntime-training, and what it trains from them.

In the environment of make_ort_trajectories.py:

    ort/bin/python tests/data/make_ort_checkpoint.py

`ort/net.onnx` is a small network, `ort/eval_model.onnx` one of its artifacts, `ort/plain.ckpt` and
`ort/moments.ckpt` its checkpoints after three steps of AdamW, the latter with moments, and
`ort/steps.npz` has the data, the parameters after these steps (`at:<name>`), the losses of three
further steps and the parameters behind them (`end:<name>`). `ort/summed.npz` has the parameters
after six updates of AdamW and of SGD, for each of which the gradients of both halves of the data
were summed, and the rates of a LinearLRScheduler of 10 and 100 steps. `ort/sgd.ckpt` is the
checkpoint behind those of SGD, `ort/nominal.ckpt` a nominal one. `ort/shared.onnx` is the network
with a tensor that it reads three times, twice by Identity, and `ort/shared.npz` has the losses of
ten steps of AdamW from it, and the parameters behind them.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

HERE = Path(__file__).parent / "ort"


def network() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    tensors = {
        "fc1.weight": draw.standard_normal((4, 6)) / 2,
        "fc1.bias": np.linspace(-0.5, 0.5, 6),
        "fc2.weight": draw.standard_normal((6, 3)) / 2,
        "fc2.bias": np.zeros(3),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "fc2.weight", "fc2.bias"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", s])
        for n, s in (("x", 4), ("y", 3))
    )
    arrays = [numpy_helper.from_array(x.astype(np.float32), n) for n, x in tensors.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def sum_gradients(x: np.ndarray, y: np.ndarray) -> None:
    summed = {}
    for name in ("AdamW", "SGD"):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            artifacts.generate_artifacts(
                network(),
                requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"],
                frozen_params=["fc1.bias"],
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType[name],
                artifact_directory=folder,
                nominal_checkpoint=True,
            )
            shutil.copy(folder / "nominal_checkpoint", HERE / "nominal.ckpt")
            state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
            module = Module(str(folder / "training_model.onnx"), state)
            optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
            optimizer.set_learning_rate(0.01)
            module.train()
            for _ in range(6):
                for half in (slice(0, 4), slice(4, 8)):
                    module(x[half], y[half])
                optimizer.step()
                module.lazy_reset_grad()
            summed |= {f"{name}:{n}": np.array(p.data) for n, p in state.parameters}
            if name == "SGD":
                path = str(HERE / "sgd.ckpt")
                CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
            state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))  # counts from 0
            module = Module(str(folder / "training_model.onnx"), state)
            optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
            schedule, rates = LinearLRScheduler(optimizer, 10, 100, 1e-3), []
            for _ in range(110):
                rates.append(optimizer.get_learning_rate())
                optimizer.step()
                schedule.step()
    np.savez(HERE / "summed.npz", rates=np.float32(rates), **summed)


def train_identities(x: np.ndarray, y: np.ndarray) -> None:
    proto = network()
    graph = proto.graph
    graph.node[-1].output[0] = "scores"
    graph.node.insert(0, helper.make_node("Identity", ["fc2.bias"], ["shift"]))
    graph.node.insert(1, helper.make_node("Identity", ["shift"], ["more"]))
    graph.node.append(helper.make_node("Add", ["scores", "shift"], ["shifted"]))
    graph.node.append(helper.make_node("Add", ["shifted", "more"], ["y"]))
    onnx.save(proto, HERE / "shared.onnx")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            proto,
            requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"],
            frozen_params=["fc1.bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        module = Module(str(folder / "training_model.onnx"), state)
        optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.01)
        module.train()
        losses = []
        for _ in range(10):
            losses.append(float(module(x, y)))
            optimizer.step()
            module.lazy_reset_grad()
        ends = {f"end:{n}": np.array(p.data) for n, p in state.parameters}
    np.savez(HERE / "shared.npz", losses=np.float32(losses), **ends)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    onnx.save(network(), HERE / "net.onnx")
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((8, 4)).astype(np.float32), np.arange(8, dtype=np.int64) % 3
    sum_gradients(x, y)
    train_identities(x, y)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            network(),
            requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"],
            frozen_params=["fc1.bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        shutil.copy(folder / "eval_model.onnx", HERE)
        state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        module = Module(str(folder / "training_model.onnx"), state)
        optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.01)
        losses, found = [], {}
        for step in range(6):
            if step == 3:
                state.properties["epoch"], state.properties["best"] = 3, 0.5
                state.properties["note"] = "three"
                path = str(HERE / "moments.ckpt")
                CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
                CheckpointState.save_checkpoint(state, str(HERE / "plain.ckpt"))
                found |= {f"at:{n}": np.array(p.data) for n, p in state.parameters}
            module.train()
            losses.append(float(module(x, y)))
            optimizer.step()
            module.lazy_reset_grad()
        found |= {f"end:{n}": np.array(p.data) for n, p in state.parameters}
    np.savez(HERE / "steps.npz", x=x, y=y, losses=np.float32(losses[3:]), **found)


if __name__ == "__main__":
    main()
