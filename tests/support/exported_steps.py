"""Runs of exported training steps in onnxruntime."""

import json

import jax
import numpy as np
import onnx
import onnxruntime

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


def match(values, state):
    """Pairs of arrays: of an exported state by name, and of a state here.

    Arrays of the optimizer for small parameters are one vector there, named as the first of them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves
    }
    leaves = {n.removeprefix("params.").removeprefix("state."): x for n, x in leaves.items()}
    for name, value in values.items():
        parts = [leaves.pop(name)]
        first = next((p for p in state.params if name.endswith(f".{p}")), None)
        if parts[0].size < value.size:
            others = (
                name.removesuffix(first) + p
                for p in sorted(state.params, key=lambda p: (state.params[p].size, p))
            )
            parts += [
                leaves.pop(other) for other in others if other in leaves.keys() - values.keys()
            ]
        yield value, np.concatenate([x.ravel() for x in parts])
    assert not leaves
