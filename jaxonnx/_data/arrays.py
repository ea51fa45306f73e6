"""Data in memory: arrays, and iterables of batches of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxonnx._data.batches import Source, Stream
from jaxonnx._data.inputs_and_targets import split_weights
from jaxonnx._data.kinds import Data, Reading, list_forms, register_data
from jaxonnx._data.rows import Begun, Row, Rows
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
            kind = type(data).__name__
            raise TrainingError(f"{name} must be {list_forms()}; it is a {kind}: {way}")
        super().__init__(Begun(data) if isinstance(data, Iterator) else data, name, names)

    def read(self, reading: Reading) -> Source:
        if reading.batch_size is not None and self.name == "data":
            raise TrainingError(
                f"batch_size={reading.batch_size} cannot be combined with an iterable, whose "
                "batches have their own size"
            )
        chosen: Any = {"padding": reading.padding, "target_names": reading.target_names}
        return Stream(self.data, reading.model.inputs, self.name, labels=reading.labels, **chosen)

    @property
    def rows(self) -> Rows | None:
        data, names = self.data, self.names
        if isinstance(data, list):
            items = lambda _: ((f"example {i} of {self.name}", x) for i, x in enumerate(data))  # noqa: E731
            return Rows(items, data[0], names)
        if isinstance(data, Begun):
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
