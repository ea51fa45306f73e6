"""Pictures as inputs of a network, and its outputs as named classes."""

from dataclasses import asdict, dataclass, fields, replace
from math import isqrt
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._file import records
from jaxonnx.errors import Error, InputError
from jaxonnx.model import Model

KEY = "jaxonnx.image"
"""The entry of `metadata_props` with the fields of `Preparation` as JSON."""


@dataclass(frozen=True)
class Preparation:
    """`(pixel * scale - mean) / std` for pixels from 0 to 255; mean and std per channel or one."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    labels: tuple[str, ...] = ()
    """The names of the classes, in the order of the network's output."""

    def __call__(self, pixels: np.ndarray, layout: "Layout") -> np.ndarray:
        """Convert uint8[n, height, width, channels] to the network's input.

        Raises:
          InputError: mean or std do not fit the channels, or are set for a network of pixels.
        """
        for name, value in (("mean", self.mean), ("std", self.std)):
            if len(value) not in (1, layout.channels) or (name == "std" and min(value) <= 0):
                raise InputError(
                    f"{name} {value} does not fit a network that takes {layout.channels} channels"
                )
        if layout.dtype == np.uint8:
            if (self.scale, {*self.mean}, {*self.std}) != (1, {0}, {1}):
                raise InputError("the network takes pixels as they are: scale 1, mean 0, std 1")
            return layout.place(pixels)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        x = (pixels * np.float32(self.scale) - mean) / std
        return layout.place(x.astype(layout.dtype))


@dataclass(frozen=True)
class Layout:
    """The place of the picture in a network's input."""

    size: tuple[int, int]
    """Height and width."""
    channels: int
    kind: str
    """`"NCHW"`, `"NHWC"`, `"NHW"` or `"N"` (the pixels of a row after those of the row above)."""
    dtype: np.dtype
    """A floating-point type, or uint8."""

    def place(self, x: np.ndarray) -> np.ndarray:
        """Convert [n, height, width, channels] to this input."""
        if self.kind == "NCHW":
            return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        if self.kind == "NHWC":
            return x
        return x[..., 0] if self.kind == "NHW" else x.reshape(len(x), -1)


def preparation(model: Model) -> Preparation | None:
    """Return what the file says about its pictures, None if nothing.

    Raises:
      ModelError: the entry is malformed.
    """
    return records.get(model.proto, KEY, _made)


def _made(entry: Any) -> Preparation:
    if odd := entry.keys() - {field.name for field in fields(Preparation)}:
        raise ValueError(f"unknown: {', '.join(sorted(odd))}")
    lists = {k: tuple(v) for k, v in entry.items() if k != "scale"}
    return Preparation(**entry | lists)


def with_preparation(model: Model, value: Preparation) -> Model:
    """Return the model with the entry that `preparation` reads."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    records.put(proto, KEY, asdict(value))
    return replace(model, proto=proto)


def layout(model: Model, size: tuple[int, int] | None = None) -> Layout:
    """Return how the model's only input takes a picture; `size` if the file leaves it open.

    Raises:
      InputError: it does not take a picture, or its size is not known.
    """
    if len(model.inputs) != 1:
        raise InputError(f"the network takes {len(model.inputs)} inputs, not one picture")
    (value,) = model.inputs
    dims: Any = (value.shape or ())[1:]
    if value.dtype is None or not (
        value.dtype == np.uint8 or jnp.issubdtype(value.dtype, jnp.floating)
    ):
        raise InputError(f"input {value} takes no picture")
    if len(dims) == 3 and dims[0] in (1, 3):
        kind, channels, sides = "NCHW", dims[0], dims[1:]
    elif len(dims) == 3 and dims[2] in (1, 3):
        kind, channels, sides = "NHWC", dims[2], dims[:2]
    elif len(dims) == 2:
        kind, channels, sides = "NHW", 1, dims
    elif len(dims) == 1 and isinstance(dims[0], int):
        side = isqrt(dims[0])
        kind, channels = "N", 1
        sides = size or (side, side)
        if sides[0] * sides[1] != dims[0]:
            raise InputError(f"input {value} is not a square of pixels: say its size (--size HxW)")
    else:
        raise InputError(
            f"input {value} takes no picture: neither one nor three channels of pixels"
        )
    wanted = size or (None, None)
    known: Any = tuple(s if isinstance(s, int) else w for s, w in zip(sides, wanted, strict=True))
    if None in known:
        raise InputError(f"input {value} takes pictures of any size: say which (--size HxW)")
    if size and known != size:
        raise InputError(f"input {value} takes pictures of {known[0]}x{known[1]}")
    return Layout(known, channels, kind, value.dtype)


def read(path: Path, where: Layout) -> np.ndarray:
    """Read a picture as uint8[1, height, width, channels], its middle resized to fill the size.

    Raises:
      Error: Pillow is not installed.
      InputError: the file is not a picture.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise Error("pictures need Pillow: pip install 'jaxonnx[image]'") from error
    if not path.is_file():
        raise InputError(f"'{path}' is not a file")
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would clip these to 255
                raise InputError(f"'{path}' has pixels of more than 8 bits: convert it first")
            picture = ImageOps.exif_transpose(image).convert("L" if where.channels == 1 else "RGB")
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"'{path}' is no picture that Pillow reads ({error})") from error
    height, width = where.size
    fitted = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(1, height, width, where.channels)


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
    return prepare(pixels, where)
