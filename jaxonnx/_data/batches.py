"""Sources of batches of one size: data in one piece, and iterables of batches.

A short batch is filled up with further examples of weight zero: with arrays, with those that the
epoch began with; with an iterable, with those of the batch before it (its own where there is none).
So batches of one width have one shape, nothing is compiled twice, and batch statistics see real
examples only, though the loss does not count the fill.
"""

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxonnx._data.batch_memory import Memory
from jaxonnx._data.fingerprint import identity
from jaxonnx._data.ragged import (
    PLAIN,
    Padding,
    Ragged,
    column,
    derived_inputs,
    next_tokens,
    with_derived,
)
from jaxonnx._data.weights import checked_weights, split_weights
from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError

_SHAPES = 16
"""Number of batch shapes of a stream from which on to warn."""


class Batch(NamedTuple):
    """Examples for a step, some of which may be fill that the loss ignores."""

    inputs: tuple[Any, ...]
    """In the order of the model's inputs."""
    targets: Any
    """A pytree of arrays with the examples along the first axis."""
    weight: Any
    """float32, what each example weighs in losses and metrics: 1, and 0 for fill."""


def as_pair(
    given: Any,
    values: Sequence[Value],
    what: str,
    labels: bool = True,
    padding: Padding = PLAIN,
) -> tuple[tuple[Any, ...], Any]:
    """Convert data to inputs in the model's order and targets, with equal numbers of examples.

    They are NumPy arrays, and Ragged where they are sequences of unequal length.
    """
    names, spare = [value.name for value in values], derived_inputs(values)
    x, y = split_inputs(given if labels else (drop_targets(given, names), ()), names, what, spare)
    inputs = [
        None if a is None and n in spare else column(a, f"{what}: input {n!r}")
        for n, a in zip(names, x, strict=True)
    ]
    inputs = with_derived(inputs, values)
    targets = jax.tree_util.tree_map_with_path(
        lambda path, a: column(a, f"{what}: the targets{jax.tree_util.keystr(path)}"),
        y,
        is_leaf=lambda v: isinstance(v, list),
    )
    if labels and padding.next_token and not jax.tree.leaves(targets):
        targets = next_tokens(inputs, values, padding.ignored, what)
    if labels and padding.untargeted and not jax.tree.leaves(targets):
        targets = np.zeros(count_examples(inputs, inputs, values), np.int32)
    named = [(f"input {n!r}", a) for n, a in zip(names, inputs, strict=True)]
    whole = {f"input {value.name!r}" for value in values if value.whole}
    numbers = {f"input {value.name!r}" for value in values if value.shape == ()}
    named += [
        (f"the targets{jax.tree_util.keystr(path)}", a)
        for path, a in jax.tree_util.tree_leaves_with_path(targets)
    ]
    if labels and len(named) == len(names):
        raise TrainingError(f"{what} has no targets")
    for name, array in named:
        if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
            remedy = (
                "; leave it out of the data if it is not a target"
                if name.startswith("the targets[")
                else ""
            )
            raise TrainingError(f"{what}: {name} must be numbers, and is {array.dtype}{remedy}")
        if not array.ndim and name not in whole:
            way = "make batches of single examples"
            way = _without_examples(name) if name in numbers else way
            raise TrainingError(f"{what}: {name} is one number, not one for each example; {way}")
    counts = {name: len(a) for name, a in named if name not in whole}
    if len({*counts.values()}) > 1:
        lengths = ", ".join(f"{n} {count}" for n, count in counts.items())
        usual = Counter(counts.values()).most_common(1)[0][0]
        odd = next(n for n, count in counts.items() if count != usual)
        raise TrainingError(
            f"{what} has different numbers of examples: {lengths}"
            + (f"; {_without_examples(odd)}" if odd.startswith("input") else "")
        )
    if not all(counts.values()):
        raise TrainingError(f"{what} has no examples")
    return inputs, targets


def _without_examples(column: str) -> str:
    """Return the ways out for a column that has not one row for each example."""
    if not column.startswith("input"):
        return "targets have the examples along the first axis, one at least"
    name = column.removeprefix("input ")
    return (
        f"fixed={{{name}: value}} gives an input one value for all examples (leave it out of the "
        f"data), and batching={{{name}: None}} passes it whole with each batch"
    )


def count_examples(inputs: Sequence[Any], targets: Any, values: Sequence[Value]) -> int:
    """Return the number of examples of a batch; inputs that are passed whole do not count."""
    pairs = zip(values, inputs, strict=True)
    rows = next((x for value, x in pairs if not value.whole), None)
    rows = jax.tree.leaves(targets)[0] if rows is None else rows
    return len(rows) if isinstance(rows, Ragged) else np.shape(rows)[0]


