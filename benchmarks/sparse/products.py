"""Products with 2:4 weights against dense ones: our kernel on CPU, cuSPARSELt on an NVIDIA GPU.

    python -m benchmarks.sparse.products [--rows 64 512] [--sizes 512 1024 2048 4096] [--rounds 15]
                                         [--clock cpu] [--fit] [--conv] [--dtype bfloat16]
                                         [--chart FILE.png [--figures FILE.json]]

For a weight of each size: the product x @ W, the product dy @ W.T, and all three of a layer's
gradient, of which x.T @ dy is dense. Each call packs the weight anew, as a training step does. On
CPU also x @ W of 1 and 8 rows with weights that are packed once, as calls of a model do. All
take turns, round by round; times are minima, and a ratio is that of minima, sparse over dense.
--clock cpu counts the seconds of all threads, which a machine that others use disturbs less.
--fit measures from how many rows on each size gains, as `LEAST_ROWS` of the kernel says it: for
float32 and bfloat16, or for --dtype alone.
--conv times 3x3 convolutions of ResNet's sizes instead: dense ones as XLA and the package compute
them, and sparse products with the im2col matrix and with the nine shifted images.
--chart draws times against size and writes the figures to .json beside; --figures draws those of a
file instead of measuring.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import sparse
from jaxonnx.cli.process import keep_pages
from jaxonnx.lowering._conv import Conv
from jaxonnx.ops.pool import place_windows
from jaxonnx.sparse import pack_matrix
from jaxonnx.sparse._products import _cpu

TARGETS = {"x @ W": 0.72, "dy @ W.T": 0.72, "gradient": 0.82, "packed x @ W": 0.6}
LIMITS = {"x @ W": 1 / 2, "dy @ W.T": 1 / 2, "gradient": 2 / 3, "packed x @ W": 17 / 32}
"""Of the multiplications; of packed weights, of the memory: half of the numbers, two bits each."""
FEW_ROWS = (1, 8)
FIT_ROWS = (8, 16, 32, 48, 64, 96, 128, 256)
FIT_SIZES = (128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
IMAGES = ((16, 28, 128, 128), (16, 14, 256, 256), (8, 56, 64, 64))
"""Images, their side, input and output channels of 3x3 convolutions."""
GAIN = 0.95
"""The ratio from which on a product counts as faster."""


def forward(params, x):
    return x @ params["w"]


def backward(params, dy):
    return dy @ params["w"].T


def gradient(params, x):
    y, back = jax.vjp(forward, params, x)
    return y, *back(y)


PRODUCTS = {"x @ W": forward, "dy @ W.T": backward, "gradient": gradient}


def weights(rows: int, size: int, dtype: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return a sparse weight of this size, and rows of inputs."""
    keys = jax.random.split(jax.random.key(0))
    w = sparse.prune({"w": jax.random.normal(keys[0], (size, size), dtype)})
    return w, jax.random.normal(keys[1], (rows, size), dtype)


