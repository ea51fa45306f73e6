"""Whether an exported step trains as jaxonnx does, step by step, on handwritten digits.

Rounding grows as training goes on: two runs of one program that add in another order part as well.
What two implementations have in common shows in float64, where rounding begins nine digits later;
what float32 makes of it shows beside runs of jaxonnx itself, from weights whose last bits
differ, and in float64.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network
from benchmarks.speed.doubles import doubled, for_onnxruntime
from benchmarks.systems import LOSS, Exported, all_trained

SIZES = {"mlp": 64, "lenet": 32, "resnet18-224": 2}
"""Examples in a batch; 8 in others: more only takes longer."""

TOLERANCE = 1e-5
"""Relative difference of losses from which on two runs have parted."""


class Run(NamedTuple):
    """The losses of a run, and the tensors of the file after it."""

    losses: np.ndarray
    tensors: dict[str, Any]


class Difference(NamedTuple):
    """How far a run is from another one.

    Attributes:
      first: the first step, counted from 1, whose losses differ by more than `TOLERANCE`, if any.
      worst: the largest relative difference of losses.
      last: that of the last step.
      weights: the largest difference of numbers, relative to the largest of their tensor.
    """

    first: int | None
    worst: float
    last: float
    weights: float


def difference(run: Run, other: Run) -> Difference:
    losses = np.abs(run.losses - other.losses) / np.abs(other.losses)
    above = np.flatnonzero(losses > TOLERANCE)
    weights = 0.0
    for name, value in other.tensors.items():
        a, b = np.asarray(run.tensors[name], np.float64), np.asarray(value, np.float64)
        weights = max(weights, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2)))
    first = int(above[0]) + 1 if len(above) else None
    return Difference(first, float(losses.max()), float(losses[-1]), weights)


def batches(network: Network, size: int, steps: int, dtype: Any) -> Iterator[tuple]:
    """Yield batches of scikit-learn's digits in the form that a network takes, in epochs."""
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    rng = np.random.default_rng(0)
    direction = rng.normal(size=network.shape[-1])
    order = np.empty(0, int)
    for _ in range(steps):
        if len(order) < size:
            order = rng.permutation(len(images))
        rows, order = order[:size], order[size:]
        x = _shaped(network, images[rows], direction)
        yield x if network.tokens else x.astype(dtype), labels[rows].astype(np.int32)


def _shaped(network: Network, pixels: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return tokens, sequences or images of 8x8 pixels between 0 and 16."""
    if network.tokens:
        return pixels.astype(np.int32)
    scaled = pixels / 16
    if len(network.shape) == 3:
        return scaled[..., None] * direction
    channels, height, width = network.shape[1:] if len(network.shape) == 4 else (1, 28, 28)
    images = scaled.reshape(-1, 8, 8)
    for axis, size in ((1, height), (2, width)):
        images = _stretched(images, size, axis)
    images = np.repeat(images[:, None], channels, axis=1)
    return images.reshape(len(pixels), *network.shape[1:])


def _stretched(images: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Return images of more places along an axis, by linear interpolation."""
    at = np.linspace(0, images.shape[axis] - 1, size)
    low = np.minimum(at.astype(int), images.shape[axis] - 2)
    part = np.expand_dims(at - low, axis=tuple({0, 1, 2} - {axis}))
    return images.take(low, axis) * (1 - part) + images.take(low + 1, axis) * part


class Trainer:
    """One network and optimizer, trained in several ways on the same batches."""

    def __init__(
        self,
        path: Path,
        network: Network,
        size: int,
        steps: int,
        optimizer: Any,
        frozen: bool = False,
    ):
        self.path, self.network, self.optimizer, self.frozen = path, network, optimizer, frozen
        self.data = network, size, steps

    def model(self, dtype: Any) -> Any:
        import jaxonnx

        proto = onnx.load(self.path)
        model = all_trained(jaxonnx.load(doubled(proto) if dtype == np.float64 else proto))
        return model.with_statistics("frozen") if self.frozen else model

    def here(self, dtype: Any, moved: bool = False) -> Run:
        """Train in jaxonnx, as it is or with all that rounding decides in another way.

        Then each weight starts one unit in the last place above or below what it is, and the
        examples of each batch are in another order.
        """
        import jax

        from jaxonnx.training import step

        rng, model = np.random.default_rng(1), self.model(dtype)
        if moved:
            ways = {
                name: rng.choice([-np.inf, np.inf], w.shape) for name, w in model.params.items()
            }
            moves = {n: np.nextafter(w, ways[n].astype(w.dtype)) for n, w in model.params.items()}
            model = model.replace(params=moves)
        one = step(model, LOSS, self.optimizer)
        update, state, losses = jax.jit(one.update, donate_argnums=0), one.init(), []
        for x, y in batches(*self.data, dtype):
            order = rng.permutation(len(x)) if moved else slice(None)
            state, (loss, _) = update(state, (x[order], y[order]))
            losses.append(float(loss))
        file = one.to_file(state)
        tensors = {name: np.asarray(x) for name, x in (file.params | file.state).items()}
        return Run(np.array(losses), tensors)

    def there(self, dtype: Any) -> Run:
        """Train in onnxruntime."""
        import jaxonnx

        example = next(batches(*self.data, dtype))
        folder = self.path.with_suffix(f".{np.dtype(dtype)}")
        jaxonnx.export_step(self.model(dtype), folder, example, LOSS, self.optimizer)
        if dtype == np.float64:
            onnx.save(for_onnxruntime(onnx.load(folder / "step.onnx")), folder / "step.onnx")
        exported = Exported(folder)
        losses = [exported.step(x, y) for x, y in batches(*self.data, dtype)]
        return Run(np.array(losses), exported.tensors())


def agreement(
    name: str, folder: Path, steps: int, optimizer: Any, frozen: bool = False
) -> dict[str, Difference]:
    """Train in all ways, with `frozen` statistics or those of batches; return the differences."""
    import jax

    write(NETWORKS[name], folder / f"{name}.onnx")
    path, size = folder / f"{name}.onnx", SIZES.get(name, 8)
    trainer = Trainer(path, NETWORKS[name], size, steps, optimizer, frozen)
    with jax.enable_x64(True):
        exact = trainer.here(np.float64)
        wide = trainer.there(np.float64)
    here, there = trainer.here(np.float32), trainer.there(np.float32)
    return {
        "float64": difference(wide, exact),
        "float32": difference(there, here),
        "jaxonnx, last bits moved": difference(trainer.here(np.float32, moved=True), here),
        "jaxonnx, float32 to float64": difference(here, exact),
    }
