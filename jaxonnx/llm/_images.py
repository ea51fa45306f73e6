"""Images in rows of texts: where messages have them, and the tokens that stand for them."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from jaxonnx._data.images import decode, measure
from jaxonnx._data.kinds import drop_nones
from jaxonnx._data.ragged import LazyColumn
from jaxonnx._files import wrap_errors
from jaxonnx._graph.bind import bind
from jaxonnx._rewrite.network import Network, cut
from jaxonnx._run.shapes import evaluate_shapes
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.llm._shapes import Texts, to_messages
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.llm._vision_language import PIXELS, find_features

COLUMNS = "images", "image"
"""Columns with the images that messages refer to without a file of their own."""
_KEYS = "image", "path", "url", "bytes", "image_url"
_MARKS = "start_image_token", "end_image_token"


@dataclass(frozen=True)
class ImageReader:
    """Finds the images of rows, and writes their tokens.

    Attributes:
      processor: the preprocessing.
      shape: of an image or a tile in the model's input.
      dtype: of that input.
      takes_tiles: whether the input has several images or tiles for each row.
      token: the token that stands for a feature.
      text: the same in texts.
      count: the number of features of an image or a tile.
      marks: the tokens before and behind those of an image.
    """

    processor: ImageProcessor
    shape: tuple[int, ...]
    dtype: np.dtype
    takes_tiles: bool
    token: int
    text: str
    count: int
    marks: tuple[list[int], ...]

    @classmethod
    def of(cls, model: Network, tokenizer: Tokenizer) -> ImageReader | None:
        """Return the reader for a vision-language model; None for other models.

        Raises:
          TrainingError: the folder does not say how images are read, or this does not fit.
        """
        folder = model.folder
        if folder is None or folder.image_token is None:
            return None
        (value,) = (v for v in model.inputs if v.name == PIXELS)
        assert value.shape is not None
        assert value.dtype is not None
        processor = ImageProcessor.of(folder.read_image_settings(), str(folder.path))
        expected = (3, *processor.sides)
        if value.shape[-3:] != expected and all(isinstance(n, int) for n in value.shape[-3:]):
            raise TrainingError(
                f"'{folder.path}': preprocessor_config.json makes images {[*expected]}, and the "
                f"model takes {value}"
            )
        takes_tiles = len(value.shape) > 4
        marks = tokenizer.find_tokens(_MARKS) if takes_tiles else ([], [])
        name, count = tokenizer.decode([folder.image_token]), _count_features(model, expected)
        return cls(
            processor, expected, value.dtype, takes_tiles, folder.image_token, name, count, marks
        )

    def find(
        self, where: str, row: Mapping[str, Any], texts: Texts, folder: Path
    ) -> tuple[Texts, RowImages]:
        """Return the images of a row, and its texts with plain parts for images.

        Args:
          where: the row, for errors.
          row: its columns.
          texts: what the row has.
          folder: that of the file with the row; paths are relative to it.

        Raises:
          TrainingError: an image is missing, broken or on the network, or there are too many.
        """
        column = next((row[n] for n in COLUMNS if row.get(n) is not None), [])
        listed = column if isinstance(column, list | tuple) else [column]
        (prompt, first), *others = (self._take(where, x) for x in (texts.prompt, *texts.answers))
        texts = Texts(prompt, tuple(answer for answer, _ in others))
        named, rest = first + others[0][1], iter(listed)
        sources = [next(rest, None) if x is None else x for x in named]
        if None in sources or next(rest, None) is not None:
            raise TrainingError(
                f"{where} has {len(listed)} images in a column, and its texts refer to "
                f"{named.count(None)}"
            )
        if len(sources) > 1 and not self.takes_tiles:
            raise TrainingError(
                f"{where} has {len(sources)} images, and the model takes one for each row"
            )
        files = tuple(_read_source(where, source, folder) for source in sources)
        try:
            tiles = tuple(self.processor.count_tiles(*measure(file)) for file in files)
        except InputError as error:
            raise TrainingError(f"{where}: {error}") from error
        return texts, RowImages(self, where, files, tiles)

    def _take(self, where: str, content: Any) -> tuple[Any, list[Any]]:
        """Return a text or messages without sources of images, and these; None is in a column."""
        if not isinstance(content, list):
            return content, [None] * (content or "").count(self.text)
        taken, sources = [], []
        for message in content:
            parts = message.get("content")
            if not isinstance(parts, list | tuple):
                parts, more = self._take(where, parts)
            else:
                pairs = [self._take_part(where, drop_nones(part)) for part in parts]
                parts, more = [part for part, _ in pairs], [x for _, some in pairs for x in some]
            taken.append({**message, "content": parts})
            sources += more
        return taken, sources

    def _take_part(self, where: str, part: Any) -> tuple[Any, list[Any]]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind == "text":
            return part, [None] * part["text"].count(self.text)
        if kind not in ("image", "image_url"):
            raise TrainingError(
                f"{where} has a part of type {kind!r}: parts of messages must be "
                '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
            )
        source = next((part[key] for key in _KEYS if key in part), None)
        inner = source.get("url") if isinstance(source, Mapping) else None
        return {"type": "image"}, [inner or source]

    def expand(
        self, ids: np.ndarray, places: np.ndarray, images: RowImages, *, whole: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write a token for each feature, and the marks around them, where there is one token.

        Args:
          ids, places: tokens and their spans in the text.
          images: those of the row.
          whole: whether the text has all of them; else it ends before.

        Raises:
          TrainingError: the text has another number of images.
        """
        at = np.flatnonzero(ids == self.token)
        if len(at) > len(images.tiles) or (whole and len(at) != len(images.tiles)):
            raise TrainingError(
                f"{images.where} has {len(images.tiles)} images, and its text has {len(at)} times "
                f"{self.text!r}: the chat template must write it once for each image"
            )
        counts = np.ones(len(ids), int)
        before, behind = self.marks
        first, last = len(before), len(behind)
        for place, tiles in zip(at, images.tiles, strict=False):
            counts[place] = first + tiles * self.count + last
        places, ends = places.repeat(counts, axis=0), counts.cumsum()
        ids = ids.repeat(counts)
        for place in at:
            start, stop = ends[place] - counts[place], ends[place]
            ids[start : start + first] = before
            ids[stop - last : stop] = behind
        return ids, places


