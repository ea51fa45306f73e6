"""Read the model and the data of a command."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxonnx import losses
from jaxonnx._data import images
from jaxonnx._data.images import Layout, Preparation
from jaxonnx._data.inputs_and_targets import KEY, take_input_types
from jaxonnx._data.kinds import Data, open_data
from jaxonnx._data.ragged import derived_inputs
from jaxonnx.errors import Error, InputError, TrainingError
from jaxonnx.losses import find, scores_tokens
from jaxonnx.model import Model, load
from jaxonnx.training import target_names

_PREPARATION = ("scale", "mean", "std", "labels", "order", "crop", "size", "stretch", "filter")
"""Flags that are fields of `images.Preparation` by the same name."""
_DECODING = ("workers", "memory")
"""Flags that are keys of `preprocess` for folders of images."""
_TEXTS = {"max_length": "max_length", "long": "long", "loss": "loss_on", "pack": "pack"}
"""Flags by the settings of texts in `preprocess`."""


class Report(NamedTuple):
    """The result of a verb."""

    data: Mapping[str, Any]
    """For `--json`."""
    shown: Any
    """For people: a text, something that rich renders, or None if nothing is left to say."""
    status: int = 0
    written: Sequence[Path] = ()
    """The files and folders that were written."""


class CommandError(Error):
    """Raised when a command fails after its work began, not because it was refused."""


def call(value: Any) -> Any:
    """Return a value, or elements of a list, with their calls made: they are `partial` before."""
    if isinstance(value, partial):
        return value()
    return [*map(call, value)] if isinstance(value, list) else value


def read(options: argparse.Namespace, outputs: Sequence[str] | None = None) -> Model:
    """Load the model of a command."""
    batch, dequantize = "any" if options.any_batch else None, bool(options.dequantize)
    on = call(mesh(options))
    return load(options.model, outputs=outputs, batch=batch, dequantize=dequantize, mesh=on)


def loss(model: Model, options: argparse.Namespace) -> Any:
    """Return the name of the loss, the call that makes it with `--reference`, or None."""
    name, second = getattr(options, "loss", None), getattr(options, "reference", None)
    if second is None:
        return name
    if name == "distill":
        of_tokens = {"next_token": True} if scores_tokens(model) else {}
        return partial(losses.distill, teacher=second, **of_tokens)
    if name not in ("dpo", "kto"):
        raise InputError("--reference goes with --loss distill, dpo or kto")
    return partial(getattr(losses, name), reference=second)


def mesh(options: argparse.Namespace) -> Any:
    """Return the call that makes the mesh of a command, "all", or None for one device."""
    axes = getattr(options, "mesh", None)
    if not isinstance(axes, Mapping):
        return axes
    needed, count = math.prod(axes.values()), jax.device_count()
    if needed > count:
        raise InputError(f"--mesh has {needed} devices, and there are {count}")
    return partial(jax.make_mesh, (*axes.values(),), (*axes,))


def examples(options: argparse.Namespace) -> Path:
    """Return the path of the data, named with or without its flag."""
    paths = [path for path in (options.examples, options.data) if path is not None]
    if len(paths) != 1:
        raise InputError(f"give the data once: jaxonnx {options.verb} MODEL DATA, or --data DATA")
    return paths[0]


class Columns(NamedTuple):
    """The columns of a file by their role."""

    inputs: Mapping[str, str]
    """Their names in the file by those of the model, in order."""
    targets: Sequence[str]
    weight: Sequence[str]
    """The column of example weights, if there is one."""


def data(path: Path, model: Model, options: argparse.Namespace) -> tuple[Any, bool]:
    """Return inputs, targets and weights, or the path of a folder; and if pictures are prepared.

    Pixels are prepared if the network takes other numbers.
    """
    values = table(path, getattr(options, "columns", None))
    if values is None:
        return path, False
    model = fix(model.without_cache(), options)
    chosen = loss(model, options)
    derived = chosen is not None and find(call(chosen)).derive(model) is not None
    roles = columns(path, [*values], model, derived)
    if not roles.targets and not derived:
        raise _lacks(path, values, "the targets, as 'y'")
    inputs = _read_inputs(path, values, roles, model)
    targets = {name: values[name] for name in roles.targets}
    labels = next(iter(targets.values())) if len(targets) == 1 else targets
    rest = (labels, *(values[name] for name in roles.weight))
    pixels = _prepare_pixels(inputs, model, options)
    if pixels is None:
        return (inputs, *rest), bool(image_options(options))
    return (pixels, *rest), True


def read_unlabeled(
    path: Path, model: Model, options: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of a file, or the path of a folder and the preparation of its pictures."""
    if table(path) is None:
        return path, {"preprocess": image_options(options) or None} if has_pictures(path) else {}
    values = inputs(path, model)
    pixels = _prepare_pixels(values, model, options)
    return values if pixels is None else pixels, {}


def _prepare_pixels(
    inputs: Mapping[str, Any], model: Model, options: argparse.Namespace
) -> np.ndarray | None:
    """Return the input of a network of pictures, if these are pixels and it takes other numbers."""
    x: Any = next(iter(inputs.values())) if len(model.inputs) == 1 else None
    if not getattr(x, "dtype", None) == np.uint8 != model.inputs[0].dtype:
        return None
    prepare = preparation(model, options)
    return arrange_pixels(x, prepare, images.layout(model, prepare.size))


