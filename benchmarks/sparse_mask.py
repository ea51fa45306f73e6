"""How fast masks are found, and what sparse training adds to an optimizer step.

    python benchmarks/sparse_mask.py [--size 4096] [--rounds 9] [--out sparse_mask.json]

All contestants of a table are timed in turn, round by round; the figures are medians, and ratios
are medians of the ratios within a round, so that a machine under load treats all alike.
"""

import argparse
import importlib
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx import sparse

templates = importlib.import_module("jaxonnx.sparse.templates")

RESNET18 = [(64, 3, 7, 7)] + [
    shape
    for c, before in ((64, 64), (128, 64), (256, 128), (512, 256))
    for shape in [(c, before, 3, 3), *[(c, c, 3, 3)] * 3, *[(c, before, 1, 1)] * (c != before)]
]


def definition(w):
    """argmax over |w| @ templates.T, as one would write it."""
    r, c = w.shape
    blocks = jnp.abs(w).reshape(r // 4, 4, c // 4, 4).transpose(0, 2, 1, 3).reshape(-1, 16)
    return jnp.argmax(blocks @ sparse.templates().T.astype(np.float32), axis=1)


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleaved(calls, rounds):
    for call in calls.values():
        seconds(call)
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: np.array([t[name] for t in times]) for name in calls}


def selection(size, rounds):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)
    search, define = jax.jit(templates.codes), jax.jit(definition)
    calls = {
        "definition": lambda: define(w),
        "search -> codes": lambda: search(w),
        "search -> mask": lambda: sparse.mask(w),
        "one-axis 2:4": lambda: sparse.mask(w, transposable=False),
        "2:8 transposable": lambda: sparse.mask(w[: size // 8], "2:8"),
        "16:32 transposable": lambda: sparse.mask(w[: size // 8], "16:32"),
    }
    elements = {name: size * size // (8 if name[-5:] == "sable" else 1) for name in calls}
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


def optimizer_step(rounds):
    """Adam on the convolutions of ResNet-18, alone: what the wrapper adds in each phase."""
    rng = np.random.default_rng(0)
    params = {
        f"conv{i}": jnp.asarray(rng.normal(size=shape), jnp.float32)
        for i, shape in enumerate(RESNET18)
    }
    grads = jax.tree.map(lambda w: 0.01 * w, params)
    schedules = {
        "Adam": None,
        "phase 1": {"dense": 10**6, "dynamic": 10**6, "refresh": 10**6},
        "phase 2": {"dense": 1, "dynamic": 10**6, "refresh": 10**6},
        "phase 2, refresh": {"dense": 1, "dynamic": 10**6, "refresh": 1},
        "phase 3": {"dense": 1, "dynamic": 0},
    }
    runs = {}
    for name, schedule in schedules.items():
        inner = optax.adam(1e-3)
        tx = inner if schedule is None else sparse.three_phase(inner, **schedule)

        def step(params, state, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1))
        carry = [(jax.tree.map(jnp.array, params), tx.init(params))]

        def call(compiled=compiled, carry=carry):
            carry[0] = compiled(*carry[0])
            return carry[0]

        runs[name] = call
    times = interleaved(runs, rounds)
    return {
        name: {
            "ms": float(np.median(t) * 1e3),
            "above Adam, ms": float(np.median(t - times["Adam"]) * 1e3),
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
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{options.size} x {options.size} float32 on {device}")
    result = {
        "device": device,
        "selection": selection(options.size, options.rounds),
        "optimizer step": optimizer_step(options.rounds),
    }
    show("selection", result["selection"])
    show("ResNet-18, Adam only", result["optimizer step"])
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
