"""Kinds of data: which objects are of a kind, and how these become batches.

A kind is a subclass of `Data` that is registered. It is chosen once, where data is opened; what a
run, an evaluation or a prediction must know of the data it asks the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from jaxonnx._data.batches import Arrays, PaddedExamples, Source, draw_share
from jaxonnx._data.inputs_and_targets import (
    as_pair,
    checked_weights,
    count_examples,
    split_weights,
    take_input_types,
)
from jaxonnx._data.padding import fit_padding
from jaxonnx._data.ragged import PLAIN, Padding
from jaxonnx._graph.values import Value, hint_at_image
from jaxonnx._limits import format_bytes, machine
from jaxonnx._require import name_type, require
from jaxonnx.errors import TrainingError

Row = tuple[str, Any]
"""The name of a row for errors, and the row."""
Names = Mapping[str, str]
"""New names of columns, of keys and roles of messages, by those of the data."""


@dataclass(frozen=True)
class Rows:
    """Data as rows.

    Attributes:
      iterate: returns the rows of an epoch.
      first: the first row, with the columns of the data.
      names: new names of columns and roles.
      folder: that of the file, to which paths of images are relative.
      is_stream: whether rows are read as they are needed.
      is_spent: whether they can be read only once.
      fills_gaps: whether they are Arrow's, whose structs have None for what a row lacks.
      classes: the names of the classes of columns that have such, as datasets' ClassLabel.
    """

    iterate: Callable[[int], Iterable[Row]]
    first: Any
    names: Names
    folder: Path = Path()
    is_stream: bool = False
    is_spent: bool = False
    fills_gaps: bool = False
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __call__(self, epoch: int = 0) -> Iterator[Row]:
        """Yield the rows of an epoch with new names of their columns, and names for errors."""
        for where, row in self.iterate(epoch):
            yield where, self.rename(row)

    def choose(self, chosen: np.ndarray) -> Rows:
        """Return these rows without those for which `chosen`, bool[rows], is False."""
        return replace(self, iterate=lambda epoch: compress(self.iterate(epoch), chosen))

    def rename(self, row: Any) -> Any:
        """Give columns their new names and Python's values, and drop nulls that Arrow fills in."""
        if not isinstance(row, Mapping):
            return row
        columns = {self.names.get(name, name): to_python(value) for name, value in row.items()}
        if not self.fills_gaps:
            return columns
        return {name: drop_nones(value, exempt=()) for name, value in columns.items()}


def to_python(value: Any, inside: bool = False) -> Any:
    """Convert values of NumPy in a row: arrays of objects, and all within objects.

    Arrays with axes, and numbers, that are no part of an object stay.

    Args:
      inside: whether the value is a part of an object.
    """
    if isinstance(value, Mapping):
        return {name: to_python(x, True) for name, x in value.items()}
    if isinstance(value, np.ndarray) and (inside or value.dtype == object or not value.ndim):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if inside or (value and isinstance(value[0], Mapping | list | tuple | np.ndarray)):
            return [to_python(x, inside) for x in value]
        return value
    return value.item() if inside and isinstance(value, np.generic) else value


def drop_nones(value: Any, exempt: Collection[str] = ("arguments",)) -> Any:
    """Drop keys that are None, which Arrow adds to structs that lack them, but not in `exempt`."""
    if isinstance(value, Mapping):
        return {
            name: x if name in exempt else drop_nones(x, exempt)
            for name, x in value.items()
            if x is not None
        }
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping | list | tuple):
        return [drop_nones(x, exempt) for x in value]
    return value


class Peekable(Iterator):
    """An iterator whose first item is known before it is drawn."""

    def __init__(self, items: Iterator):
        self._items, self._ahead = items, [*islice(items, 1)]

    @property
    def first(self) -> Any:
        return self._ahead[0] if self._ahead else None

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._items)


K = TypeVar("K", bound="type[Data]")


