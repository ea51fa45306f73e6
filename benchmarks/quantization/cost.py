"""What training through the rounding to int8 costs, beside the float step.

    python -m benchmarks.quantization.cost [mlp lenet] [--rounds 15]

Each of the seven networks is quantized by `jaxonnx.quantize`, and its step compiled as
`jaxonnx.train(..., quantize="int8")` has it. Steps of both take turns in one process; printed are
the least CPU times, their ratio, and the ratio of the memory of the compiled programs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network, batch
from benchmarks.systems import all_trained, train_step
from jaxonnx.cli.process import keep_pages

STEPS = 3
"""Steps that are measured together."""


def compiled(network: Network) -> list[list[Any]]:
    """Return program, state and other arguments of the float step and of the quantized one."""
    x, y = batch(network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        write(network, path)
        model = all_trained(jaxonnx.load(path))
        models = model, jaxonnx.quantize(model, x, "int8")
    steps = []
    for model in models:
        step, state, *others = train_step(model, jnp.asarray(x), jnp.asarray(y))
        program = jax.jit(step, donate_argnums=0).lower(state, *others).compile()
        steps.append([program, state, others])
    return steps


def bytes_of(program: jax.stages.Compiled) -> int:
    sizes: Any = program.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes


def measure(network: Network, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of both steps, and how many times the memory the second takes."""
    steps = compiled(network)
    least = [float("inf")] * 2
    for turn in range(rounds + 1):
        for i, step in enumerate(steps):
            program, state, others = step
            began = time.process_time()
            for _ in range(STEPS):
                state, seen = program(state, *others)
            jax.block_until_ready((state, seen))
            step[1] = state
            if turn:
                least[i] = min(least[i], (time.process_time() - began) / STEPS)
    plain, rounded = (bytes_of(program) for program, *_ in steps)
    return least[0], least[1], rounded / plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], metavar="network")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    keep_pages()
    print(f"{'network':<14}{'float, ms':>10}{'int8, ms':>10}{'ratio':>7}{'memory':>8}")
    for name in chosen.networks:
        plain, rounded, memory = measure(NETWORKS[name], chosen.rounds)
        row = f"{1e3 * plain:>10.2f}{1e3 * rounded:>10.2f}{rounded / plain:>7.2f}{memory:>8.2f}"
        print(f"{name:<14}{row}", flush=True)


if __name__ == "__main__":
    main()
