"""Checkpoints of onnxruntime-training, which are flatbuffers.

The schema is onnxruntime's (core/flatbuffers/schema/ort_training_checkpoint.fbs, with Tensor of
ort.fbs), of which the reader follows what it needs. A file is not trusted: offsets are checked
where they are followed, and arrays are views of its bytes, so that none is larger than the file.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from jaxonnx._io.protocol import Format
from jaxonnx._require import check_arguments
from jaxonnx._safe_read import wrap_errors
from jaxonnx.errors import ModelError

_IDENTIFIER = b"ODTC"
_VERSIONS = (1, 2)
"""2, which release 1.19.2 writes, may have its tensors in a file beside it."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint of onnxruntime-training.

    Attributes:
      params: what is trained, by name.
      frozen: its other tensors, by name.
      moments: the averages of the gradient and of its square, by name, if they were saved.
      count: the number of updates until then.
      learning_rate: that of the optimizer.
      properties: what the user's loop put into it.
    """

    params: Mapping[str, np.ndarray]
    frozen: Mapping[str, np.ndarray]
    moments: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    count: int = 0
    learning_rate: float | None = None
    properties: Mapping[str, int | float | str] = field(default_factory=dict)


class TrainingCheckpointFormat(Format):
    """A checkpoint of onnxruntime-training: the weights of a graph that has them as inputs."""

    has_graph = False
    replaces_inputs = True

    def find(self, source: Any, choice: str | None) -> Path | None:
        if not isinstance(source, str | os.PathLike) or not os.path.isfile(source):
            return None
        with open(source, "rb") as file:
            return Path(source) if file.read(8)[4:] == _IDENTIFIER else None

    def read_weights(self, place: Path) -> dict[str, np.ndarray]:
        checkpoint = read_training_checkpoint(place)
        return {**checkpoint.frozen, **checkpoint.params}


def read_training_checkpoint(path: str | os.PathLike[str]) -> TrainingCheckpoint:
    """Read a checkpoint.

    Raises:
      ModelError: it is not one, is damaged, or has its tensors in a file beside it or not at all.
      OSError: it cannot be read.
    """
    check_arguments(read_training_checkpoint, locals())
    failure = f"'{os.fspath(path)}' is not a checkpoint of onnxruntime-training, or is damaged"
    data = Path(path).read_bytes()
    with wrap_errors(failure, ModelError):
        if data[4:8] != _IDENTIFIER:
            raise ValueError("it does not say that it is one")
        root = _Table.root(data)
        version = root.number(0, "i")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, and versions 1 and 2 are known")
        module = root.table(1)
        if module is None or module.number(2, "b") or module.number(3, "b"):
            raise ValueError("its tensors are not in it: a nominal one, or with external data")
        params, frozen = (_unique(map(_tensor, module.tables(i))) for i in (0, 1))
        checkpoint = TrainingCheckpoint(params, frozen, properties=_properties(root.table(3)))
        groups = [*root.tables(2)]
        if not groups:
            return checkpoint
        if len(groups) > 1:
            raise ValueError(f"it has {len(groups)} groups of parameters, and one is known")
        states = (
            (s.text(0), tuple(v for _, v in map(_tensor, s.tables(1)))) for s in groups[0].tables(3)
        )
        count, rate = groups[0].number(1, "q"), groups[0].number(2, "f")
        return TrainingCheckpoint(
            params, frozen, _unique(states), int(count), float(rate), checkpoint.properties
        )


class _Table:
    """A table of a flatbuffer: fields by their number in the schema."""

    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at
        start = at - self._read("i", at)
        size = self._read("H", start)
        count = max(size - 4, 0) // 2
        self._fields = struct.unpack_from(f"<{count}H", data, self._inside(start + 4))

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, which: int, form: str) -> int | float:
        """Return a number; 0 where it is left out."""
        at = self._place(which)
        return 0 if at is None else self._read(form, at)

    def text(self, which: int) -> str:
        return bytes(self.bytes(which)).decode()

    def bytes(self, which: int, size: int = 1) -> memoryview:
        """Return a vector of elements of `size` bytes."""
        at = self._follow(which)
        if at is None:
            return memoryview(b"")
        end = at + 4 + size * self._read("I", at)
        if end > len(self._data):
            raise ValueError("a vector is longer than the file")
        return memoryview(self._data)[at + 4 : end]

    def table(self, which: int) -> "_Table | None":
        at = self._follow(which)
        return None if at is None else _Table(self._data, at)

    def tables(self, which: int) -> Iterator["_Table"]:
        """Yield the tables of a vector."""
        at, offsets = self._follow(which), self.bytes(which, 4)
        for i in range(0, len(offsets), 4):
            place = (at or 0) + 4 + i
            yield _Table(self._data, place + self._read("I", place))

    def _place(self, which: int) -> int | None:
        offset = self._fields[which] if which < len(self._fields) else 0
        return self._at + offset if offset else None

    def _follow(self, which: int) -> int | None:
        at = self._place(which)
        return None if at is None else at + self._read("I", at)

    def _read(self, form: str, at: int) -> Any:
        return struct.unpack_from(f"<{form}", self._data, self._inside(at))[0]

    def _inside(self, at: int) -> int:
        if at < 0:  # Python would count from the end
            raise ValueError("an offset points before the file")
        return at


def _tensor(table: _Table) -> tuple[str, np.ndarray]:
    """Return a tensor and its name."""
    shape = tuple(np.frombuffer(table.bytes(2, 8), "<i8").tolist())
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(int(table.number(3, "i"))))
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"'{table.text(0)}' is of type {dtype}{[*shape]}")
    return table.text(0), np.frombuffer(table.bytes(4), dtype.newbyteorder("<")).reshape(shape)


def _unique(pairs):
    """Return pairs as a dict; a name that comes twice is a damaged file."""
    unique = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"'{name}' is in it twice")
        unique[name] = value
    return unique


def _properties(bag: _Table | None) -> dict[str, int | float | str]:
    if bag is None:
        return {}
    numbers = [(t.text(0), t.number(1, form)) for i, form in enumerate("qf") for t in bag.tables(i)]
    return _unique([*numbers, *((t.text(0), t.text(1)) for t in bag.tables(2))])