@dataclass
class Reading:
    """The purpose of reading data; kinds that prepare the model, or choose widths, change it."""

    model: Any
    """The model that takes the batches."""
    padding: Padding = PLAIN
    """How sequences of unequal length are padded, and what losses need of the data."""
    batch_size: int | None = None
    """The size of batches of data in one piece; by default that of the file, or 32."""
    seed: int | None = None
    """The seed of the order of examples; None keeps their order."""
    preprocess: Any = None
    """The argument `preprocess` of `train`."""
    augment: Any = None
    """Names of augmentations in the argument `augment` of `train`."""
    labels: bool = True
    """Whether targets are wanted; otherwise they may be missing, and are dropped."""
    trains: bool = False
    """Whether the model is trained."""
    per_row: bool = False
    """Whether there must be one example for each row of the data, in its order."""
    target_names: Collection[str] = ()
    """Names that targets can have: an entry "weight" of a dict may be one of them."""
    notes: list[Sequence[str]] = field(default_factory=list)
    """Notes for the history. A list of a kind grows while its data is read."""
    long: Mapping[str, int] = field(default_factory=dict)
    """The number of texts that were "cut", "split" or skipped ("skip"), as far as they are read."""


class Data:
    """A kind of data; an instance has the data that a user passes.

    A subclass says which objects are of the kind, by a class method `accepts(data, labels)`, where
    `labels` is whether targets are wanted; and what arrays these are (`load`). One whose batches
    are not made of arrays in memory has its own `read` and `first_batch` instead. A class method
    `prepare(parts, reading)` is called before batches are read, with all data of the kind in a run
    by name ("data", "validation"): it may change the model and add notes (`Reading`).

    `register_data` makes it one of the kinds that `jaxonnx.train`, `evaluate`, `Model.predict`,
    `quantize` and the commands take.

    Attributes:
      data: the object that the user passes.
      name: "data" or "validation".
      names: new names of its columns, by their own.
    """

    form: ClassVar[str] = ""
    """The objects that are accepted, for errors."""
    takes: ClassVar[Collection[str]] = ()
    """Those of the arguments "preprocess" and "augment" of `train` that the kind uses."""
    has_columns: ClassVar[bool] = True
    """Whether the argument `columns` of `train` can rename something."""

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        """Check whether an object is data of this kind.

        Args:
          labels: whether targets are wanted, as for training, or inputs alone, as for `predict`.
        """
        raise NotImplementedError

    def __init__(self, data: Any, name: str = "data", names: Mapping[str, str] | None = None):
        self.data: Any = data
        self.name: str = name
        self.names: Mapping[str, str] = names or {}

    def load(self) -> Any:
        """Return all of the data: a pair (x, y), (x, y, weights), or a dict of columns."""
        raise NotImplementedError

    def read(self, reading: Reading) -> Source:
        """Return batches of the examples.

        Raises:
          TrainingError: the data does not fit the model.
        """
        columns = self.arrays
        if not self.has_types:
            columns = take_input_types(columns, reading.model.inputs)
        return read_arrays(columns, reading, self.what)

    @classmethod
    def prepare(cls, parts: Mapping[str, Any], reading: Reading) -> None:
        """Prepare the data of this kind in a run: "data", "validation" or both, before `read`.

        Args:
          parts: instances of the kind, by name.
          reading: `model`, `padding`, `notes` and `long` may be changed.
        """

    def split(self, validation: Any) -> tuple[Data, Any, list[str]]:
        """Return the data to train with, the validation data, and notes for the history."""
        return self, validation, []

    def hold_out(self, share: float, reading: Reading) -> tuple[Data, Data] | None:
        """Return the data without a share of it, and that share; None for a share of examples."""
        return None

    def convert_samples(self, samples: Any) -> Any:
        """Return the argument `samples` of `train` in the form of these examples."""
        return samples

    def choose_loss(self, model: Any) -> tuple[str, str] | None:
        """Return the usual loss of this kind on a model, and a name of the data for the notes."""
        return None

    @property
    def what(self) -> str:
        """The data, for errors."""
        return self.name

    @property
    def has_types(self) -> bool:
        """Whether numbers have types that were chosen for the model, as those of arrays are."""
        return True

    @property
    def title(self) -> str:
        """The name of the data, for a model card."""
        return ""

    @property
    def rows(self) -> Rows | None:
        """The data as rows, among which there may be texts."""
        return None

    @property
    def table(self) -> Mapping[str, Any] | None:
        """The columns of a file, of which a command chooses inputs, targets and weights."""
        return None

    @property
    def first_batch(self) -> Any:
        """The first batch, or all of the data, in the form of `load`; None if it is not known."""
        return self.arrays

    @cached_property
    def arrays(self) -> Any:
        """The result of `load`, with new names of columns."""
        table = self.load()
        if not self.names:
            return table
        if not isinstance(table, Mapping):
            raise self._refuse_names()
        if unknown := [name for name in self.names if name not in table]:
            raise TrainingError(
                f"columns has {', '.join(map(repr, unknown))}, and {self.name} has the columns "
                f"{', '.join(map(repr, table))}"
            )
        return {self.names.get(name, name): column for name, column in table.items()}

    def _refuse_names(self) -> TrainingError:
        return TrainingError(
            f"columns= renames columns of rows, of files and of dicts; {self.name} is "
            f"{name_type(self.data)}"
        )


