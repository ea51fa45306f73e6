"""What training on a folder of pictures adds to a step, and where the time goes.

    python -m benchmarks.speed.images [--network mobilenetv2] [--batch 16] [--size 224]
                                      [--count 128] [--from 224x224] [--epochs 3] [--workers N]

The pictures are JPEGs of smooth noise, written by the program itself. A table has the milliseconds
of one picture in one thread (read and decode, resize), and of a batch (to the device, its numbers;
the same with random parts and mirroring). Then an epoch of `jaxonnx.train` over the folder stands
beside a loop of as many steps of the same compiled function over a batch that is ready on the
device; both take turns, epoch by epoch, in one process. Pictures are decoded in each epoch, or
kept, with augmentation or without. "waited" is the time in which the loop had no batch, part of
which passes while the device works on the steps before.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
from rich.console import Console
from rich.table import Table

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS
from benchmarks.systems import LEARNING_RATE, train_step
from jaxonnx._data.images import preparation as images
from jaxonnx._data.images.augment import Augment, prepare_batch
from jaxonnx._data.images.batches import Pictures
from jaxonnx.cli.process import keep_pages

LOSS = "softmax_cross_entropy_with_integer_labels"
CLASSES = 1000
WAYS: dict[str, dict[str, Any]] = {
    "decoded each epoch": {"memory": 0},
    "kept": {"memory": 2**32},
    "kept, crop and flip": {"memory": 2**32, "augment": ["crop", "flip"]},
    "decoded, crop and flip": {"memory": 0, "augment": ["crop", "flip"]},
}


def draw(root: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Write JPEGs of two classes."""
    random = np.random.default_rng(0)
    paths = [root / str(i % 2) / f"{i}.jpg" for i in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (size[0] // 8, size[1] // 8, 3), np.uint8)
        image = Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC)
        image.save(path, quality=90)
    return paths


def milliseconds(function: Callable[[], Any], count: int) -> float:
    """Return the median time of a call, whose result is waited for."""
    jax.block_until_ready(function())
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def parts(paths: list[Path], where: images.Layout, batch: int) -> dict[str, float]:
    """Time the parts of the work."""
    turn: Iterator[Path] = iter(paths * 100)

    def decode() -> np.ndarray:
        with Image.open(next(turn)) as image:
            return np.asarray(image.convert("RGB"))

    times = {
        "a picture: read, decode": milliseconds(decode, 50),
        "a picture: the same and resize": milliseconds(lambda: images.read(next(turn), where), 50),
    }
    key, aspects, how = jax.random.key(0), np.ones(batch, np.float32), images.Preparation()
    for name, augment, larger in (
        ("a batch: to the device, numbers", Augment(), 1.0),
        ("a batch: the same with crop and flip", Augment.of(["crop", "flip"]), 4 / 3),
    ):
        side = [round(n * larger) for n in where.size]
        pixels = np.zeros((batch, *side, 3), np.uint8)
        count = np.uint32(0)
        rest: dict[str, Any] = {"how": how, "where": where, "augment": augment}
        args = (pixels, aspects, key, count, count)
        times[name] = milliseconds(lambda args=args, rest=rest: prepare_batch(*args, **rest), 15)
    return times


def loop(model: jaxonnx.Model, root: Path, options: argparse.Namespace, way: dict) -> np.ndarray:
    """Time (a step in `train`, on a ready batch, the wait of the first) in all epochs but one."""
    labels = [str(i) for i in range(CLASSES)]
    preprocess = {"scale": 1 / 255, "labels": labels, **way}
    if options.workers:
        preprocess["workers"] = options.workers
    shape = (options.batch, 3, options.size, options.size)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    update, state, like, frozen = train_step(model, x, jnp.arange(options.batch))
    update = jax.jit(update, donate_argnums=0)
    like = like._replace(weight=np.ones(options.batch, np.float32))
    steps = -(-options.count // options.batch)
    rows, waits, start = [], [0.0], 0.0

    def bare() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(steps):
            state, seen = update(state, like, frozen)
        jax.block_until_ready(seen)
        return time.perf_counter() - began

    def watch(step: int, metrics: dict[str, Any]) -> None:
        nonlocal start
        if "epoch" in metrics:  # all its steps have ended
            whole = time.perf_counter() - start
            rows.append((whole, bare(), waits[-1]))
            waits.append(0.0)
            start = time.perf_counter()

    plain = Pictures.batches

    def timed(self: Pictures, epoch: int, start: int = 0) -> Iterator:
        batches = plain(self, epoch, start)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            waits[-1] += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    Pictures.batches = timed
    try:
        jaxonnx.train(
            model,
            root,
            loss=LOSS,
            optimizer=optax.adam(LEARNING_RATE),
            batch_size=options.batch,
            epochs=options.epochs + 1,
            preprocess=preprocess,
            on_log=watch,
            progress=False,
        )
    finally:
        Pictures.batches = plain
    return 1e3 * np.array(rows[1:]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pictures = [name for name, n in NETWORKS.items() if n.shape[1:2] == (3,)]
    parser.add_argument("--network", choices=pictures, default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="that the network takes")
    parser.add_argument("--count", type=int, default=128, help="of pictures")
    parser.add_argument("--from", dest="source", default="224x224", metavar="HxW")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    keep_pages()
    height, width = map(int, options.source.split("x"))
    network = NETWORKS[options.network]
    network = replace(network, shape=(options.batch, 3, options.size, options.size))
    console = Console(width=100)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = draw(folder / "photos", options.count, (height, width))
        write(network, folder / "network.onnx")
        model = jaxonnx.load(folder / "network.onnx")
        table = Table("part", "ms", title=f"JPEGs of {options.source}, one thread")
        for part, value in parts(paths, images.layout(model), options.batch).items():
            table.add_row(part, f"{value:.2f}")
        console.print(table)
        console.print(f"{options.network}, {options.batch} a step, {jax.devices()[0].device_kind}")
        for way, said in WAYS.items():
            times = loop(model, folder / "photos", options, said)
            whole, bare, waited = np.median(times, axis=0)
            low, middle, high = np.quantile(
                100 * (times[:, 0] / times[:, 1] - 1), (0.25, 0.5, 0.75)
            )
            console.print(
                f"{way}: train {whole:.1f} ms, bare {bare:.1f} ms, added {middle:.1f} % "
                f"({low:.1f} to {high:.1f}), waited {waited:.1f} ms"
            )


if __name__ == "__main__":
    main()
