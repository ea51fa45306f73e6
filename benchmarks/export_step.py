"""The exported training step in stock onnxruntime: does it train the same, and how quickly?

    python -m benchmarks.export_step [--networks lenet mlp] [--rounds 7]
                                     [--ort-python PYTHON] [--sim-python PYTHON]
    python -m benchmarks.export_step --agree 100 [--networks lenet mlp]

Times and peak memory are those of `python -m benchmarks`, of the systems that train an ONNX file:
jaxonnx, its exported step in onnxruntime, onnxruntime-training 1.19.2 (its own interpreter:
`--ort-python`) and onnxsim's loop (`--sim-python`).

With `--agree` jaxonnx and onnxruntime train side by side, on batches that repeat after ten steps.
Shown are the largest differences of losses (relative) and of weights (relative to the largest of
their tensor), and beside them what they are between two runs of jaxonnx of which one has the
examples of each batch in another order: sums of float32 in another order, nothing else.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import __main__ as networks
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network
from benchmarks.systems import LEARNING_RATE, LOSS, Exported, all_trained

SMALL = {"mlp": 64, "resnet18-224": 2}
"""Examples in a batch of `--agree`; 8 in others: more only takes longer."""


def batches(network: Network, size: int, count: int = 10) -> list[tuple]:
    rng = np.random.default_rng(1)
    shape = (size, *network.shape[1:])
    made = []
    for _ in range(count):
        if network.tokens:
            x = rng.integers(0, network.tokens, shape).astype(np.int32)
        else:
            x = rng.normal(size=shape).astype(np.float32)
        made.append((x, rng.integers(0, network.classes, size).astype(np.int32)))
    return made


def difference(tensors: dict[str, Any], others: dict[str, Any]) -> float:
    """Return the largest difference of numbers, relative to the largest of their tensor."""
    worst = 0.0
    for name, value in tensors.items():
        a, b = np.asarray(value), np.asarray(others[name])
        worst = max(worst, float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-2)))
    return worst


def agree(name: str, folder: Path, steps: int, optimizer: Any) -> list[float]:
    """Train in all three ways; return the differences of losses and weights, and their floor."""
    import jax

    import jaxonnx
    from jaxonnx.train import step

    network = NETWORKS[name]
    write(network, folder / f"{name}.onnx")
    model = all_trained(jaxonnx.load(folder / f"{name}.onnx"))
    data = batches(network, SMALL.get(name, 8))
    jaxonnx.export_step(model, folder / name, data[0], LOSS, optimizer)
    there = Exported(folder / name)
    one = step(model, LOSS, optimizer)
    update = jax.jit(one.update)
    here = turned = one.init()
    worst = {"losses": 0.0, "losses, floor": 0.0}
    for i in range(steps):
        x, y = data[i % len(data)]
        loss = there.step(x, y)
        here, (wanted, _) = update(here, (x, y))
        order = np.random.default_rng(i).permutation(len(x))
        turned, (other, _) = update(turned, (x[order], y[order]))
        for what, value in (("losses", loss), ("losses, floor", other)):
            worst[what] = max(worst[what], abs(float(value) - float(wanted)) / abs(float(wanted)))
    files = [one.to_file(state) for state in (here, turned)]
    wanted, other = ({**state.params, **state.state} for state in files)
    weights = difference(wanted, there.tensors()), difference(wanted, other)
    return [worst["losses"], worst["losses, floor"], *weights]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, default=[*NETWORKS], nargs="+")
    parser.add_argument("--agree", type=int, help="steps to train side by side")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam", help="of --agree")
    options, rest = parser.parse_known_args()
    if options.agree is None:
        systems = ["jaxonnx", "exported", "onnxruntime-training", "onnxsim"]
        absent = [
            a
            for flag, a in zip(("--ort-python", "--sim-python"), systems[2:], strict=True)
            if not any(r.startswith(flag) for r in rest)
        ]
        chosen = [system for system in systems if system not in absent]
        sys.argv[1:] = ["--networks", *options.networks, "--phases", "train", *rest]
        sys.argv += ["--systems", *chosen]
        networks.main()
        return
    import optax

    optimizer = {"adam": optax.adam(LEARNING_RATE), "sgd": optax.sgd(1e-2, momentum=0.9)}
    table = Table("network", "losses", "jaxonnx, reordered", "weights", "jaxonnx, reordered")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            differences = agree(name, Path(folder), options.agree, optimizer[options.optimizer])
            table.add_row(name, *(f"{x:.1e}" for x in differences))
            print(name, *(f"{x:.1e}" for x in differences), file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