def split_inputs(
    given: Any, names: list[str], what: str, spare: Sequence[str] = ()
) -> tuple[tuple[Any, ...], Any]:
    """Return inputs in the model's order and targets, of a pair or of a dict of both.

    Args:
      spare: inputs that may be missing, the first ones before others; they are None then.
    """
    x, y = _split_pair(given, names, what, spare)
    if isinstance(x, Mapping):
        if not {*names} - {*spare} <= {*x} <= {*names}:
            raise TrainingError(f"{what} has the inputs {sorted(x)}; the model has {sorted(names)}")
        x = tuple(x.get(name) for name in names)
    x = x if isinstance(x, tuple) else (x,)
    missing = spare[: max(0, len(names) - len(x))]
    if len(x) == len(names) - len(missing):
        rest = iter(x)
        x = tuple(None if name in missing else next(rest) for name in names)
    if len(x) != len(names):
        raise TrainingError(f"{what} has {len(x)} inputs; the model has {len(names)}: {names}")
    return x, y


def drop_targets(given: Any, names: list[str]) -> Any:
    """Return the inputs of data without its targets."""
    if isinstance(given, Mapping):
        if len(names) == 1 and names[0] not in given and "x" in given:
            return given["x"]
        return {name: given[name] for name in names if name in given}
    if not isinstance(given, tuple | list):
        return given
    nested = any(isinstance(x, tuple | Mapping) for x in given)
    if len(given) == len(names) and not nested:
        return tuple(given)
    return given[0] if len(given) == 2 else given


def _split_pair(given: Any, names: list[str], what: str, spare: Collection[str]) -> tuple[Any, Any]:
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
    if missing := [name for name in names if name not in given and name not in spare]:
        raise TrainingError(
            f"{what} has {', '.join(map(repr, given)) or 'nothing'}; it lacks the model's "
            f"{'input' if len(missing) == 1 else 'inputs'} {', '.join(map(repr, missing))} "
            f"(fixed={{{missing[0]!r}: value}} gives an input one value for all examples)"
        )
    targets = {name: value for name, value in given.items() if name not in names}
    inputs = {name: given[name] for name in names if name in given}
    return inputs, next(iter(targets.values())) if len(targets) == 1 else targets


class Source(ABC):
    """Batches of examples, as a run reads them.

    A source is data in one piece (`Examples`), batches that something else makes (`Stream`), or
    either of these changed by a function (`Augmented`).
    """

    targets: Any
    """The targets of all examples; None where they are not known before the batches."""
    weights: np.ndarray | None = None
    """The weight of each example, float32; None means 1 for all, or not known before."""
    size: int | None
    """The number of examples in a batch, where it is the same for all."""
    classes: Sequence[str] | None = None
    """The names of the classes, where the data has them."""
    resumable: Mapping[str, Any] | None = None
    """Settings of the data that must be the same in a run that resumes, as JSON holds them."""
    in_shares: bool = False
    """Whether each of several processes has a share of each batch, not all of it."""
    spent: bool = False
    """Whether the batches that were read cannot be read again."""
    checks_batches: bool = False
    """Whether all batches can be checked before the run, in place of all targets at once."""

    @property
    @abstractmethod
    def steps(self) -> int | None:
        """The number of batches in an epoch, where it is known."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """The number, types and a checksum of the examples, as JSON holds them, if known."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from number `start` on."""


