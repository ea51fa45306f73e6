"""What it costs that steps which are not finite are not taken.

python -m benchmarks.speed.guard mlp lstm --rounds 15

Each network's step is compiled as `jaxonnx.train` has it, and once more as if all numbers were
finite. Both run in turn, with an allocator that keeps its pages, as on the command line; times are
medians of the ratios of neighbours.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network, batch
from benchmarks.systems import all_trained, lower_step, train_step
from jaxonnx.cli.process import keep_pages
from jaxonnx.training._step import gradient


@contextmanager
def trusting() -> Iterator[None]:
    """Make steps without a look at whether numbers are finite."""
    parts: dict[str, Any] = {
        "finite": lambda tree: jnp.bool(True),
        "stays_finite": lambda old, new, small=False: jnp.bool(True),
        "_keep_finite": lambda good, old, new: new,
        "_select": lambda good, new, old: new,
    }
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(mock.patch.object(gradient, name, part))
        stack.enter_context(mock.patch.object(jax.lax, "cond", lambda good, move, stay: move()))
        yield


def compiled(network: Network) -> list[tuple[jax.stages.Compiled, Any, list[Any]]]:
    """Return the step with the guard and the one without, each with its state and arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        write(network, path)
        model = all_trained(jaxonnx.load(path))
    steps = []
    for mode in (nullcontext, trusting):
        with mode():
            step, state, *others = train_step(model, *map(jnp.asarray, batch(network)))
            steps.append((lower_step(model, step, state, *others).compile(), state, others))
    return steps


def more(steps: list[tuple[jax.stages.Compiled, Any, list[Any]]]) -> dict[str, float]:
    """Return how many times the operations and bytes of one are those of the other."""
    costs: list[Any] = [step.cost_analysis() for step, *_ in steps]
    return {name: costs[0][name] / costs[1][name] for name in ("flops", "bytes accessed")}


def ratios(steps: list[tuple[jax.stages.Compiled, Any, list[Any]]], rounds: int) -> np.ndarray:
    """Return the ratio of their times in each round."""
    states, times = [state for _, state, _ in steps], np.zeros((rounds + 1, 2))
    for row in times:
        for i, (step, _, others) in enumerate(steps):
            began = time.perf_counter()
            for _ in range(5):
                states[i], _ = step(states[i], *others)
            jax.block_until_ready(states[i])
            row[i] = time.perf_counter() - began
    return times[1:, 0] / times[1:, 1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.guard", description=__doc__)
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], metavar="network")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    keep_pages()
    for name in chosen.networks:
        steps = compiled(NETWORKS[name])
        cost = ", ".join(f"{n} {x:.3f}" for n, x in more(steps).items())
        low, middle, high = np.quantile(ratios(steps, chosen.rounds), (0.25, 0.5, 0.75))
        print(f"{name}: {cost}, time {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
