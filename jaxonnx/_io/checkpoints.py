"""Read checkpoints: those of a run, and those of onnxruntime-training.

A run has a folder with the file of a model and, by step, its tensors::

    checkpoints/model.onnx             the model that the run began with
    checkpoints/120/leaves             all arrays of the run after step 120, as a list (Orbax)
    checkpoints/120/about              which of them is which tensor, and more, as JSON with its CRC
    checkpoints/120/metrics/metrics    the score of the epoch, if it had one

Those of onnxruntime-training are flatbuffers. The schema is onnxruntime's
(core/flatbuffers/schema/ort_training_checkpoint.fbs, with Tensor of ort.fbs), of which the reader
follows what it needs. A file is not trusted: offsets are checked where they are followed, and
arrays are views of its bytes, so that none is larger than the file.
"""

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper, numpy_helper

from jaxonnx._arrays import to_host
from jaxonnx._files import wrap_errors
from jaxonnx._io.files import OnnxFormat
from jaxonnx._io.protocol import File, Format, check_exists
from jaxonnx._io.records import SPARSITY, has
from jaxonnx._io.save import in_file_types
from jaxonnx._io.tensors import to_array
from jaxonnx._io.ties import update_tied
from jaxonnx._require import check_arguments, require_choice
from jaxonnx.errors import ModelError, warn

MODEL = "model.onnx"
FORMAT = 2
"""The version of the layout of a checkpoint: a change of the stored arrays raises it."""
UNREADABLE = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Orbax's errors for files that are truncated, altered or missing."""


class RunFormat(Format):
    """A folder of checkpoints: its model, with the tensors of one of them."""

    form = "a folder of checkpoints"
    choice = "checkpoint"

    def find(self, source: Any, choice: str | None) -> tuple[Path, str] | None:
        if not isinstance(source, str | os.PathLike) or not os.path.isdir(source):
            return None
        which = "newest" if choice is None else choice
        require_choice("checkpoint", which, ("newest", "best"))
        return Path(source), which

    def read(self, place: tuple[Path, str]) -> File:
        folder, path = place[0], place[0] / MODEL
        stored = read(*place)
        if stored.adapters is not None:
            raise ModelError(
                f"'{folder}' has checkpoints of adapters: "
                f"jaxonnx.Adapters.load({os.fspath(folder)!r}).apply(jaxonnx.load({str(path)!r}))"
            )
        file = OnnxFormat().read(check_exists(path))
        proto, tensors = file.proto, file.tensors
        for name in stored.tensors.keys() & tensors.keys():
            if tensors[name].dtype == object:
                raise ModelError(
                    f"'{path}': '{name}' is a string, and has numbers in the checkpoints"
                )
        values = in_file_types(stored.tensors, tensors)
        for info in proto.training_info:  # variables of the algorithm alone
            for tensor in info.algorithm.initializer:
                if tensor.name in values:
                    value = values[tensor.name].astype(to_array(tensor).dtype)
                    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        new = {name: value for name, value in values.items() if name in tensors}
        tensors = update_tied(proto.graph, tensors, new)
        if has(proto, SPARSITY):
            from jaxonnx._io import packed

            packed.keep_true(proto, tensors)
        return file._replace(tensors=tensors)


class Checkpoint(NamedTuple):
    """The tensors of a model and the metadata of adapters in a checkpoint."""

    tensors: dict[str, np.ndarray]
    """Parameters to evaluate (not those that are trained, where a run has both), and statistics."""
    adapters: dict[str, Any] | None
    """The metadata of adapters, where these are the parameters."""


def read(folder: str | os.PathLike[str], which: str = "newest") -> Checkpoint:
    """Read the newest checkpoint that can be read, or that of the best epoch.

    Raises:
      ModelError: the folder has no checkpoint that can be read.
    """
    # takes seconds to import
    from orbax import checkpoint as orbax

    folder = Path(folder).absolute()
    steps = sorted(orbax.utils.checkpoint_steps(folder), reverse=True)
    if not steps or not (folder / MODEL).is_file():
        raise ModelError(
            f"'{folder}' is a folder without checkpoints; give the checkpoint_dir of a run, or an "
            ".onnx file"
        )
    if which == "best":
        steps = [_best(folder, steps)]
    for step in steps:
        try:
            return _read(orbax, folder / str(step))
        except UNREADABLE as error:
            warn(
                f"the checkpoint of step {step} in '{folder}' cannot be read ({reason(error)})",
            )
    raise ModelError(f"no checkpoint in '{folder}' can be read")


def _best(folder: Path, steps: list[int]) -> int:
    """Return the step with the greatest score."""
    scores = dict.fromkeys(steps, -np.inf)
    for step in steps:
        with suppress(*UNREADABLE):
            scores[step] = score(folder / str(step))
    best = max(steps, key=scores.__getitem__)
    if scores[best] == -np.inf:
        raise ModelError(
            f"no checkpoint in '{folder}' is a candidate for the best epoch; the newest is that of "
            f"step {steps[0]}"
        )
    return best


