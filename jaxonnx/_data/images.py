"""Preprocessing of images: metadata in the file, and reading with Pillow."""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from jaxonnx._io import records
from jaxonnx._io.protos import text
from jaxonnx._require import require, require_choice
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import Error, InputError, UnsupportedError

M = TypeVar("M", bound=Network)

KEY = records.IMAGE
"""The entry of `metadata_props` with the fields of `Preparation` as JSON."""

_RANGES = {
    "nominalrange_0_255": {"scale": 1.0},
    "normalized_0_1": {"scale": 1 / 255},
    "normalized_1_1": {"scale": 1 / 255, "mean": (0.5,), "std": (0.5,)},
}
"""The preprocessing that each value of `Image.NominalPixelRange` in ONNX's own metadata means
(MetadataProps.md)."""

_NUMBERS = {"scale", "mean", "std"}
"""The fields that say what becomes of the numbers of pixels."""

_KINDS = {
    "labels": (str, int, float),
    "order": (str,),
    "size": (int,),
    "stretch": (bool,),
    "filter": (str,),
}
"""The Python types of fields in the file's entry; the other fields are numbers."""

_ORIENTATION = 0x0112
"""The tag of EXIF whose values above 4 turn an image by a quarter."""

_BROKEN = (OSError, SyntaxError, ValueError, struct.error)
"""Exceptions of Pillow for truncated or corrupt files."""


FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters that resize images, in the order of Pillow's numbers."""


@dataclass(frozen=True)
class Preparation:
    """`(pixel * scale - mean) / std` for pixels from 0 to 255; mean and std per channel or one."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    labels: tuple[str, ...] = ()
    """The names of the classes, in the order of the network's output."""
    order: str = "RGB"
    """The order of the channels, of `mean` and of `std`: `"RGB"` or `"BGR"`."""
    crop: float = 1.0
    """The fraction of each side that the center crop keeps: 0.875 for 224 of 256."""
    size: tuple[int, int] | None = None
    """Height and width, for a network that takes any size."""
    stretch: bool = False
    """Whether the image is stretched to the aspect ratio of the input, in place of a crop to it."""
    filter: str = "bilinear"
    """The filter that resizes images, one of `FILTERS`."""

    def check(self, layout: "Layout") -> None:
        """Raise an `InputError` if these settings do not fit the layout of the network's input."""
        for name, value in (("mean", self.mean), ("std", self.std)):
            wrong = not np.isfinite(value).all() or (name == "std" and min(value) <= 0)
            if len(value) not in (1, layout.channels) or wrong:
                raise InputError(
                    f"{name} {value} does not fit a network that takes {layout.channels} channels"
                )
        require("scale", self.scale, np.isfinite(self.scale), "a finite number")
        require_choice("order", self.order, ("RGB", "BGR"))
        require("crop", self.crop, 0 < self.crop <= 1, "a share above 0, up to 1")
        require("stretch", self.stretch, isinstance(self.stretch, bool), "True or False")
        require_choice("filter", self.filter, FILTERS)
        pixels = (self.scale, {*self.mean}, {*self.std}) == (1, {0}, {1})
        if layout.dtype == np.uint8 and not pixels:
            raise InputError("the network takes pixels as they are: scale 1, mean 0, std 1")

    def __call__(self, pixels: Any, layout: "Layout") -> Any:
        """Convert RGB pixels [n, height, width, channels] from 0 to 255 to the network's input.

        Raises:
          InputError: mean or std do not fit the channels, or are set for a network of pixels.
        """
        self.check(layout)
        x = pixels[..., ::-1] if self.order == "BGR" else pixels
        if layout.dtype != np.uint8:
            mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
            x = (x * np.float32(self.scale) - mean) / std
        return layout.place(x.astype(layout.dtype))


@dataclass(frozen=True)
class Layout:
    """The size and layout of images in a network's input."""

    size: tuple[int, int]
    """Height and width."""
    channels: int
    kind: str
    """`"NCHW"`, `"NHWC"`, `"NHW"` or `"N"` (the pixels of a row after those of the row above)."""
    dtype: np.dtype
    """A floating-point type, or uint8."""

    def place(self, x: Any) -> Any:
        """Convert images [n, height, width, channels] to this layout."""
        if self.kind == "NCHW":
            return x.transpose(0, 3, 1, 2)
        if self.kind == "NHWC":
            return x
        return x[..., 0] if self.kind == "NHW" else x.reshape(len(x), -1)