@dataclass(frozen=True)
class Examples(Source):
    """Examples in one piece, in an order that depends on seed and epoch only."""

    inputs: Any
    targets: Any
    size: int
    seed: int | None
    """None for the order that they have."""
    rows: np.ndarray
    """Which of the examples."""
    weights: np.ndarray | None = field(default=None, kw_only=True)
    """What each example weighs, float32; None means 1 for all."""
    group: int = field(default=1, kw_only=True)
    """The number of examples that stay together: rows, and batches, are whole groups."""

    def __post_init__(self):
        if isinstance(self.size, bool) or not isinstance(self.size, int | np.integer):
            raise TrainingError(f"batch_size must be a positive integer, and is {self.size!r}")
        if not 1 <= self.size < 2**31:
            limit = f", at most {2**31 - 1}" if self.size > 0 else ""
            raise TrainingError(f"batch_size must be a positive integer{limit}, and is {self.size}")
        for what, count in (("batch_size", self.size), ("the number of examples", len(self.rows))):
            if count % self.group:
                raise TrainingError(
                    f"the loss takes examples in groups of {self.group}, one behind the other: "
                    f"{what} must be a multiple of it, and is {count}"
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
        """Return the arrays that the examples are in."""

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows in the order of an epoch."""
        order = self.rows.reshape(-1, self.group).copy()
        if self.seed is not None:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order.reshape(-1)

    def rows_of_batches(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of each batch from number `start` on, and what they weigh."""
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
    """Which inputs are passed as they are with each batch; none by default."""

    def contents(self) -> Sequence[np.ndarray]:
        return jax.tree.leaves((self.inputs, self.targets))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        whole = self.whole or (False,) * len(self.inputs)
        split = [x for x, kept in zip(self.inputs, whole, strict=True) if not kept]
        arrays, form = jax.tree.flatten((split, self.targets))
        memories = [Memory(array, self.size) for array in arrays]
        for rows, weight in self.rows_of_batches(epoch, start):
            some, targets = form.unflatten([memory.rows(rows) for memory in memories])
            parts = iter(some)
            pairs = zip(self.inputs, whole, strict=True)
            inputs = tuple(x if kept else next(parts) for x, kept in pairs)
            yield Batch(inputs, targets, weight)


@dataclass(frozen=True)
class Stream(Source):
    """An iterable of batches, made by the caller."""

    data: Any
    values: Sequence[Value]
    """The inputs of the model."""
    what: str
    targets: None = None
    """They are not known before the batches."""
    labels: bool = True
    """Whether there are targets, or only inputs are wanted."""
    padding: Padding = PLAIN
    target_names: Collection[str] = ()
    """Names that targets can have."""
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
        except TypeError:  # loaders have a length that some of their data has not
            return None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches from number `start` on; those before it are made and dropped.

        Fill comes from the batch before, so skipping gives the batches of the whole epoch.
        """
        return islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Batch]:
        latest: dict[Any, Any] = {}  # of each shape
        pairs: Any = self.data(epoch) if callable(self.data) else self.data
        for number, given in enumerate(pairs):
            what = f"batch {number + 1} of {self.what} in epoch {epoch + 1}"
            weights = None
            if self.labels:
                names = [value.name for value in self.values]
                given, weights = split_weights(given, names, self.target_names)
            pair = as_pair(given, self.values, what, self.labels, self.padding)
            if any(value.whole for value in self.values):
                yield self._batch_as_it_is(pair, weights, what, latest)
                continue
            columns = self.padding.sequences(*pair, self.values, what, whole=False)
            if columns is not None:
                pair = columns.rows(np.arange(len(pair[0][0])))
            shape = tuple(x.shape[1:] for x in pair[0])
            if shape in latest:
                _same(pair, latest[shape], what)
            elif latest:
                _same(pair, next(iter(latest.values())), what, self.values)
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
            hint = (
                "; an iterator serves one epoch: pass a list, a loader or a function of the epoch"
            )
            raise TrainingError(
                f"{self.what} has no batches in epoch {epoch + 1}{hint if epoch else ''}"
            )

    def _batch_as_it_is(self, pair: Any, weights: Any, what: str, latest: dict[Any, Any]) -> Batch:
        """Return a batch with inputs that are passed whole: nothing fills it up."""
        inputs, targets = pair
        count = count_examples(inputs, targets, self.values)
        shape = tuple(x.shape for x in jax.tree.leaves(pair))
        if shape not in latest and len(latest) == _SHAPES:
            self._warn("pad graphs to a few sizes, with the weight 0 for what fills them")
        latest[shape] = None
        ones = np.ones(count, np.float32)
        return Batch(
            inputs, targets, ones if weights is None else checked_weights(weights, count, what)
        )

    def _warn(self, remedy: str = "length_buckets=(32, 64, 128) fills them up to a few") -> None:
        warnings.warn(
            f"{self.what} has batches of more than {_SHAPES} shapes, and a program is compiled for "
            f"each; {remedy}",
            stacklevel=3,
        )


def _same(pair: Any, first: Any, what: str, values: Sequence[Value] = ()) -> None:
    """Refuse a batch whose shapes or dtypes, but for its length, are not those before it.

    Args:
      values: the inputs of the model, where sizes may differ that it leaves open.
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
    """Return whether two batches differ only in sizes that the model leaves open."""
    if any((len(a), b) != (len(c), d) for (a, b), (c, d) in zip(new, old, strict=True)):
        return False
    for value, (shape, _), (before, _) in zip(values, new, old, strict=False):
        sizes = () if value.shape is None else value.shape[1:]
        pairs = enumerate(zip(shape, before, strict=True))
        if any(a != b and i < len(sizes) and isinstance(sizes[i], int) for i, (a, b) in pairs):
            return False
    return True
