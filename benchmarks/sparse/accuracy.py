"""What transposable 2:4 training costs in accuracy: paired seeds, one table and a chart.

    python -m benchmarks.sparse.accuracy                          # scikit-learn's 8x8 digits
    python -m benchmarks.sparse.accuracy --data mnist10k.npz      # any .npz with images x, labels y
    python -m benchmarks.sparse.accuracy --conv 16,32,32          # a convolutional network
    python -m benchmarks.sparse.accuracy --networks resnet18 depthwise --data mnist10k.npz
    python -m benchmarks.sparse.accuracy --networks decoder       # perplexity of a small Llama

Every method trains the same network (an MLP in which every layer but the head is sparse, or 3x3
convolutions, which are sparse from the second on) from the same weights, on the same batches, for
the same number of epochs, with the same optimizer and step size schedule. A difference is that of a
method's test accuracy to the dense one's with the same seed. `--networks` are files, trained by
`jaxonnx.train`: those of `benchmarks.quantization.accuracy`, and the decoder of the notebook on
texts, which learns lines of Python's manual, a byte at a time.
"""

import argparse
import itertools
import math
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network
from benchmarks.quantization.accuracy import LOSS, NETWORKS, load_data
from jaxonnx import sparse
from tests.support.paths import DATA


def phases(dense, dynamic, **options):
    """Return a wrapper with three phases as fractions of the epochs; the rest has a fixed mask."""

    def wrap(inner, epochs, steps, **weights):
        lengths = {"dense": round(dense * epochs), "dynamic": round(dynamic * epochs)}
        return sparse.three_phase(inner, **lengths, steps_per_epoch=steps, **options, **weights)

    return wrap


def sr_ste(inner, epochs, steps, **weights):
    return sparse.sr_ste(inner, **weights)


def s_ste(inner, epochs, steps, **weights):
    return sparse.s_ste(inner, **weights)


HALF = "dense, half the weights"
"""A method of the MLPs and convolutions of this file, which have any width."""
METHODS = {
    "dense": None,
    HALF: None,
    "three-phase": phases(1 / 3, 1 / 2),
    "three-phase, reset": phases(1 / 3, 1 / 2, reset=True),
    "one-shot transposable": phases(2 / 3, 0),
    "one-shot one-axis": phases(2 / 3, 0, transposable=False),
    "SR-STE, transposable": sr_ste,
    "S-STE, one axis": s_ste,
}
SCHEDULES = {
    f"{dense}/{dynamic}/{12 - dense - dynamic}{', reset' if reset else ''}": phases(
        dense / 12, dynamic / 12, reset=reset
    )
    for dense, dynamic in ((1, 9), (2, 8), (4, 6), (6, 4), (8, 2))
    for reset in (False, True)
}


def load(path):
    if path is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    else:
        with np.load(path) as file:
            x, y = file["x"], file["y"]
    side = math.isqrt(x[0].size)
    x = x.reshape(len(x), side, side).astype(np.float32)
    x = (x - x.mean()) / x.std()
    order = np.random.default_rng(0).permutation(len(x))
    cut = len(x) * 4 // 5
    return [jnp.asarray(a[part]) for part in (order[:cut], order[cut:]) for a in (x, y)]


def shapes(widths):
    """Return the shapes of the weights; with one input channel the first are convolutions."""
    matrices = list(itertools.pairwise(widths))
    if widths[0] != 1:
        return matrices
    return [*((m, n, 3, 3) for n, m in matrices[:-1]), matrices[-1]]


def initial(widths, seed):
    """Draw weights: those of convolutions in the layout of ONNX, matrices as (input, output)."""
    keys = jax.random.split(jax.random.key(seed), len(widths) - 1)
    return [
        {"w": jax.random.normal(k, s) * np.sqrt(2 * m / math.prod(s)), "b": jnp.zeros(m)}
        for k, s, m in zip(keys, shapes(widths), widths[1:], strict=True)
    ]


def apply(params, x):
    """Compute the logits of images (N, side, side)."""
    convolutional = params[0]["w"].ndim == 4
    x = x[..., None] if convolutional else x.reshape(len(x), -1)
    for layer in params[:-1]:
        x = jax.nn.relu((convolve if convolutional else jnp.matmul)(x, layer["w"]) + layer["b"])
    if convolutional:
        x = x.reshape(len(x), -1, x.shape[-1]).max(1)
    return x @ params[-1]["w"] + params[-1]["b"]


