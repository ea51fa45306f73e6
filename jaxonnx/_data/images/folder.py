"""Folders of images: one folder for each class, and their preprocessing."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jaxonnx._data.images import preparation as images
from jaxonnx._data.images.augment import Augment
from jaxonnx._data.images.preparation import Layout, M, Preparation
from jaxonnx._require import require
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError, TrainingError

SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_LARGER = 4 / 3
"""The sides of a whole image that is read for random crops, in sides of the network's input."""
_IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
_MASKS = {"annotations", "labels", "mask", "masks", "segmentationclass", "segmentations"}
"""Names (in lower case) of the two folders of a data set for segmentation."""
_LISTED = 8
"""The most names that a message lists."""


class DecodedImages:
    """A cache of decoded images with a limit in bytes, and the images that cannot be read."""

    def __init__(self, limit: int):
        self.broken: dict[Path, InputError] = {}
        self._free = limit
        self._held: dict[Any, tuple[np.ndarray, float]] = {}
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], tuple[np.ndarray, float]]) -> Any:
        """Return a cached image, or make it and cache it if there is room."""
        held = self._held.get(key)
        if held is None:
            held = make()
            with self._lock:
                if held[0].nbytes <= self._free and key not in self._held:
                    self._free -= held[0].nbytes
                    self._held[key] = held
        return held

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
            return images.read(path, settings.where, settings.how.crop)[0], 1.0

        return settings.decoded.get((path, whole), make)

    def size(self, whole: bool) -> tuple[int, int]:
        """Return the height and width of the pixels that `picture` returns."""
        height, width = self.settings.where.size
        return (round(height * _LARGER), round(width * _LARGER)) if whole else (height, width)


def is_folder(data: Any) -> bool:
    """Check whether data is the path of a folder."""
    return isinstance(data, str | os.PathLike) and os.path.isdir(data)


def find_folders(
    data: Any,
    validation: Any,
    model: M,
    preprocess: Mapping[str, Any] | None,
    training: bool = True,
) -> tuple[Any, Any, M]:
    """List the images of data and validation, if these are folders with one folder for each class.

    Args:
      data, validation: as `train` takes them; anything but folders is returned as it is.
      model: the network.
      preprocess: as `train` takes it.
      training: whether the model is trained, which takes more than one class.

    Returns:
      Data and validation, as a `Folder` if it was one, and the model with the preprocessing and
      the classes in its file.

    Raises:
      TrainingError: a folder has no classes of pictures, or `preprocess` does not fit.
      InputError: the model takes no pictures.
    """
    if not is_folder(data):
        if is_folder(validation) or preprocess is not None:
            what = "preprocess" if preprocess is not None else f"validation '{validation}'"
            raise TrainingError(
                f"{what} goes with data that is a folder of pictures, with one folder for each "
                "class in it"
            )
        return data, validation, model
    settings = _preprocess(model, preprocess or {}, stacklevel=5)
    classes, notes = _classes(data)
    labels_given = "labels" in (preprocess or {})
    labels = _labels(data, classes, settings.how.labels, model, labels_given, training)
    settings = replace(settings, how=replace(settings.how, labels=labels))
    examples = _folder(data, classes, settings, notes)
    if is_folder(validation):
        classes, notes = _classes(validation)
        if odd := classes.keys() - {*labels}:
            raise TrainingError(
                f"validation '{validation}' has the classes {_names(sorted(odd))}, which "
                f"'{data}' does not have: {_names(labels)}"
            )
        validation = _folder(validation, classes, settings, notes)
    return examples, validation, images.with_preparation(model, settings.how)


def list_folder(data: Any, model: Network, preprocess: Mapping[str, Any] | None) -> Any:
    """List all images of a folder, or the images that data names by path, without classes.

    Other data is returned as it is.

    Raises:
      TrainingError: the folder has no pictures, or `preprocess` does not fit.
      InputError: the model takes no pictures.
    """
    listed = _listed_pictures(data)
    if not is_folder(data) and not listed:
        if preprocess is not None:
            raise TrainingError("preprocess goes with a folder of pictures, or with paths of them")
        return data
    settings = _preprocess(model, preprocess or {})
    if listed:
        return Folder(".", tuple(listed), np.zeros(len(listed), np.int32), settings, ())
    paths = image_paths(data)
    if not paths:
        kinds = ", ".join(sorted(SUFFIXES))
        raise TrainingError(f"the folder '{data}' has no pictures: no file that ends in {kinds}")
    return Folder(os.fspath(data), tuple(paths), np.zeros(len(paths), np.int32), settings, ())


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
    wanted = "pictures lie in one folder for each class, like photos/cat/1.jpg and photos/dog/2.jpg"
    if not any(classes.values()):
        raise TrainingError(f"the folder '{root}' has no classes of pictures: {wanted}")
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
        odd = repeated or sorted(classes.keys() - {*listed})
        raise TrainingError(
            f"labels must have each class of '{root}' once: {_names(odd)}; they are "
            f"{_names(listed)}"
        )
    shape = model.outputs[0].shape or (None,)
    fits = explicit or len(listed) == shape[-1]
    if listed and fits and classes.keys() <= {*listed} and not repeated:
        return listed
    if len(classes) < 2 and not training:
        warnings.warn(
            f"the folder '{root}' has one class only, {_names(classes)}, and the file does not "
            "name its classes: it counts as class 0; preprocess={'labels': [...]} names them",
            stacklevel=5,
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


def _preprocess(model: Network, preprocess: Mapping[str, Any], stacklevel: int = 4) -> Preprocess:
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
        "labels": lambda names: tuple(map(str, names)),
        "augment": Augment.of,
        "memory": int,
        "workers": int,
    }
    is_dict = isinstance(preprocess, Mapping)
    if odd := [n for n in preprocess if n not in kinds] if is_dict else [preprocess]:
        wrong = _names(odd) if is_dict else preprocess
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
        warnings.warn(
            "the file does not say how to scale pixels: they are divided by 255; "
            "preprocess={'mean': ..., 'std': ...} sets this (--mean, --std)",
            stacklevel=stacklevel,
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
