"""Memory of a training step, as XLA reserves it: jaxonnx, with `remat`, and hand-written Flax.

    python -m benchmarks.speed.memory [--networks lenet encoder ...]

Megabytes of arguments (parameters, moments, batch) and of what the step needs meanwhile; they are
the same in every run, so this is no measurement of time. The peak of a process, which also has
libraries and what the allocator keeps, is in the table of `python -m benchmarks`.
"""

import argparse
import tempfile
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network, batch
from benchmarks.systems import flax_functions, lower_step, optax_step, train_step


def ours(network: Network, path: Path, remat: bool):
    model = jaxonnx.load(path)
    model = model.with_remat() if remat else model
    update, *arguments = train_step(model, *batch(network))
    return lower_step(model, update, *arguments).compile()


def flax(network: Network):
    x, y = batch(network)
    x = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
    init, train, _ = flax_functions(network)
    step, optimizer = optax_step(train)
    params, state = init(jax.random.key(0), x)
    carry = params, state, optimizer.init(params)
    return jax.jit(step, donate_argnums=0).lower(carry, x, y).compile()


def reserved(compiled) -> int:
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, default=[*NETWORKS], nargs="+")
    table = Table(
        "network", "jaxonnx, MB", "with remat", "Flax", "jaxonnx / Flax", "remat / without"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().networks:
            network, path = NETWORKS[name], Path(folder) / "network.onnx"
            write(network, path)
            steps = ours(network, path, False), ours(network, path, True), flax(network)
            plain, again, other = map(reserved, steps)
            sizes = (f"{n / 1e6:.1f}" for n in (plain, again, other))
            table.add_row(name, *sizes, f"{plain / other:.2f}", f"{again / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
