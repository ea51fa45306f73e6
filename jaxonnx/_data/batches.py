"""Sources of batches of one size: data in one piece, and iterables of batches.

A short batch is filled up with further examples of weight zero: with arrays, with those that the
epoch began with; with an iterable, with those of the batch before it (its own where there is none).
So batches of one width have one shape, nothing is compiled twice, and batch statistics see real
examples only, though the loss does not count the fill.
"""

from __future__ import annotations

import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxonnx._data.inputs_and_targets import as_pair, checked_weights, count_examples, split_weights
from jaxonnx._data.ragged import PLAIN, Columns, LazyColumn, Padding, Ragged
from jaxonnx._graph.values import Value
from jaxonnx._require import require_integer
from jaxonnx.errors import TrainingError, warn

_SHAPES = 16
"""Number of batch shapes of a stream from which on to warn."""


class Batch(NamedTuple):
    """The examples of a step; some may be fill that the loss ignores."""

    inputs: tuple[Any, ...]
    """The inputs, in the order of the model's."""
    targets: Any
    """A pytree of arrays with the examples along the first axis."""
    weight: Any
    """float32[n], the weight of each example in losses and metrics: 1 by default, 0 for fill."""


class ShortBatch(Batch):
    """A batch whose targets and weights are those of its first examples alone.

    The outputs of the others, which fill it up, are dropped before a loss or metric.
    """


class Source(ABC):
    """Batches of examples, as a run reads them.

    A source is data in one piece (`Examples`), batches that something else makes (`Stream`), or
    made of either of these (`DerivedSource`).
    """

    targets: Any
    """The targets of all examples; None if they are not known before the batches are read."""
    weights: np.ndarray | None = None
    """The weight of each example, float32; None if all are 1, or not known beforehand."""
    size: int | None
    """The number of examples in a batch; None if it varies."""
    classes: Sequence[str] | None = None
    """The names of the classes, if the data has them."""
    resumable: Mapping[str, Any] | None = None
    """Settings of the data that must be the same in a resumed run, as values of JSON."""
    in_shares: bool = False
    """Whether each of several processes yields its own share of a batch, not the whole batch."""
    spent: bool = False
    """Whether the source is an iterator, which can be read only once."""
    checks_batches: bool = False
    """Whether targets are checked batch by batch before the run, not all at once."""

    @property
    @abstractmethod
    def steps(self) -> int | None:
        """The number of batches in an epoch; None if it is not known."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """The result of `identity` for the examples; None if they are not known."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch, from batch `start` on."""

    def split(self, share: float) -> tuple[Source, Source]:
        """Return a source without a share of the examples, and that share.

        Raises:
          TrainingError: the examples cannot be divided so.
        """
        raise TrainingError(
            f"validation={share} is a fraction, and data is an iterable: pass "
            "validation data like it"
        )

    def sample(self, batches: int) -> Source:
        """Return a source of so many batches that stand for all examples, if it can choose them."""
        return self

    def release(self) -> None:  # noqa: B027
        """Free the memory of a cache; the batches can be read as before."""


class DataEnded(TrainingError):
    """Raised when an iterator is asked for an epoch after its only one."""


SERVES_ONE_EPOCH = "an iterator serves one epoch: pass a list, a loader or a function of the epoch"


class DerivedSource(Source):
    """A source of the batches of another one, which it changes or divides otherwise."""

    def __init__(self, source: Source):
        self._source = source
        self.targets, self.weights, self.size = source.targets, source.weights, source.size
        self.classes, self.resumable, self.spent = source.classes, source.resumable, source.spent
        self.in_shares = source.in_shares

    @property
    def identity(self) -> dict[str, Any] | None:
        return self._source.identity


class Portions(DerivedSource):
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
        for epoch in itertools.count():
            yield from self._source.batches(epoch)


def draw_share(count: int, share: float, seed: int | None, what: str) -> np.ndarray:
    """Return the numbers of a share of examples, in order; the seed chooses them.

    Args:
      count: the number of all examples.
      share: above 0 and below 1.
      what: the examples, for the error.

    Raises:
      TrainingError: it is no share, or none of the examples are in it, or all.
    """
    size = round(count * share) if 0 < share < 1 else 0
    if isinstance(share, bool) or not 0 < size < count:
        raise TrainingError(
            f"validation={share!r} must be a share between 0 and 1 of the {count} {what} that "
            "leaves some on either side"
        )
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    return np.sort(order.permutation(count)[:size])


@dataclass(frozen=True)
class Examples(Source):
    """Examples that are known beforehand, in an order that depends only on seed and epoch."""

    inputs: Any
    targets: Any
    size: int
    seed: int | None
    """The seed of the shuffle; None keeps the order of the rows."""
    rows: np.ndarray
    """The indices of the examples that are used."""
    weights: np.ndarray | None = field(default=None, kw_only=True)
    """The weight of each example, float32; None if all are 1."""
    group: int = field(default=1, kw_only=True)
    """The number of consecutive rows that stay together in the shuffle and within a batch."""

    def __post_init__(self):
        require_integer("batch_size", self.size, 1, 2**31 - 1, TrainingError)
        for what, count in (("batch_size", self.size), ("the number of examples", len(self.rows))):
            if count % self.group:
                raise TrainingError(
                    f"the loss takes examples in groups of {self.group}, one behind the other: "
                    f"{what} must be a multiple of it, got {count}"
                )

    @property
    def steps(self) -> int:
        return -(-len(self.rows) // self.size)

    @property
    def identity(self) -> dict[str, Any]:
        weights = [] if self.weights is None else [self.weights]
        return identity(self.rows, [*self.contents(), *weights])

    @abstractmethod
    def contents(self) -> Sequence[np.ndarray]:
        """Return the arrays that identify the examples, for the fingerprint."""

    def split(self, share: float) -> tuple[Source, Source]:
        """Return a source without a share of the examples, and that share; the seed chooses."""
        groups = self.rows.reshape(-1, self.group)
        what = "examples" if self.group == 1 else "groups of examples"
        chosen = draw_share(len(groups), share, self.seed, what)
        rest, held_out = np.delete(groups, chosen, axis=0).reshape(-1), groups[chosen].reshape(-1)
        return replace(self, rows=rest), replace(self, rows=held_out, seed=None)

    def sample(self, batches: int) -> Source:
        """Return a source of so many batches of examples drawn at random, always the same ones.

        The first examples of a data set need not be like the others: those of a folder of images
        come class by class.
        """
        groups = self.rows.reshape(-1, self.group)
        count = batches * self.size // self.group
        if len(groups) <= count:
            return self
        chosen = np.random.default_rng(0).permutation(len(groups))[:count]
        return replace(self, rows=groups[chosen].reshape(-1))

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows in the order of an epoch, shuffled in whole groups."""
        order = self.rows.reshape(-1, self.group).copy()
        if self.seed is not None:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order.reshape(-1)

    def rows_of_batches(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows and the weights of each batch, from batch `start` on."""
        # np.resize repeats the order from its beginning, which fills up the last batch
        order = np.resize(self.order(epoch), self.steps * self.size)
        weight = np.ones(self.size, np.float32)
        for first in range(start * self.size, len(order), self.size):
            if len(self.rows) - first < self.size:
                weight = (np.arange(first, first + self.size) < len(self.rows)).astype(np.float32)
            rows = order[first : first + self.size]
            yield rows, weight if self.weights is None else weight * self.weights[rows]


@dataclass(frozen=True)
class Arrays(Examples):
    """All examples as arrays; `inputs` is a tuple in the order of the model's."""

    whole: Sequence[bool] = field(default=(), kw_only=True)
    """For each input, whether it is passed whole with each batch; False by default."""

    def contents(self) -> Sequence[np.ndarray]:
        return jax.tree.leaves((self.inputs, self.targets))

    def split(self, share: float) -> tuple[Source, Source]:
        if any(self.whole):
            raise TrainingError(
                f"validation={share} is a share of examples, and batching= passes inputs whole: "
                "pass validation data, like (inputs, targets, weights) with the weight 0 for what "
                "is trained"
            )
        return super().split(share)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        whole = self.whole or (False,) * len(self.inputs)
        split = [x for x, is_whole in zip(self.inputs, whole, strict=True) if not is_whole]
        arrays, form = jax.tree.flatten((split, self.targets))
        memories = [MemoryPool(array, self.size) for array in arrays]
        for rows, weight in self.rows_of_batches(epoch, start):
            gathered, targets = form.unflatten([memory.rows(rows) for memory in memories])
            parts = iter(gathered)
            pairs = zip(self.inputs, whole, strict=True)
            inputs = tuple(x if is_whole else next(parts) for x, is_whole in pairs)
            yield Batch(inputs, targets, weight)


@dataclass(frozen=True)
class Stream(Source):
    """An iterable of batches that the user passes, such as a loader."""

    data: Any
    """The iterable, or a function of the epoch that returns one."""
    values: Sequence[Value]
    """The inputs of the model."""
    what: str
    """The data, for errors."""
    targets: None = None
    """None: targets are not known before the batches are read."""
    labels: bool = True
    """Whether targets are wanted; else only inputs are."""
    padding: Padding = PLAIN
    target_names: Collection[str] = ()
    """The names of targets, one of which may be "weight"."""
    size = None
    in_shares = True

    @property
    def spent(self) -> bool:  # type: ignore[override]
        return isinstance(self.data, Iterator)

    @property
    def identity(self) -> None:
        return None

    @property
    def steps(self) -> int | None:
        try:
            return len(self.data)
        except TypeError:  # no length, or that of a loader whose dataset has none
            return None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches from batch `start` on; those before are read and dropped.

        A short batch is filled up from the one before it, so that they are needed in any case.
        """
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        """Yield all batches of an epoch, checked, padded and filled up.

        Raises:
          TrainingError: a batch differs from those before it, or there are none.
        """
        latest: dict[Any, Any] = {}  # the last batch of each shape of examples, for fill
        pairs: Any = self.data(epoch) if callable(self.data) else self.data
        for number, batch in enumerate(pairs):
            what = f"batch {number + 1} of {self.what} in epoch {epoch + 1}"
            weights = None
            if self.labels:
                names = [value.name for value in self.values]
                derived = self.padding.needs.derive is not None
                batch, weights = split_weights(batch, names, self.target_names, derived)
            pair = as_pair(batch, self.values, what, self.labels, self.padding)
            if any(value.whole for value in self.values):
                yield self._batch_as_it_is(pair, weights, what, latest)
                continue
            columns = self.padding.sequences(*pair, self.values, what, whole=False)
            if columns is not None:
                pair = columns.rows(np.arange(len(pair[0][0])))
            shape = tuple(x.shape[1:] for x in pair[0])
            if shape in latest:
                _check_same(pair, latest[shape], what)
            elif latest:
                _check_same(pair, next(iter(latest.values())), what, self.values)
                if len(latest) == _SHAPES:
                    self._warn()
            before = latest.get(shape, pair)
            size, count = len(before[0][0]), len(pair[0][0])
            if count > size and len(latest) == 1:
                raise TrainingError(f"{what} has {count} examples, more than the {size} before it")
            fill = max(size - count, 0)
            filled = jax.tree.map(lambda a, b: np.concatenate([a, b[:fill]]), pair, before)  # noqa: B023
            latest[shape] = filled
            weight = (np.arange(count + fill) < count).astype(np.float32)
            if weights is not None:
                weight[:count] = checked_weights(weights, count, what)
            yield Batch(filled[0], filled[1], weight)
        if not latest:
            hint = f"; {SERVES_ONE_EPOCH}" if epoch else ""
            kind = DataEnded if epoch and self.spent else TrainingError
            raise kind(f"{self.what} has no batches in epoch {epoch + 1}{hint}")

    def _batch_as_it_is(self, pair: Any, weights: Any, what: str, latest: dict[Any, Any]) -> Batch:
        """Return a batch whose inputs are passed whole; it cannot be filled up."""
        inputs, targets = pair
        count = count_examples(inputs, targets, self.values)
        shape = tuple(x.shape for x in jax.tree.leaves(pair))
        if shape not in latest and len(latest) == _SHAPES:
            self._warn("pad graphs to a few sizes, with weight 0 for the padding")
        latest[shape] = None
        ones = np.ones(count, np.float32)
        return Batch(
            inputs, targets, ones if weights is None else checked_weights(weights, count, what)
        )

    def _warn(self, remedy: str = "length_buckets=(32, 64, 128) pads them to a few widths") -> None:
        warn(
            f"{self.what} has batches of more than {_SHAPES} shapes, and a program is compiled for "
            f"each; {remedy}",
        )


def _check_same(pair: Any, first: Any, what: str, values: Sequence[Value] = ()) -> None:
    """Raise if a batch differs from an earlier one in structure, dtypes or the shape of examples.

    Args:
      pair: inputs and targets.
      first: those of the earlier batch.
      what: the batch, for errors.
      values: the inputs of the model; sizes that these leave open may differ. None may by default.
    """
    if jax.tree.structure(pair) != jax.tree.structure(first):
        raise TrainingError(
            f"{what} has targets {jax.tree.structure(pair[1])}, those before it "
            f"{jax.tree.structure(first[1])}"
        )
    new, old = ([(a.shape[1:], a.dtype) for a in jax.tree.leaves(p)] for p in (pair, first))
    if new != old and not (values and _of_one_kind(new, old, values)):
        raise TrainingError(f"{what} has (shape, dtype) {new} for each example, those before {old}")


def _of_one_kind(new: list[Any], old: list[Any], values: Sequence[Value]) -> bool:
    """Check whether batches, as (shape, dtype) of leaves, differ only in sizes that are open."""
    if any((len(a), b) != (len(c), d) for (a, b), (c, d) in zip(new, old, strict=True)):
        return False
    for value, (shape, _), (before, _) in zip(values, new, old, strict=False):
        sizes = () if value.shape is None else value.shape[1:]
        pairs = enumerate(zip(shape, before, strict=True))
        if any(a != b and i < len(sizes) and isinstance(sizes[i], int) for i, (a, b) in pairs):
            return False
    return True


@dataclass(frozen=True)
class PaddedExamples(Examples):
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
        leaves = [x.checksums if isinstance(x, LazyColumn) else x for x in leaves]
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


def iterate_inputs(batches: Iterable[Batch], values: Sequence[Value]) -> Iterator[tuple[Any, ...]]:
    """Iterate the inputs of batches, without the examples of weight 0 that fill them up.

    Batches whose size the file fixes stay as they are.

    Args:
      batches: of examples.
      values: the inputs of the model.
    """
    for batch in batches:
        counted = np.flatnonzero(np.asarray(batch.weight))
        if 0 < len(counted) < len(batch.weight):
            inputs = take_examples(batch.inputs, values, counted)
            yield tuple(batch.inputs) if inputs is None else inputs
        else:
            yield tuple(batch.inputs)


def drop_fill(batch: Batch, values: Sequence[Value]) -> Batch:
    """Return a batch of the examples whose weight is not 0, for a loss that is a scalar.

    It is a `ShortBatch` if the file fixes the size of batches.

    Args:
      values: the inputs of the model; none to keep the size of the batch.

    Raises:
      TrainingError: the size is fixed, and an example of weight 0 is before others.
    """
    counted = np.flatnonzero(np.asarray(batch.weight))
    if not 0 < len(counted) < len(batch.weight):
        return batch
    rest = jax.tree.map(lambda x: x[counted], batch.targets), batch.weight[counted]
    inputs = take_examples(batch.inputs, values, counted)
    if inputs is not None:
        return Batch(inputs, *rest)
    if counted[-1] >= len(counted):
        raise TrainingError(
            "a scalar loss or metric is computed without the examples of weight 0, and the file or "
            "a mesh fixes the size of batches: return one value for each example, or leave these "
            "examples out of the data"
        )
    return ShortBatch(batch.inputs, *rest)


def take_examples(
    inputs: Sequence[Any], values: Sequence[Value], examples: np.ndarray
) -> tuple[Any, ...] | None:
    """Return the inputs of some examples of a batch; None if its size is fixed."""
    shapes = {v.name: v.shape or (None,) for v in values if v.shape != () and not v.whole}
    sizes = {shape[0] for shape in shapes.values() if not isinstance(shape[0], int)}
    # the axis of examples may come later: recurrent states are [layers, batch, size]
    axes = {
        name: next((i for i, size in enumerate(shape) if size in sizes), None)
        for name, shape in shapes.items()
    }
    if not axes or None in axes.values():
        return None
    where = [(slice(None),) * (axes.get(v.name) or 0) for v in values]
    pairs = zip(inputs, values, where, strict=True)
    return tuple(x[(*i, examples)] if v.name in axes else x for x, v, i in pairs)


T = TypeVar("T")


def prefetch(started: Iterable[T], count: int = 4) -> Iterator[T]:
    """Yield items with a delay of `count`, so that as many computations stay in flight.

    Args:
      started: items whose computation runs asynchronously once they are drawn.
      count: a larger one takes more memory for no further overlap.
    """
    waiting: deque[T] = deque()
    for item in started:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


# A fingerprint of examples, to refuse other data when a run resumes.

_BYTES = 2**28
"""The most bytes of an array that its checksum reads; of a larger one it reads every k-th row."""


def identity(rows: np.ndarray, columns: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return the number, dtypes and checksums of examples, as values of JSON.

    Args:
      rows: the indices of the examples that are used.
      columns: inputs, targets and weights.
    """
    columns = [np.asarray(column) for column in columns]
    return {
        "examples": len(rows),
        "arrays": [f"{x.dtype}{[*x.shape[1:]]}" for x in columns],
        "checksum": [_checksum(rows), *map(_checksum, columns)],
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between two results of `identity`, for an error."""
    if before["examples"] != now["examples"]:
        return f"{before['examples']} examples, and now there are {now['examples']}"
    if before["arrays"] != now["arrays"]:
        return f"examples of {', '.join(before['arrays'])}, and now {', '.join(now['arrays'])}"
    return "examples with other values"


def _checksum(x: np.ndarray) -> int:
    """Return the CRC-32 of an array, or of evenly spaced rows of a large one."""
    step = max(1, -(-x.nbytes // _BYTES))
    content: Any = np.ascontiguousarray(x[::step]).reshape(-1).view(np.uint8)
    return zlib.crc32(content)


# Reuse host memory for batches.
#
# A fresh array of some hundred kilobytes costs more in page faults than what is written into it:
# of a batch of 200 kB 140 us instead of 12. And XLA:CPU reads an array of NumPy where it is, if it
# begins at a multiple of 64 bytes, which saves another copy.

_SMALL = 2**15
"""Bytes of a batch below which reuse does not pay."""

_ALIGNED = 64
"""The alignment at which XLA:CPU reads an array of NumPy without a copy."""


class MemoryPool:
    """A pool of memory blocks for batches of `count` rows of an array.

    A block returns to the pool when the last array that uses it is garbage collected.
    """

    def __init__(self, array: np.ndarray, count: int):
        self._array = array
        self._shape = (count, *array.shape[1:])
        self._size = math.prod(self._shape) * array.itemsize
        # `take` would copy the whole of an array whose elements do not lie in order
        in_order = array.flags.c_contiguous and not array.dtype.hasobject
        self.again = self._size >= _SMALL and in_order
        self._free: list[np.ndarray] = []

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return `array[rows]`; the rows must be in bounds."""
        if not self.again:
            return self._array[rows]
        # with mode="raise" NumPy gathers into a buffer first, as it may fail half way
        return self._array.take(rows, axis=0, out=self.allocate(), mode="clip")

    def allocate(self) -> np.ndarray:
        """Return uninitialized memory for a batch."""
        block = np.asarray(
            _BlockOwner(self._free.pop() if self._free else self._block(), self._free)
        )
        return block.view(self._array.dtype).reshape(self._shape)

    def _block(self) -> np.ndarray:
        """Return new aligned memory for a batch, as bytes."""
        block = np.empty(self._size + _ALIGNED, np.uint8)
        start = -block.ctypes.data % _ALIGNED
        return block[start : start + self._size]


class _BlockOwner:
    """An owner of a block, which every array on it refers to; it returns the block when it dies.

    JAX keeps the arrays that a computation reads alive until it has ended.
    """

    def __init__(self, block: np.ndarray, free: list[np.ndarray]):
        self._block, self._free = block, free
        self.__array_interface__ = block.__array_interface__

    def __del__(self):
        self._free.append(self._block)
