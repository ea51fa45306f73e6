"""How fast masks are found, beside the definition and a copy of the weight in memory.

    python -m benchmarks.sparse.mask [--size 4096] [--rounds 9] [--threads 1]

All contestants are timed in turn, round by round; the figures are medians, and ratios are medians
of the ratios within a round, so that a machine under load treats all alike. On one core by default,
as the copy is. What sparse training adds to a step is in benchmarks/sparse/step.py.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import sparse
from jaxonnx.sparse import _templates, _three_phase

PART = 32
"""The share of the weight that the slower searches are timed on."""
TARGETS = {"x definition": 80, "x copy": 0.5}
"""Targets of the search on CPU."""


def definition(w):
    """Compute argmax over |w| @ templates.T, as one would write it."""
    r, c = w.shape
    blocks = jnp.abs(w).reshape(r // 4, 4, c // 4, 4).transpose(0, 2, 1, 3).reshape(-1, 16)
    return jnp.argmax(blocks @ sparse.templates().T.astype(np.float32), axis=1)


def seconds(call):
    jax.block_until_ready(call())  # until then the memory of the one before is being given back
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleaved(calls, rounds):
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(1 + rounds)]
    return {name: np.array([t[name] for t in times[1:]]) for name in calls}


def selection(size, rounds):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)
    search, define = jax.jit(_templates.codes), jax.jit(definition)
    where = {"w": sparse.Goal(sparse.Pattern(), (0, 1))}
    refresh = jax.jit(
        lambda true, w, old: _three_phase.renew_masks(true, {"w": w}, {"w": old}, where)
    )
    bits = sparse.to_bits(sparse.mask(w))
    calls = {
        "definition": lambda: define(w),
        "search -> codes": lambda: search(w),
        "search -> mask": lambda: sparse.mask(w),
        "refresh": lambda: refresh(True, w, bits),
        "one-axis 2:4": lambda: sparse.mask(w, transposable=False),
    }
    part = w[: size // PART]
    for pattern in ("1:4", "2:8", "4:8", "16:32"):
        calls[f"{pattern} transposable"] = lambda pattern=pattern: sparse.mask(part, pattern)
    elements = {n: size * size // (PART if n.endswith("transposable") else 1) for n in calls}
    if jax.default_backend() == "cpu":
        # into memory that is there already: a fresh array would be timed by its page faults
        source, target = np.asarray(w), np.ones((size, size), np.float32)
        calls["copy"] = lambda: np.copyto(target, source)
    else:
        double = jax.jit(lambda x: x + 1)
        calls["copy"] = lambda: double(w)
    elements["copy"] = size * size
    times = interleaved(calls, rounds)
    return {
        name: {
            "ms": float(np.median(t) * 1e3),
            "Gel/s": float(elements[name] / np.median(t) / 1e9),
            "x definition": float(np.median(times["definition"] / t) * elements[name] / size**2),
            "x copy": float(np.median(times["copy"] / t) * elements[name] / size**2),
        }
        for name, t in times.items()
    }


def show(title, rows):
    columns = list(next(iter(rows.values())))
    print(f"\n{title:24}" + "".join(f"{c:>16}" for c in columns))
    for name, row in rows.items():
        print(f"{name:24}" + "".join(f"{row[c]:16.3g}" for c in columns))


def main():
    parser = argparse.ArgumentParser(description="How fast masks are found")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-options.threads :])  # XLA asks when it starts
    device = jax.devices()[0].device_kind
    print(f"{options.size} x {options.size} float32 on {device}, {options.threads} threads")
    result = {"device": device, "selection": selection(options.size, options.rounds)}
    show("selection", result["selection"])
    for name, target in TARGETS.items():
        value = result["selection"]["search -> codes"][name]
        met = "met" if value >= target else "missed"
        print(f"search -> codes, {name}: {value:.3g}, target {target:g}, {met}")


if __name__ == "__main__":
    main()
