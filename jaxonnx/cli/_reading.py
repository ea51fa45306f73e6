"""The model and the data of a command, and what it reports."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxonnx.cli import _images as pictures
from jaxonnx.errors import Error, InputError
from jaxonnx.model import Model, load
from jaxonnx.model import _images as images

_PREPARATION = ("scale", "mean", "std", "labels", "order", "crop", "size")
"""Flags that are fields of `images.Preparation` by the same name."""


class Report(NamedTuple):
    """The result of a verb."""

    data: Mapping[str, Any]
    """For `--json`."""
    shown: Any
    """For people: a text, something that rich renders, or None if nothing is left to say."""
    status: int = 0
    written: Sequence[Path] = ()
    """The files and folders that were written."""


class Failed(Error):
    """Raised when a command fails after its work began, not because it was refused."""


def read(options: argparse.Namespace, outputs: Sequence[str] | None = None) -> Model:
    """Load the model of a command."""
    batch = "any" if options.any_batch else None
    return load(options.model, outputs=outputs, batch=batch, dequantize=options.dequantize)


def examples(options: argparse.Namespace) -> Path:
    """Return the path of the data, named with or without its flag."""
    paths = [path for path in (options.examples, options.data) if path is not None]
    if len(paths) != 1:
        raise InputError(f"give the data once: jaxonnx {options.verb} MODEL DATA, or --data DATA")
    return paths[0]


def data(path: Path, model: Model, options: argparse.Namespace) -> tuple[Any, bool]:
    """Return inputs and targets, or the path of a folder; and whether the file is to say how.

    Pixels are prepared if the network takes other numbers.
    """
    if path.is_dir():
        return path, False
    inputs, targets = arrays(path, model, labelled=True)
    if len(inputs) != 1 or not inputs[0].dtype == np.uint8 != model.inputs[0].dtype:
        return (inputs, targets), bool(said(options))
    prepare = preparation(model, options)
    where = images.layout(model, prepare.size)
    return ((pictures.batch(inputs[0], prepare, where),), targets), True


def arrays(path: Path, model: Model, labelled: bool = False) -> tuple[tuple[Any, ...], Any]:
    """Load the model's inputs in order, and the targets, from a .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values = dict(file)
    except FileNotFoundError as error:
        raise InputError(f"there is no file or folder '{path}'") from error
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' is not a .npz file ({error})") from error
    names, others = columns(path, [*values], model, labelled)
    targets = {name: values[name] for name in others}
    single = next(iter(targets.values()), None) if len(targets) < 2 else targets
    return tuple(values[name] for name in names), single


def columns(
    path: Path, names: Sequence[str], model: Model, labelled: bool
) -> tuple[list[str], list[str]]:
    """Return which arrays of a file are the inputs in order, and which are targets.

    One input may be called "x". The targets are "y", or else all that are no inputs.
    """
    inputs = [value.name for value in model.inputs]
    if len(inputs) == 1 and inputs[0] not in names and "x" in names:
        inputs = ["x"]
    others = [name for name in names if name not in inputs]
    targets = ["y"] if "y" in others else others
    missing = [name for name in inputs if name not in names]
    if labelled and not targets:
        missing += ["the targets, as 'y'"]
    if missing:
        raise InputError(f"'{path}' has {', '.join(names) or 'no arrays'}, and needs {missing[0]}")
    return inputs, targets if labelled else []


def preparation(model: Model, options: argparse.Namespace) -> images.Preparation:
    """Return the preparation by the flags, or else by the file, or else the usual one."""
    return replace(images.preparation(model), **said(options))


def said(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say of pictures."""
    flags = {name: getattr(options, name, None) for name in _PREPARATION}
    if flags["labels"] is not None:
        flags["labels"] = class_names(flags["labels"])
    return {name: value for name, value in flags.items() if value is not None}


def class_names(labels: Path) -> tuple[str, ...]:
    """Return the lines of a file, or names that are joined by commas."""
    if "," in str(labels) and not labels.exists():
        return tuple(name.strip() for name in str(labels).split(","))
    return tuple(labels.read_text("utf-8").splitlines())
