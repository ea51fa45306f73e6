"""The values of TensorProtos: inline, in external files, sparse, or of types that share bytes.

Neither the model nor the other files of its folder are trusted, and all may change while they are
read. So nothing is looked up twice: each part of a path is opened from the descriptor of the folder
that it lies in, links are followed here and only to places below the root, and the open file is
checked, which is then mapped. That is RESOLVE_BENEATH of Linux for every system with openat.
"""

import errno
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from jaxonnx._limits import FOLDED, check_size, count_elements
from jaxonnx.errors import LimitError, ModelError

_BY_DESCRIPTOR = {os.open, os.readlink} <= os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether files are opened from the descriptor of their folder; Windows has no such call."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# a pipe that nobody writes to would be waited for
_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_IS_LINK = (errno.ELOOP, errno.EMLINK)
"""Error numbers of opening a link, in Linux and macOS and in FreeBSD."""
_LINKS = 40
"""Links on the way to one file, as in Linux."""
_OUTSIDE = "outside the model's folder; external data must lie beside or below the model"


class Folder(NamedTuple):
    """A folder that may hold the external data of a model."""

    root: Path
    """The folder that links may not leave."""
    below: tuple[str, ...] = ()
    """The folder of the model, below the root."""
    end: str = ""
    """The folder of the root in which files behind links must lie; "" for any."""

    def __truediv__(self, location: str) -> Path:
        return self.root.joinpath(*self.below, location)


class _RefusedError(Exception):
    """Raised for a file that must not be read; the message names its kind."""


def list_folders(model: Path) -> tuple[Folder, ...]:
    """Return where the external data of a file may lie: beside it, and beside the link to it.

    In the cache of the Hugging Face hub, `snapshots/<revision>/onnx/model.onnx` and its data are
    links into `blobs`: there the root is the folder of the repository.
    """
    return tuple(map(_folder, dict.fromkeys((model.resolve().parent, model.absolute().parent))))


def _folder(path: Path) -> Folder:
    for revision in (path, *path.parents):
        repository = revision.parent.parent
        named = revision.parent.name == "snapshots" and "--" in repository.name
        if named and (repository / "blobs").is_dir():
            return Folder(repository, path.relative_to(repository).parts, "blobs")
    return Folder(path)


def map_external(tensor: TensorProto, places: Sequence[Folder]) -> np.ndarray:
    """Return external data as bytes in a read-only memory map.

    Raises:
      ModelError: the entry is malformed, or the file is missing, short, outside the folder, or
        not a regular file with one name.
      OSError: it cannot be opened.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not places:
        raise ModelError(
            f"tensor '{tensor.name}' lies in external file '{location}'; load the model by its "
            "path, or read the data first with onnx.load_external_data_for_model"
        )
    try:
        descriptor = _open_regular(location, places)
    except _RefusedError as refused:
        text = f"tensor '{tensor.name}' points to '{location}', {refused}"
        raise ModelError(text) from refused
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        try:
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", size - offset))
        except ValueError as error:
            raise ModelError(
                f"tensor '{tensor.name}': bad external data entry ({error})"
            ) from error
        if offset < 0 or length < 0 or offset + length > size:
            raise ModelError(
                f"tensor '{tensor.name}' needs bytes {offset} to {offset + length} of "
                f"'{location}', which has {size}; the file is truncated"
            )
        if length == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(file, np.uint8, "r", offset, (length,))


def _open_regular(location: str, places: Sequence[Folder]) -> int:
    """Return a descriptor of a regular file with one name."""
    parts = _parts(location)
    if not parts:
        raise _RefusedError(_OUTSIDE)
    for place in places:
        try:
            descriptor = (_below if _BY_DESCRIPTOR else _open_checked)(place, parts)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            if error.errno in _IS_LINK:
                raise _RefusedError(f"{_OUTSIDE} (a link)") from error
            raise
        if refused := _explain_refusal(os.fstat(descriptor)):
            os.close(descriptor)
            raise _RefusedError(refused)
        return descriptor
    hub = next((place for place in places if place.end), None)
    get = "download it with huggingface_hub too" if hub else "copy it beside the model"
    raise _RefusedError(f"and '{(hub or places[0]) / location}' does not exist; {get}")


def _parts(location: str) -> list[str]:
    """Return the parts of a location without "." and ".."; none if it leaves the folder."""
    if not isinstance(location, str) or "\0" in location or PurePath(location).anchor:
        return []
    parts: list[str] = []
    for part in PurePath(location).parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            return []
    return parts


def _explain_refusal(info: os.stat_result) -> str:
    """Say why an open file is not read; empty if it is."""
    if not stat.S_ISREG(info.st_mode):
        return "which is not a regular file"
    if info.st_nlink > 1:
        return (
            f"a file of {info.st_nlink} names (hard links), one of which may lie outside the "
            "model's folder; replace it by a copy of it (cp)"
        )
    return ""


def _below(place: Folder, parts: Sequence[str]) -> int:
    """Open a file below the root, whatever its folders and links become in between."""
    opened, names, links = [os.open(place.root, _FOLDER)], [], 0
    todo = [*place.below, *parts]
    try:
        while todo:
            name = todo.pop(0)
            if name == "..":
                if not names:
                    raise _RefusedError(_OUTSIDE)
                names.pop()
                os.close(opened.pop())
            elif target := _link(name, opened[-1]):
                links += 1
                if links > _LINKS:
                    raise _RefusedError(f"{_OUTSIDE} (a circle of links)")
                if PurePath(target).anchor:
                    target = _relative_to_root(target, place.root)
                    names.clear()
                    while len(opened) > 1:
                        os.close(opened.pop())
                todo[:0] = PurePath(target).parts
            elif todo:
                opened.append(os.open(name, _FOLDER | _NO_LINK, dir_fd=opened[-1]))
                names.append(name)
            elif links and place.end and names != [place.end]:
                raise _RefusedError(f"{_OUTSIDE} (a link)")
            else:
                return os.open(name, _FILE, dir_fd=opened[-1])
        raise _RefusedError("which is not a regular file")
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _link(name: str, folder: int) -> str:
    """Return the target of a symbolic link, "" for any other file."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return ""


