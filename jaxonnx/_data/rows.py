"""Data as rows, wherever these come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

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

    def rename(self, row: Any) -> Any:
        """Give the columns of a row their new names, and drop what Arrow has filled in."""
        if not (isinstance(row, Mapping) and (self.names or self.fills_gaps)):
            return row
        columns = {self.names.get(name, name): value for name, value in row.items()}
        if not self.fills_gaps:
            return columns
        return {name: drop_nones(value, exempt=()) for name, value in columns.items()}


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


class Begun(Iterator):
    """An iterator whose first item is known before it is drawn."""

    def __init__(self, items: Iterator):
        self._items, self._ahead = items, [*islice(items, 1)]

    @property
    def first(self) -> Any:
        return self._ahead[0] if self._ahead else None

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._items)
