"""Images for vision-language models, read as the image processors of transformers read them.

`preprocessor_config.json` has their settings. Results equal those of the processors that work on
Pillow's images (tests/oracles/test_vision_language.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxonnx._safe_read import wrap_errors
from jaxonnx.errors import TrainingError

_CROPS = ("CLIP", "Llava")
_KINDS = (*_CROPS, "Siglip", "GotOcr2")
"""The names of image processors, in front of "ImageProcessor"; the first two crop."""
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5,) * 3, (0.5,) * 3
_BICUBIC = 3


@dataclass(frozen=True)
class ImageProcessor:
    """The preprocessing of images.

    Attributes:
      size: the height and width to resize to, or the length of the shorter side.
      crop: the height and width of the center crop; None for no crop.
      scale: of the pixels, from 0 to 255; None leaves them.
      mean, std: of the scaled channels.
      resample: Pillow's filter.
      tiles: the fewest and the most tiles of an image; None for one image.
    """

    size: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    resample: int
    tiles: tuple[int, int] | None

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> ImageProcessor:
        """Parse the settings of a folder.

        Raises:
          TrainingError: they are missing, damaged, or of a processor that is not known.
        """
        kind = settings.get("image_processor_type", settings.get("feature_extractor_type", ""))
        name = next((n for n in _KINDS if str(kind).startswith(n)), None)
        if name is None or settings.get("do_pad"):
            what = f"{kind!r} with do_pad" if name else repr(kind) if kind else "no image processor"
            raise TrainingError(
                f"'{where}': preprocessor_config.json has {what}; images are read as those of "
                f"{', '.join(_KINDS)} are: take the original checkpoint's file, or pass "
                "pixel_values as an array, with tokens"
            )
        mean, std = _CLIP if name != "Siglip" else _HALF
        tiles = settings.get("min_patches", 1), settings.get("max_patches", 12)
        crops, normalizes = (
            settings.get("do_center_crop", name in _CROPS),
            settings.get("do_normalize", True),
        )
        with wrap_errors(f"'{where}': preprocessor_config.json is damaged", TrainingError):
            return cls(
                size=_read_size(settings["size"]) if settings.get("do_resize", True) else None,
                crop=_read_sides(settings["crop_size"]) if crops else None,
                scale=settings.get("rescale_factor", 1 / 255)
                if settings.get("do_rescale", True)
                else None,
                mean=tuple(settings.get("image_mean", mean)) if normalizes else None,
                std=tuple(settings.get("image_std", std)) if normalizes else None,
                resample=settings.get("resample", _BICUBIC),
                tiles=tiles if settings.get("crop_to_patches") and tiles[1] > 1 else None,
            )

    def count_tiles(self, width: int, height: int) -> int:
        """Return the number of tiles of an image of a size: a grid of them, and a small image."""
        columns, rows = self._choose_grid(width, height)
        return columns * rows + (columns * rows > 1)

    def read(self, image: Any) -> np.ndarray:
        """Convert an RGB image of Pillow's to float32[tiles, 3, height, width]."""
        columns, rows = self._choose_grid(*image.size)
        if self.tiles is None:
            parts = [self._crop(np.asarray(self._resize(image)))]
        else:
            height, width = self.sides
            resized = np.asarray(image.resize((width * columns, height * rows), self.resample))
            split = resized.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
            parts = [*split.reshape(-1, height, width, 3)]
            if len(parts) > 1:
                parts.append(np.asarray(image.resize((width, height), self.resample)))
        pixels = np.stack(parts).astype(np.float32)
        pixels = pixels if self.scale is None else pixels * np.float32(self.scale)
        if self.mean is not None and self.std is not None:
            pixels = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return pixels.transpose(0, 3, 1, 2)

    @property
    def sides(self) -> tuple[int, int]:
        """The height and width of an image or a tile."""
        sides = self.crop or self.size
        if not isinstance(sides, tuple):
            raise TrainingError(f"preprocessor_config.json makes images of no one size: {sides}")
        return sides

    def _choose_grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of tiles whose ratio is nearest to that of an image.

        Of equal ratios the grid with more tiles is chosen, unless the image has less than half of
        their pixels.
        """
        if self.tiles is None:
            return 1, 1
        least, most = self.tiles
        sides = range(1, most + 1)
        grids = [(c, r) for c in sides for r in sides if least <= c * r <= most]
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * np.prod(self.sides) * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (columns, rows), distance
        return best

    def _resize(self, image: Any) -> Any:
        if self.size is None:
            return image
        if isinstance(self.size, tuple):
            height, width = self.size
            return image.resize((width, height), self.resample)
        shorter = min(image.size)
        sides = (self.size if n == shorter else int(self.size * n / shorter) for n in image.size)
        return image.resize((*sides,), self.resample)

    def _crop(self, pixels: np.ndarray) -> np.ndarray:
        """Return the center of pixels [height, width, 3], with zeros around what is too small."""
        for axis, wanted in enumerate(self.crop or ()):
            lack = max(wanted - pixels.shape[axis], 0)
            pads = [(0, 0)] * 3
            pads[axis] = (-(-lack // 2), lack // 2)
            pixels = np.pad(pixels, pads)
            start = (pixels.shape[axis] - wanted) // 2
            pixels = pixels.take(range(start, start + wanted), axis)
        return pixels


def _read_size(size: Any) -> tuple[int, int] | int:
    if isinstance(size, Mapping) and "shortest_edge" in size:
        if size.get("longest_edge"):
            raise ValueError("size has a longest_edge")
        return int(size["shortest_edge"])
    return size if isinstance(size, int) else _read_sides(size)


def _read_sides(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return int(size["height"]), int(size["width"])