def _relative_to_root(target: str, root: Path) -> PurePath:
    """Return an absolute path as one from the root."""
    for base in (root, root.resolve()):
        if PurePath(target).is_relative_to(base):
            return PurePath(target).relative_to(base)
    raise _RefusedError(f"{_OUTSIDE} (a link)")


def _open_checked(place: Folder, parts: Sequence[str]) -> int:
    """Open a file by its path, and check that the path still leads to it afterwards."""
    root = place.root.resolve()
    plain = root.joinpath(*place.below, *parts)
    try:
        path = plain.resolve(strict=True)
    except RuntimeError as error:  # Python before 3.13 tells so of a circle of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(plain)) from error
    ends = path == plain or not place.end or path.parent == root / place.end
    if not path.is_relative_to(root) or not ends:
        raise _RefusedError(f"{_OUTSIDE} (a link)")
    descriptor = os.open(path, _FILE)
    if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
        os.close(descriptor)
        raise _RefusedError(f"{_OUTSIDE} (a link)")
    return descriptor


_BITS: dict[int, int] = {
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.UINT2: 2,
    TensorProto.INT2: 2,
    TensorProto.FLOAT6E2M3: 6,
    TensorProto.FLOAT6E3M2: 6,
}
"""Bits of the element types that share bytes."""


def to_array(tensor: TensorProto, folders: Sequence[Folder] = ()) -> np.ndarray:
    """Return the value of a TensorProto; external data is memory-mapped from one of `folders`.

    Raises:
      ModelError: the element type is unknown, or the data does not fill the shape.
      LimitError: it is empty, and its other axes are longer than memory.
    """
    shape = tuple(tensor.dims)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        raise ModelError(
            f"tensor '{tensor.name}' has element type {tensor.data_type}, unknown to ONNX"
        ) from None
    if any(dim < 0 for dim in shape):
        raise ModelError(f"tensor '{tensor.name}' has a negative dimension: {list(shape)}")
    # nothing of the file stands for the other axes of an empty tensor
    if 0 in shape and count_elements(shape) * dtype.itemsize > FOLDED:
        try:
            check_size(shape, dtype, host=True)
        except LimitError as error:
            raise LimitError(f"tensor '{tensor.name}': {error}") from None
    if tensor.data_location == TensorProto.EXTERNAL:
        data = map_external(tensor, folders)
    elif tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the data of tensor '{tensor.name}' does not fit its shape {list(shape)} ({error})"
            ) from error
    if tensor.data_type == TensorProto.STRING:
        raise ModelError(f"tensor '{tensor.name}' holds strings, which must lie in string_data")
    bits = _BITS.get(tensor.data_type, 8 * dtype.itemsize)
    expected = -(-math.prod(shape) * bits // 8)
    if data.nbytes != expected:
        raise ModelError(
            f"tensor '{tensor.name}' of shape {list(shape)}, type {dtype}, needs {expected} bytes "
            f"but has {data.nbytes}; the file is truncated or inconsistent"
        )
    try:
        if tensor.data_type in _BITS:
            inline = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=data.tobytes())
            return numpy_helper.to_array(inline)
        return data.view(dtype).reshape(shape)
    except ValueError as error:  # more dimensions, or larger ones, than an array can have
        raise ModelError(f"tensor '{tensor.name}' of shape {list(shape)}: {error}") from error


def to_dense(sparse: onnx.SparseTensorProto, folders: Sequence[Folder] = ()) -> np.ndarray:
    """Convert a SparseTensorProto to an array (IR: indices are linear, or one row per value).

    Raises:
      ModelError: what onnx.checker refuses: values that are not one-dimensional, another number
        of indices, indices outside the shape or not in ascending order.
      LimitError: the array would be larger than memory.
    """
    values, indices = to_array(sparse.values, folders), to_array(sparse.indices, folders)
    shape = tuple(sparse.dims)
    what = f"sparse tensor '{sparse.values.name}' of shape {list(shape)}"
    rows = (values.size,) if indices.ndim == 1 else (values.size, len(shape))
    if values.ndim != 1 or indices.shape != rows or indices.dtype != np.int64:
        raise ModelError(
            f"{what}: indices {indices.dtype}{list(indices.shape)} do not fit values "
            f"{list(values.shape)}"
        )
    check_size(shape, values.dtype, host=True)
    try:
        dense = np.zeros(shape, values.dtype)
        places = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        flat = np.asarray(places)
    except (ValueError, TypeError, MemoryError) as error:
        raise ModelError(f"{what}: its indices do not fit ({error})") from error
    if flat.size and not (flat[0] >= 0 and flat[-1] < dense.size and (np.diff(flat) > 0).all()):
        raise ModelError(f"{what}: the indices must be in the shape and in ascending order")
    dense.reshape(-1)[flat] = values
    return dense


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Check whether two arrays are equal bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a is b or a.dtype == object:
        return a is b or bool(np.array_equal(a, b))
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(first, second)
