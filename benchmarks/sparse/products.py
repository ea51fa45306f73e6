"""Products with 2:4 weights by cuSPARSELt against dense ones, on an NVIDIA GPU.

    python -m benchmarks.sparse.products [--rows 8192] [--sizes 1024 4096 8192]

Each round times both programs for the products of a layer's gradient, x @ W, dy @ W.T and
x.T @ dy, of which the first two are sparse. Each call packs the weight anew, as a training step
does. Times are medians of the ratios of neighbours.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import sparse


def programs(rows: int, size: int) -> tuple[tuple[Any, Any], tuple[jax.Array, ...]]:
    """Return the sparse and the dense gradient of a layer, and their arguments."""
    keys = jax.random.split(jax.random.key(0))
    weight = sparse.prune({"w": jax.random.normal(keys[0], (size, size), jnp.bfloat16)})
    x = jax.random.normal(keys[1], (rows, size), jnp.bfloat16)

    def layer(params, x):
        return x @ params["w"]

    def gradient(params, x):
        y, back = jax.vjp(layer, params, x)
        return y, *back(y)

    structured = sparse.sparse_products(gradient, {"w"})
    return (jax.jit(structured), jax.jit(gradient)), (weight, x)


def ratio(pair: tuple[Any, Any], arguments: tuple[Any, ...], rounds: int) -> np.ndarray:
    """Return the times of the first function over those of the second, a number each round."""
    times = np.zeros((rounds + 1, 2))
    for row in times:
        for i, function in enumerate(pair):
            began = time.perf_counter()
            for _ in range(10):
                done = function(*arguments)
            jax.block_until_ready(done)
            row[i] = time.perf_counter() - began
    return times[1:, 0] / times[1:, 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse.products", description=__doc__
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"this measures an NVIDIA GPU, and JAX is on {jax.default_backend()}")
    sparse.register_products()
    for size in chosen.sizes:
        found = ratio(*programs(chosen.rows, size), chosen.rounds)
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
        print(f"{chosen.rows} x {size} x {size}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
