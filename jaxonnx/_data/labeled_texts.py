"""Convert rows of texts, or of pairs of texts, with a label each, for networks that score texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxonnx._data.images.preparation import preparation
from jaxonnx._data.inputs_and_targets import KEY
from jaxonnx._data.ragged import segment_input
from jaxonnx._data.rows import LABELS, Row, Rows, Shape
from jaxonnx._data.text_examples import TextSettings, read_weight
from jaxonnx._data.tokenizer import Tokenizer
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import TrainingError

_SHOWN = 8
"""Names of classes that a message shows."""


def scores_texts(model: Network) -> bool:
    """Check whether a network has one row of outputs for each text, rather than for each token."""
    shape = model.outputs[0].shape if model.outputs else None
    return shape is not None and len(shape) <= 2


def class_names(model: Network) -> tuple[str, ...]:
    """Return the names of a model's classes: of its file, or `id2label` in its folder's config."""
    if (labels := preparation(model).labels) or model.folder is None:
        return labels
    named = model.folder.read_json("config.json").get("id2label") or {}
    return tuple(map(str, named.values())) if [*named] == [*map(str, range(len(named)))] else ()


@dataclass
class LabelReader:
    """Converts rows to tokens, segments and labels; the tokens are those of transformers.

    Attributes:
      tokenizer: of the model's folder.
      model: the model, which has one row of outputs for each text.
      settings: of `preprocess`.
      limit: the most tokens of an example.
      tokens: the input of tokens.
      lengths: the length of each example so far.
      long: the number of texts that were cut and skipped.
      unread: the columns that nothing reads.
      reordered: the data whose classes are in another order than the model's.
      notes: for the history.
    """

    tokenizer: Tokenizer
    model: Network
    settings: TextSettings
    limit: int
    tokens: str
    lengths: list[int] = field(default_factory=list)
    long: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    reordered: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        shape = self.model.outputs[0].shape or ()
        self._count = 1 if len(shape) < 2 else shape[1] if isinstance(shape[1], int) else None
        self._column = len(shape) > 1
        names = class_names(self.model)
        self._names = names if self._count in (None, len(names)) else ()
        self._segments = segment_input(self.model.inputs)
        for name, value in (("long", "split"), ("loss", "all"), ("pack", True)):
            if getattr(self.settings, name) == value:
                raise TrainingError(
                    f"preprocess={{{name!r}: {value!r}}} is for language models, and the output "
                    f"'{self.model.outputs[0].name}' has one row for each text: leave it out"
                )

    def read(self, data: Rows, rows: Iterable[Row], name: str) -> dict[str, list[Any]]:
        """Convert rows to columns of tokens, segments, labels and weights, where there are such.

        Args:
          data: what the rows are of.
          rows: all of them, or some.
          name: of the data, for the notes.
        """
        shape = data.find_shape(scores=True)
        assert shape is not None
        first = data.rename(data.first)
        label = next((column for column in LABELS if column in first), None)
        order = self._match_classes(data.classes.get(label or ""), name)
        ids, segments, labels, weights = [], [], [], []
        for where, row in rows:
            encoded = self._encode(where, row, shape)
            if encoded is None:
                continue
            ids.append(encoded[0])
            segments.append(encoded[1])
            weights.append(read_weight(where, row))
            if label is not None:
                labels.append(self._read_label(f"{where}: {label}", row.get(label), order))
            columns_read = {*shape.columns, KEY, label}
            unread = (n for n in row if n not in columns_read and row[n] is not None)
            self.unread |= dict.fromkeys(unread)
        self.lengths += map(len, ids)
        columns: dict[str, list[Any]] = {self.tokens: ids}
        if self._segments is not None:
            columns[self._segments] = segments
        if label is not None:
            columns["label"] = labels
            if data.is_stream or {*weights} - {1}:
                columns[KEY] = weights
        self._add_notes()
        return columns if ids else {}

    def _encode(self, where: str, row: Any, shape: Shape) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the tokens of a row and their segments, int64[n] both; None if it is skipped."""
        if not shape.fits(row):
            columns = " and ".join(map(repr, shape.columns))
            raise TrainingError(f"{where} must have {columns}, as those before it")
        ids, segments, is_cut = self.tokenizer.encode_segments(
            [row[name] for name in shape.columns], self.limit
        )
        if not len(ids):
            raise TrainingError(f"{where} has no tokens")
        if is_cut:
            how = self.settings.long or "cut"
            if how == "refuse":
                raise TrainingError(f"{where} has more than {self.limit} tokens")
            self.long[how] += 1
            if how == "skip":
                return None
        return ids, segments

    def _match_classes(self, named: Sequence[str] | None, what: str) -> Sequence[int] | None:
        """Return the model's number of each class of the data; None where these say nothing.

        Args:
          named: the names of the classes of the data (of datasets' ClassLabel), in their order.
        """
        if named is None or not self._names:
            return None
        numbers = {name.casefold(): number for number, name in enumerate(self._names)}
        names = [name.casefold() for name in named]
        if numbers.keys() != {*names} or len(names) != len(numbers):
            return None
        order = [numbers[name] for name in names]
        if order == [*range(len(order))]:
            return None
        self.reordered[what] = None
        return order

    def _read_label(self, where: str, value: Any, order: Sequence[int] | None) -> Any:
        """Return a class, or numbers of the shape of the model's outputs.

        Raises:
          TrainingError: it is missing, or neither a class nor such numbers.
        """
        if isinstance(value, str):
            names = [name.casefold() for name in self._names]
            if (name := value.strip().casefold()) in names:
                return self._fit(names.index(name))
            try:
                value = float(value)
            except ValueError:
                has = f"are {_list(self._names)}" if self._names else "have no names"
                raise TrainingError(
                    f"{where} {value!r} is no class of the model, whose {self._count or ''} "
                    f"classes {has}: head=[...] gives it new classes by their names"
                ) from None
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise TrainingError(
                f"{where} is {value!r}: a label is the number or name of a class, or numbers for "
                "the outputs; leave out the rows without one"
            )
        if array.ndim:
            if array.shape != (self._count,) and self._count is not None:
                raise TrainingError(
                    f"{where} has {array.shape} numbers, and the model has ({self._count},) outputs"
                )
            return array.astype(np.float32)
        number = float(array)
        if self._count not in (None, 1):
            if number != int(number):
                raise TrainingError(
                    f"{where} is {number}, and the model has {self._count} classes, 0 ... "
                    f"{self._count - 1}: head=1 gives it one output, for numbers"
                )
            number = int(number)
            return order[number] if order is not None and 0 <= number < len(order) else number
        return self._fit(number)

    def _fit(self, number: Any) -> Any:
        """Return a class, or a number in the shape of the only output."""
        if self._count != 1:
            return int(number) if number == int(number) else np.float32(number)
        return np.array([number] if self._column else number, np.float32)

    def _add_notes(self) -> None:
        done = [f"{n} {'skipped' if how == 'skip' else how}" for how, n in self.long.items()]
        order = _list(self._names)
        notes = (
            *(
                (True, f"{name}: classes by name, as the model has them in the order {order}")
                for name in self.reordered
            ),
            (
                done,
                f"texts of more than {self.limit} tokens: {' and '.join(done)} "
                "(preprocess={'max_length': ..., 'long': 'cut', 'skip' or 'refuse'})",
            ),
            (self.unread, f"columns that nothing reads: {', '.join(map(repr, self.unread))}"),
        )
        self.notes[:] = [text for applies, text in notes if applies]


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