def convolve(x, w):
    """Convolve by one product of all taps, the quickest on CPU; halve a side of more than 4."""
    stride = 2 if x.shape[1] > 4 else 1
    side = -(-x.shape[1] // stride)
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    reach = stride * (side - 1) + 1
    taps = [x[:, i : i + reach : stride, j : j + reach : stride] for i, j in np.ndindex(3, 3)]
    return jnp.concatenate(taps, axis=-1) @ w.transpose(2, 3, 1, 0).reshape(-1, len(w))


def trainer(tx, x, y):
    """Return a whole training run as one program."""

    def loss(params, batch):
        logits = apply(params, x[batch])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[batch]).mean()

    @jax.jit
    def train(params, batches):
        def step(carry, batch):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), batches)[0][0]

    return train


def halved(widths):
    """Return the widths of a dense net with as many weights as the sparse net has nonzeros."""
    dense = widths[-2] * widths[-1]  # the head, and a convolution of one channel
    if widths[0] == 1:
        dense += 9 * widths[1]
    wanted = (size(widths) + dense) / 2

    def scaled(factor):
        return [widths[0], *(round(n * factor) for n in widths[1:-1]), widths[-1]]

    return min(map(scaled, np.linspace(0.3, 1, 701)), key=lambda w: abs(size(w) - wanted))


def size(widths):
    return sum(map(math.prod, shapes(widths)))


def study(methods, data, hidden, convolutional, options):
    x, y, x_test, y_test = data
    widths = [1 if convolutional else x[0].size, *hidden, int(y.max()) + 1]
    steps = len(x) // options.batch
    accuracy = {name: [] for name in methods}
    for name, wrap in methods.items():
        start = time.perf_counter()
        inner = optax.adam(
            optax.cosine_decay_schedule(options.rate, options.epochs * steps, alpha=0.05)
        )
        tx = inner if wrap is None else wrap(inner, options.epochs, steps)
        train = trainer(tx, x, y)
        shape = halved(widths) if name == HALF else widths
        for seed in range(options.seeds):
            rng = np.random.default_rng(seed)
            batches = np.concatenate(
                [
                    rng.permutation(len(x))[: steps * options.batch].reshape(steps, -1)
                    for _ in range(options.epochs)
                ]
            )
            params = train(initial(shape, seed), jnp.asarray(batches))
            right = jnp.argmax(apply(params, x_test), axis=1) == y_test
            accuracy[name].append(100 * float(right.mean()))
        print(f"  {name}: {np.mean(accuracy[name]):.2f}  ({time.perf_counter() - start:.0f} s)")
    return widths, accuracy


def load_lines():
    """Return lines of Python's manual as bytes, four fifths of them to train on."""
    texts = [line for text in topics.values() for line in text.splitlines()]
    lines = [
        list(f"{line}\n".encode()) for line in texts if 20 <= len(line) < 72 and line.isascii()
    ]
    order = np.random.default_rng(0).permutation(len(lines))
    cut = len(lines) * 4 // 5
    return [{"input_ids": [lines[i] for i in part]} for part in (order[:cut], order[cut:])]


def choose_optimizer(wrap, options, weights):
    """Return a function of the number of steps to the optimizer of a method."""

    def optimizer(steps):
        inner = optax.adam(optax.cosine_decay_schedule(options.rate, steps, alpha=0.05))
        every = steps // options.epochs
        return inner if wrap is None else wrap(inner, options.epochs, every, **weights)

    return optimizer


def study_file(name, methods, options, folder):
    """Train a network of ONNX by each method; return title and figures of its files."""
    if name == "decoder":
        model, (data, test) = jaxonnx.load(DATA / "text" / "llama.onnx"), load_lines()
        text: dict[str, Any] = {"loss": "causal_lm", "length_buckets": (72,)}
        data = {"input_ids": data["input_ids"][: options.examples]}
        count = len(data["input_ids"])
    else:
        data, test = load_data(name, options.data, options.examples, options.size)
        text, count = {"loss": LOSS}, len(data[0])
        network = Network(NETWORKS[name], (options.batch, *data[0].shape[1:]), 10)
        write(network, folder / "network.onnx")
        model = jaxonnx.load(folder / "network.onnx")
    weights = model.sparsity_options()
    # those that every method makes sparse: along one axis, a head for 10 classes could be, too
    weights["select"] = [*sparse.goals(sparse.layers(model.params, **weights))]
    figures = {method: [] for method in methods}
    for seed in range(options.seeds):
        start = model.reinitialize(jax.random.key(seed), ".*")
        for method, wrap in methods.items():
            trained = jaxonnx.train(
                start,
                data,
                optimizer=choose_optimizer(wrap, options, weights),
                epochs=options.epochs,
                batch_size=options.batch,
                seed=seed,
                progress=False,
                **text,
            ).model
            found = jaxonnx.evaluate(trained, test, metrics=["accuracy"], batch_size=256, **text)
            figure = math.exp(found["loss"]) if name == "decoder" else 100 * found["accuracy"]
            figures[method].append(figure)
            print(f"  {name}, seed {seed}, {method}: {figure:.3f}", flush=True)
            if wrap is not None:
                check(trained.params, weights)
    return f"{name}, {count} examples, {options.epochs} epochs, {options.seeds} seeds", figures


