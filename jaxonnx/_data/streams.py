"""Sources that are read as they are needed: rows of a stream, and epochs of some batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from jaxonnx._data.batches import Batch, Derived, Source
from jaxonnx._data.ragged import Padding
from jaxonnx._data.rows import Rows
from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError

_BUFFER = 1024
"""Rows that are read and shuffled together."""


@dataclass(frozen=True)
class RowStream(Source):
    """Batches of the rows of a stream, shuffled through a buffer.

    The rows of a buffer are converted and shuffled together, as data in one piece. Examples that
    fill no batch go into the next buffer. The order depends on the seed and the epoch alone.
    """

    rows: Rows
    values: Sequence[Value]
    """The inputs of the model."""
    size: int
    seed: int | None
    """The seed of the shuffle; None keeps the order of the rows."""
    padding: Padding
    read: Callable[..., Source]
    """Makes the source of the columns of a buffer, as `examples_of`."""
    targets = None
    identity = None  # type: ignore[assignment]
    steps = None  # type: ignore[assignment]

    @property
    def spent(self) -> bool:  # type: ignore[override]
        return self.rows.is_spent

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        rows, padding, left, steps = self.rows(epoch), self.padding, {}, 0
        for number in count():
            part = [*islice(rows, _BUFFER)]
            columns, padding = self.rows.convert(part, padding)
            columns = {name: [*left.get(name, ()), *column] for name, column in columns.items()}
            columns = columns or left
            total = len(next(iter(columns.values()), ()))
            whole = total - total % self.size if part else total
            left = {name: column[whole:] for name, column in columns.items()}
            if whole:
                seed = None if self.seed is None else _combine(self.seed, epoch, number)
                columns = {name: column[:whole] for name, column in columns.items()}
                source = self.read(columns, self.values, self.size, seed, padding=padding)
                yield from source.batches(0)
                steps += 1
            if not part:
                break
        if not steps:
            hint = "; an iterator serves one epoch" if epoch and self.spent else ""
            raise TrainingError(f"the data has no examples in epoch {epoch + 1}{hint}")


def _combine(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Portions(Derived):
    """A source whose epochs have a fixed number of batches, read on and on.

    Args:
      source: the source. At its end it is read again.
      steps: the number of batches of an epoch.
    """

    def __init__(self, source: Source, steps: int):
        super().__init__(source)
        self._steps, self._running, self._at = steps, iter(()), -1
        self.checks_batches = source.checks_batches

    @property
    def steps(self) -> int:
        return self._steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        first = epoch * self._steps + start
        if self._at != first:
            self._running = islice(self._repeat(), first, None)
        for at in range(first, (epoch + 1) * self._steps):
            self._at = at + 1
            yield next(self._running)

    def _repeat(self) -> Iterator[Batch]:
        for epoch in count():
            yield from self._source.batches(epoch)