class RowData(Data):
    """A kind of rows, wherever they come from: a file, a list, a data set, a stream.

    Attributes:
      plain: the same data as the kind that its rows come from.
    """

    @classmethod
    def accepts_rows(cls, rows: Rows) -> bool:
        """Check by the first row whether rows are of this kind."""
        raise NotImplementedError

    @classmethod
    def check_rows(cls, rows: Rows, name: str, model: Any) -> None:
        """Refuse rows that are not of this kind, and are meant to be."""

    def __init__(self, plain: Data):
        super().__init__(plain.data, plain.name, plain.names)
        self.plain = plain
        self._chosen: np.ndarray | None = None
        """For each row, whether it is in this part of the data; None: all are."""

    @property
    def title(self) -> str:
        return self.plain.title

    @property
    def rows(self) -> Any:
        rows: Any = self.plain.rows
        return rows if self._chosen is None else rows.choose(self._chosen)

    def hold_out(self, share: float, reading: Reading) -> tuple[Data, Data] | None:
        """Hold out rows: the examples that a row becomes stay together."""
        if self.rows.is_stream:
            return None
        held_out = np.zeros(sum(1 for _ in self.rows.iterate(0)), bool)
        held_out[draw_share(len(held_out), share, reading.seed, "rows")] = True
        rest, part = copy(self), copy(self)
        rest._chosen, part._chosen, part.name = ~held_out, held_out, "validation"
        return rest, part

    @property
    def first_batch(self) -> Mapping[str, Any]:
        return {}  # none of the model's inputs by name: neither states nor caches


KINDS: list[type[Data]] = []
"""The kinds of data; the first one that accepts an object is its kind."""
ROW_KINDS: list[type[RowData]] = []


def register_data(kind: K) -> K:
    """Register a kind of data, which is asked before those that are there; return it.

    Args:
      kind: a subclass of `Data`.

    Raises:
      TrainingError: it is not one, or lacks a method that a kind must have.
    """
    fits = isinstance(kind, type) and issubclass(kind, Data)
    require("register_data: kind", kind, fits, "a subclass of jaxonnx.training.Data", TrainingError)
    of_rows = issubclass(kind, RowData)
    chooses = "accepts_rows" if of_rows else "accepts"
    if getattr(kind, chooses).__func__ is getattr(RowData, chooses).__func__:
        raise TrainingError(f"register_data: {kind.__name__} has no class method {chooses}")
    if kind.load is Data.load and kind.read is Data.read:
        raise TrainingError(
            f"register_data: {kind.__name__} has neither load, which returns arrays, nor read, "
            "which returns batches"
        )
    kinds: list[Any] = ROW_KINDS if of_rows else KINDS
    kinds.insert(0, kind)
    return kind


def open_data(
    data: Any, name: str = "data", names: Mapping[str, str] | None = None, labels: bool = True
) -> Data:
    """Find the kind of data.

    Args:
      data: as `train` takes it.
      name: of the data, for errors.
      names: new names of columns by those of the data; also of the keys and roles of messages.
      labels: whether targets are wanted.

    Raises:
      TrainingError: it is of no kind, or `names` are for a kind without columns.
    """
    kind = next((kind for kind in KINDS if kind.accepts(data, labels)), None)
    if kind is None:
        raise TrainingError(f"{name} must be {list_forms()}; it is {name_type(data)}")
    opened = kind(data, name, names)
    if (rows := opened.rows) is not None:
        of_rows = next((kind for kind in ROW_KINDS if kind.accepts_rows(rows)), None)
        opened = opened if of_rows is None else of_rows(opened)
    if names and not opened.has_columns:
        raise opened._refuse_names()
    return opened


def list_forms() -> str:
    """List the forms of data, for errors."""
    *forms, last = [kind.form for kind in KINDS if kind.form]
    return f"{', '.join(forms)}, or {last}"