@dataclass(frozen=True)
class RowImages:
    """The images of a row, which are read when a batch needs them.

    Attributes:
      reader: reads them.
      where: the row, for errors.
      files: paths, contents of files, or images of Pillow's.
      tiles: the number of tiles of each.
    """

    reader: ImageReader
    where: str
    files: tuple[Any, ...]
    tiles: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.reader.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        many = (max(sum(self.tiles), 1),) if self.reader.takes_tiles else ()
        return many + self.reader.shape

    @property
    def checksum(self) -> int:
        """A number that identifies the images, without reading files."""
        parts = (f.tobytes() if hasattr(f, "convert") else f for f in self.files)  # of Pillow
        encoded = (part if isinstance(part, bytes) else str(part).encode() for part in parts)
        return zlib.crc32(b"\0".join(encoded))

    def read(self) -> np.ndarray:
        """Return the pixels; zeros if there is no image.

        Raises:
          TrainingError: a file cannot be read.
        """
        try:
            parts = [self.reader.processor.read(decode(file)) for file in self.files]
        except InputError as error:
            raise TrainingError(f"{self.where}: {error}") from error
        if not parts:
            return np.zeros(self.shape, self.dtype)
        return np.concatenate(parts).reshape(self.shape).astype(self.dtype)


def is_open(messages: Sequence[Any], variables: Mapping[str, Any]) -> bool:
    """Check whether a chat is to be continued within its last message.

    That is one of the assistant, as in transformers' pipelines, unless variables of the template
    say otherwise (`add_generation_prompt`, `continue_final_message`).
    """
    by_role = to_messages(messages, {})[-1]["role"] == "assistant"
    usual = by_role and not variables.get("add_generation_prompt")
    return bool(variables.get("continue_final_message", usual))


