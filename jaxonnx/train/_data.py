"""Examples as batches of one size, whatever they come as.

A short batch is filled up with further examples of weight zero: with arrays, with those that the
epoch began with; with an iterable, with those of the batch before it (its own where there is none).
So every batch has the same shape, nothing is compiled twice, and batch statistics see real examples
only, though the loss does not count the fill.
"""

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError
from jaxonnx.train._memory import Memory


class Batch(NamedTuple):
    """Examples for a step, some of which may be fill that the loss ignores."""

    inputs: tuple[Any, ...]
    """In the order of the model's inputs."""
    targets: Any
    """A pytree of arrays with the examples along the first axis."""
    weight: Any
    """float32, 1 for an example and 0 for fill."""


def sources(
    data: Any, validation: Any, inputs: Sequence[Value], batch_size: int | None, seed: int
) -> tuple["Arrays | Stream", "Arrays | Stream | None"]:
    """Return the examples to train with and those held out, in the forms that `train` documents.

    Args:
      validation: like `data`, a share of it between 0 and 1, or None.
      inputs: the model's; where they are fixed to a batch size, data in one piece takes it.
      batch_size: for data in one piece; the batches of an iterable have their own size.
      seed: of the order of data in one piece, which depends on it and on the epoch only, and of
        which examples are held out; validation data keeps its order.
    """
    examples = _source(data, inputs, batch_size, seed, "data")
    if isinstance(examples, Stream) and batch_size is not None:
        raise TrainingError(
            f"batch_size={batch_size} goes with data in one piece; data is an iterable, whose "
            "batches have their own size"
        )
    if validation is None:
        return examples, None
    if isinstance(validation, int | float):
        return _split(examples, validation)
    return examples, _source(validation, inputs, batch_size, None, "validation")


def _source(
    data: Any, inputs: Sequence[Value], batch_size: int | None, seed: int | None, what: str
) -> "Arrays | Stream":
    names = [value.name for value in inputs]
    what = f"{what} '{os.fspath(data)}'" if isinstance(data, str | os.PathLike) else what
    data = next((read(data) for applies, read in SOURCES if applies(data)), data)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and len(data) == 2):
        arrays, targets = _pair(data, names, what)
        rows = np.arange(len(arrays[0]))
        return Arrays(arrays, targets, _batch_size(inputs, batch_size), seed, rows)
    if not (callable(data) or isinstance(data, Iterable)):
        raise TrainingError(
            f"{what} must be a pair (x, y) of arrays, a dict of arrays or the path of an .npz file "
            "with them, an iterable of batches, or a function from the epoch to such an iterable; "
            f"it is a {type(data).__name__}"
        )
    return Stream(data, names, what)


def _read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.lib.npyio.NpzFile):
                return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise TrainingError(f"the data '{os.fspath(path)}' cannot be read: {error}") from error
    raise TrainingError(
        f"the data '{os.fspath(path)}' must be an .npz file, which numpy.savez writes, with arrays "
        "by name"
    )


def _rows(dataset: Any) -> Mapping[str, Any]:
    """Return the columns of a Hugging Face Dataset, whose iterator would give single examples."""
    return (dataset if dataset.format["type"] else dataset.with_format("numpy"))[:]


SOURCES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (lambda data: isinstance(data, str | os.PathLike), _read),
    (lambda data: all(hasattr(data, n) for n in ("column_names", "format", "__len__")), _rows),
)
"""Kinds of data besides arrays and iterables: how one is told, and how it becomes one of these."""


def _batch_size(inputs: Sequence[Value], wanted: int | None) -> int:
    """Return the size that the inputs are fixed to, or what was asked for, or 32."""
    fixed = [value.shape[0] for value in inputs if value.shape]
    size = next((size for size in fixed if isinstance(size, int)), None)
    if size is None:
        return 32 if wanted is None else wanted
    if wanted not in (None, size):
        raise TrainingError(
            f"batch_size={wanted}, but the model's inputs are fixed to batches of {size}; "
            "jaxonnx.load(path, batch='any') may open it"
        )
    return size


def _split(examples: "Arrays | Stream", share: float) -> tuple["Arrays", "Arrays"]:
    """Return examples without a share of them, and that share; the seed alone chooses."""
    if not isinstance(examples, Arrays):
        raise TrainingError(
            f"validation={share} is a share of data in one piece; data is an iterable: pass "
            "validation data like it"
        )
    count = len(examples.rows)
    held = round(count * share)
    if isinstance(share, bool) or not 0 < share < 1 or not 0 < held < count:
        raise TrainingError(
            f"validation={share!r} must be a share between 0 and 1 of the {count} examples that "
            "leaves some on either side"
        )
    order = np.random.default_rng(np.random.SeedSequence(examples.seed, spawn_key=(0,)))
    chosen = np.sort(order.permutation(count)[:held])
    rest = np.delete(examples.rows, chosen)
    return replace(examples, rows=rest), replace(examples, rows=chosen, seed=None)


def _pair(given: Any, names: list[str], what: str) -> tuple[tuple[np.ndarray, ...], Any]:
    """Return inputs in the model's order and targets, as NumPy arrays of one length."""
    x, y = ordered(given, names, what)
    inputs, targets = jax.tree.map(np.asarray, (x, y), is_leaf=lambda v: isinstance(v, list))
    named = [(f"input {n!r}", a) for n, a in zip(names, inputs, strict=True)]
    named += [
        (f"the targets{jax.tree_util.keystr(path)}", a)
        for path, a in jax.tree_util.tree_leaves_with_path(targets)
    ]
    if len(named) == len(names):
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
class Arrays:
    """All examples in one piece."""

    inputs: tuple[np.ndarray, ...]
    targets: Any
    size: int
    seed: int | None
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

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from number `start` on."""
        order = self.rows.copy()
        if self.seed is not None:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        order = np.resize(order, self.steps * self.size)
        arrays, form = jax.tree.flatten((self.inputs, self.targets))
        memories = [Memory(array, self.size) for array in arrays]
        weight = np.ones(self.size, np.float32)
        for first in range(start * self.size, len(order), self.size):
            rows = order[first : first + self.size]
            inputs, targets = form.unflatten([memory.rows(rows) for memory in memories])
            if len(self.rows) - first < self.size:
                weight = (np.arange(first, first + self.size) < len(self.rows)).astype(np.float32)
            yield Batch(inputs, targets, weight)


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
    """Refuse a batch whose shapes or dtypes, but for its length, are not those before it."""
    new, old = ([(a.shape[1:], a.dtype) for a in jax.tree.leaves(p)] for p in (pair, first))
    if jax.tree.structure(pair) != jax.tree.structure(first):
        raise TrainingError(
            f"{what} has targets {jax.tree.structure(pair[1])}, those before it "
            f"{jax.tree.structure(first[1])}"
        )
    if new != old:
        raise TrainingError(f"{what} has (shape, dtype) {new} for each example, those before {old}")
