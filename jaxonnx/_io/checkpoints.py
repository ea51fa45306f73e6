"""Reading the checkpoints of a run: a folder with the file of a model and, by step, its tensors.

checkpoints/model.onnx             the model that the run began with
checkpoints/120/leaves             all arrays of the run after step 120, as a list (Orbax)
checkpoints/120/about              which of them is which tensor, and more, as JSON with its CRC
checkpoints/120/metrics/metrics    the score of the epoch, if it had one
"""

import errno
import json
import os
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import numpy_helper

from jaxonnx._arrays import to_host
from jaxonnx._io.files import OnnxFormat
from jaxonnx._io.protocol import File, Format, check_exists
from jaxonnx._io.records import SPARSITY, has
from jaxonnx._io.save import in_file_types
from jaxonnx._io.tensors import to_array
from jaxonnx._io.ties import update_tied
from jaxonnx._require import require_choice
from jaxonnx.errors import ModelError

MODEL = "model.onnx"
FORMAT = 2
"""The number of the layout of a checkpoint: a change of what is stored raises it."""
UNREADABLE = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What Orbax raises for files that are truncated, altered or missing."""


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
    """What a checkpoint says of a model."""

    tensors: dict[str, np.ndarray]
    """Parameters to evaluate (not those that are trained, where a run has both), and statistics."""
    adapters: dict[str, Any] | None
    """The metadata of adapters, where these are the parameters."""


def read(folder: str | os.PathLike[str], which: str = "newest") -> Checkpoint:
    """Read the newest checkpoint that can be read, or that of the best epoch.

    Raises:
      ModelError: there is none.
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
            warnings.warn(
                f"the checkpoint of step {step} in '{folder}' cannot be read ({reason(error)})",
                stacklevel=2,
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