def pair(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the sparse and the dense form of a function, compiled."""
    return jax.jit(sparse.sparse_products(function, {"w"})), jax.jit(function)


def minima(calls: list[Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> np.ndarray:
    """Return the least seconds of each call; each round times all of them.

    Of processor time it is the median: what other threads use is counted late.
    """
    times = np.zeros((rounds + 1, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            began = clock()
            jax.block_until_ready(call())
            row[i] = clock() - began
    return (np.median if clock is time.process_time else np.min)(times[1:], axis=0)


Figures = dict[str, tuple[float, float]]
"""Dense seconds and the ratio of sparse to dense, by product."""


def measure(
    rows: int, size: int, rounds: int, clock: Callable[[], float], dtype: Any = jnp.float32
) -> Figures:
    """Time each product, with a weight that is packed in each call."""
    params, x = weights(rows, size, dtype)
    calls = []
    for function in PRODUCTS.values():
        for one in pair(function):
            calls.append(lambda one=one: one(params, x))
    times = minima(calls, rounds, clock).reshape(-1, 2)
    return {
        name: (dense, fast / dense) for name, (fast, dense) in zip(PRODUCTS, times, strict=True)
    }


def measure_few(rows: int, size: int, rounds: int, clock: Callable[[], float]) -> Figures:
    """Time x @ W with a weight that was packed before."""
    params, x = weights(rows, size, jnp.float32)
    fast, dense = pair(forward)
    packed = {"w": pack_matrix(params["w"], 0)}
    times = minima([lambda: fast(packed, x), lambda: dense(params, x)], rounds, clock)
    return {"packed x @ W": (times[1], times[0] / times[1])}


Convolution = tuple[Callable[..., Any], Any]
"""A function of a weight and images, and the weight as it takes it."""


def convolutions(
    side: int, inputs: int, outputs: int
) -> tuple[dict[str, Convolution], dict[str, Convolution]]:
    """Return dense and sparse forms of a 3x3 convolution of images (N, side, side, inputs)."""
    windows = place_windows((side,) * 2, (3, 3), strides=(1, 1), pads=[1] * 4)
    form = Conv((side,) * 2, *windows, groups=1, turned=True)
    w = jax.random.normal(jax.random.key(0), (9 * inputs, outputs))
    params = sparse.prune({"w": w})
    taps = {str(i): tap for i, tap in enumerate(params["w"].reshape(9, inputs, outputs))}

    def multiply_columns(params, x):
        return jnp.concatenate(form.taps.read(x), -1) @ params["w"]

    def add_products(taps, x):
        return sum(tap @ taps[str(i)] for i, tap in enumerate(form.taps.read(x)))

    kernel = params["w"].reshape(3, 3, inputs, outputs)
    dense = {
        "XLA": (lambda w, x: form.plain(2, x, w), kernel),
        "the package": (lambda w, x: form.fast(2, x, w), kernel),
        "im2col": (multiply_columns, params),
    }
    return dense, {
        "im2col": (sparse.sparse_products(multiply_columns, {"w"}), params),
        "shifted": (sparse.sparse_products(add_products, taps), taps),
    }


def measure_convolution(
    batch: int, side: int, inputs: int, outputs: int, rounds: int, clock: Callable[[], float]
) -> str:
    """Return the times of the forms of a 3x3 convolution, sparse ones over the best dense one."""
    dense, fast = convolutions(side, inputs, outputs)
    x = jax.random.normal(jax.random.key(1), (batch, side, side, inputs))
    forms = [(jax.jit(function), w) for function, w in (*dense.values(), *fast.values())]
    times = minima([lambda f=f, w=w: f(w, x) for f, w in forms], rounds, clock)
    least = times[: len(dense)].min()
    parts = [f"{name} {1e3 * t:.2f} ms" for name, t in zip(dense, times, strict=False)]
    parts += [
        f"2:4 {name} {1e3 * t:.2f} ms ({t / least:.2f})"
        for name, t in zip(fast, times[len(dense) :], strict=True)
    ]
    return f"{batch}x{side}x{side}x{inputs} -> {outputs}: " + ", ".join(parts)


def fit(rounds: int, clock: Callable[[], float], dtype: Any) -> None:
    """Print `LEAST_ROWS`: the least rows from which on both products gain, by size."""
    _cpu.LEAST_ROWS = ((4, 1),)  # everything
    found: list[tuple[int, int]] = []
    for size in reversed(FIT_SIZES):
        gains = []
        for rows in FIT_ROWS:
            result = measure(rows, size, rounds, clock, dtype)
            worst = max(result["x @ W"][1], result["dy @ W.T"][1])
            print(f"{dtype}, {rows:4} rows, {size:4}: {worst:.2f}", flush=True)
            gains.append(worst < GAIN)
        least = [r for i, r in enumerate(FIT_ROWS) if all(gains[i:])]
        if least:
            found.append((size, least[0]))
    smaller = [[least for _, least in found[i + 1 :]] for i in range(len(found))]
    kept = [
        one for one, rest in zip(found, smaller, strict=True) if one[1] < min(rest, default=999)
    ]
    print(f"{dtype}: LEAST_ROWS = {tuple(kept)}")


def draw(path: Path, about: str, results: dict[str, dict[str, Figures]]) -> None:
    """Draw times against size for each number of rows, and below them the ratios to dense.

    Dotted is the limit, which leaving out half of the multiplications (or of the memory) has.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, NullLocator

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    grid = figure.subplots(2, len(results), squeeze=False, sharex=True, sharey="row")
    for (above, below), (rows, by_size) in zip(grid.T, results.items(), strict=True):
        sizes = [int(size) for size in by_size]
        names = [*next(iter(by_size.values()))]
        first = np.array([found[names[0]] for found in by_size.values()])
        dense = 1e3 * first[:, 0]
        above.plot(sizes, dense, "o--", color="black", label="x @ W, dense")
        above.plot(sizes, dense * first[:, 1], "o-", color="C0", label="2:4")
        above.plot(sizes, dense * LIMITS[names[0]], ":", color="C0", label="limit")
        below.axhline(1, linestyle="--", color="black")
        for color, name in enumerate(names):
            ratios = [found[name][1] for found in by_size.values()]
            below.plot(sizes, ratios, "o-", color=f"C{color}", label=name)
            below.axhline(LIMITS[name], linestyle=":", color=f"C{color}")
        above.set(title=f"rows: {rows}", xscale="log", yscale="log")
        below.set(xlabel="inputs and outputs")
        below.set_xticks(sizes, map(str, sizes))
        below.xaxis.set_minor_locator(NullLocator())
        above.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        above.yaxis.set_minor_formatter(NullFormatter())
        for axes in (above, below):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    grid[0, 0].set_ylabel("ms")
    grid[1, 0].set(ylabel="time / dense", ylim=(0, 1.25))
    figure.suptitle(about, fontsize="medium")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--conv", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--chart", type=Path, help="png, svg or pdf; figures go to .json beside")
    parser.add_argument("--figures", type=Path, help="draw those of this file")
    chosen = parser.parse_args()
    if chosen.figures:
        return draw(chosen.chart, **json.loads(chosen.figures.read_text()))
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and jax.default_backend() != "cpu":
        parser.error(f"sparse products are for CPU and NVIDIA GPUs, not {jax.default_backend()}")
    sparse.register_products()
    clock = time.process_time if chosen.clock == "cpu" else time.perf_counter
    if chosen.fit:
        for dtype in [chosen.dtype] if chosen.dtype else ("float32", "bfloat16"):
            fit(chosen.rounds, clock, jnp.dtype(dtype))
        return
    dtype = jnp.dtype(chosen.dtype or ("bfloat16" if on_gpu else "float32"))
    kind = jax.devices()[0].device_kind if on_gpu else f"{len(os.sched_getaffinity(0))} CPU cores"
    kernel = "cuSPARSELt" if on_gpu else _cpu.variants()[0]
    about = f"{kind}, {kernel}, {dtype}, JAX {jax.__version__}, {chosen.clock} clock"
    print(about)
    if chosen.conv:
        keep_pages()
        for sizes in IMAGES:
            print(measure_convolution(*sizes, chosen.rounds, clock), flush=True)
        return
    results: dict[str, dict[str, Figures]] = {}
    sizes = chosen.sizes or ([1024, 4096, 8192] if on_gpu else [512, 1024, 2048, 4096])
    for rows in [] if on_gpu or chosen.rows else FEW_ROWS:
        results[str(rows)] = {str(n): measure_few(rows, n, 4 * chosen.rounds, clock) for n in sizes}
    for rows in chosen.rows or ([8192] if on_gpu else [64, 512]):
        results[str(rows)] = {str(n): measure(rows, n, chosen.rounds, clock, dtype) for n in sizes}
    for rows, by_size in results.items():
        for size, found in by_size.items():
            parts = (
                f"{name} {1e3 * dense:.2f} ms x {ratio:.2f} (<= {TARGETS[name]:.2f})"
                for name, (dense, ratio) in found.items()
            )
            print(f"{rows} x {size} x {size}: " + ", ".join(parts))
    if chosen.chart:
        figures = {"about": about, "results": results}
        chosen.chart.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
        draw(chosen.chart, **figures)


if __name__ == "__main__":
    main()