def score(path: Path) -> float:
    """Return the score of a checkpoint, infinitely small if it does not compete.

    Raises:
      OSError: the file is missing.
      KeyError, TypeError, ValueError: it is damaged.
    """
    return float(json.loads((path / "metrics" / "metrics").read_text())["score"])


def check_form(path: Path) -> None:
    """Raise an error that `UNREADABLE` has if a folder is not a valid checkpoint."""
    if not all((path / item).is_dir() for item in ("about", "leaves")):
        raise ValueError("it is not a checkpoint of jaxonnx")
    score(path)


def _read(orbax: Any, path: Path) -> Checkpoint:
    def restore_item(handler: Any, item: str, **options: Any) -> Any:
        with orbax.Checkpointer(handler) as checkpointer:
            return checkpointer.restore(path / item, **options)

    about = verify_checksum(restore_item(orbax.JsonCheckpointHandler(), "about"))
    # in the host's memory, on however many devices they were
    restore_args = [orbax.RestoreArgs(restore_type=np.ndarray)] * len(about["crc"])
    args = orbax.args.PyTreeRestore(restore_args=restore_args)
    leaves = [*map(np.asarray, restore_item(orbax.PyTreeCheckpointHandler(), "leaves", args=args))]
    check(leaves, about["crc"])
    tensors = {name: leaves[i] for name, i in about["tensors"].items()}
    return Checkpoint(tensors, about["adapters"])


def add_checksum(about: dict[str, Any]) -> dict[str, Any]:
    """Return metadata as JSON, with the format of checkpoints and a CRC."""
    text = json.dumps({"format": FORMAT, **about})
    return {"about": text, "crc": zlib.crc32(text.encode())}


def verify_checksum(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that `add_checksum` took.

    Raises:
      ValueError: it was altered, or is of another format.
    """
    if zlib.crc32(stored["about"].encode()) != stored["crc"]:
        raise ValueError("its metadata is damaged: the checksum differs")
    about = json.loads(stored["about"])
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')}; this jaxonnx reads {FORMAT}")
    return about


def crc(x: np.ndarray) -> int:
    numbers: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return zlib.crc32(numbers)


def checksum(x: np.ndarray | jax.Array) -> int | str:
    """Return a checksum: the CRC of an array in host memory, the sum of one on a mesh."""
    return crc(x) if isinstance(x, np.ndarray) else f"sum {_sum(x)}"


def check(arrays: Sequence[np.ndarray | jax.Array], checksums: Sequence[int | str]) -> None:
    """Raise ValueError if an array, in host memory or on a mesh, has another checksum."""
    for x, expected in zip(arrays, checksums, strict=True):
        if expected != (crc(to_host(x)) if isinstance(expected, int) else f"sum {_sum(x)}"):
            raise ValueError("its arrays are damaged: a checksum differs")


@jax.jit
def _sum(x: Any) -> jax.Array:
    """Return the sum of the bits of numbers, each times an odd number by its place, mod 2**32."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    bits = lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])
    bits = bits ^ (bits >> 32) if x.dtype.itemsize == 8 else bits
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return (bits.astype(jnp.uint32) * (2 * place + 1)).sum(dtype=jnp.uint32)


def reason(error: BaseException) -> str:
    """Return the operating system's message for an error, or else the first line of its text.

    Orbax has errors of the system as the cause of its own, or only in the middle of their text.
    """
    text, cause = str(error).strip(), error
    while cause is not None:
        if strerror := getattr(cause, "strerror", None):
            return strerror
        cause = cause.__cause__ or cause.__context__
    messages = [message for message in map(os.strerror, errno.errorcode) if message in text]
    first = (text or type(error).__name__).splitlines()[0][:200]
    return max(messages, key=len, default=first)


_IDENTIFIER = b"ODTC"
_VERSIONS = (1, 2)
"""2, which release 1.19.2 writes, may have its tensors in a file beside it."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint of onnxruntime-training.

    Attributes:
      params: the trained tensors, by name.
      frozen: its other tensors, by name.
      moments: the averages of the gradient and of its square, by name, if they were saved.
      count: the number of updates until then.
      learning_rate: that of the optimizer.
      properties: entries of the user's loop.
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
        if module is None:
            raise ValueError("it has no tensors")
        if module.number(2, "b") or module.number(3, "b"):
            where = (
                "a nominal one, which has their names; give the 'checkpoint' that "
                "generate_artifacts wrote beside it"
                if module.number(2, "b")
                else "they are in a file beside it, which is not read"
            )
            raise ModelError(
                f"'{os.fspath(path)}' is a checkpoint of onnxruntime-training without tensors: "
                f"{where}"
            )
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
