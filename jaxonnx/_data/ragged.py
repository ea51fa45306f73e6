"""Sequences of unequal length, padded to a few widths.

XLA compiles a program for each shape. If each batch were padded to its longest example, nearly
every batch would need a program; if all were padded to the longest example of the data, most of the
work would be on padding. So each example has a bucket, by default the next power of two (which at
most doubles its length, and needs log2(longest) programs), and shuffled batches are made of
examples of one bucket (`_data.batches`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from jaxonnx._graph.values import Value
from jaxonnx._require import require
from jaxonnx.errors import TrainingError

IGNORED = -100
"""The label of padding by default, as in PyTorch: losses ignore it."""
_LEAST = 8
"""The smallest default width."""
_TARGETS = ("y", "targets", "labels")
"""The names in `pad` for a target that has no name."""
_MASK = re.compile(r"(?P<side>(.*[._])?)((attention|input)_mask(\.\d+)?|(?<![._])mask)")
"""Inputs that are 1 for each token and 0 for padding."""
_POSITIONS = re.compile(r"(?P<side>(.*[._])?)position_ids(\.\d+)?")
"""Inputs with the position of each token in its example, from 0."""
_TYPES = re.compile(r"(?P<side>(.*[._])?)token_type_ids(\.\d+)?")
"""Inputs with the number of the segment that each token belongs to."""
_TOKENS = re.compile(r"(.*[._])?(decoder_)?input_ids(\.\d+)?")
"""Inputs of tokens, as Hugging Face names them."""


@dataclass(frozen=True)
class Ragged:
    """Sequences of unequal length, concatenated along their first axis."""

    values: np.ndarray
    starts: np.ndarray
    """The offset of each sequence in `values`, and the end of the last (length n + 1)."""

    @classmethod
    def of(cls, sequences: Any, what: str) -> Self:
        """Concatenate sequences, whose shapes may differ only along the first axis.

        Args:
          sequences: arrays or lists of numbers.
          what: the data, for errors.

        Raises:
          TrainingError: they are not such sequences.
        """
        try:
            parts = [np.asarray(sequence) for sequence in sequences]
        except ValueError:  # NumPy makes no array of lists of unequal length
            parts = []
        refuse_none(parts, what)
        full = [part for part in parts if part.size]
        if not all(part.ndim for part in parts) or len({part.shape[1:] for part in full}) != 1:
            raise TrainingError(
                f"{what} must be arrays of numbers whose shapes differ only in the first axis, the "
                "length"
            )
        return cls(np.concatenate(full), np.cumsum([0, *map(len, parts)]))

    @classmethod
    def rectangular(cls, array: np.ndarray) -> Self:
        """Return the rows of an array (count, length, ...) as sequences of equal length."""
        count, length, *rest = array.shape
        return cls(array.reshape(-1, *rest), np.arange(count + 1) * length)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def ndim(self) -> int:
        return self.values.ndim + 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def pad_rows(self, rows: np.ndarray, width: int, fill: Any) -> np.ndarray:
        """Return sequences as an array (rows, width, ...), padded at their ends with `fill`."""
        # a mask (rows, width) gathers and scatters all rows at once, without a loop over examples
        is_token = np.arange(width) < self.lengths[rows, None]
        array = np.full((*is_token.shape, *self.values.shape[1:]), fill, self.dtype)
        array[is_token] = self.values[(self.starts[rows, None] + np.arange(width))[is_token]]
        return array


class LazyColumn:
    """Examples that are read when a batch needs them, with zeros behind those that are shorter.

    Args:
      rows: the examples, each with a dtype, a shape, `read()` and a checksum.
    """

    def __init__(self, rows: Sequence[Any]):
        self._rows, self.dtype = rows, rows[0].dtype
        self.shape = (len(rows), *map(max, *(row.shape for row in rows), rows[0].shape))
        self.ndim, self.nbytes = len(self.shape), math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        array = np.zeros((len(rows), *self.shape[1:]), self.dtype)
        for place, row in enumerate(rows):
            values = self._rows[row].read()
            array[place, : len(values)] = values
        return array

    @property
    def checksums(self) -> np.ndarray:
        return np.array([row.checksum for row in self._rows])


def column(values: Any, what: str) -> Any:
    """Convert examples to an array, or to `Ragged` if they are sequences of unequal length.

    Examples that are read later become a `LazyColumn`.

    Raises:
      TrainingError: they are None, or not sequences of numbers.
    """
    if values is None:
        raise TrainingError(f"{what} is None")
    if isinstance(values, list) and values and hasattr(values[0], "checksum"):
        return LazyColumn(values)
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy makes no array of lists of unequal length
        return Ragged.of(values, what)
    several = array.dtype == object and array.ndim == 1 and len(array) > 0
    if several and all(isinstance(part, list | np.ndarray) for part in array):
        return Ragged.of(array, what)
    if array.dtype == object and array.ndim:
        refuse_none(array, what)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def refuse_none(examples: Any, what: str) -> None:
    """Refuse examples that are None or have None in them, as empty cells of files are read.

    Raises:
      TrainingError: some are; it names the first.
    """
    if not (lacking := [i for i, example in enumerate(examples) if _has_none(example)]):
        return
    place, remedy = f"example {lacking[0]}", "fill it in, or leave the example"
    if len(lacking) == len(examples):
        place, remedy = "every example", "leave the column"
    raise TrainingError(f"{what} must be numbers, and {place} has None: {remedy} out of the data")


def _has_none(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == object and any(map(_has_none, value.flat))
    return value is None or (isinstance(value, list | tuple) and any(map(_has_none, value)))


def derived_inputs(inputs: Sequence[Value]) -> list[str]:
    """Return the inputs that data may omit, as they can be computed from the tokens.

    Masks come first, then positions, then segment numbers.
    """
    derived = [
        value.name
        for kind in (_MASK, _POSITIONS, _TYPES)
        for value in inputs
        if kind.fullmatch(value.name) and _rank(value) in (None, 2)
    ]
    return derived if len(derived) < len(inputs) else []


def token_inputs(inputs: Sequence[Value]) -> list[str]:
    """Return the inputs of tokens: those that are called so, or else the only one of integers."""
    if named := [value.name for value in inputs if _TOKENS.fullmatch(value.name)]:
        return named
    spare = derived_inputs(inputs)
    kinds = [(v.name, v.dtype) for v in inputs if v.name not in spare and _rank(v) in (None, 2)]
    integers = [name for name, kind in kinds if kind is not None and kind.kind in "iu"]
    return integers if len(integers) == 1 else []


def segment_input(inputs: Sequence[Value]) -> str | None:
    """Return the input with the segment of each token, if there is one."""
    return next((v.name for v in inputs if _TYPES.fullmatch(v.name)), None)


def masks_and_positions(inputs: Sequence[Value]) -> tuple[list[Value], list[str]]:
    """Return the attention masks among the inputs, and the names of the inputs of positions."""
    masks = [value for value in inputs if _MASK.fullmatch(value.name)]
    return masks, [v.name for v in inputs if _POSITIONS.fullmatch(v.name) and _rank(v) == 2]


def with_derived(columns: Sequence[Any], inputs: Sequence[Value]) -> tuple[Any, ...]:
    """Compute the columns that are None from the tokens.

    A mask is 1 for every token, positions count the tokens that the mask keeps from 0 on, and all
    tokens belong to segment 0.

    Args:
      columns: for each input an array, `Ragged` or None.
      inputs: the model's inputs.
    """
    named = {v.name: c for v, c in zip(inputs, columns, strict=True) if c is not None}
    first = next(iter(named.values()))

    def derive(value: Value) -> Any:
        dtype = np.dtype(np.int64) if value.dtype is None else value.dtype
        kinds = ((kind, kind.fullmatch(value.name)) for kind in (_MASK, _POSITIONS, _TYPES))
        kind, match = next(pair for pair in kinds if pair[1] is not None)
        side = match["side"] if match else ""
        tokens = named.get(f"{side}input_ids", first)
        if kind is not _POSITIONS:
            return _full(tokens, int(kind is _MASK), dtype)
        mask = named.get(f"{side}attention_mask")
        return _count_tokens(_full(tokens, 1, dtype) if mask is None else mask, dtype)

    pairs = zip(inputs, columns, strict=True)
    return tuple(derive(value) if c is None else c for value, c in pairs)


def _full(tokens: Any, number: int, dtype: np.dtype) -> Any:
    """Return an array, or `Ragged`, with the same number for each token."""
    if isinstance(tokens, Ragged):
        return Ragged(np.full(len(tokens.values), number, dtype), tokens.starts)
    return np.full(tokens.shape[:2], number, dtype)


def _count_tokens(mask: Any, dtype: np.dtype) -> Any:
    """Return the position of each token: how many tokens before it the mask keeps.

    Padding on the left, where no token is before, has position 0.
    """
    if not isinstance(mask, Ragged):
        return ((mask > 0).cumsum(axis=1) - 1).clip(0).astype(dtype)
    counts = np.concatenate([[0], np.cumsum(mask.values > 0)])
    before = np.repeat(counts[mask.starts[:-1]], mask.lengths)
    return Ragged((counts[1:] - before - 1).clip(0).astype(dtype), mask.starts)


@dataclass(frozen=True)
class Needs:
    """The needs of the losses of a run: padding, groups, targets and inputs made of labels."""

    ignored: Any = IGNORED
    """The padding value of labels; a dict for several targets."""
    group: int = 1
    """The number of consecutive examples that a loss reads together, such as pairs."""
    derive: Callable[[Sequence[Any], Sequence[Value], str], Any] | None = None
    """A function of (inputs, values, what) that makes the targets of data without any."""
    complete: Mapping[str, Callable[[Any], tuple[Any, Any]]] = field(default_factory=dict)
    """Functions of the labels, by the names of inputs that data may omit, that return the input
    and the labels to learn."""
    losses: Sequence[Any] = ()
    """The losses themselves (`losses.Loss`)."""


@dataclass(frozen=True)
class Padding:
    """Settings of `train` for padding sequences, and the needs of its losses."""

    pad: Mapping[str, Any] = field(default_factory=dict)
    """Padding values of inputs and targets, by name."""
    buckets: tuple[int, ...] | None = None
    """Widths of batches; None for powers of two."""
    needs: Needs = Needs()
    token: int = 0
    """The padding value of inputs of tokens that have none in `pad`."""
    check: Callable[[Columns, str], None] | None = None
    """Checks, before columns are padded, that padding does not change what the model computes."""

    @classmethod
    def of(cls, pad: Any, length_buckets: Any, **settings: Any) -> Self:
        """Parse the arguments `pad` and `length_buckets` of `train`.

        Raises:
          TrainingError: `pad` is not a dict of numbers, or `length_buckets` has no widths.
        """
        kinds = int | float | np.number
        numeric = isinstance(pad, Mapping) and all(isinstance(x, kinds) for x in pad.values())
        expected = "a dict of numbers by the names of inputs, like {'input_ids': 1}"
        require("pad", pad, pad is None or numeric, expected, TrainingError)
        if length_buckets is None:
            return cls(pad or {}, None, **settings)
        several = np.iterable(length_buckets)
        widths = [*length_buckets] if several else [length_buckets]
        whole = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in widths)
        fits = widths and all(whole) and min(widths) >= 1
        expected = "a width or several, like (32, 64, 128)"
        require("length_buckets", length_buckets, fits, expected, TrainingError)
        return cls(pad or {}, tuple(sorted({*map(int, widths)})), **settings)

    def sequences(
        self, inputs: Sequence[Any], targets: Any, values: Sequence[Value], what: str, whole: bool
    ) -> Columns | None:
        """Assign each example the width of its bucket, if any column has unequal lengths.

        Args:
          inputs, targets: arrays or `Ragged`.
          values: the inputs of the model.
          what: the data, for errors.
          whole: whether these are all examples; the longest is then the last width.

        Returns:
          The columns; None if all are plain arrays that need no padding.

        Raises:
          TrainingError: an example is longer than the last width, or a padding value is missing.
        """
        if self.buckets is not None:
            inputs, targets = _open_columns(inputs, targets, values)
        columns = (tuple(inputs), targets)
        self._check_names(targets, values)
        ragged = [x for x in jax.tree.leaves(columns) if isinstance(x, Ragged)]
        if not ragged:
            return None
        lengths = np.max([x.lengths for x in ragged], axis=0)
        pairs = zip(values, inputs, strict=True)
        fixed = {_size(v) for v, x in pairs if isinstance(x, Ragged)} - {None}
        widths = tuple(sorted(fixed)) or self.buckets  # type: ignore[type-var]
        if widths is not None and lengths.max() > widths[-1]:
            longer = int(np.argmax(lengths > widths[-1]))
            limit = "what the file is fixed to" if fixed else "the last of length_buckets"
            raise TrainingError(
                f"{what}: example {longer} has the length {lengths[longer]}, more than "
                f"{widths[-1]}, {limit}: cut it" + ("" if fixed else ", or add a wider bucket")
            )
        if widths is None:
            # 8, 16, 32, ... below the longest, and the longest itself (of a stream, whose longest
            # example is not known, the next power of two)
            longest = int(lengths.max())
            longest = longest if whole else max(_LEAST, 1 << (longest - 1).bit_length())
            widths = *(2**n for n in range(3, longest.bit_length()) if 2**n < longest), longest
        each = np.array(widths)[np.searchsorted(widths, lengths)]
        padded = Columns(columns, self._fills(columns, values, what), lengths, each)
        if self.check is not None:
            self.check(padded, what)
        return padded

    def _check_names(self, targets: Any, values: Sequence[Value]) -> None:
        named = [*targets] if isinstance(targets, Mapping) else [*_TARGETS]
        names = [*(value.name for value in values), *named]
        if unknown := [name for name in self.pad if name not in names]:
            raise TrainingError(
                f"pad has {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, names))}"
            )

    def _fills(self, columns: Any, values: Sequence[Value], what: str) -> list[Any]:
        """Return the padding value of each leaf of (inputs, targets).

        Raises:
          TrainingError: a target that is not labels has no padding value, or a value is not of
            its column's dtype.
        """
        tokens = token_inputs(values)
        usual = (self.token if value.name in tokens else 0 for value in values)
        inputs = [self.pad.get(v.name, fill) for v, fill in zip(values, usual, strict=True)]

        def of_target(path: Any, target: Any) -> Any:
            names = [path[0].key] if path and hasattr(path[0], "key") else _TARGETS
            for name in names:
                if name in self.pad:
                    return self.pad[name]
            if isinstance(target, Ragged) and target.dtype.kind not in "iu":
                raise TrainingError(
                    f"{what}: the targets{jax.tree_util.keystr(path)} have unequal lengths and are "
                    f"not labels: pass their padding, pad={{{names[0]!r}: ...}}"
                )
            ignored = self.needs.ignored
            return ignored.get(names[0], IGNORED) if isinstance(ignored, Mapping) else ignored

        targets = jax.tree_util.tree_map_with_path(of_target, columns[1])
        fills = [*inputs, *jax.tree.leaves(targets)]
        for x, fill in zip(jax.tree.leaves(columns), fills, strict=True):
            if isinstance(x, Ragged) and np.asarray(fill).astype(x.dtype) != fill == fill:
                raise TrainingError(f"{what}: {fill} pads sequences, and is not a valid {x.dtype}")
        return fills


PLAIN = Padding()


@dataclass(frozen=True)
class Columns:
    """Examples, some of whose columns are sequences of unequal length.

    Attributes:
      pair: inputs and targets, as arrays or Ragged.
      fills: the padding value of each leaf of `pair`.
      lengths: int[n], the length of the longest sequence of each example.
      widths: int[n], the smallest bucket that each example fits into.
    """

    pair: tuple[tuple[Any, ...], Any]
    fills: list[Any]
    lengths: np.ndarray
    widths: np.ndarray

    def rows(self, rows: np.ndarray) -> tuple[tuple[np.ndarray, ...], Any]:
        """Return a batch of these examples as arrays, padded to the widest of their buckets."""
        width = int(self.widths[rows].max())
        leaves, form = jax.tree.flatten(self.pair)
        return form.unflatten(
            x.pad_rows(rows, width, fill) if isinstance(x, Ragged) else x[rows]
            for x, fill in zip(leaves, self.fills, strict=True)
        )


def _open_columns(
    inputs: Sequence[Any], targets: Any, values: Sequence[Value]
) -> tuple[tuple[Any, ...], Any]:
    """Convert rectangular columns to `Ragged` where the model leaves the length open.

    Targets are converted if they have the shape of such an input, as labels of tokens have.
    """

    def of_input(value: Value, x: Any) -> Any:
        if isinstance(x, Ragged) or not 2 <= x.ndim <= 3 or _size(value) is not None:
            return x  # images and their tiles are no sequences of tokens
        return Ragged.rectangular(x)

    sizes = {x.shape[:2] for x in inputs if isinstance(x, np.ndarray) and x.ndim > 1}
    inputs = tuple(of_input(value, x) for value, x in zip(values, inputs, strict=True))

    def of_target(x: Any) -> Any:
        return Ragged.rectangular(x) if isinstance(x, np.ndarray) and x.shape[:2] in sizes else x

    return inputs, jax.tree.map(of_target, targets)


def _rank(value: Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _size(value: Value) -> int | None:
    """Return the length of an input if the file fixes it."""
    size = value.shape[1] if value.shape is not None and len(value.shape) > 1 else None
    return size if isinstance(size, int) else None
