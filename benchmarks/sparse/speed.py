"""Training steps and forward passes with sparse products beside dense ones, on CPU.

    python -m benchmarks.sparse.speed [--networks mlp4x1024 encoder] [--rounds 15] [--clock cpu]

The steps are those of `jaxonnx.train` with Adam, dense and in the dynamic phase of 2:4 training,
with dense and with sparse products; the forward passes those of `model(x)`, dense, sparse
(`with_sparse_products`), and onnxruntime's of the same file. All take turns, round by round; times
are minima, and a ratio is that of minima.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network, batch
from benchmarks.sparse.products import minima
from benchmarks.systems import FOREVER, lower_step, train_step
from jaxonnx import sparse
from jaxonnx.cli.process import keep_pages


def mlp4x1024(layers, x):
    for _ in range(4):
        x = layers.relu(layers.dense(x, 1024))
    return layers.dense(x, 10)


CHOICE = {"encoder": NETWORKS["encoder"], "mlp4x1024": Network(mlp4x1024, (128, 1024), 10)}
PHASE = {"dense": 0, "dynamic": FOREVER, "refresh": FOREVER}
TARGETS = {"step, sparse": 0.86, "forward, sparse": 0.75}


def calls(name: str, folder: Path) -> dict:
    """Return the step and the forward pass of each kind as functions without arguments."""
    path = folder / f"{name}.onnx"
    write(CHOICE[name], path)
    model = jaxonnx.load(path)
    x, y = (jnp.asarray(array) for array in batch(CHOICE[name]))
    found = {}
    for kind, sparsity in (
        ("dense", None), ("masked", PHASE), ("sparse", PHASE | {"products": "sparse"})
    ):  # fmt: skip
        update, state, *rest = train_step(model, x, y, sparsity)
        compiled = lower_step(model, update, state, *rest).compile()

        def step(compiled=compiled, held=[state], rest=rest):  # noqa: B006
            held[0], seen = compiled(held[0], *rest)
            return seen

        step()  # the first one prunes
        found[f"step, {kind}"] = step
    pruned = model.replace(params=sparse.prune(model.params, **model.sparsity_options()))
    quick = sparse.record(pruned).with_sparse_products()
    found["forward, dense"], found["forward, sparse"] = lambda: pruned(x), lambda: quick(x)
    try:
        import onnxruntime
    except ImportError:
        return found
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: np.asarray(x)}
    found["forward, onnxruntime"] = lambda: session.run(None, feed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=CHOICE, nargs="+", default=list(CHOICE))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    keep_pages()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            named = calls(name, Path(folder))
            times = minima(list(named.values()), options.rounds, clock)
            result = dict(zip(named, times, strict=True))
            print(f"{name}, {options.clock} clock")
            for what, seconds in result.items():
                ratio = seconds / result[f"{what.split(',')[0]}, dense"]
                goal = f" (<= {TARGETS[what]:.2f})" if what in TARGETS else ""
                print(f"  {what:22}{1e3 * seconds:9.2f} ms {ratio:6.2f}{goal}", flush=True)


if __name__ == "__main__":
    main()
