"""Folders of images as data: one folder for each class, decoded ahead of time by threads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from threading import Lock
from typing import Any, Self

import jax
import numpy as np

from jaxonnx._arrays import make_key
from jaxonnx._data import images
from jaxonnx._data.augment import Augment, prepare_batch
from jaxonnx._data.batches import Batch, Examples, MemoryPool, prefetch
from jaxonnx._data.images import Layout, Preparation
from jaxonnx._data.kinds import Data, Reading, register_data, size_of_batches
from jaxonnx._require import require
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError, TrainingError, warn

SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_LARGER = 4 / 3
"""The sides of a whole image that is read for random crops, in sides of the network's input."""
_IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
_MASKS = {"annotations", "labels", "mask", "masks", "segmentationclass", "segmentations"}
"""Names (in lower case) of the two folders of a data set for segmentation."""
_TRAIN = {"train", "training"}
_SPLITS = {*_TRAIN, "dev", "eval", "test", "testing", "val", "valid", "validation"}
"""Names (in lower case) of the folders of the parts of a data set."""
_AHEAD = 2
"""Batches decoded ahead of the one in use."""
_KEY = 2**32 - 3
"""Folded into the seed's key for augmentation. Steps fold in
their numbers, which are smaller."""
_LISTED = 8
"""The most names that a message lists."""


class DecodedImages:
    """A cache of decoded images with a limit in bytes, and the images that cannot be read."""

    def __init__(self, limit: int):
        self.broken: dict[Path, InputError] = {}
        self.notes: list[str] = []
        self._free = limit
        self._held: dict[Any, tuple[np.ndarray, float]] = {}
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], tuple[np.ndarray, float]]) -> Any:
        """Return a cached image, or make it and cache it if there is room."""
        entry = self._held.get(key)
        if entry is None:
            entry = make()
            with self._lock:
                if entry[0].nbytes <= self._free and key not in self._held:
                    self._free -= entry[0].nbytes
                    self._held[key] = entry
        return entry

    def release(self) -> None:
        """Empty the cache, and cache nothing from now on."""
        with self._lock:
            self._free = 0
            self._held.clear()


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of images, shared by training and validation."""

    how: Preparation
    """The scaling of pixels, and the names of the classes."""
    where: Layout
    """The network's input."""
    augment: Augment
    workers: int
    """Threads that decode."""
    decoded: DecodedImages


@dataclass(frozen=True)
class Folder:
    """Image files with their classes."""

    path: str
    """The folder."""
    paths: tuple[Path, ...]
    """The image files."""
    targets: np.ndarray
    """int32, the class of each file."""
    settings: Preprocess
    notes: tuple[str, ...]
    """Notes for the history of a run: how many images, and which files were left out."""

    def picture(self, row: int, whole: bool) -> tuple[np.ndarray, float]:
        """Return the pixels of an image, uint8[height, width, channels], and its aspect ratio.

        Args:
          row: the number of the file.
          whole: read the whole image, larger than the network's input, for random crops; else its
            center crop, with the aspect ratio 1.

        Raises:
          InputError: the file is not a picture.
        """
        path, settings = self.paths[row], self.settings

        def make() -> tuple[np.ndarray, float]:
            if whole:
                return images.read_whole(path, settings.where, self.size(True))
            return images.read(path, settings.where, settings.how)[0], 1.0

        return settings.decoded.get((path, whole), make)

    def size(self, whole: bool) -> tuple[int, int]:
        """Return the height and width of the pixels that `picture` returns."""
        height, width = self.settings.where.size
        return (round(height * _LARGER), round(width * _LARGER)) if whole else (height, width)


