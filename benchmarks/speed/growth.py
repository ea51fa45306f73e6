"""How a training step of a transformer grows with depth, width and batch: time, memory, compiling.

    python -m benchmarks.speed.growth [--depths 1 2 4 8 12] [--widths 64 128 256 512]
                                [--batches 2 8 32 128] [--rounds 7] [--chart FILE.png]

Each size is a process of its own. Depth grows at width 128 and batch 8, the others at two layers;
sequences have 32 tokens. Printed are the median step time, the seconds of tracing (with lowering)
and of XLA, the memory that XLA plans for the step and the peak of the process; then the exponents
of the curves, least squares over all sizes and between the last two, beside that of the work: a
number well above it is a superlinear surprise. The last line compares compiling 12 layers with 2.
With `--chart` all is drawn, and the figures written to .json beside.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import KEEP_PAGES
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network, batch
from benchmarks.systems import train_step
from benchmarks.worker import resident

LENGTH, WORDS, HEADS = 32, 1000, 4
BASE = {"depth": 2, "width": 128, "batch": 8}
MEASURE_S = 0.1
COLUMNS = ("step, ms", "trace, s", "lower, s", "XLA, s", "planned MB", "peak MB")
WORK = {
    "depth": (1, 1, 1, 1, 1, 1),
    "width": (2, 0, 0, 0, 2, 2),
    "batch": (1, 0, 0, 0, 1, 1),
}
"""Exponents of the work itself where the sizes are large."""


def network(depth: int, width: int, count: int) -> Network:
    def encoder(layers, tokens):
        x = layers.positions(layers.embed(tokens, WORDS, width))
        for _ in range(depth):
            x = x + layers.attention(layers.layer_norm(x), HEADS)
            x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 4 * width)), width)
        return layers.dense(layers.sequence_mean(layers.layer_norm(x)), 10)

    return Network(encoder, (count, LENGTH), 10, tokens=WORDS)


def measure(depth: int, width: int, count: int, rounds: int) -> tuple[float, ...]:
    """Measure what `COLUMNS` lists, in a process that has done nothing else."""
    import jax
    import jax.numpy as jnp

    import jaxonnx

    net = network(depth, width, count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        write(net, path)
        model = jaxonnx.load(path)
    x, y = map(jnp.asarray, batch(net))
    update, state, *rest = train_step(model, x, y)
    jax.block_until_ready(state)
    marks = [time.perf_counter()]
    traced = jax.jit(update, donate_argnums=0).trace(state, *rest)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    plan: Any = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    planned -= plan.alias_size_in_bytes

    def run(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, seen = compiled(state, *rest)
        jax.block_until_ready(seen)
        return (time.perf_counter() - start) / steps

    run(2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of steps, not of compiling
    steps = max(1, min(100, round(MEASURE_S / run(2))))
    step = statistics.median(run(steps) for _ in range(rounds))
    costs = [b - a for a, b in itertools.pairwise(marks)]
    return (1e3 * step, *costs, planned / 1e6, resident("VmHWM") / 1e6)


def exponents(sizes: list[int], values: list[float]) -> tuple[float, float]:
    """Fit the power of the size that the values follow: over all, and between the last two."""
    x, y = np.log(sizes), np.log(values)
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


def show(results: dict[str, dict[int, tuple[float, ...]]]) -> None:
    console = Console(width=100)
    for kind, rows in results.items():
        rest = ", ".join(f"{name} {size}" for name, size in BASE.items() if name != kind)
        table = Table(kind, *COLUMNS, title=f"growth with {kind}; {rest}")
        for size, values in rows.items():
            table.add_row(str(size), *(f"{value:.2f}" for value in values))
        if len(rows) > 1:
            table.add_section()
            curves = [exponents([*rows], list(curve)) for curve in zip(*rows.values(), strict=True)]
            table.add_row("exponent", *(f"{whole:.2f}" for whole, _ in curves))
            table.add_row("last two", *(f"{last:.2f}" for _, last in curves))
            table.add_row("work", *map(str, WORK[kind]))
        console.print(table)
    depths = results["depth"]
    if {2, 12} <= depths.keys():
        few, many = (depths[n][1:4] for n in (2, 12))
        parts = (
            f"{c.split(',')[0]} {b / a:.1f}"
            for c, a, b in zip(COLUMNS[1:4], few, many, strict=True)
        )
        print(
            "compile time of the 12-layer transformer step over the 2-layer one: "
            f"{sum(many) / sum(few):.1f} ({sum(few):.2f} s, {sum(many):.2f} s; target at most 4; "
            f"{', '.join(parts)})"
        )


def draw(results: dict[str, dict[int, tuple[float, ...]]], path: Path) -> None:
    """Draw a panel for each of time, compiling and memory, by what grows.

    Dotted is what grows with the work alone, from the last size of the first curve backwards.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = (("step, ms", (0,)), ("compiling, s", (1, 2, 3)), ("memory of a step, MB", (4, 5)))
    figure = Figure(figsize=(10, 8), layout="constrained")
    grid = figure.subplots(len(panels), len(results), squeeze=False, sharex="col", sharey="row")
    for row, (label, columns) in zip(grid, panels, strict=True):
        for axes, (kind, rows) in zip(row, results.items(), strict=True):
            sizes = np.array([*rows])
            for column in columns:
                values = [row[column] for row in rows.values()]
                axes.plot(sizes, values, "o-", label=COLUMNS[column].split(",")[0])
            work, last = WORK[kind][columns[0]], rows[sizes[-1]][columns[0]]
            guide = last * (sizes / sizes[-1]) ** work
            axes.plot(sizes, guide, ":", color="black", label="as the work")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sizes, map(str, sizes))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
        row[0].set_ylabel(label)
        row[0].legend(fontsize="small")
    for axes, kind in zip(grid[-1], results, strict=True):
        rest = ", ".join(f"{name} {size}" for name, size in BASE.items() if name != kind)
        axes.set_xlabel(f"{kind} ({rest})")
    figure.savefig(path, dpi=150)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 12])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chart", type=Path, help="png, svg or pdf")
    options = parser.parse_args()
    os.environ["GLIBC_TUNABLES"] = KEEP_PAGES
    sizes = {"depth": options.depths, "width": options.widths, "batch": options.batches}
    results = {}
    # every size in a new process, one after the other
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for kind, values in sizes.items():
            results[kind] = {}
            for size in sorted(values):
                shape = {**BASE, kind: size}.values()
                results[kind][size] = pool.apply(measure, (*shape, options.rounds))
    show(results)
    if options.chart:
        draw(results, options.chart)


if __name__ == "__main__":
    main()