def check(params, weights):
    """Raise AssertionError unless all weights that can be sparse are, along their input axis."""
    report = sparse.layers(params, transposable=False, **weights)
    for name, (pattern, axes) in sparse.goals(report).items():
        w = np.asarray(params[name])
        hidden = ~np.asarray(sparse.mask(w, pattern, axes=axes))
        assert not w[hidden].any(), f"{name} is not sparse"


def metric(title):
    """Return what the figures of a network are, by the title of its table."""
    return "perplexity of a byte" if title.startswith("decoder") else "test accuracy, %"


def table(title, accuracy):
    dense = np.array(accuracy["dense"])
    lines = [
        f"\n{title}",
        "",
        f"| method | {metric(title)} | difference to dense |",
        "|---|---|---|",
    ]
    for name, values in accuracy.items():
        gap = np.array(values) - dense
        spread = "" if name == "dense" else f"{gap.mean():+.2f} ± {gap.std(ddof=1):.2f}"
        lines.append(f"| {name} | {np.mean(values):.2f} | {spread} |")
    return "\n".join(lines)


def chart(path, results):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(5.5 * len(results), 3.6), squeeze=False, layout="constrained"
    )
    for ax, (title, accuracy) in zip(axes[0], results.items(), strict=True):
        names = [n for n in accuracy if n != "dense"][::-1]
        for row, name in enumerate(names):
            gap = np.array(accuracy[name]) - accuracy["dense"]
            ax.scatter(gap, np.full(len(gap), row), s=14, alpha=0.4, color="tab:blue")
            ax.scatter(gap.mean(), row, s=90, marker="|", color="black", zorder=3)
        ax.axvline(0, color="gray", linewidth=0.8)
        ax.set_yticks(range(len(names)), names)
        ax.set_xlabel(f"{metric(title).split(',')[0]} less that of the dense net")
        ax.set_title(title.replace(", ", "\n", 1), fontsize=9)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description="Accuracy of sparse training, paired seeds")
    parser.add_argument("--data", help=".npz of images x and labels y; default: 8x8 digits")
    parser.add_argument(
        "--hidden", action="append", help="widths of an MLP's hidden layers; may be given again"
    )
    parser.add_argument(
        "--conv", action="append", default=[], help="channels of 3x3 convolutions; likewise"
    )
    parser.add_argument(
        "--networks", nargs="+", default=[], choices=[*NETWORKS, "decoder"], help="files instead"
    )
    parser.add_argument("--examples", type=int, help="of --networks: train on so many")
    parser.add_argument("--size", type=int, default=64, help="side of the images of resnet18")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3, help="step size at the start")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--schedules", action="store_true", help="compare schedules instead")
    parser.add_argument("--chart", help="write a picture")
    options = parser.parse_args()
    methods = {name: METHODS[name] for name in options.methods}
    if options.schedules:
        methods = {"dense": None, **SCHEDULES}
    results = {}
    for name in options.networks:
        chosen = {n: w for n, w in methods.items() if n != HALF}
        with tempfile.TemporaryDirectory() as folder:
            title, accuracy = study_file(name, chosen, options, Path(folder))
        results[title] = accuracy
        print(table(title, accuracy), flush=True)
    data = load(options.data)
    mlps = options.hidden or ([] if options.conv or options.networks else ["128,128", "32,32"])
    for hidden, convolutional in [*((h, False) for h in mlps), *((c, True) for c in options.conv)]:
        hidden = [int(n) for n in hidden.split(",")]
        widths, accuracy = study(methods, data, hidden, convolutional, options)
        shape, count = "-".join(map(str, widths)), f"{size(widths) / 1000:.1f}k weights"
        kind = "3x3 convolutions " if convolutional else ""
        title = f"{kind}{shape}, {count}, {len(data[0])} images, {options.seeds} seeds"
        results[title] = accuracy
        print(table(title, accuracy))
    if options.chart:
        chart(options.chart, results)


if __name__ == "__main__":
    main()
