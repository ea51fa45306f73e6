"""Convert data in any form to a source of batches; `SOURCES` has an entry for each form."""

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._data.batches import Arrays, Padded, Source, Stream
from jaxonnx._data.files import FILES, read_table
from jaxonnx._data.inputs_and_targets import (
    as_pair,
    checked_weights,
    count_examples,
    drop_targets,
    split_weights,
)
from jaxonnx._data.ragged import PLAIN, Padding
from jaxonnx._data.rows import Names, Rows, is_dataset, is_streamed, open_rows
from jaxonnx._data.streams import RowStream
from jaxonnx._graph.values import Value, hint_at_image
from jaxonnx._limits import format_bytes, machine
from jaxonnx.errors import TrainingError

_FORMS = (
    "a pair (x, y) of arrays, or (x, y, weights), a dict of arrays, a Hugging Face Dataset, a list "
    f"of dicts with texts, the path of {FILES}, an iterable of batches, or a function from the "
    "epoch to such an iterable"
)


def examples_of(
    data: Any,
    inputs: Sequence[Value],
    batch_size: int | None,
    seed: int | None,
    what: str,
    labels: bool = True,
    padding: Padding = PLAIN,
    target_names: Collection[str] = (),
) -> Source:
    """Convert data in any form that `train` accepts to a source of batches.

    Args:
      data: arrays, a file, an iterable of batches, ... (see `SOURCES`).
      inputs: the model's inputs. If they have a fixed batch size, arrays are batched by it.
      batch_size: of arrays; an iterable has its own.
      seed: of the order of arrays; None keeps their order.
      what: the data, for errors.
      labels: whether targets are wanted; else they may be missing, and are dropped.
      padding: how sequences of unequal length are padded.
      target_names: the names of targets: an entry "weight" of a dict may be one of them.

    Raises:
      TrainingError: the data has none of these forms, or does not fit the model.
    """
    what = f"{what} '{os.fspath(data)}'" if isinstance(data, str | os.PathLike) else what
    _check_form(data, what)
    data = next((read(data) for applies, read in SOURCES if applies(data)), data)
    if isinstance(data, Rows):
        read = functools.partial(examples_of, what=what, labels=labels, target_names=target_names)
        size = size_of_batches(inputs, batch_size)
        return RowStream(data, inputs, size, seed, padding, read)
    weights = None
    if labels:
        names = [value.name for value in inputs]
        data, weights = split_weights(data, names, target_names)
    whole = isinstance(data, Mapping) or (isinstance(data, tuple) and len(data) == 2)
    if not labels:
        whole |= isinstance(data, tuple) or hasattr(data, "__array__")
    if whole:
        arrays, targets = as_pair(data, inputs, what, labels, padding)
        rows = np.arange(count_examples(arrays, targets, inputs))
        if all(value.whole for value in inputs):  # a graph: its targets keep their order
            batch_size, seed = len(rows), None
        size = size_of_batches(inputs, batch_size)
        if weights is not None:
            weights = checked_weights(weights, len(rows), what)
        _check_batch(arrays, targets, size, len(rows))
        also: Any = {"weights": weights, "group": padding.needs.group if labels else 1}
        whole = [value.whole for value in inputs]
        if any(whole):
            return Arrays(arrays, targets, size, seed, rows, whole=whole, **also)
        columns = padding.sequences(arrays, targets, inputs, what, whole=True)
        if columns is not None:
            return Padded(None, None, size, seed, rows, columns, **also)
        return Arrays(arrays, targets, size, seed, rows, **also)
    if not (callable(data) or np.iterable(data)):
        raise TrainingError(f"{what} must be {_FORMS}; it is a {type(data).__name__}")
    return Stream(data, inputs, what, labels=labels, padding=padding, target_names=target_names)


def lacks_batch_axis(data: Any, inputs: Sequence[Value]) -> bool:
    """Check whether the model takes single examples, and data has one more axis, of examples.

    Args:
      data: arrays, a file with them, or a list of batches. For any other data this is False, as
        nothing is known before it is read.
      inputs: the model's inputs.
    """
    if isinstance(data, str | os.PathLike):
        sizes = [value.shape[0] for value in inputs if value.shape]
        if not any(isinstance(size, int) and size > 1 for size in sizes):
            return False  # a file is not read twice for what is rare
        data = read_table(data) if os.path.isfile(data) else None
    pair = isinstance(data, tuple) and len(data) in (2, 3)
    if isinstance(data, list) and data:
        data = data[0]
    elif not (isinstance(data, Mapping) or pair or hasattr(data, "shape")):
        return False
    names = [value.name for value in inputs]
    weighed = isinstance(data, tuple) and len(data) == 3 != len(names)
    x = drop_targets(data[:2] if weighed else data, names)
    if isinstance(x, Mapping):
        x = tuple(x.get(name) for name in names)
    arrays = x if isinstance(x, tuple) else (x,)
    return len(arrays) == len(inputs) > 0 and all(map(_has_further_axis, arrays, inputs))