def preparation(model: Network) -> Preparation:
    """Return the preprocessing that the file or its folder declares, or the default.

    The entry that jaxonnx writes takes precedence over the files beside the graph, and these over
    the metadata that ONNX defines for images.

    Raises:
      ModelError: the entry, or a file beside the graph, is malformed.
    """
    usual = Preparation(scale=1 if model.inputs[0].dtype == np.uint8 else 1 / 255)
    return replace(usual, **_read_declaration(model))


def says_numbers(model: Network) -> bool:
    """Check whether a network declares how to scale pixels, or takes uint8 pixels unscaled."""
    return model.inputs[0].dtype == np.uint8 or bool(_read_declaration(model).keys() & _NUMBERS)


def _read_declaration(model: Network) -> dict[str, Any]:
    """Return the fields of `Preparation` that the file and the files beside it give."""
    beside, (first, *_) = dict(model.companion.image_settings), model.inputs
    shape = (model.outputs[0].shape or (None,)) if model.outputs else (None,)
    fits = not model.heads and len(beside.get("labels", ())) == shape[-1]
    dropped = {"labels"} if not fits else set()
    if first.dtype == np.uint8:
        dropped |= _NUMBERS
    if all(isinstance(n, int) for n in (first.shape or (None,))[1:]):
        dropped.add("size")  # the file has one
    beside = {name: value for name, value in beside.items() if name not in dropped}
    entry = records.get(model.proto, KEY, _entry) or {}
    return {**_standard(model.proto), **beside, **entry}


def _entry(entry: Any) -> dict[str, Any]:
    """Return the file's entry as arguments of `Preparation`.

    Raises:
      ValueError: a field is unknown or has another type.
    """
    if unknown := entry.keys() - {field.name for field in fields(Preparation)}:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    lists = ("mean", "std", "labels", "size")
    settings = {name: tuple(value) if name in lists else value for name, value in entry.items()}
    for name, value in settings.items():
        parts = value if name in lists else (value,)
        kinds = _KINDS.get(name, (int, float))
        wrong = name == "size" and len(parts) != 2
        if wrong or not all(isinstance(part, kinds) for part in parts):
            raise ValueError(f"{name} is {value!r}")
    return settings


def _standard(proto: ModelProto) -> dict[str, Any]:
    """Return the fields of `Preparation` that ONNX's own image metadata give."""
    metadata = {text(e.key).lower(): text(e.value).lower() for e in proto.metadata_props}
    bgr = metadata.get("image.bitmappixelformat", "").startswith("bgr")
    return {
        **_RANGES.get(metadata.get("image.nominalpixelrange", ""), {}),
        **({"order": "BGR"} if bgr else {}),
    }


