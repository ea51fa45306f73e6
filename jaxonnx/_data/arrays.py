"""Data as arrays: in memory, in iterables of batches, in files of examples.

Text files are UTF-8, or UTF-16 with a byte order mark.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxonnx._data.batches import Source, Stream
from jaxonnx._data.inputs_and_targets import split_weights
from jaxonnx._data.kinds import Data, Peekable, Reading, Row, Rows, list_forms, register_data
from jaxonnx._files import read_arrays, wrap_errors
from jaxonnx._require import name_type
from jaxonnx.errors import TrainingError


@register_data
class Batches(Data):
    """A list, a loader or an iterator of batches, or a function from the epoch to one."""

    form = "an iterable of batches, or a function from the epoch to such an iterable"
    has_columns = False

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return callable(data) or np.iterable(data)

    def __init__(self, data: Any, name: str = "data", names: Mapping[str, str] | None = None):
        way = None
        if hasattr(data, "iloc"):
            way = "datasets.Dataset.from_pandas(data) converts it"
        elif isinstance(data, list) and data and isinstance(data[0], str):
            way = "[{'text': text} for text in data] makes rows of texts"
        elif isinstance(data, list) and not data:
            raise TrainingError(f"{name} has no examples")
        if way is not None:
            kind = name_type(data)
            raise TrainingError(f"{name} must be {list_forms()}; it is {kind}: {way}")
        super().__init__(Peekable(data) if isinstance(data, Iterator) else data, name, names)

    def read(self, reading: Reading) -> Source:
        if reading.batch_size is not None and self.name == "data":
            way = "(np.stack(xs), np.stack(ys))"
            if self.rows is not None and isinstance(self.rows.first, Mapping):
                column = next(iter(self.rows.first), "x")
                way = f"columns, {{{column!r}: [row[{column!r}] for row in data], ...}}"
            raise TrainingError(
                f"batch_size={reading.batch_size} cannot be combined with an iterable, whose "
                f"batches have their own size: leave it out, or if these are rows, pass {way}"
            )
        return Stream(
            self.data,
            reading.model.inputs,
            self.name,
            labels=reading.labels,
            padding=reading.padding,
            target_names=reading.target_names,
        )

    @property
    def rows(self) -> Rows | None:
        data, names = self.data, self.names
        if isinstance(data, list):
            items = lambda _: ((f"example {i} of {self.name}", x) for i, x in enumerate(data))  # noqa: E731
            return Rows(items, data[0], names)
        if isinstance(data, Peekable):
            iterate = iterate_stream(data, self.name)
            return Rows(iterate, data.first, names, is_stream=True, is_spent=True)
        return None

    @property
    def first_batch(self) -> Any:
        return self.data[0] if isinstance(self.data, list) else None


def iterate_stream(data: Any, name: str) -> Callable[[int], Iterator[Row]]:
    """Return a function of the epoch that yields the rows of an iterable, with names for errors."""

    def iterate(epoch: int) -> Iterator[Row]:
        getattr(data, "set_epoch", lambda epoch: None)(epoch)
        for number, row in enumerate(data):
            yield f"example {number} of {name}", row

    return iterate


@register_data
class ArrayData(Data):
    """Arrays: a pair or a dict; of inputs alone also an array or a tuple."""

    form = "a pair (x, y) of arrays, or (x, y, weights), a dict of arrays"

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        if hasattr(data, "iloc"):  # a table of pandas is an array, too
            return False
        if not labels:
            return isinstance(data, Mapping | tuple) or hasattr(data, "__array__")
        pair, _ = split_weights(data, (), ()) if isinstance(data, tuple) else (data, None)
        return isinstance(data, Mapping) or (isinstance(pair, tuple) and len(pair) == 2)

    def load(self) -> Any:
        return self.data


FILES = (
    "an .npz file, a .jsonl file with an object in each line, a .json file with a list of objects, "
    "a .csv, .tsv or .parquet file, or a folder of pictures"
)


def iterate_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the rows of a file, dicts by column, each with its name for errors.

    Cells of .csv and .tsv files are strings, or None if they are empty.

    Raises:
      TrainingError: the file cannot be read, or has no rows; the message names the line.
    """
    path = Path(path)
    failure = f"the data '{path}' cannot be read"
    rows = _READERS[path.suffix](path, failure)
    first = next(rows, None)
    if first is None:
        raise TrainingError(f"{failure}: it is empty, and must be {FILES}")
    for where, row in chain([first], rows):
        if not isinstance(row, Mapping):
            raise TrainingError(f"{where} cannot be read: it must be an object with columns")
        yield where, row


