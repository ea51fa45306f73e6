"""Products with 2:4 weights against dense ones: our kernel on CPU, cuSPARSELt on an NVIDIA GPU.

    python -m benchmarks.sparse.products [--rows 64 512] [--sizes 512 1024 2048 4096] [--rounds 15]
                                         [--clock cpu] [--fit] [--chart products.png]

For a weight of each size: the product x @ W, the product dy @ W.T, and all three of a layer's
gradient, of which x.T @ dy is dense. Each call packs the weight anew, as a training step does. On
CPU also x @ W of 1 and 8 rows with weights that are packed once, as calls of a model do. All
take turns, round by round; times are minima, and a ratio is that of minima, sparse over dense.
--clock cpu counts the seconds of all threads, which a machine that others use disturbs less.
--fit measures from how many rows on each size gains, as `LEAST_ROWS` of the kernel says it.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import sparse
from jaxonnx.sparse import pack_matrix
from jaxonnx.sparse._products import _cpu

TARGETS = {"x @ W": 0.72, "dy @ W.T": 0.72, "gradient": 0.82}
FIT_ROWS = (8, 16, 32, 48, 64, 96, 128)
FIT_SIZES = (128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
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


def measure(rows: int, size: int, rounds: int, clock: Callable[[], float], dtype: Any) -> dict:
    """Return (dense seconds, ratio) of each product."""
    params, x = weights(rows, size, dtype)
    calls = []
    for function in PRODUCTS.values():
        for one in pair(function):
            calls.append(lambda one=one: one(params, x))
    times = minima(calls, rounds, clock).reshape(-1, 2)
    return {
        name: (dense, fast / dense) for name, (fast, dense) in zip(PRODUCTS, times, strict=True)
    }


def measure_few(rows: int, size: int, rounds: int, clock: Callable[[], float]) -> tuple:
    """Return (dense seconds, ratio) of x @ W with a weight that was packed before."""
    params, x = weights(rows, size, jnp.float32)
    fast, dense = pair(forward)
    packed = {"w": pack_matrix(params["w"], 0)}
    times = minima([lambda: fast(packed, x), lambda: dense(params, x)], rounds, clock)
    return times[1], times[0] / times[1]


def fit(rounds: int, clock: Callable[[], float]) -> None:
    """Print `LEAST_ROWS`: the least rows from which on both products gain, by size."""
    _cpu.LEAST_ROWS = ((4, 1),)  # everything
    found: list[tuple[int, int]] = []
    for size in reversed(FIT_SIZES):
        gains = []
        for rows in FIT_ROWS:
            result = measure(rows, size, rounds, clock, jnp.float32)
            worst = max(result["x @ W"][1], result["dy @ W.T"][1])
            print(f"{rows:4} rows, {size:4}: {worst:.2f}", flush=True)
            gains.append(worst < GAIN)
        least = [r for i, r in enumerate(FIT_ROWS) if all(gains[i:])]
        if least:
            found.append((size, least[0]))
    kept = [entry for i, entry in enumerate(found) if found[i + 1 :][:1] != [entry]]
    print(f"LEAST_ROWS = {tuple(kept)}")


def draw(path: str, results: dict[tuple[int, int], dict]) -> None:
    """Draw the times of x @ W against size: dense, sparse, and half of dense as the limit."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for color, rows in enumerate(sorted({rows for rows, _ in results})):
        points = sorted((size, r["x @ W"]) for (n, size), r in results.items() if n == rows)
        sizes = [size for size, _ in points]
        dense = np.array([1e3 * seconds for _, (seconds, _) in points])
        ratio = np.array([r for _, (_, r) in points])
        for label, values, style in (
            ("dense", dense, "--"), ("2:4", dense * ratio, "-"), ("half of dense", dense / 2, ":")
        ):  # fmt: skip
            axes.plot(sizes, values, style, color=f"C{color}", label=f"{label}, {rows} rows")
    axes.set(xscale="log", yscale="log", xlabel="inputs and outputs", ylabel="ms of x @ W")
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


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
    parser.add_argument("--chart", help="draw time against size")
    chosen = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and jax.default_backend() != "cpu":
        parser.error(f"sparse products are for CPU and NVIDIA GPUs, not {jax.default_backend()}")
    sparse.register_products()
    clock = time.process_time if chosen.clock == "cpu" else time.perf_counter
    if chosen.fit:
        return fit(chosen.rounds, clock)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    results = {}
    print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, {chosen.clock} clock")
    for rows in chosen.rows or ([8192] if on_gpu else [64, 512]):
        for size in chosen.sizes or ([1024, 4096, 8192] if on_gpu else [512, 1024, 2048, 4096]):
            found = results[rows, size] = measure(rows, size, chosen.rounds, clock, dtype)
            parts = (
                f"{name} {1e3 * dense:.2f} ms x {ratio:.2f} (<= {TARGETS[name]:.2f})"
                for name, (dense, ratio) in found.items()
            )
            print(f"{rows} x {size} x {size}: " + ", ".join(parts), flush=True)
    for size in [] if on_gpu else [2048, 4096]:
        for rows in (1, 8):
            dense, ratio = measure_few(rows, size, chosen.rounds, clock)
            print(f"{rows} x {size} x {size}, packed: {1e3 * dense:.2f} ms x {ratio:.2f} (<= 0.60)")
    if chosen.chart:
        draw(chosen.chart, results)


if __name__ == "__main__":
    main()
