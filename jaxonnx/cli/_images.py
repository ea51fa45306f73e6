"""Read images as inputs of a network, and name the classes of its outputs."""

import jax
import numpy as np

from jaxonnx._data.images.preparation import Layout, Preparation
from jaxonnx.errors import InputError
from jaxonnx.model import Model


def classify(
    model: Model, pixels: np.ndarray, prepare: Preparation, where: Layout
) -> list[tuple[str, float]]:
    """Return the classes of one picture (`read`) with probabilities, the most probable first.

    Raises:
      InputError: the output is not a row of class scores, or the labels do not fit it.
    """
    (value,) = model.inputs
    size = value.shape[0] if value.shape and isinstance(value.shape[0], int) else 1
    outputs = model(np.repeat(prepare(pixels, where), size, axis=0))
    if isinstance(outputs, tuple):
        raise InputError(f"the network has {len(outputs)} outputs, not one row of scores")
    scores = np.asarray(outputs, np.float64)
    if scores.ndim < 2 or scores[0].size != scores.shape[1] or scores.shape[1] < 2:
        raise InputError(f"the output {list(scores.shape)} is not one score for each class")
    row = scores[0].reshape(-1)
    if not np.isfinite(row).all():
        raise InputError("the scores of the network are not all finite numbers")
    if not (row.min() >= 0 and abs(row.sum() - 1) < 1e-2):  # else the network ends in a softmax
        row = np.asarray(jax.nn.softmax(row), np.float64)
    labels = prepare.labels or tuple(map(str, range(row.size)))
    if len(labels) != row.size:
        raise InputError(f"there are {len(labels)} labels for {row.size} classes")
    return [(labels[i], float(row[i])) for i in np.argsort(-row, kind="stable")]


def batch(images: np.ndarray, prepare: Preparation, where: Layout) -> np.ndarray:
    """Convert uint8 pictures [n, h, w], [n, h, w, c] or [n, c, h, w] to the network's input.

    Raises:
      InputError: their shape does not fit the network.
    """
    pixels = images[..., None] if images.ndim == 3 else images
    wanted = (*where.size, where.channels)
    if pixels.ndim == 4 and pixels.shape[1:] != wanted:
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.shape[1:] != wanted:
        raise InputError(
            f"pictures of shape {list(images.shape[1:])}, but the network takes {where.size[0]}x"
            f"{where.size[1]} with {where.channels} channel{'s' * (where.channels > 1)}"
        )
    return np.ascontiguousarray(prepare(pixels, where))
