"""Data in the forms that `train` documents, as batches."""

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError
from jaxonnx.train._batches import Arrays, Examples, Stream, as_pair
from jaxonnx.train._folder import Folder
from jaxonnx.train._pictures import Pictures


def sources(
    data: Any, validation: Any, inputs: Sequence[Value], batch_size: int | None, seed: int
) -> tuple[Examples | Stream, Examples | Stream | None]:
    """Return the examples to train with and those held out, in the forms that `train` documents.

    Args:
      validation: like `data`, a share of it between 0 and 1, or None.
      inputs: the model's; where they are fixed to a batch size, data in one piece takes it.
      batch_size: for data in one piece; the batches of an iterable have their own size.
      seed: of the order of data in one piece, which depends on it and on the epoch only, and of
        which examples are held out; validation data keeps its order.
    """
    examples = source(data, inputs, batch_size, seed)
    if validation is None:
        return examples, None
    if isinstance(validation, int | float):
        return _split(examples, validation)
    return examples, _source(validation, inputs, batch_size, None, "validation")


def source(
    data: Any, inputs: Sequence[Value], batch_size: int | None, seed: int | None = None
) -> Examples | Stream:
    """Return examples, in their own order if there is no seed."""
    examples = _source(data, inputs, batch_size, seed, "data")
    if isinstance(examples, Stream) and batch_size is not None:
        raise TrainingError(
            f"batch_size={batch_size} goes with data in one piece; data is an iterable, whose "
            "batches have their own size"
        )
    return examples


def _source(
    data: Any, inputs: Sequence[Value], batch_size: int | None, seed: int | None, what: str
) -> Examples | Stream:
    names = [value.name for value in inputs]
    if isinstance(data, Folder):
        rows = np.arange(len(data.paths))
        return Pictures(data, data.targets, _batch_size(inputs, batch_size), seed, rows)
    what = f"{what} '{os.fspath(data)}'" if isinstance(data, str | os.PathLike) else what
    data = next((read(data) for applies, read in SOURCES if applies(data)), data)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and len(data) == 2):
        arrays, targets = as_pair(data, names, what)
        rows = np.arange(len(arrays[0]))
        return Arrays(arrays, targets, _batch_size(inputs, batch_size), seed, rows)
    if not (callable(data) or isinstance(data, Iterable)):
        raise TrainingError(
            f"{what} must be a pair (x, y) of arrays, a dict of arrays, the path of an .npz file "
            "with them or of a folder of pictures, an iterable of batches, or a function from the "
            f"epoch to such an iterable; it is a {type(data).__name__}"
        )
    return Stream(data, names, what)


def _read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.lib.npyio.NpzFile):
                return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise TrainingError(f"the data '{os.fspath(path)}' cannot be read: {error}") from error
    raise TrainingError(
        f"the data '{os.fspath(path)}' must be an .npz file, which numpy.savez writes, with arrays "
        "by name"
    )


def _rows(dataset: Any) -> Mapping[str, Any]:
    """Return the columns of a Hugging Face Dataset, whose iterator would give single examples."""
    return (dataset if dataset.format["type"] else dataset.with_format("numpy"))[:]


SOURCES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (lambda data: isinstance(data, str | os.PathLike), _read),
    (lambda data: all(hasattr(data, n) for n in ("column_names", "format", "__len__")), _rows),
)
"""Kinds of data besides arrays and iterables: how one is told, and how it becomes one of these."""


def _batch_size(inputs: Sequence[Value], wanted: int | None) -> int:
    """Return the size that the inputs are fixed to, or what was asked for, or 32."""
    fixed = [value.shape[0] for value in inputs if value.shape]
    size = next((size for size in fixed if isinstance(size, int)), None)
    if size is None:
        return 32 if wanted is None else wanted
    if wanted not in (None, size):
        raise TrainingError(
            f"batch_size={wanted}, but the model's inputs are fixed to batches of {size}; "
            "jaxonnx.load(path, batch='any') may open it"
        )
    return size


def _split(examples: Examples | Stream, share: float) -> tuple[Examples, Examples]:
    """Return examples without a share of them, and that share; the seed alone chooses."""
    if not isinstance(examples, Examples):
        raise TrainingError(
            f"validation={share} is a share of data in one piece; data is an iterable: pass "
            "validation data like it"
        )
    count = len(examples.rows)
    held = round(count * share)
    if isinstance(share, bool) or not 0 < share < 1 or not 0 < held < count:
        raise TrainingError(
            f"validation={share!r} must be a share between 0 and 1 of the {count} examples that "
            "leaves some on either side"
        )
    order = np.random.default_rng(np.random.SeedSequence(examples.seed, spawn_key=(0,)))
    chosen = np.sort(order.permutation(count)[:held])
    rest = np.delete(examples.rows, chosen)
    return replace(examples, rows=rest), replace(examples, rows=chosen, seed=None)
