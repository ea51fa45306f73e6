"""What weights of convolutions stored kernel first gain: times in the file's order over those.

    python -m benchmarks.speed.weight_order [NETWORK ...] [--rounds 8] [--batch 1]

Training steps, also with precision="bf16", and forward passes. Above 1 the order pays. Rounds are
interleaved in one process; printed are medians and, in parentheses, quartiles of the ratios of a
round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, REAL
from benchmarks.systems import all_trained, batch, lower_step, train_step
from jaxonnx.cli.process import keep_pages
from jaxonnx.lowering import _stored_array

REPEATS = 3


def training(path: Path, precision: str | None, x: jax.Array, y: jax.Array) -> Callable[[], None]:
    """Return a run of one training step, compiled."""
    model = all_trained(jaxonnx.load(path))
    update, state, *rest = train_step(model, x, y, precision=precision)
    compiled = lower_step(model, update, state, *rest, precision=precision).compile()
    state = jax.tree.map(jnp.copy, state)

    def run():
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state, *rest))

    return run


def forward(path: Path, x: jax.Array) -> Callable[[], None]:
    """Return a run of a forward pass, compiled."""
    model = jaxonnx.load(path)
    jax.block_until_ready(model(x))
    return lambda: jax.block_until_ready(model(x))


def compare(stored: Callable[[], None], plain: Callable[[], None], rounds: int) -> list[str]:
    """Time two runs in turns; return the milliseconds of the first, and the ratio of the second."""
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for run, times in zip((stored, plain), seconds, strict=True):
            run()  # without the pages that the other one took
            start = time.perf_counter()
            for _ in range(REPEATS):
                run()
            times.append((time.perf_counter() - start) / REPEATS)
    ratios = [slow / fast for fast, slow in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [f"{1e3 * statistics.median(seconds[0]):.1f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = NETWORKS | REAL
    parser.add_argument(
        "networks", nargs="*", default=["lenet", "resnet18-64", "mobilenetv2"], metavar="NETWORK"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, help="measure forward passes alone, of so many images")
    options = parser.parse_args()
    keep_pages()
    table = Table("network", "phase", "ms", "in the order of the file")
    for name in options.networks:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            write(networks[name], path)
            x, y = (jnp.asarray(a) for a in batch(networks[name]))

            def prepare(phase: str, path=path, x=x, y=y) -> Callable[[], None]:
                if phase == "forward":
                    return forward(path, x[: options.batch])
                return training(path, "bf16" if phase == "bf16 step" else None, x, y)

            for phase in ("float32 step", "bf16 step", "forward")[-1 if options.batch else 0 :]:
                stored = prepare(phase)
                with patch.dict(_stored_array.ORDERS, clear=True):
                    plain = prepare(phase)
                table.add_row(name, phase, *compare(stored, plain, options.rounds))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