def _has_further_axis(array: Any, value: Value) -> bool:
    """Check whether an array has one axis more than an input, in front of axes that fit it."""
    shape = getattr(array, "shape", None)
    if shape is None or value.shape is None or value.whole or len(shape) != len(value.shape) + 1:
        return False
    sizes = zip(shape[1:], value.shape, strict=True)
    return all(not isinstance(wanted, int) or wanted == size for size, wanted in sizes)


def _check_form(data: Any, what: str) -> None:
    """Raise an error with a conversion if data is in a form that is near to one of `_FORMS`."""
    way = None
    if isinstance(data, Mapping) and hasattr(data, "column_names"):
        way = f"pass one of its splits, like data[{next(iter(data), 'train')!r}]"
    elif hasattr(data, "iloc"):
        way = "datasets.Dataset.from_pandas(data) converts it"
    elif isinstance(data, list) and isinstance(next(iter(data), None), str):
        way = "[{'text': text} for text in data] makes rows of texts"
    elif (isinstance(data, list) or is_dataset(data)) and not len(data):
        raise TrainingError(f"{what} has no examples")
    if way is not None:
        raise TrainingError(f"{what} must be {_FORMS}; it is a {type(data).__name__}: {way}")


def _rows(dataset: Any) -> Mapping[str, Any]:
    """Return the columns of a Hugging Face Dataset (its iterator yields single examples)."""
    return (dataset if dataset.format["type"] else dataset.with_format("numpy"))[:]


SOURCES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (lambda data: isinstance(data, str | os.PathLike), read_table),
    (is_dataset, _rows),
    (is_streamed, lambda data: open_rows(data, "data")),
)
"""Forms of data besides arrays and iterables: a test, and a conversion to arrays."""


def rename_columns(data: Any, names: Names | None, what: str) -> Any:
    """Rename the columns of a file, a dataset or a dict of arrays.

    Args:
      data: as `train` takes it, or `Rows`, which rename their columns themselves.
      names: new names by those of the data.
      what: the data, for errors.

    Raises:
      TrainingError: the data has no columns, or none of some name.
    """
    if not names or isinstance(data, Rows | float | None):
        return data
    table = next((read(data) for applies, read in SOURCES if applies(data)), data)
    if not isinstance(table, Mapping):
        raise TrainingError(
            f"columns= renames columns of rows, of files and of dicts; {what} is a "
            f"{type(data).__name__}"
        )
    if odd := [name for name in names if name not in table]:
        raise TrainingError(
            f"columns has {', '.join(map(repr, odd))}, and {what} has the columns "
            f"{', '.join(map(repr, table))}"
        )
    return {names.get(name, name): column for name, column in table.items()}


def size_of_batches(inputs: Sequence[Value], wanted: int | None) -> int:
    """Return the batch size: that of the file if fixed, else `wanted`, else 32."""
    firsts = {value.shape[0] for value in inputs if value.shape and not value.whole}
    firsts = {size for size in firsts if isinstance(size, str)}
    fixed = [
        value.shape[0]
        for value in inputs
        # an axis of examples may come later: recurrent states are [layers, batch, size]
        if value.shape and not value.whole and firsts.isdisjoint(value.shape[1:])
    ]
    size = next((size for size in fixed if isinstance(size, int)), None)
    if size is None:
        return 32 if wanted is None else wanted
    if wanted not in (None, size):
        raise TrainingError(
            f"batch_size={wanted}, but the model's inputs are fixed to batches of {size}; "
            f"jaxonnx.load(path, batch='any') may open it{hint_at_image(inputs, size)}"
        )
    return size


def _check_batch(arrays: Any, targets: Any, size: Any, count: int) -> None:
    """Raise if a batch does not fit into this machine's memory."""
    columns = [getattr(x, "values", x) for x in (*arrays, *jax.tree.leaves(targets))]
    needed = size * sum(x.nbytes for x in columns) // count if isinstance(size, int) else 0
    if needed > machine():
        raise TrainingError(
            f"batch_size={size}: a batch of these examples takes {format_bytes(needed)} of "
            f"memory, and this machine has {format_bytes(machine())}; accumulate= makes one update "
            "of several batches"
        )


def check_size(examples: Source, batch_size: int | None) -> None:
    """Raise if a batch size is given for an iterable, whose batches have their own size."""
    if isinstance(examples, Stream) and batch_size is not None:
        raise TrainingError(
            f"batch_size={batch_size} cannot be combined with an iterable, whose batches "
            "have their own size"
        )