def fix(model: Model, options: argparse.Namespace) -> Model:
    """Return a model without the inputs that `--fixed` gives a value (not for `sparsify`)."""
    values = getattr(options, "fixed", None)
    return model.with_fixed_inputs(values) if isinstance(values, dict) else model


def inputs(path: Path, model: Model) -> dict[str, Any]:
    """Load the model's inputs from a file, by name and in order.

    Raises:
      InputError: the file has no columns.
    """
    values = table(path)
    if values is None:
        raise InputError(f"'{path}' has no columns that are inputs")
    return _read_inputs(path, values, columns(path, [*values], model), model)


def _read_inputs(
    path: Path, values: Mapping[str, Any], roles: Columns, model: Model
) -> dict[str, Any]:
    """Return the inputs among the columns of a file by name, as `Data.read` has them."""
    inputs = {name: values[column] for name, column in roles.inputs.items()}
    return inputs if open_file(path).has_types else take_input_types(inputs, model.inputs)


def table(path: Path, names: Any = None) -> Mapping[str, Any] | None:
    """Load the columns of a file; None for what is read in the library, as pictures and texts are.

    Args:
      names: new names of columns.
    """
    data = open_file(path, names)
    try:
        return data.table
    except TrainingError as error:
        raise InputError(f"'{path}' is not a file of data: {error}") from error


def has_pictures(path: Path) -> bool:
    """Check whether a path is data that names of augmentations go with."""
    return "augment" in open_file(path).takes


def open_file(path: Path, names: Any = None) -> Data:
    """Find the kind of data that a path names."""
    if not path.exists():
        raise InputError(f"there is no file or folder '{path}'")
    return open_data(path, names=names or {})


def columns(path: Path, names: Sequence[str], model: Model, derived: bool = False) -> Columns:
    """Assign the columns of a file to the inputs, the targets and the weights.

    One input may be called "x", and masks may be missing. The targets are "y", or else all that are
    neither inputs nor "weight".

    Args:
      derived: whether the loss needs no targets.
    """
    by_name = {value.name: value.name for value in model.inputs}
    if len(by_name) == 1 and by_name.keys().isdisjoint(names) and "x" in names:
        by_name = dict.fromkeys(by_name, "x")
    spare = derived_inputs(model.inputs)
    for name, column in by_name.items():
        if column not in names and name not in spare:
            raise _lacks(path, names, column)
    others = [name for name in names if name not in by_name.values()]
    weighed = KEY in others and (derived or len(others) > 1) and KEY not in target_names(model)
    weight = [KEY] if weighed else []
    targets = ["y"] if "y" in others else [name for name in others if name not in weight]
    return Columns(
        {name: column for name, column in by_name.items() if column in names}, targets, weight
    )


def _lacks(path: Path, names: Iterable[str], what: str) -> InputError:
    return InputError(f"'{path}' has {', '.join(names) or 'no arrays'}, and needs {what}")


def preparation(model: Model, options: argparse.Namespace) -> images.Preparation:
    """Return the preparation by the flags, or else by the file, or else the usual one."""
    return replace(images.preparation(model), **image_options(options))


def image_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for pictures that the flags give."""
    flags = {name: getattr(options, name, None) for name in _PREPARATION}
    if flags["labels"] is not None:
        flags["labels"] = class_names(flags["labels"])
    return {name: x for name, x in flags.items() if x is not None and x is not False}


def preprocessing(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return the argument `preprocess` for a folder of pictures, or else for texts.

    Raises:
      InputError: flags for texts, and a folder of pictures.
    """
    flags = {key: getattr(options, flag, None) for key, flag in _TEXTS.items()}
    flags = {key: value for key, value in flags.items() if value not in (None, False)}
    pictures = has_pictures(path)
    if pictures and flags:
        name = _TEXTS[next(iter(flags))].replace("_", "-")
        raise InputError(f"--{name} is for texts, and '{path}' is a folder of pictures")
    if not pictures:
        return flags
    reading = {name: getattr(options, name, None) for name in _DECODING}
    return image_options(options) | {n: x for n, x in reading.items() if x is not None}


def class_names(labels: Path) -> tuple[str, ...]:
    """Return the lines of a file, or names that are joined by commas."""
    if "," in str(labels) and not labels.exists():
        return tuple(name.strip() for name in str(labels).split(","))
    try:
        return tuple(labels.read_text("utf-8").splitlines())
    except UnicodeDecodeError as error:
        raise InputError(f"--labels {labels} is not UTF-8 text ({error.reason})") from error


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


def arrange_pixels(images: np.ndarray, prepare: Preparation, where: Layout) -> np.ndarray:
    """Convert uint8 pictures [n, h, w], [n, h, w, c] or [n, c, h, w] to the network's input.

    Raises:
      InputError: their shape does not fit the network.
    """
    pixels = images[..., None] if images.ndim == 3 else images
    expected = (*where.size, where.channels)
    if pixels.ndim == 4 and pixels.shape[1:] != expected:
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.shape[1:] != expected:
        raise InputError(
            f"pictures of shape {list(images.shape[1:])}, but the network takes {where.size[0]}x"
            f"{where.size[1]} with {where.channels} channel{'s' * (where.channels > 1)}"
        )
    return np.ascontiguousarray(prepare(pixels, where))
