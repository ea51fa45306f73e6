"""From `import jaxonnx` to the end of the first training step: import, load, trace, XLA, step.

    python -m benchmarks.speed.startup [--networks mlp resnet18-64] [--repeat 5] [--cache FOLDER]

Each run is a process of its own. Printed are the least of the wall-clock times and the least of
the CPU times (user and system, all threads), in seconds. With `--cache` the programs are kept
there by JAX's persistent cache, so that all runs but the first find them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PARTS = ("import jax", "import jaxonnx", "load", "trace", "XLA", "first step")
RUN = """
import json, sys, time
marks = []
def mark():
    marks.append((time.perf_counter(), time.process_time()))
mark()
import jax
mark()
import jaxonnx
mark()
import jax.numpy as jnp, numpy as np, optax
from benchmarks.networks import NETWORKS, batch
x, y = batch(NETWORKS[sys.argv[1]])
optimizer = optax.adam(1e-3)
jnp.ones(3).block_until_ready()
mark()
model = jaxonnx.load(sys.argv[2])
jax.block_until_ready(model.params)
mark()
def step(carry, x, y):
    params, state, memory = carry
    def objective(params):
        logits, renewed = model.apply_train(params, state, jax.random.key(0), x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), renewed
    gradients, state = jax.grad(objective, has_aux=True)(params)
    updates, memory = optimizer.update(gradients, memory, params)
    return optax.apply_updates(params, updates), state, memory
carry = model.params, model.state, optimizer.init(model.params)
jax.block_until_ready(carry)
mark()
lowered = jax.jit(step).lower(carry, x, y)
mark()
compiled = lowered.compile()
mark()
jax.block_until_ready(compiled(carry, x, y))
mark()
print(json.dumps(marks))
"""
"""The third pause, what the benchmark itself imports and XLA's own start, and the fifth, the
optimizer's arrays, are left out."""
MARKS = ((0, 1), (1, 2), (3, 4), (5, 6), (6, 7), (7, 8))


def measure(network: str, path: Path, cache: Path | None) -> list[tuple[float, float]]:
    """Measure the (wall, CPU) seconds of each part."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", RUN, network, path],
        env=environment,
        cwd=Path(__file__).parents[2],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    marks = json.loads(done.stdout)
    return [tuple(b - a for a, b in zip(marks[i], marks[j], strict=True)) for i, j in MARKS]


def main() -> None:
    from benchmarks.layers.onnx_file import write
    from benchmarks.networks import NETWORKS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=["mlp", "resnet18-64"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    print(f"{'network':14}{'clock':6}" + "".join(f"{part:>16}" for part in PARTS))
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks:
            path = Path(folder) / f"{network}.onnx"
            write(NETWORKS[network], path)
            runs = [measure(network, path, options.cache) for _ in range(options.repeat)]
            for clock, kind in enumerate(("wall", "CPU")):
                least = [min(run[part][clock] for run in runs) for part in range(len(PARTS))]
                print(f"{network:14}{kind:6}" + "".join(f"{seconds:16.2f}" for seconds in least))


if __name__ == "__main__":
    main()