def with_preparation(model: M, value: Preparation) -> M:
    """Return the model with an entry for `preparation` in its file."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    # newer fields are left out at their default, so that readers that do not know them accept it
    new = {"order": "RGB", "crop": 1.0, "size": None, "stretch": False, "filter": "bilinear"}
    entry = {k: v for k, v in asdict(value).items() if k not in new or v != new[k]}
    records.put(proto, KEY, entry)
    return replace(model, proto=proto)


def layout(model: Network, size: tuple[int, int] | None = None) -> Layout:
    """Return the layout of images in the model's only input.

    Args:
      model: the network.
      size: height and width, if the file leaves them open.

    Raises:
      InputError: the input does not take an image, or its size is not known.
    """
    if len(model.inputs) != 1:
        raise InputError(f"the network takes {len(model.inputs)} inputs, not one picture")
    (value,) = model.inputs
    dims: Any = (value.shape or ())[1:]
    if value.dtype is None or not (
        value.dtype == np.uint8 or jnp.issubdtype(value.dtype, jnp.floating)
    ):
        raise InputError(f"input {value} does not take images")
    if len(dims) == 3 and not any(isinstance(size, int) for size in dims):
        dims = (_count_channels(model.proto, value.name), *dims[1:])
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
            f"input {value} does not take images: it has neither one nor three channels"
        )
    fixed = size or (None, None)
    sizes: Any = tuple(s if isinstance(s, int) else w for s, w in zip(sides, fixed, strict=True))
    if None in sizes:
        raise InputError(
            f"input {value} takes pictures of any size: say which (--size HxW; in Python "
            "preprocess={'size': (height, width)})"
        )
    if size and sizes != size:
        raise InputError(f"input {value} takes pictures of {sizes[0]}x{sizes[1]}")
    return Layout(sizes, channels, kind, value.dtype)


def _count_channels(proto: ModelProto, name: str) -> int | None:
    """Return the channels of the convolution that reads an input (optimum leaves its axes open)."""
    weights = {tensor.name: tensor.dims for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Conv" and node.input[0] == name and node.input[1] in weights:
            return weights[node.input[1]][1]
    return None


def read(path: Path, where: Layout, how: Preparation = Preparation()) -> np.ndarray:
    """Read an image file as uint8[1, height, width, channels]: a center crop, resized to fit.

    Args:
      path: the file.
      where: the size and the channels.
      how: the crop, and how it is resized.

    Raises:
      Error: Pillow is not installed.
      InputError: the file is not a picture.
    """
    Image, ImageOps = _pillow()
    height, width = where.size
    picture = decode(path, where.channels, max(where.size) / how.crop)
    border, kind = (1 - how.crop) / 2, Image.Resampling[how.filter.upper()]
    if how.stretch:
        left, top = border * picture.width, border * picture.height
        box = (left, top, picture.width - left, picture.height - top)
        fitted = picture.resize((width, height), kind, box)
    else:
        fitted = ImageOps.fit(picture, (width, height), kind, bleed=border)
    return np.asarray(fitted).reshape(1, height, width, where.channels)


def read_whole(path: Path, where: Layout, size: tuple[int, int]) -> tuple[np.ndarray, float]:
    """Read a whole image file, stretched to a size.

    Returns:
      The pixels, uint8[height, width, channels], and the aspect ratio (width / height) of the file.

    Raises:
      Error: Pillow is not installed.
      InputError: the file is not a picture.
    """
    Image, _ = _pillow()
    picture = decode(path, where.channels, max(size))
    resized = picture.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(resized).reshape(*size, where.channels), picture.width / picture.height


def decode(source: Any, channels: int = 3, side: float = 2**20) -> Any:
    """Open an image with Pillow, upright (by EXIF), in grey or RGB.

    Args:
      source: the path or the content of a file, or an image of Pillow's.
      channels: 1 for grey, 3 for RGB.
      side: the side that is needed. JPEGs are decoded at a half, a quarter or an eighth of their
        size if that is at least twice this, which is faster.

    Raises:
      InputError: the file is not an image that Pillow reads.
      UnsupportedError: its pixels have 32 bits.
    """
    _, ImageOps = _pillow()
    with _open(source) as image:
        if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):
            # scale a grey image of 16 bits to 8 bits: 65535 is 255
            scaled = (np.asarray(image).astype(np.uint32) + 128) // 257  # rounded
            result = _pillow()[0].fromarray(scaled.astype(np.uint8))
            result.info = image.info
            image = result
        if image.mode[0] in "IF":  # Pillow would clip these to 255
            raise UnsupportedError(
                f"'{source}' has pixels of 32 bits, whose range is not known: convert it to 8 or "
                "16 bits first"
            )
        image.draft(None, (round(2 * side), round(2 * side)))
        upright = ImageOps.exif_transpose(image)
        if "transparency" in upright.info and upright.mode == "P":
            upright = upright.convert("RGBA")  # Pillow warns of the direct way
        return upright.convert("L" if channels == 1 else "RGB")


def measure(source: Any) -> tuple[int, int]:
    """Return the width and height of an image, upright, without decoding it.

    Raises:
      InputError: the source is not an image that Pillow reads.
    """
    with _open(source) as image:
        width, height = image.size
        if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it for that
            return width, height
        turned = image.getexif().get(_ORIENTATION, 1) > 4
        return (height, width) if turned else (width, height)


@contextmanager
def _open(source: Any) -> Iterator[Any]:
    """Open an image with Pillow; errors of reading it become an InputError."""
    Image, _ = _pillow()
    if hasattr(source, "convert"):
        yield source
        return
    content = isinstance(source, bytes)
    if not content and not source.is_file():
        raise InputError(f"'{source}' is not a file")
    try:
        with Image.open(io.BytesIO(source) if content else source) as image:
            yield image
    except UnsupportedError:
        raise
    except (*_BROKEN, Image.DecompressionBombError) as error:
        name = "an image in the data" if content else f"'{source}'"
        raise InputError(f"{name} is not an image that Pillow reads ({error})") from error


def _pillow() -> Any:
    """Import `Image` and `ImageOps` of Pillow, at first use since that takes a while."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise Error("pictures need Pillow: pip install 'jaxonnx[image]'") from error
    return Image, ImageOps
