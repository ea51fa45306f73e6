"""Examples as batches of one size, whatever they come as.

A short batch is filled up with further examples of weight zero: with arrays, with those that the
epoch began with; with an iterable, with those of the batch before it (its own where there is none).
So every batch has the same shape, nothing is compiled twice, and batch statistics see real examples
only, though the loss does not count the fill.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxonnx._data.memory import Memory
from jaxonnx.errors import TrainingError


class Batch(NamedTuple):
    """Examples for a step, some of which may be fill that the loss ignores."""

    inputs: tuple[Any, ...]
    """In the order of the model's inputs."""
    targets: Any
    """A pytree of arrays with the examples along the first axis."""
    weight: Any
    """float32, 1 for an example and 0 for fill."""


def as_pair(
    given: Any, names: list[str], what: str, labels: bool = True
) -> tuple[tuple[np.ndarray, ...], Any]:
    """Return inputs in the model's order and targets, as NumPy arrays of one length."""
    x, y = ordered(given if labels else (_unlabelled(given, names), ()), names, what)
    inputs, targets = jax.tree.map(np.asarray, (x, y), is_leaf=lambda v: isinstance(v, list))
    named = [(f"input {n!r}", a) for n, a in zip(names, inputs, strict=True)]
    named += [
        (f"the targets{jax.tree_util.keystr(path)}", a)
        for path, a in jax.tree_util.tree_leaves_with_path(targets)
    ]
    if labels and len(named) == len(names):
        raise TrainingError(f"{what} has no targets")
    for name, array in named:
        if array.dtype.kind in "OSUMm":
            raise TrainingError(f"{what}: {name} must be numbers, and is {array.dtype}")
        if not array.ndim:
            raise TrainingError(
                f"{what}: {name} must have the examples along the first axis; make batches of "
                "single examples"
            )
    if len({len(a) for _, a in named}) > 1:
        lengths = ", ".join(f"{n} {len(a)}" for n, a in named)
        raise TrainingError(f"{what} has different numbers of examples: {lengths}")
    if not len(inputs[0]):
        raise TrainingError(f"{what} has no examples")
    return inputs, targets


def ordered(given: Any, names: list[str], what: str) -> tuple[tuple[Any, ...], Any]:
    """Return inputs in the model's order and targets, of a pair or of a dict of both."""
    x, y = _parted(given, names, what)
    if isinstance(x, Mapping):
        if {*x} != {*names}:
            raise TrainingError(f"{what} has the inputs {sorted(x)}; the model has {sorted(names)}")
        x = tuple(x[name] for name in names)
    x = x if isinstance(x, tuple) else (x,)
    if len(x) != len(names):
        raise TrainingError(f"{what} has {len(x)} inputs; the model has {len(names)}: {names}")
    return x, y


def _unlabelled(given: Any, names: list[str]) -> Any:
    """Return inputs as they come, without the targets beside them."""
    if isinstance(given, Mapping):
        if len(names) == 1 and names[0] not in given and "x" in given:
            return given["x"]
        return {name: given[name] for name in names if name in given}
    if not isinstance(given, tuple | list):
        return given
    nested = any(isinstance(x, tuple | list | Mapping) for x in given)
    if len(given) == len(names) and not nested:
        return tuple(given)
    return given[0] if len(given) == 2 else given


def _parted(given: Any, names: list[str], what: str) -> tuple[Any, Any]:
    """Return inputs and targets, each as it comes."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    if not isinstance(given, Mapping):
        raise TrainingError(
            f"{what} must be a pair (x, y) or a dict with the inputs and targets, and is a "
            f"{type(given).__name__}"
        )
    if len(names) == 1 and names[0] not in given and {*given} == {"x", "y"}:
        return given["x"], given["y"]
    if missing := [name for name in names if name not in given]:
        raise TrainingError(
            f"{what} has {', '.join(map(repr, given)) or 'nothing'}; it lacks the model's inputs "
            f"{', '.join(map(repr, missing))}"
        )
    targets = {name: value for name, value in given.items() if name not in names}
    inputs = {name: given[name] for name in names}
    return inputs, next(iter(targets.values())) if len(targets) == 1 else targets


@dataclass(frozen=True)
class Examples(ABC):
    """Examples in one piece, in an order that depends on seed and epoch only."""

    inputs: Any
    targets: Any
    size: int
    seed: int | None
    """None for the order that they have."""
    rows: np.ndarray
    """Which of the examples."""

    def __post_init__(self):
        if isinstance(self.size, bool) or not isinstance(self.size, int | np.integer):
            raise TrainingError(f"batch_size must be a positive integer, and is {self.size!r}")
        if self.size < 1:
            raise TrainingError(f"batch_size must be a positive integer, and is {self.size}")

    @property
    def steps(self) -> int:
        """The number of batches in an epoch."""
        return -(-len(self.rows) // self.size)

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from number `start` on."""

    def chosen(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of each batch from number `start` on, and what they weigh."""
        order = self.rows.copy()
        if self.seed is not None:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        order = np.resize(order, self.steps * self.size)
        weight = np.ones(self.size, np.float32)
        for first in range(start * self.size, len(order), self.size):
            if len(self.rows) - first < self.size:
                weight = (np.arange(first, first + self.size) < len(self.rows)).astype(np.float32)
            yield order[first : first + self.size], weight


@dataclass(frozen=True)
class Arrays(Examples):
    """All examples as arrays; `inputs` is a tuple in the order of the model's."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        arrays, form = jax.tree.flatten((self.inputs, self.targets))
        memories = [Memory(array, self.size) for array in arrays]
        for rows, weight in self.chosen(epoch, start):
            inputs, targets = form.unflatten([memory.rows(rows) for memory in memories])
            yield Batch(inputs, targets, weight)


@dataclass(frozen=True)
class Stream:
    """Batches that something else makes."""

    data: Any
    names: list[str]
    what: str
    targets: None = None
    """They are not known before they come."""
    labels: bool = True
    """Whether there are targets, or only inputs are wanted."""

    @property
    def steps(self) -> int | None:
        """The number of batches in an epoch, where it is known."""
        try:
            return len(self.data)
        except TypeError:  # loaders have a length that some of their data has not
            return None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches from number `start` on; those before it are made and dropped.

        Fill comes from the batch before, so skipping gives the batches of the whole epoch.
        """
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        full = None
        number = -1
        pairs: Any = self.data(epoch) if callable(self.data) else self.data
        for number, pair in enumerate(pairs):
            what = f"batch {number} of {self.what} in epoch {epoch}"
            pair = as_pair(pair, self.names, what, self.labels)
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
    """Refuse a batch whose shapes or dtypes, but for its length, are not those before it."""
    new, old = ([(a.shape[1:], a.dtype) for a in jax.tree.leaves(p)] for p in (pair, first))
    if jax.tree.structure(pair) != jax.tree.structure(first):
        raise TrainingError(
            f"{what} has targets {jax.tree.structure(pair[1])}, those before it "
            f"{jax.tree.structure(first[1])}"
        )
    if new != old:
        raise TrainingError(f"{what} has (shape, dtype) {new} for each example, those before {old}")
