"""Batches of sequences of unequal length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import jax
import numpy as np

from jaxonnx._data.batches import Batch, Examples
from jaxonnx._data.ragged import Columns, Ragged


@dataclass(frozen=True)
class Padded(Examples):
    """Examples of unequal length, in batches padded to the widest bucket of their examples.

    With a seed, batches are made of examples of one bucket: in each epoch the examples of each
    bucket are shuffled, and then the batches. The remainder of a bucket goes into the first batch
    of the next wider one, so that there are as many batches as with arrays. Without a seed the
    examples keep their order, whatever their lengths.
    """

    columns: Columns
    checks_batches = True

    def contents(self) -> Sequence[np.ndarray]:
        leaves = jax.tree.leaves(self.columns.pair)
        parts = [(x.values, x.starts) if isinstance(x, Ragged) else (x,) for x in leaves]
        return [*chain.from_iterable(parts)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for rows, weight in self.rows_of_batches(epoch, start):
            yield Batch(*self.columns.rows(rows), weight)

    def order(self, epoch: int) -> np.ndarray:
        order = super().order(epoch)
        if self.seed is None:
            return order
        # a stable sort of the shuffled groups by width keeps the shuffle within each width
        groups = order.reshape(-1, self.group)
        widths = self.columns.widths[groups].max(axis=1)
        return groups[np.argsort(widths, kind="stable")].reshape(-1)

    def rows_of_batches(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        # all batches of the epoch, as their order is shuffled: a resumed run skips the first ones
        batches = [*super().rows_of_batches(epoch, 0)]
        if self.seed is not None:
            order = np.random.default_rng((self.seed, epoch, 1)).permutation(len(batches))
            batches = [batches[number] for number in order]
        yield from batches[start:]

    @property
    def lengths(self) -> np.ndarray:
        """The length of each example, in order."""
        return self.columns.lengths[self.rows]

    def width(self, batch: Batch) -> int:
        """Return the padded length of a batch."""
        inputs, _ = self.columns.pair
        pairs = zip(inputs, batch.inputs, strict=True)
        return next(x.shape[1] for column, x in pairs if isinstance(column, Ragged))
