"""Data sets of Hugging Face: in memory, streamed, and with splits by name; rows of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

import numpy as np

from jaxonnx._data.arrays import iterate_stream, to_columns
from jaxonnx._data.batches import SERVES_ONE_EPOCH, Batch, DataEnded, Source
from jaxonnx._data.inputs_and_targets import take_input_types
from jaxonnx._data.kinds import (
    Data,
    Reading,
    Row,
    Rows,
    list_forms,
    open_data,
    read_arrays,
    register_data,
    size_of_batches,
)
from jaxonnx._data.ragged import Padding
from jaxonnx._require import name_type
from jaxonnx.errors import TrainingError

_BUFFER = 1024
"""Rows that are read and shuffled together."""


@register_data
class Dataset(Data):
    """A Dataset, which is read into memory."""

    form = "a Hugging Face Dataset, a list of dicts with texts"

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return all(hasattr(data, name) for name in ("column_names", "format", "__len__"))

    def __init__(self, data: Any, name: str = "data", names: Mapping[str, str] | None = None):
        super().__init__(data, name, names)
        if not len(data):
            raise TrainingError(f"{name} has no examples")

    def load(self) -> Mapping[str, Any]:
        """Return the columns (an iterator of a Dataset yields single examples)."""
        data = self.data
        return (data if data.format["type"] else data.with_format("numpy"))[:]

    @property
    def has_types(self) -> bool:
        return False

    @cached_property
    def rows(self) -> Rows | None:
        data, name = self.data, self.name
        items = lambda _: ((f"example {i} of {name}", data[i]) for i in range(len(data)))  # noqa: E731
        classes = _find_classes(data, self.names)
        return Rows(items, data[0], self.names, fills_gaps=True, classes=classes)


@register_data
class StreamedDataset(Data):
    """An IterableDataset, whose rows are read as they are needed."""

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return hasattr(data, "column_names") and not hasattr(data, "__len__")

    def read(self, reading: Reading) -> Source:
        return RowStream(self.rows, reading, self.name)

    @cached_property
    def rows(self) -> Rows:
        first, iterate = next(iter(self.data), None), iterate_stream(self.data, self.name)
        return Rows(
            iterate,
            first,
            self.names,
            is_stream=True,
            fills_gaps=True,
            classes=_find_classes(self.data, self.names),
        )

    @property
    def first_batch(self) -> None:
        return None


@register_data
class DatasetSplits(Data):
    """A DatasetDict: the split "train", and one for validation unless some is passed."""

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return isinstance(data, Mapping) and hasattr(data, "column_names")

    def load(self) -> Any:
        raise TrainingError(
            f"{self.name} must be {list_forms()}; it is {name_type(self.data)}: pass one of "
            f"its splits, like data[{next(iter(self.data), 'train')!r}]"
        )

    def split(self, validation: Any) -> tuple[Data, Any, list[str]]:
        data = self.data
        if "train" not in data:
            raise TrainingError(
                f"data has the splits {', '.join(map(repr, data))}, and none of them is 'train': "
                f"pass one, like data[{next(iter(data), 'train')!r}]"
            )
        usual = ("validation", "valid", "val", "dev")
        held_out, notes = next((name for name in usual if name in data), None), []
        if validation is None and held_out is not None:
            validation = data[held_out]
            notes.append(f"validation is the split {held_out!r} of the data")
        else:
            held_out = None
        if unread := [repr(name) for name in data if name not in ("train", held_out)]:
            notes.append(f"splits of the data that nothing reads: {', '.join(unread)}")
        return open_data(data["train"], self.name, self.names), validation, notes


def _find_classes(data: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the names of the classes of columns that have such (ClassLabel), or lists of these."""
    features = getattr(data, "features", None)
    features = features if isinstance(features, Mapping) else {}
    features = {names.get(n, n): getattr(f, "feature", f) for n, f in features.items()}
    return {n: f.names for n, f in features.items() if hasattr(f, "names")}


@dataclass(frozen=True)
class RowStream(Source):
    """Batches of the rows of a stream, shuffled through a buffer.

    The rows of a buffer are converted and shuffled together, as data in one piece. Examples that
    fill no batch go into the next buffer. The order depends on the seed and the epoch alone.
    """

    rows: Rows
    reading: Reading
    what: str
    """The data, for errors."""
    convert: Callable[[Sequence[Row], Padding], tuple[Mapping[str, Any], Padding]] = (
        lambda rows, padding: (to_columns(rows), padding)
    )
    """Returns the columns of some rows, and the padding of their sequences."""
    explain: Callable[[], str] | None = None
    """Returns why no row that was converted became an example."""
    targets = None
    identity = None  # type: ignore[assignment]
    steps = None  # type: ignore[assignment]

    @property
    def size(self) -> int:  # type: ignore[override]
        return size_of_batches(self.reading.model.inputs, self.reading.batch_size)

    @property
    def spent(self) -> bool:  # type: ignore[override]
        return self.rows.is_spent

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        reading, size = self.reading, self.size
        rows, padding, left, steps = self.rows(epoch), reading.padding, {}, 0
        for number in count():
            part = [*islice(rows, _BUFFER)]
            columns, padding = self.convert(part, padding)
            columns = {name: [*left.get(name, ()), *column] for name, column in columns.items()}
            columns = columns or left
            total = len(next(iter(columns.values()), ()))
            whole = total - total % size if part else total
            left = {name: column[whole:] for name, column in columns.items()}
            if whole:
                seed = reading.seed
                if seed is not None:
                    numbers = np.random.SeedSequence((seed, epoch, number))
                    seed = int(numbers.generate_state(1)[0])
                columns = {name: column[:whole] for name, column in columns.items()}
                columns = take_input_types(columns, reading.model.inputs)
                buffer = replace(reading, batch_size=size, seed=seed, padding=padding)
                yield from read_arrays(columns, buffer, self.what).batches(0)
                steps += 1
            if not part:
                if number and not steps and self.explain is not None:
                    raise TrainingError(self.explain())
                break
        if not steps:
            what = f"the data has no examples in epoch {epoch + 1}"
            if epoch and self.spent:
                raise DataEnded(f"{what}; {SERVES_ONE_EPOCH}")
            raise TrainingError(what)
