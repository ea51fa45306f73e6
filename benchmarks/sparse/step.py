"""What sparse training adds to a step of ResNet-18: each phase beside the dense step.

    python -m benchmarks.sparse.step [--networks resnet18-64 resnet18-224] [--rounds 11]
                                     [--steps 2] [--clock cpu]

The steps are those of `jaxonnx.train` with Adam, compiled. The dense one and those of the phases
take turns, round by round, in one process; a ratio is that of two times of one round, so that a
machine under load treats both alike. Printed are medians and quartiles. A refresh is the time by
which a step of phase 2 with a new mask is longer than one without. The second table is the memory
of the optimizer.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, batch
from benchmarks.systems import FOREVER, lower_step, train_step
from jaxonnx import sparse
from jaxonnx.cli.process import keep_pages

VARIANTS = {
    "dense": None,
    "phase 1": {"dense": FOREVER - 1, "refresh": 1},
    "phase 2": {"dynamic": FOREVER, "refresh": FOREVER},
    "phase 2, new mask": {"dynamic": FOREVER, "refresh": 1},
    "phase 3": {"dynamic": 0},
}
TARGETS = {"phase 2": 1.05, "phase 3": 1.05, "refresh": 1.0}
"""In multiples of the dense step."""


def steps(path: Path, name: str) -> tuple[dict, dict]:
    """Build for each variant a function that runs so many steps, and its optimizer's state."""
    write(NETWORKS[name], path)
    model = jaxonnx.load(path)
    x, y = (jnp.asarray(array) for array in batch(NETWORKS[name]))
    runs, states = {}, {}
    for variant, sparsity in VARIANTS.items():
        update, state, *rest = train_step(model, x, y, sparsity)
        states[variant] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.optimizer
        )
        compiled = lower_step(model, update, state, *rest).compile()

        def run(count, compiled=compiled, held=[state], rest=rest):  # noqa: B006
            for _ in range(count):
                held[0], seen = compiled(held[0], *rest)
            if not seen[1]:
                raise FloatingPointError("the loss or a gradient is not finite")

        runs[variant] = run
    return runs, states


def measure(runs: dict, rounds: int, count: int, clock) -> dict[str, np.ndarray]:
    """Time a step in seconds, each round; every other round has the order reversed."""
    for run in runs.values():
        run(1)
    times = {variant: [] for variant in runs}
    for turn in range(rounds):
        for variant in list(runs)[:: 1 if turn % 2 else -1]:
            start = clock()
            runs[variant](count)
            times[variant].append((clock() - start) / count)
    return {variant: np.array(values) for variant, values in times.items()}


def summary(times: dict[str, np.ndarray]) -> dict[str, dict]:
    dense = times["dense"]
    times = times | {"refresh": times["phase 2, new mask"] - times["phase 2"]}
    return {
        variant: {
            "ms": float(1e3 * np.median(values)),
            "ratio": [float(q) for q in np.quantile(values / dense, (0.25, 0.5, 0.75))],
        }
        for variant, values in times.items()
    }


def memory(states: dict) -> dict[str, float]:
    """Count the bytes of the optimizer, in all and beyond Adam's for each sparse weight."""

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    masked, dense = states["phase 2"], size(states["dense"])
    weights = sum(x.size for x in masked.pruned.values())
    return {
        "dense": dense,
        "sparse": size(masked),
        "sparse weights": weights,
        "added to one, bytes": (size(masked) - dense) / weights,
        "of it masks": size(masked.masks) / weights,
    }


def seconds_of_proof(path: Path) -> float:
    """Time the first proof of the pruned network."""
    model = jaxonnx.load(path)
    params = sparse.prune(model.params, **model.sparsity_options())
    model = sparse.record(model.replace(params=params))
    start = time.perf_counter()
    sparse.verify(model)
    return time.perf_counter() - start


def show(results: dict[str, dict]) -> None:
    console = Console()
    for name, result in results.items():
        table = Table("step", "ms", "/ dense", "quartiles", "target", title=name)
        for variant, row in result["steps"].items():
            low, middle, high = row["ratio"]
            goal = TARGETS.get(variant)
            met = "" if goal is None else f"<= {goal:g}, {'met' if middle <= goal else 'missed'}"
            quartiles = f"{low:.3f} to {high:.3f}"
            table.add_row(variant, f"{row['ms']:.1f}", f"{middle:.3f}", quartiles, met)
        console.print(table)
        rows = {k: f"{v:,.0f}" if v > 100 else f"{v:.3f}" for k, v in result["memory"].items()}
        console.print("optimizer, bytes:", ", ".join(f"{k} {v}" for k, v in rows.items()))
        console.print(f"verify: {result['verify']:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["resnet18-64", "resnet18-224"]
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=default)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2, help="of a round")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    keep_pages()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            path = Path(folder, "network.onnx")
            runs, states = steps(path, name)
            times = measure(runs, options.rounds, options.steps, clock)
            results[name] = {"steps": summary(times), "memory": memory(states)}
            results[name]["verify"] = seconds_of_proof(path)
    show(results)


if __name__ == "__main__":
    main()
