"""What a machine can do at most: matrix products by type, and copying. Prints a line of JSON.

    python -m benchmarks.speed.ceilings

Operations a second of the product of two large matrices in float32 and bfloat16, and bytes a second
(read and written) of a large copy; the best of several rounds of each.
"""

import json
import time

import jax
import jax.numpy as jnp

ROUNDS = 12


def best(function, *arguments) -> float:
    """Return the seconds of the fastest call."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    on_cpu = jax.default_backend() == "cpu"
    side, length = (2048, 2**26) if on_cpu else (8192, 2**29)
    ceilings = {}
    for dtype in ("float32",) if on_cpu else ("float32", "bfloat16"):
        a = jnp.ones((side, side), dtype)
        ceilings[dtype] = 2 * side**3 / best(lambda a, b: a @ b, a, a)
    x = jnp.zeros(length, jnp.float32)
    ceilings["copy"] = 2 * x.nbytes / best(lambda x: x + 1, x)
    print(json.dumps({"device": jax.devices()[0].device_kind, **ceilings}))


if __name__ == "__main__":
    main()
