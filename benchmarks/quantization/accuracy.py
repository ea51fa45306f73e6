"""What 8, 4 and 2 bits cost in accuracy: onnxruntime, `quantize`, training through the rounding.

    python -m benchmarks.quantization.accuracy                        # scikit-learn's 8x8 digits
    python -m benchmarks.quantization.accuracy --data mnist10k.npz    # any .npz with x, y; 28x28
    python -m benchmarks.quantization.accuracy --networks text        # bytes of Python's library
    python -m benchmarks.quantization.accuracy --networks cnn --qwix

Each network is trained in float32, quantized by onnxruntime's `quantize_static` (per channel, the
best of its calibrations on the test images, which favours it), by `jaxonnx.quantize`, and trained
for `--tune` epochs through the rounding. Every figure is the accuracy of the file in onnxruntime,
without its graph optimizations, on images that nobody trained on; a difference is to the float
network of the same seed. The float network is also trained for the same epochs more, since training
alone may gain something, and 2:4 sparse for these epochs, in float32 and in int8. Weights have a
scale for each channel, activations are uint8, beside weights of two bits float32, for which
onnxruntime has no quantizer.
"""

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import numpy as np
import onnxruntime
import optax
from onnxruntime import quantization as ort

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network, resnet18

LOSS = "softmax_cross_entropy_with_integer_labels"
CALIBRATIONS = ("MinMax", "Percentile", "Entropy")
TYPES = {"int8": ort.QuantType.QInt8, "int4": ort.QuantType.QInt4, "int2": None}
"""The types of weights, and their names in onnxruntime."""


def cnn(layers, x):
    for features in (16, 32):
        x = layers.relu(layers.batch_norm(layers.conv(x, features, 3, 1, 1)))
        x = layers.max_pool(x, 2, 2)
    x = layers.relu(layers.dense(layers.flatten(x), 64))
    return layers.dense(x, 10)


def depthwise(layers, x):
    x = layers.relu6(layers.batch_norm(layers.conv(x, 16, 3, 1, 1)))
    hidden = 16
    for features, stride in ((32, 2), (64, 1), (64, 2)):
        x = layers.relu6(layers.batch_norm(layers.conv(x, hidden, 3, stride, 1, groups=hidden)))
        x = layers.relu6(layers.batch_norm(layers.conv(x, features, 1)))
        hidden = features
    return layers.dense(layers.spatial_mean(x), 10)


def text(layers, tokens):
    x = layers.positions(layers.embed(tokens, 256, 64))
    for _ in range(2):
        x = x + layers.attention(layers.layer_norm(x), 4)
        x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 256)), 64)
    return layers.dense(layers.sequence_mean(layers.layer_norm(x)), len(PACKAGES))


NETWORKS = {"cnn": cnn, "depthwise": depthwise, "resnet18": resnet18, "text": text}
PACKAGES = ("asyncio", "ctypes", "email", "idlelib", "json", "logging", "unittest", "xml")
"""Parts of Python's standard library, which the text network tells apart by 64 bytes of source."""


def load_text():
    root = Path(asyncio.__file__).parents[1]
    rows = []
    for package in PACKAGES:
        whole = b"".join(path.read_bytes() for path in sorted((root / package).rglob("*.py")))
        rows.append(np.frombuffer(whole, np.uint8, len(whole) // 64 * 64).reshape(-1, 64)[:1000])
    labels = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    return np.concatenate(rows).astype(np.int32), labels


def load_data(name, path, count, size):
    """Return what a network is trained on, at most `count` examples, and what it is tested on."""
    if name == "text":
        return split(*load_text(), count)
    if path is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8)
    else:
        with np.load(path) as file:
            x, y = file["x"], file["y"]
    x = x.reshape(len(x), 1, *x.shape[1:]).astype(np.float32) / np.float32(x.max())
    if name == "resnet18":
        x = np.asarray(jax.image.resize(x, (len(x), 1, size, size), "linear"))
    return split(x, y, count)


def split(x, y, count):
    order = np.random.default_rng(0).permutation(len(x))
    cut = len(x) * 4 // 5
    train, test = order[: min(cut, count or cut)], order[cut:]
    return (x[train], y[train].astype(np.int32)), (x[test], y[test].astype(np.int32))


def accuracy(path, data):
    x, y = data
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # as the file says: fused int8 products saturate in 16 bits on x86 without VNNI
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    logits = np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])
    return 100 * float((logits.argmax(1) == y).mean())


class Reader(ort.CalibrationDataReader):
    def __init__(self, name, x):
        self.batches = iter([{name: x[i : i + 32]} for i in range(0, 512, 32)])

    def get_next(self):
        return next(self.batches, None)


def peer(path, data, kind, test, folder):
    """Return the best accuracy of onnxruntime's calibrations, with its own preparation."""
    prepared, best = folder / "prepared.onnx", 0.0
    ort.shape_inference.quant_pre_process(str(path), str(prepared))
    name = onnxruntime.InferenceSession(str(prepared)).get_inputs()[0].name
    for method in CALIBRATIONS:
        ort.quantize_static(
            str(prepared),
            str(folder / "peer.onnx"),
            Reader(name, data[0]),
            per_channel=True,
            weight_type=kind,
            activation_type=ort.QuantType.QUInt8,
            calibrate_method=getattr(ort.CalibrationMethod, method),
        )
        best = max(best, accuracy(folder / "peer.onnx", test))
    return best


