"""What jaxonnx adds to its compiled functions: to a call of a model, and to the steps of a run.

    python -m benchmarks.speed.overhead [--networks mlp lenet] [--rounds 15] [--calls 1000]
                                  [--epochs 12] [--steps 100] [--small] [--synchronous]

The table of small networks (with --small the only one): microseconds of a call of three Gemms for
one row, a NumPy array in and out, beside onnxruntime in its default session; they take turns. With
--synchronous, `jax_cpu_enable_async_dispatch` is off: XLA computes in the calling thread.

A line: milliseconds to trace `model.apply` of 30 Gemm and 30 Tanh (60 nodes) anew, and a function
written in jax.numpy that computes the same; and to run both without `jax.jit`. JAX keeps
the trace of a function that it gets again, so that each is wrapped in a new one; they take turns.

Second table: microseconds of a call `model(x)` of a tiny network, of the same function under a
`jax.jit` of the caller, and the difference, for JAX and NumPy arrays. Third table: an epoch of
`jaxonnx.train` over arrays in memory beside two loops of as many steps of the same compiled
function on the same examples, one over batches that are ready on the device, one that collects them
(`x[rows]`) and does nothing else; all take turns, epoch by epoch, in one process. Printed are
medians and quartiles of what `train` adds to the first, and the median of what collecting adds.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network, batch
from benchmarks.systems import LEARNING_RATE, train_step
from jaxonnx.cli.process import keep_pages
from jaxonnx.training import Batch

TINY = Network(lambda layers, x: layers.dense(layers.relu(layers.dense(x, 16)), 4), (4, 8), 4)
LOSS = "softmax_cross_entropy_with_integer_labels"
SMALL = (17, 64, 64, 6), (64, 256, 256, 8), (128, 400, 400, 16)
"""The sizes of small networks, such as policies of robots."""
TARGETS = {"call": 20.0, "loop": 2.0}
"""In microseconds and per cent."""


def seconds(function, count: int) -> float:
    """Return the seconds of one call, the mean of `count` of which the last has ended."""
    start = time.perf_counter()
    for _ in range(count):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def calls(path: Path, rounds: int, count: int) -> dict[str, np.ndarray]:
    """Time (`model(x)`, the jitted function) in microseconds, each round, by the kind of input."""
    write(TINY, path)
    model = jaxonnx.load(path)

    @jax.jit
    def jitted(params, state, x):
        return model.apply(params, x, state=state)

    x = batch(TINY)[0]
    times = {}
    for kind, array in (("jax", jnp.asarray(x)), ("numpy", x)):
        systems = (
            lambda array=array: model(array),
            lambda array=array: jitted(model.params, model.state, array),
        )
        for system in systems:
            seconds(system, count)
        pairs = [[seconds(system, count) for system in systems] for _ in range(rounds)]
        times[f"{kind} arrays"] = np.array(pairs) * 1e6
    return times


def small(path: Path, rounds: int, count: int) -> Table:
    """Time small networks beside onnxruntime, in microseconds: of the clock and of all threads."""
    import onnxruntime

    table = Table("sizes", "kB", "jaxonnx, us", "onnxruntime, us", "ratio", "CPU, us", "CPU ratio")
    for sizes in SMALL:
        first, *others = sizes

        def network(layers, x, sizes=others):
            for size in sizes[:-1]:
                x = layers.relu(layers.dense(x, size))
            return layers.dense(x, sizes[-1])

        write(Network(network, (1, first), sizes[-1]), path)
        model, session = jaxonnx.load(path), onnxruntime.InferenceSession(path)
        x = np.random.default_rng(0).normal(size=(1, first)).astype(np.float32)
        name = session.get_inputs()[0].name
        systems = (
            lambda model=model, x=x: np.asarray(model(x)),
            lambda session=session, x=x, name=name: session.run(None, {name: x})[0],
        )
        np.testing.assert_allclose(*(np.asarray(call()) for call in systems), rtol=1e-3, atol=1e-4)
        times = []
        for _ in range(rounds):
            for system in systems:
                start = time.process_time()
                clock = seconds(system, count)
                times.append((clock, (time.process_time() - start) / count))
        pairs = 1e6 * np.array(times).reshape(rounds, 2, 2)[1:]
        (clock, cpu), (clock_ort, cpu_ort) = np.median(pairs, axis=0)
        low, ratio, high = np.quantile(pairs[:, 0, 0] / pairs[:, 1, 0], (0.25, 0.5, 0.75))
        row = f"{clock:.1f}", f"{clock_ort:.1f}", f"{ratio:.1f} ({low:.1f} to {high:.1f})"
        title = "-".join(map(str, sizes))
        kilobytes = f"{path.stat().st_size / 1000:.0f}"
        processor = f"{cpu:.1f}, {cpu_ort:.1f}", f"{cpu / cpu_ort:.1f}"
        table.add_row(title, kilobytes, *row, *processor)
    return table


def traces(path: Path, rounds: int) -> np.ndarray:
    """Time (traced, traced by hand, eager, eager by hand) in milliseconds of CPU, each round."""

    def network(layers, x):
        for _ in range(30):
            x = layers.dense(x, 8)
            x = layers.node("Tanh", x, shape=x.shape)
        return x

    write(Network(network, (4, 8), 8), path)
    model = jaxonnx.load(path)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)

    def by_hand(params, x):
        for i in range(30):
            w, bias = params[f"w{2 * i}"], params[f"w{2 * i + 1}"]
            x = jnp.tanh(x @ w.T + bias)
        return x

    def milliseconds(call) -> float:
        start = time.process_time()
        jax.block_until_ready(call())
        return 1e3 * (time.process_time() - start)

    def trace(function):
        jax.make_jaxpr(lambda *arrays: function(*arrays))(model.params, x)

    functions = model.apply, by_hand
    np.testing.assert_allclose(*(f(model.params, x) for f in functions), rtol=1e-4, atol=1e-5)
    calls = [lambda f=f: trace(f) for f in functions]
    calls += [lambda f=f: f(model.params, x) for f in functions]
    return np.array([[milliseconds(call) for call in calls] for _ in range(rounds)])[1:]


def loops(path: Path, network: Network, epochs: int, steps: int) -> np.ndarray:
    """Time a step (in `train`, on ready batches, collecting) in each epoch but the first."""
    write(network, path)
    model = jaxonnx.load(path)
    x, y = batch(network)
    size = len(x)
    random = np.random.default_rng(1)
    order = random.permutation(np.resize(np.arange(size), steps * size))
    x, y = x[order], y[order]
    update, state, like, frozen = train_step(model, jnp.asarray(x[:size]), jnp.asarray(y[:size]))
    update = model.program.jit(update, donate_argnums=0)
    weight = np.ones(size, np.float32)
    ready = [
        like._replace(inputs=(jnp.asarray(xs),), targets=jnp.asarray(ys))
        for xs, ys in zip(np.split(x, steps), np.split(y, steps), strict=True)
    ]

    def collected():
        for rows in np.split(random.permutation(len(x)), steps):
            yield Batch((x[rows],), y[rows], weight)

    def bare(batches: Iterable) -> float:
        nonlocal state
        start = time.perf_counter()
        for examples in batches:
            state, seen = update(state, examples, frozen)
        jax.block_until_ready(seen)
        return time.perf_counter() - start

    pairs, start = [], 0.0

    def watch(step, metrics):
        nonlocal start
        if "epoch" in metrics:  # all its steps have ended
            whole = time.perf_counter() - start
            pairs.append((whole, bare(ready), bare(collected())))
            start = time.perf_counter()

    jaxonnx.train(
        model,
        (x, y),
        loss=LOSS,
        optimizer=optax.adam(LEARNING_RATE),
        batch_size=size,
        epochs=epochs + 1,
        on_log=watch,
        progress=False,
    )
    return np.array(pairs[1:]) / steps


def summary(times: np.ndarray, relative: bool) -> dict:
    """Return medians of the first two columns and quartiles of what others add to the second."""
    added = times - times[:, 1:2]
    if relative:
        added = 100 * added / times[:, 1:2]
    medians = np.median(times, axis=0)
    figures = {
        "whole": float(medians[0]),
        "compiled": float(medians[1]),
        "added": [float(q) for q in np.quantile(added[:, 0], (0.25, 0.5, 0.75))],
    }
    return figures | ({"collecting": float(np.median(added[:, 2]))} if relative else {})


def show(results: dict[str, dict[str, dict]]) -> None:
    console = Console()
    titles = {"call": "what a call adds", "loop": "what the loop of train adds to a step"}
    heads = {
        "call": ("input", "model(x), us", "jitted, us", "added, us"),
        "loop": ("network", "train, ms", "compiled, ms", "added, %", "collecting alone, %"),
    }
    for kind, rows in results.items():
        table = Table(*heads[kind], "target", title=titles[kind])
        scale = 1e3 if kind == "loop" else 1
        for name, row in rows.items():
            low, middle, high = row["added"]
            both = (f"{scale * row[part]:.2f}" for part in ("whole", "compiled"))
            added = [f"{middle:.2f} ({low:.2f} to {high:.2f})"]
            added += [f"{row['collecting']:.2f}"] if "collecting" in row else []
            met = "met" if middle < TARGETS[kind] else "missed"
            table.add_row(name, *both, *added, f"< {TARGETS[kind]:g}, {met}")
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=["mlp", "lenet"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--small", action="store_true", help="small networks only")
    parser.add_argument("--synchronous", action="store_true", help="compute in the calling thread")
    options = parser.parse_args()
    if options.synchronous:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    keep_pages()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        Console(width=100).print(small(path, options.rounds, options.calls))
        if options.small:
            return
        traced, by_hand, eager, eager_by_hand = np.median(traces(path, 200), axis=0)
        print(
            f"60 nodes: traced in {traced:.1f} ms, by hand {by_hand:.1f}; "
            f"eager {eager:.1f} ms, by hand {eager_by_hand:.1f}"
        )
        times = calls(path, options.rounds, options.calls)
        results = {"call": {kind: summary(pairs, False) for kind, pairs in times.items()}}
        results["loop"] = {
            name: summary(loops(path, NETWORKS[name], options.epochs, options.steps), True)
            for name in options.networks
        }
    show(results)


if __name__ == "__main__":
    main()