def read_table(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the columns of a file of numbers.

    Raises:
      TrainingError: the file cannot be read, or its rows differ in their columns.
    """
    failure, suffix = f"the data '{os.fspath(path)}' cannot be read", Path(path).suffix
    if _has_rows(path):
        rows = iterate_rows(path)
        if suffix in _CELLS:
            rows = ((where, {n: _parse_cell(x) for n, x in row.items()}) for where, row in rows)
        return to_columns(rows)
    try:
        return read_arrays(path, failure, TrainingError)
    except OSError as error:
        raise TrainingError(f"{failure}: {error}") from error
    except TrainingError as error:
        if Path(path).suffix == ".npz":
            raise
        raise TrainingError(f"{error}, or {FILES.partition(', ')[2]}") from error


def to_columns(rows: Iterable[Row]) -> dict[str, Any]:
    """Convert rows to columns: arrays, or lists if lengths differ; float64 becomes float32.

    Raises:
      TrainingError: a row has other columns than the first one.
    """
    values: dict[str, list[Any]] = {}
    for where, row in rows:
        values = values or {name: [] for name in row}
        if row.keys() != values.keys():
            raise TrainingError(
                f"{where} cannot be read: it has the columns {', '.join(row)}, and those before it "
                f"have {', '.join(values)}"
            )
        for name, value in row.items():
            values[name].append(value)
    return {name: _to_array(column) for name, column in values.items()}


def _to_array(values: list[Any]) -> np.ndarray | list[Any]:
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy makes no array of lists of unequal length
        return [_to_array(part) if isinstance(part, list) else part for part in values]
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _parse_cell(cell: Any) -> Any:
    """Return the number, list or other JSON value of a cell of text, or the text."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(cell)
    return cell


def _open(path: Path, **settings: Any) -> IO[str]:
    with path.open("rb") as file:
        begin = file.read(4)
    wide = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return path.open(encoding="utf-16" if wide else "utf-8-sig", **settings)


def _wrap(failure: str) -> Any:
    return wrap_errors(failure, TrainingError, csv.Error, OSError)


def _read_lines(path: Path, failure: str) -> Iterator[Row]:
    with _wrap(failure), _open(path) as file:
        for number, line in enumerate(file, 1):
            where = f"line {number} of '{path}'"
            if number == 1 and line.startswith("["):  # a list, whatever the name says
                yield from _read_list(path, failure)
                return
            if line.strip():
                with _wrap(f"{where} cannot be read"):
                    row = json.loads(line)
                yield where, row


def _read_list(path: Path, failure: str) -> Iterator[Row]:
    with _wrap(failure), _open(path) as file:
        rows = json.load(file)
        if not isinstance(rows, list):
            raise ValueError(f"it must be a list of objects, got {name_type(rows)}")
    for number, row in enumerate(rows):
        yield f"example {number} of '{path}'", row


def _read_cells(path: Path, failure: str) -> Iterator[Row]:
    with _wrap(failure), _open(path, newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(rows, [])
        if len({*header}) < len(header):
            raise ValueError(f"two columns have one name: {', '.join(header)}")
        for row in rows:
            where = f"line {rows.line_num} of '{path}'"
            if len(row) not in (0, len(header)):
                raise TrainingError(
                    f"{where} cannot be read: it has {len(row)} cells, and the header has "
                    f"{len(header)}"
                )
            if row:
                yield where, {n: cell or None for n, cell in zip(header, row, strict=True)}


def _read_parquet(path: Path, failure: str) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TrainingError(f"{failure}: it needs pyarrow: pip install pyarrow") from error
    with _wrap(failure), parquet.ParquetFile(path) as file:
        parts = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
        for number, row in enumerate(chain.from_iterable(parts)):
            yield f"example {number} of '{path}'", row


_CELLS = (".csv", ".tsv")
_READERS: Mapping[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_list,
    ".csv": _read_cells,
    ".tsv": _read_cells,
    ".parquet": _read_parquet,
}
"""How the rows of a file are read, by its suffix."""


def _has_rows(path: str | os.PathLike[str]) -> bool:
    named = "\0" not in os.fspath(path)
    return named and Path(path).suffix in _READERS and Path(path).is_file()


@register_data
class Table(Data):
    """A file with columns, of which a table of rows may have texts."""

    form = f"the path of {FILES}"

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return isinstance(data, str | os.PathLike)

    def load(self) -> Mapping[str, Any]:
        return read_table(self.data)

    @property
    def has_types(self) -> bool:
        return not _has_rows(self.data)

    @property
    def what(self) -> str:
        return f"{self.name} '{os.fspath(self.data)}'"

    @property
    def title(self) -> str:
        return Path(self.data).name

    @property
    def table(self) -> Mapping[str, Any]:
        return self.arrays

    @cached_property
    def rows(self) -> Rows | None:
        path = self.data
        if not _has_rows(path):
            return None
        first, from_arrow = next(iterate_rows(path))[1], Path(path).suffix == ".parquet"
        folder = Path(path).parent
        return Rows(lambda _: iterate_rows(path), first, self.names, folder, fills_gaps=from_arrow)