def train(model, data, epochs, rate, seed, **options):
    return jaxonnx.train(
        model,
        data,
        loss=LOSS,
        optimizer=lambda steps: optax.adam(optax.cosine_decay_schedule(rate, steps, 0.05)),
        epochs=epochs,
        batch_size=64,
        seed=seed,
        progress=False,
        **options,
    ).model


def study(name, data, test, options, folder):
    rows = defaultdict(list)
    sparsity = {"pattern": "2:4", "dynamic": options.tune / 2, "refresh": options.tune / 4}

    def add(row, model):
        model.save(folder / "ours.onnx")
        rows[row].append(accuracy(folder / "ours.onnx", test))

    for seed in range(options.seeds):
        shape, tokens = (64, *data[0].shape[1:]), 256 if name == "text" else 0
        network = Network(NETWORKS[name], shape, 10, tokens)
        write(network, folder / "untrained.onnx")
        model = jaxonnx.load(folder / "untrained.onnx")
        model = model.reinitialize(jax.random.key(seed), ".*")
        model = train(model, data, options.epochs, 3e-3, seed)
        tune = partial(train, model, data, options.tune, 3e-4, seed)
        add("float", model)
        add("float: train", tune())
        model.save(folder / "float.onnx")
        for scheme in options.schemes:
            kind = TYPES[scheme]
            if kind is not None:
                rows[f"{scheme}: onnxruntime"].append(
                    peer(folder / "float.onnx", data, kind, test, folder)
                )
            add(f"{scheme}: quantize", jaxonnx.quantize(model, data[0][:512], scheme))
            add(f"{scheme}: train", tune(quantize=scheme))
        add("2:4: train", tune(sparsity=sparsity))
        add("2:4 and int8: train", tune(sparsity=sparsity, quantize="int8"))
        if options.qwix and name in ("cnn", "resnet18"):
            from benchmarks.quantization import qwix_peer

            figures = qwix_peer.measure(
                folder / "float.onnx", network, data, test, options.tune, 3e-4, seed
            )
            for row, figure in zip(("float", "int8", "int8, train"), figures, strict=True):
                rows[f"Qwix, {row}"].append(figure)
        print(
            f"{name}, seed {seed}:",
            {row: round(each[-1], 2) for row, each in rows.items()},
            flush=True,
        )
    return rows


def table(title, rows):
    base = np.asarray(rows["float"])
    lines = ["", title, "", "| network | accuracy, % | points lost |", "|---|---|---|"]
    for row, values in rows.items():
        lost = base - np.asarray(values)
        lines.append(f"| {row} | {np.mean(values):.2f} | {lost.mean():+.2f} ± {lost.std():.2f} |")
    return "\n".join(lines)


def keep(title, rows, path):
    """Write the accuracies to the .json beside the chart, with those of other runs; draw all."""
    file = path.with_suffix(".json")
    kept = json.loads(file.read_text()) if file.exists() else {}
    name = title.split(",")[0]
    if (
        kept.get(name, {}).get("title") == title
        and kept[name]["accuracy"]["float"] == rows["float"]
    ):
        rows = kept[name]["accuracy"] | rows  # other schemes of the same float networks
    kept[name] = {"title": title, "accuracy": rows}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    draw(kept, path)


def draw(kept, path):
    """Draw a panel for each network: points lost by each seed, and their mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(kept), 4.2), layout="constrained")
    for axes, network in zip(
        figure.subplots(1, len(kept), squeeze=False)[0], kept.values(), strict=True
    ):
        base = np.asarray(network["accuracy"]["float"])
        rows = {n: base - v for n, v in reversed(network["accuracy"].items()) if n != "float"}
        for place, (row, lost) in enumerate(rows.items()):
            color = "tab:orange" if "onnxruntime" in row or "Qwix" in row else "tab:blue"
            axes.scatter(lost, np.full(len(lost), place), s=14, alpha=0.4, color=color)
            axes.scatter(lost.mean(), place, s=90, marker="|", color=color, zorder=3)
        axes.axvline(0, color="gray", linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel="points of accuracy lost", title=network["title"].replace(", ", "\n", 1))
        axes.title.set_fontsize(9)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz with images x and labels y")
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=NETWORKS)
    parser.add_argument("--schemes", nargs="+", default=[*TYPES], choices=TYPES)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tune", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, help="train on so many")
    parser.add_argument("--size", type=int, default=64, help="side of the images of resnet18")
    parser.add_argument("--chart", type=Path, help="a picture; its .json keeps all accuracies")
    parser.add_argument(
        "--qwix",
        action="store_true",
        help="also Qwix, which must be installed, of cnn and resnet18",
    )
    options = parser.parse_args()
    for name in options.networks:
        data, test = load_data(name, options.data, options.examples, options.size)
        with tempfile.TemporaryDirectory() as folder:
            rows = study(name, data, test, options, Path(folder))
        title = f"{name}, {len(data[0])} examples to train, {len(test[0])} to test"
        print(table(title, rows), flush=True)
        if options.chart:
            keep(title, rows, options.chart)


if __name__ == "__main__":
    main()
