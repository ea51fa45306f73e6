"""What training through the rounding to int8 costs, beside the float step.

    python -m benchmarks.quantization.cost [mlp lenet] [--rounds 15]

The step of each of the seven networks is compiled as `jaxonnx.train` and
`jaxonnx.train(..., quantize="int8")` have it, with trained scales and with fixed ones. All steps
take turns in one process. The table has the least CPU times, their ratios, and the ratios of the
memory of the compiled programs.
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
from benchmarks.systems import FOREVER, all_trained, lower_step, train_step
from jaxonnx._data.kinds import open_data
from jaxonnx.cli.process import keep_pages
from jaxonnx.model import read_inputs
from jaxonnx.training._settings import Plan, Settings
from jaxonnx.training._settings.quantize import quantize_weights

SCHEMES = (jaxonnx.Quantization(), jaxonnx.Quantization(learn=None))
"""The schemes of the quantized steps: with trained scales, the default, and with fixed ones."""
STEPS = 3
"""Steps that are measured together."""


def compiled(network: Network) -> list[list[Any]]:
    """Return program, state and other arguments of the float step and of the quantized ones."""
    x, y = batch(network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        write(network, path)
        model = all_trained(jaxonnx.load(path))
        source = read_inputs(model, open_data(x, labels=False))
        plans = [Plan(model, Settings(quantize=x), FOREVER, 1, source, None, None) for x in SCHEMES]
        for plan in plans:
            quantize_weights(plan)
    steps = []
    for each in (model, *(plan.model for plan in plans)):
        step, state, *others = train_step(each, jnp.asarray(x), jnp.asarray(y))
        program = lower_step(each, step, state, *others).compile()
        steps.append([program, state, others])
    return steps


def bytes_of(program: jax.stages.Compiled) -> int:
    sizes: Any = program.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes


def measure(network: Network, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of the steps, and their memory relative to the float step."""
    steps = compiled(network)
    least = [float("inf")] * len(steps)
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
    sizes = [bytes_of(program) for program, *_ in steps]
    return least, [size / sizes[0] for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], metavar="network")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    keep_pages()
    print(f"{'network':<14}{'float, ms':>10}" + f"{'int8, ms':>10}{'ratio':>7}{'memory':>8}" * 2)
    for name in chosen.networks:
        (plain, *times), (_, *sizes) = measure(NETWORKS[name], chosen.rounds)
        row = f"{name:<14}{1e3 * plain:>10.2f}"
        for seconds, memory in zip(times, sizes, strict=True):
            row += f"{1e3 * seconds:>10.2f}{seconds / plain:>7.2f}{memory:>8.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