def encode_chat(
    model: Network, tokenizer: Tokenizer, messages: Sequence[Any], **variables: Any
) -> np.ndarray | tuple[np.ndarray, RowImages]:
    """Return the tokens of messages that the assistant answers or continues.

    If they have parts, their images are returned as well.
    """
    if fixed := variables.keys() & {"messages", "tokenize"}:
        raise InputError(f"{', '.join(fixed)}: not a variable of chat templates")
    continued = is_open(messages, variables)
    usual = {"add_generation_prompt": not continued, "continue_final_message": continued}
    variables = {**usual, **variables}
    messages = to_messages(messages, {})
    plain = all(isinstance(message.get("content"), str | None) for message in messages)
    reader = None if plain else ImageReader.of(model, tokenizer)
    if reader is None:
        return tokenizer.apply_chat_template(messages, **variables)
    texts = Texts(messages, ([],))
    texts, images = reader.find("the prompt", {}, texts, Path())
    text = tokenizer.apply_chat_template(texts.prompt, tokenize=False, **variables)
    tokens = tokenizer.locate_tokens(text, special=False)
    return reader.expand(*tokens, images, whole=True)[0], images


def stack_images(prompts: Sequence[Any]) -> tuple[list[Any], np.ndarray | None]:
    """Return the tokens of prompts, and the pixels of all; None if no prompt has images."""
    first = next((prompt[1] for prompt in prompts if _has_images(prompt)), None)
    if first is None:
        return [*prompts], None
    none = replace(first, files=(), tiles=())
    pairs = [prompt if _has_images(prompt) else (prompt, none) for prompt in prompts]
    pixels = LazyColumn([images for _, images in pairs])[np.arange(len(pairs))]
    return [tokens for tokens, _ in pairs], pixels


def _has_images(prompt: Any) -> bool:
    return isinstance(prompt, tuple) and any(isinstance(part, RowImages) for part in prompt)


def _read_source(where: str, source: Any, folder: Path) -> Any:
    """Return the path or the content of a file with an image, or an image of Pillow's."""
    if isinstance(source, Mapping):  # as a Hugging Face Dataset has them
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Path):
        return folder / source
    if isinstance(source, bytes) or hasattr(source, "convert"):
        return source
    if not isinstance(source, str):
        raise TrainingError(
            f"{where}: an image must be a path, a data: URI or an image of Pillow's, got "
            f"{type(source).__name__}"
        )
    kind, _, rest = source.partition(":")
    if kind == "data":
        try:
            return base64.b64decode(rest.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise TrainingError(f"{where}: an image is not valid base64 ({error})") from error
    if kind in ("http", "https"):
        raise TrainingError(
            f"{where}: the image {source!r} is on the network, from where nothing is read: "
            "download it, and name its file"
        )
    return folder / (unquote(rest.removeprefix("//")) if kind == "file" else source)


def _count_features(model: Network, shape: tuple[int, ...]) -> int:
    """Return the number of features of an image or a tile of a shape.

    Raises:
      TrainingError: it depends on the image.
    """
    name = find_features(model.proto)
    part = cut(model.proto, model.graph, model.tensors, [name])
    part.graph.ClearField("value_info")
    (pixels,) = part.graph.input
    dims = pixels.type.tensor_type.shape.dim
    for dim, size in zip(dims, (*[1] * (len(dims) - len(shape)), *shape), strict=True):
        dim.dim_value = size
    graph = bind(part, part.graph, model.tensors.keys())
    shapes = evaluate_shapes(part, graph, model.tensors)
    sizes = shapes.values[name].shape if shapes and name in shapes.values else None
    if sizes is None or not isinstance(sizes[-2], int):
        raise TrainingError(f"the number of features of an image is not known: {sizes}")
    return sizes[-2]


_CROPS = ("CLIP", "Llava")
_KINDS = (*_CROPS, "Siglip", "GotOcr2")
"""The names of image processors, in front of "ImageProcessor"; the first two crop."""
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5,) * 3, (0.5,) * 3
_BICUBIC = 3


@dataclass(frozen=True)
class ImageProcessor:
    """The preprocessing of images by `preprocessor_config.json`, as in transformers.

    Results equal those of the processors that work on Pillow's images
    (tests/oracles/test_vision_language.py).

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
        for axis, length in enumerate(self.crop or ()):
            lack = max(length - pixels.shape[axis], 0)
            pads = [(0, 0)] * 3
            pads[axis] = (-(-lack // 2), lack // 2)
            pixels = np.pad(pixels, pads)
            start = (pixels.shape[axis] - length) // 2
            pixels = pixels.take(range(start, start + length), axis)
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