def read(parts: Mapping[str, Data], reading: Reading) -> list[Source]:
    """Return the batches of data to train with, or to evaluate, and of validation data.

    Args:
      parts: "data", and "validation" if there is some, whose examples keep their order.
      reading: changed by the kinds of data.

    Raises:
      TrainingError: the data does not fit the model, or an argument does not go with it.
    """
    kinds = dict.fromkeys(map(type, parts.values()))
    if reading.augment is not None and "augment" not in parts["data"].takes:
        raise TrainingError(
            f"augment={reading.augment!r}: names go with a folder of pictures; for other data pass "
            "a function (key, x) that returns what x becomes, or (key, batch)"
        )
    if reading.preprocess is not None and not any("preprocess" in kind.takes for kind in kinds):
        raise TrainingError(
            "preprocess goes with data that is a folder of pictures, with one folder for each class"
            " in it (to predict, pictures in any folder), or rows of texts"
        )
    for name, part in parts.items():
        if reading.per_row or isinstance(part, RowData) or (rows := part.rows) is None:
            continue
        for of_rows in ROW_KINDS:
            of_rows.check_rows(rows, name, reading.model)
    for kind in kinds:
        kind.prepare({name: x for name, x in parts.items() if type(x) is kind}, reading)
    reading.padding = fit_padding(reading.padding, reading.model)
    ordered = replace(reading, seed=None)
    return [x.read(reading if name == "data" else ordered) for name, x in parts.items()]


def read_arrays(data: Any, reading: Reading, what: str) -> Source:
    """Return batches of arrays, or of lists of sequences, in the form of `Data.load`.

    Args:
      what: the data, for errors.

    Raises:
      TrainingError: the data does not fit the model.
    """
    values, padding, labels = reading.model.inputs, reading.padding, reading.labels
    batch_size, seed, weights = reading.batch_size, reading.seed, None
    if labels:
        names = [value.name for value in values]
        derived = padding.needs.derive is not None
        data, weights = split_weights(data, names, reading.target_names, derived)
    arrays, targets = as_pair(data, values, what, labels, padding)
    rows = np.arange(count_examples(arrays, targets, values))
    if all(value.whole for value in values):  # a graph: its targets keep their order
        batch_size, seed = len(rows), None
    size = size_of_batches(values, batch_size)
    if weights is not None:
        weights = checked_weights(weights, len(rows), what)
    # raise if a batch does not fit into this machine's memory
    count = len(rows)
    columns = [getattr(x, "values", x) for x in (*arrays, *jax.tree.leaves(targets))]
    needed = size * sum(x.nbytes for x in columns) // count if isinstance(size, int) else 0
    if needed > machine():
        raise TrainingError(
            f"batch_size={size}: a batch of these examples takes {format_bytes(needed)} of "
            f"memory, and this machine has {format_bytes(machine())}; accumulate= makes one update "
            "of several batches"
        )
    also: Any = {"weights": weights, "group": padding.needs.group if labels else 1}
    whole = [value.whole for value in values]
    if any(whole):
        return Arrays(arrays, targets, size, seed, rows, whole=whole, **also)
    columns = padding.sequences(arrays, targets, values, what, whole=True)
    if columns is not None:
        return PaddedExamples(None, None, size, seed, rows, columns, **also)
    return Arrays(arrays, targets, size, seed, rows, **also)


def find_fixed_sizes(inputs: Sequence[Value]) -> list[int]:
    """Return the sizes to which inputs fix the axis of examples.

    It may not be the first one: recurrent states are [layers, batch, size].
    """
    firsts = {value.shape[0] for value in inputs if value.shape and not value.whole}
    firsts = {size for size in firsts if isinstance(size, str)}
    return [
        value.shape[0]
        for value in inputs
        if value.shape
        and not value.whole
        and isinstance(value.shape[0], int)
        and firsts.isdisjoint(value.shape[1:])
    ]


def size_of_batches(inputs: Sequence[Value], batch_size: int | None) -> int:
    """Return the batch size: that of the file if fixed, else `batch_size`, else 32."""
    size = next(iter(find_fixed_sizes(inputs)), None)
    if size is None:
        return 32 if batch_size is None else batch_size
    if batch_size not in (None, size):
        raise TrainingError(
            f"batch_size={batch_size}, but the model's inputs are fixed to batches of {size}; "
            f"jaxonnx.load(path, batch='any') may open it{hint_at_image(inputs, size)}"
        )
    return size