@dataclass(frozen=True)
class Pictures(Examples):
    """The images of a folder, decoded in each epoch unless they are cached.

    Another image with weight zero takes the place of one that cannot be read.
    """

    inputs: Folder
    strict: bool = field(default=False, kw_only=True)
    """Whether an image that cannot be read is an error: predictions need a result for each."""

    @classmethod
    def of(cls, folder: Folder, size: int, seed: int | None = None, strict: bool = False) -> Self:
        """Return the source of all images of a folder."""
        return cls(folder, folder.targets, size, seed, np.arange(len(folder.paths)), strict=strict)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        return self.inputs.settings.how.labels

    @property
    def resumable(self) -> dict[str, Any]:
        settings = self.inputs.settings
        how = {k: v for k, v in vars(settings.how).items() if k != "labels"}
        how = {k: list(v) if isinstance(v, tuple) else v for k, v in how.items()}
        return {**how, "augment": settings.augment._asdict(), "pictures": len(self.inputs.paths)}

    def release(self) -> None:
        self.inputs.settings.decoded.release()

    def contents(self) -> Sequence[np.ndarray]:
        """Return the classes, sizes and names of the files, without reading the files."""
        paths = self.inputs.paths
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        names = "/".join(os.path.relpath(path, self.inputs.path) for path in paths)
        return [self.targets, np.array(sizes), np.frombuffer(os.fsencode(names), np.uint8)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        settings = self.inputs.settings
        dtype = jax.dtypes.canonicalize_dtype(settings.where.dtype)
        where = replace(settings.where, dtype=dtype)
        augment = settings.augment if self.seed is not None else Augment()
        whole = augment.crop is not None
        like = np.empty((0, *self.inputs.size(whole), where.channels), np.uint8)
        memory = MemoryPool(like, self.size)  # only to allocate blocks; its array has no rows
        key = jax.random.fold_in(make_key(self.seed or 0), _KEY)

        def to_batch(
            number: int, rows: Any, weight: Any, block: Any, decoded: list[Future]
        ) -> Batch:
            rows, weight, aspects = self._whole(rows, weight, block, decoded, whole)
            x = prepare_batch(
                block,
                aspects,
                key,
                np.uint32(epoch),
                np.uint32(number),
                how=settings.how,
                where=where,
                augment=augment,
            )
            return Batch((x,), self.targets[rows], weight)

        def start_decoding() -> Iterator[tuple[int, Any, Any, np.ndarray, list[Future]]]:
            for number, (rows, weight) in enumerate(self.rows_of_batches(epoch, start), start):
                block = memory.allocate()
                decoded = [
                    pool.submit(self._decode, row, block[i], whole) for i, row in enumerate(rows)
                ]
                yield number, rows, weight, block, decoded

        pool = ThreadPoolExecutor(settings.workers, "jaxonnx-pictures")
        try:
            yield from starmap(to_batch, prefetch(start_decoding(), _AHEAD))
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, row: int, place: np.ndarray, whole: bool) -> float | InputError:
        """Decode an image into the array `place`; return its aspect ratio, or the error."""
        path, broken = self.inputs.paths[row], self.inputs.settings.decoded.broken
        if path in broken:
            return broken[path]
        try:
            place[...], aspect = self.inputs.picture(row, whole)
        except InputError as error:
            return error
        return aspect

    def _whole(
        self, rows: np.ndarray, weight: np.ndarray, block: np.ndarray, decoded: list, whole: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the images of a batch, and substitute those that cannot be read.

        Args:
          rows, weight: of the batch.
          block: uint8[size, height, width, channels], which the threads write.
          decoded: a future of `_decode` for each image.
          whole: whether whole images are read.

        Returns:
          The rows, with those of substitutes; the weights, 0 for substitutes; the aspect ratios.
        """
        rows, weight = rows.copy(), weight.copy()
        aspects = np.ones(len(rows), np.float32)
        for i, future in enumerate(decoded):
            aspect = future.result()
            if isinstance(aspect, InputError) and self.strict:
                raise aspect
            if isinstance(aspect, InputError):
                weight[i] = 0
                rows[i], aspect = self._substitute(rows[i], aspect, block[i], whole)
            aspects[i] = aspect
        return rows, weight, aspects

    def _substitute(
        self, row: int, error: InputError, place: np.ndarray, whole: bool
    ) -> tuple[int, float]:
        """Decode the next image that can be read into `place`; return its row and aspect ratio.

        Raises:
          TrainingError: no image of the folder can be read.
        """
        self._warn_of(row, error)
        for other in np.roll(self.rows, -1 - np.searchsorted(self.rows, row)):
            aspect = self._decode(other, place, whole)
            if not isinstance(aspect, InputError):
                return other, aspect
            self._warn_of(other, aspect)
        raise TrainingError(f"no picture of '{self.inputs.path}' can be read: {error}")

    def _warn_of(self, row: int, error: InputError) -> None:
        """Warn once of an image that cannot be read."""
        path, broken = self.inputs.paths[row], self.inputs.settings.decoded.broken
        if path not in broken:
            broken[path] = error
            self.inputs.settings.decoded.notes.append(f"left out: {error}")
            warn(f"left out: {error}")


@register_data
class PictureFiles(Data):
    """A folder of images with a folder for each class; to predict, any folder, or paths."""

    takes = "preprocess", "augment"
    has_columns = False

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        named = isinstance(data, str | os.PathLike)
        return (named and os.path.isdir(data)) or (not labels and bool(_listed_pictures(data)))

    @classmethod
    def prepare(cls, parts: Mapping[str, PictureFiles], reading: Reading) -> None:
        """List the images of each class; without labels, all images.

        The model gets the preprocessing and the classes in its file.

        Raises:
          TrainingError: a folder has no classes of pictures, or `preprocess` does not fit.
          InputError: the model takes no pictures.
        """
        preprocess, model = _add_augmentation(reading), reading.model
        if "data" not in parts:
            raise TrainingError(
                f"validation '{parts['validation'].data}' goes with data that is a folder of "
                "pictures, with one folder for each class in it"
            )
        data = parts["data"]
        settings = _preprocess(model, preprocess)
        if not reading.labels:
            # the images of a folder and its subfolders, or those that data names, without classes
            listed = _listed_pictures(data.data)
            paths = tuple(listed or image_paths(data.data))
            if not paths:
                kinds = ", ".join(sorted(SUFFIXES))
                raise TrainingError(
                    f"the folder '{data.data}' has no pictures: no file that ends in {kinds}"
                )
            where = "." if listed else os.fspath(data.data)
            data.folder = Folder(where, paths, np.zeros(len(paths), np.int32), settings, ())
            return
        classes, notes = _classes(data.data)
        listed, explicit = settings.how.labels, "labels" in preprocess
        labels = _labels(data.data, classes, listed, model, explicit, reading.trains)
        settings = replace(settings, how=replace(settings.how, labels=labels))
        data.folder = _folder(data.data, classes, settings, notes)
        reading.notes.append(data.folder.notes)
        if (validation := parts.get("validation")) is not None:
            classes, notes = _classes(validation.data)
            if unlisted := classes.keys() - {*labels}:
                raise TrainingError(
                    f"validation '{validation.data}' has the classes {_names(sorted(unlisted))}, "
                    f"which '{data.data}' does not have: {_names(labels)}"
                )
            validation.folder = _folder(validation.data, classes, settings, notes)
            reading.notes.append(validation.folder.notes)
        reading.notes.append(settings.decoded.notes)
        reading.model = images.with_preparation(model, settings.how)

    def __init__(self, data: Any, name: str = "data", names: Mapping[str, str] | None = None):
        super().__init__(data, name, names)
        self.folder: Any = None
        """The `Folder`, once it is listed."""

    def read(self, reading: Reading) -> Pictures:
        group, size = reading.padding.needs.group, reading.batch_size
        if reading.labels and group != 1:
            raise TrainingError(f"{self.name}: a folder of images has no groups of {group}")
        size = size_of_batches(reading.model.inputs, size)
        return Pictures.of(self.folder, size, reading.seed, strict=not reading.labels)

    @property
    def title(self) -> str:
        return Path(self.data).name

    @property
    def first_batch(self) -> None:
        return None


def _add_augmentation(reading: Reading) -> Mapping[str, Any]:
    """Return `preprocess` with the augmentations that `augment` names."""
    preprocess = {} if reading.preprocess is None else reading.preprocess
    if reading.augment is None or not isinstance(preprocess, Mapping):
        return preprocess  # another one is refused where it is read
    if "augment" in preprocess:
        raise TrainingError(
            "augment= and preprocess={'augment': ...} are two forms of one argument: leave one out"
        )
    return {**preprocess, "augment": reading.augment}


def _listed_pictures(data: Any) -> list[Path]:
    """Return the paths of images if data is one or a list of them, else []."""
    paths = data if isinstance(data, list | tuple) else [data]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        return []
    files = [*map(Path, paths)]
    return files if all(map(_is_picture, files)) else []


def image_paths(folder: Any) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted by path."""
    return sorted(filter(_is_picture, _files(folder)))


def _files(root: Any) -> list[Path]:
    """Return the files in a folder and then those in its subfolders, without hidden ones."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return files


def _is_picture(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix in SUFFIXES or suffix in _registered_suffixes()


def _registered_suffixes() -> set[str]:
    """Return the suffixes of formats that plugins have registered with Pillow, like HEIC."""
    image = sys.modules.get("PIL.Image")
    if image is None:  # a plugin would have imported it
        return set()
    return {
        suffix
        for suffix, kind in image.EXTENSION.items()
        if kind in image.OPEN and not image.OPEN[kind][0].__module__.startswith("PIL.")
    }


def _folder(
    path: Any, classes: Mapping[str, Sequence[Path]], settings: Preprocess, notes: list[str]
) -> Folder:
    """Return a `Folder` of the images of each class, with a note of their number."""
    numbers = {name: number for number, name in enumerate(settings.how.labels)}
    targets = [numbers[name] for name, files in classes.items() for _ in files]
    paths = tuple(file for files in classes.values() for file in files)
    many = f"'{path}': {len(paths):,} pictures of {len(classes)} classes: {_names(classes)}"
    targets = np.array(targets, np.int32)
    return Folder(os.fspath(path), paths, targets, settings, (many, *notes))


def _classes(root: Any) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the images of each subfolder by its name, and notes on files that were left out.

    Raises:
      TrainingError: there are no images in subfolders, or a subfolder has none; or the folders
        are those of images and masks.
    """
    classes: dict[str, list[Path]] = {}
    others: Counter[str] = Counter()
    entries = [e for e in os.scandir(root) if not e.name.startswith(".")]  # .ipynb_checkpoints
    loose = sum(e.is_file() and _is_picture(Path(e.name)) for e in entries)
    for name in sorted(entry.name for entry in entries if entry.is_dir()):
        files = _files(os.path.join(root, name))
        classes[name] = [path for path in files if _is_picture(path)]
        others.update(p.suffix.lower() or "no suffix" for p in files if not _is_picture(p))
    names = {name.lower(): name for name in classes}
    if len(classes) == 2 and names.keys() & _IMAGES and names.keys() & _MASKS:
        raise TrainingError(
            f"the folder '{root}' is a data set for segmentation: it has {_names(classes)}. A "
            "folder is read for classification only; pass arrays for segmentation, pictures "
            "[n, channels, height, width] and masks [n, height, width]: data=(pictures, masks)"
        )
    if names.keys() <= _SPLITS and (training := [*names.keys() & _TRAIN]):
        first = os.path.join(root, names[training[0]])
        rest = [os.path.join(root, x) for x in classes if x.lower() not in _TRAIN]
        raise TrainingError(
            f"the folder '{root}' has the parts of a data set, {_names(classes)}, not classes: "
            f"pass one of them, like data={first!r}" + f" with validation={rest[-1]!r}" * bool(rest)
        )
    expected = (
        "pictures lie in one folder for each class, like photos/cat/1.jpg and photos/dog/2.jpg"
    )
    if not any(classes.values()):
        raise TrainingError(f"the folder '{root}' has no classes of pictures: {expected}")
    if empty := [name for name, paths in classes.items() if not paths]:
        raise TrainingError(
            f"the folder '{root}' has no pictures of {_names(empty)}: add some, or remove the "
            "folder"
        )
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
    notes = [f"'{root}': left out what is not named like a picture: {kinds}"] if others else []
    if loose:
        notes.append(f"'{root}': left out pictures that lie in no folder of a class: {loose}")
    return classes, notes


def _labels(
    root: Any,
    classes: Mapping[str, Any],
    listed: tuple[str, ...],
    model: Network,
    explicit: bool,
    training: bool,
) -> tuple[str, ...]:
    """Return the names of all classes in the order of the outputs.

    These are `listed` if they include all classes that were found, else the sorted names of the
    folders.

    Args:
      root: the folder, for errors.
      classes: the classes of the folder.
      listed: the classes that the file or `preprocess` names.
      model: the network.
      explicit: whether `listed` is from `preprocess`, which must then fit.
      training: whether the model is trained.

    Raises:
      TrainingError: given names lack a class, or there is only one class to train.
    """
    repeated = [name for name in classes if listed.count(name) > 1]
    if explicit and (not classes.keys() <= {*listed} or repeated):
        mismatched = repeated or sorted(classes.keys() - {*listed})
        raise TrainingError(
            f"labels must have each class of '{root}' once: {_names(mismatched)}; they are "
            f"{_names(listed)}"
        )
    shape = model.outputs[0].shape or (None,)
    fits = explicit or len(listed) == shape[-1]
    if listed and fits and classes.keys() <= {*listed} and not repeated:
        return listed
    if listed and fits and not training:
        warn(
            f"the file has the classes {_names(listed)}, and '{root}' has others, "
            f"{_names(sorted(classes.keys() - {*listed}))}: its folders count as classes 0, 1, ... "
            "in their order; preprocess={'labels': [...]} names the classes of the outputs",
        )
    elif len(classes) < 2 and not training:
        warn(
            f"the folder '{root}' has one class only, {_names(classes)}, and the file does not "
            "name its classes: it counts as class 0; preprocess={'labels': [...]} names them",
        )
    elif len(classes) < 2:
        raise TrainingError(
            f"the folder '{root}' has one class only, {_names(classes)}: a classifier needs two, "
            "each in a folder of its own"
        )
    return tuple(classes)


def _sides(size: Any) -> tuple[int, int]:
    """Parse (height, width)."""
    height, width = map(int, size)
    return height, width


def _preprocess(model: Network, preprocess: Mapping[str, Any]) -> Preprocess:
    """Return the settings of the file, overridden by those of `preprocess`.

    Raises:
      TrainingError: a setting is unknown or not valid.
      InputError: it does not fit the network.
    """
    kinds: dict[str, Callable[[Any], Any]] = {
        "scale": float,
        "mean": _numbers,
        "std": _numbers,
        "order": str,
        "crop": float,
        "size": _sides,
        "stretch": lambda value: value,
        "filter": str,
        "labels": lambda names: tuple(map(str, names)),
        "augment": Augment.of,
        "memory": int,
        "workers": int,
    }
    is_dict = isinstance(preprocess, Mapping)
    if unknown := [n for n in preprocess if n not in kinds] if is_dict else [preprocess]:
        wrong = _names(unknown) if is_dict else preprocess
        raise TrainingError(f"preprocess is a dict of any of {', '.join(kinds)}; not {wrong}")
    settings = {}
    for name, value in preprocess.items():
        try:
            settings[name] = kinds[name](value)
        except (TypeError, ValueError) as error:
            if isinstance(error, TrainingError):
                raise
            raise TrainingError(f"preprocess: {name} cannot be {value!r}") from error
    augment = settings.pop("augment", Augment())
    decoded = DecodedImages(settings.pop("memory", 2**30))
    workers = settings.pop("workers", min(os.cpu_count() or 1, 16))
    require("preprocess: workers", workers, workers >= 1, "at least 1", TrainingError)
    if not (images.says_numbers(model) or settings.keys() & {"scale", "mean", "std"}):
        warn(
            "the file does not say how to scale pixels: they are divided by 255; "
            "preprocess={'mean': ..., 'std': ...} sets this (--mean, --std)",
        )
    how = replace(images.preparation(model), **settings)
    where = images.layout(model, how.size)
    how.check(where)
    return Preprocess(how, where, augment, workers, decoded)


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(float, np.atleast_1d(value)))


def _names(names: Any) -> str:
    """Join names for a message; of many only the first ones."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    more = len(names) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown
