"""Examples as batches of one size, whatever they come as.

A short batch is filled up with further examples of weight zero: with arrays, with those that the
epoch began with; with an iterable, with those of the batch before it (its own where there is none).
So every batch has the same shape, nothing is compiled twice, and batch statistics see real examples
only, though the loss does not count the fill.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxonnx.errors import TrainingError


class Batch(NamedTuple):
    inputs: tuple[np.ndarray, ...]
    """In the order of the model's inputs."""
    targets: Any
    """A pytree of arrays with the examples along the first axis."""
    weight: np.ndarray
    """float32, 1 for an example and 0 for fill."""


def source(
    data: Any, names: list[str], batch_size: int | None, seed: int | None, what: str = "data"
) -> "Arrays | Stream":
    """`(x, y)`, an iterable of such pairs, or a function from the epoch to such an iterable.

    Args:
      data: a tuple of two is `(x, y)` in one piece; `x` is an array, a tuple of arrays, or a dict
        by input name.
      names: the model's inputs.
      batch_size: for data in one piece; the batches of an iterable have their own size.
      seed: of the order of data in one piece, which depends on it and on the epoch only; None
        keeps the order.
      what: the name of the argument, for errors.
    """
    if isinstance(data, tuple) and len(data) == 2:
        return Arrays(*_pair(data, names, what), 32 if batch_size is None else batch_size, seed)
    if not (callable(data) or isinstance(data, Iterable)) or isinstance(data, str | Mapping):
        raise TrainingError(
            f"{what} must be a pair (x, y) of arrays, an iterable of such pairs or a function from "
            f"the epoch to such an iterable, and is a {type(data).__name__}"
        )
    if batch_size is not None:
        raise TrainingError(
            f"batch_size={batch_size} goes with a pair (x, y) of arrays; {what} is an iterable, "
            "whose batches have their own size"
        )
    return Stream(data, names, what)


def _pair(pair: Any, names: list[str], what: str) -> tuple[tuple[np.ndarray, ...], Any]:
    """Inputs in the model's order and targets, as NumPy arrays of one length."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TrainingError(f"{what} must be a pair (x, y), and is a {type(pair).__name__}")
    x, y = pair
    if isinstance(x, Mapping):
        if {*x} != {*names}:
            raise TrainingError(f"{what} has the inputs {sorted(x)}; the model has {sorted(names)}")
        x = tuple(x[name] for name in names)
    x = x if isinstance(x, tuple) else (x,)
    if len(x) != len(names):
        raise TrainingError(f"{what} has {len(x)} inputs; the model has {len(names)}: {names}")
    inputs, targets = jax.tree.map(np.asarray, (x, y), is_leaf=lambda v: isinstance(v, list))
    named = [(f"input {n!r}", a) for n, a in zip(names, inputs, strict=True)]
    named += [("the targets", a) for a in jax.tree.leaves(targets)]
    if scalars := [n for n, a in named if not a.ndim]:
        raise TrainingError(f"{what}: {scalars[0]} must have the examples along the first axis")
    if len({len(a) for _, a in named}) > 1:
        lengths = ", ".join(f"{n} {len(a)}" for n, a in named)
        raise TrainingError(f"{what} has different numbers of examples: {lengths}")
    if not len(inputs[0]):
        raise TrainingError(f"{what} has no examples")
    return inputs, targets


@dataclass(frozen=True)
class Arrays:
    """All examples in one piece."""

    inputs: tuple[np.ndarray, ...]
    targets: Any
    size: int
    seed: int | None

    def __post_init__(self):
        if not isinstance(self.size, int | np.integer) or self.size < 1:
            raise TrainingError(f"batch_size must be a positive integer, and is {self.size!r}")

    @property
    def steps(self) -> int:
        """The number of batches in an epoch."""
        return -(-len(self.inputs[0]) // self.size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""
        count = len(self.inputs[0])
        order = np.arange(count)
        if self.seed is not None:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        order = np.resize(order, self.steps * self.size)
        for first in range(start * self.size, len(order), self.size):
            rows = order[first : first + self.size]
            inputs, targets = jax.tree.map(lambda a: a[rows], (self.inputs, self.targets))  # noqa: B023
            weight = np.arange(first, first + self.size) < count
            yield Batch(inputs, targets, weight.astype(np.float32))


@dataclass(frozen=True)
class Stream:
    """Batches that something else makes."""

    data: Any
    names: list[str]
    what: str
    targets: None = None
    """They are not known before they come."""

    @property
    def steps(self) -> int | None:
        """The number of batches in an epoch, where it is known."""
        return len(self.data) if hasattr(self.data, "__len__") else None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on; those before it are made and dropped.

        Fill comes from the batch before, so skipping gives the batches of the whole epoch.
        """
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        full = None
        number = -1
        pairs: Any = self.data(epoch) if callable(self.data) else self.data
        for number, pair in enumerate(pairs):
            what = f"batch {number} of {self.what} in epoch {epoch}"
            pair = _pair(pair, self.names, what)
            full = pair if full is None else full
            _same(pair, full, what)
            size, count = len(full[0][0]), len(pair[0][0])
            if count > size:
                raise TrainingError(f"{what} has {count} examples, more than the {size} before it")
            fill = size - count
            filled = jax.tree.map(lambda a, b: np.concatenate([a, b[:fill]]), pair, full)  # noqa: B023
            full = filled
            yield Batch(filled[0], filled[1], (np.arange(size) < count).astype(np.float32))
        if number < 0:
            hint = (
                "; an iterator serves one epoch: pass a list, a loader or a function of the epoch"
            )
            raise TrainingError(
                f"{self.what} has no batches in epoch {epoch}{hint if epoch else ''}"
            )


def _same(pair: Any, first: Any, what: str) -> None:
    """Refuses a batch whose shapes or dtypes, other than its length, are not those before it."""
    new, old = ([(a.shape[1:], a.dtype) for a in jax.tree.leaves(p)] for p in (pair, first))
    if new != old:
        raise TrainingError(f"{what} has (shape, dtype) {new} for each example, those before {old}")
