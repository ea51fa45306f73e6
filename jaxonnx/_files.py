"""Files: readers that no file can harm, and writers that leave no half-written file.

Errors of readers of untrusted .npz archives and JSON become errors of ours, and no file makes them
allocate more than it holds, or more than the machine has. A file is written beside its place,
and moved there when it is whole.
"""

import errno
import math
import os
import shutil
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import Error, InputError

_RAISED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # encryption, compression, JSON that is nested too deeply
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of zipfile, zlib, json, struct, tokenize and NumPy for bytes of another format."""

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of a header by its version; a later one is of structured arrays only."""


@contextmanager
def wrap_errors(what: str, error: type[Error], *also: type[Exception]) -> Iterator[None]:
    """Turn the errors of readers of bytes into `error`: `what`, and the reason.

    An OSError whose reason is the system passes.

    Args:
      also: further exceptions of a reader.
    """
    try:
        yield
    except error:
        raise
    except (*_RAISED, *also) as raised:
        raise error(f"{what} ({_reason(raised)})") from raised
    except OSError as raised:
        # seeking to where a damaged file says, and bz2, do not have the system's reasons
        if raised.errno not in (None, errno.EINVAL):
            raise
        raise error(f"{what} ({_reason(raised)})") from raised


def _reason(raised: Exception) -> str:
    lines = str(raised).strip().splitlines()
    return f"{type(raised).__name__}: {lines[0][:500]}" if lines else type(raised).__name__


def read_arrays(
    path: str | os.PathLike[str], what: str, error: type[Error]
) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name.

    Raises:
      error: the file is none, or damaged, or its arrays are larger than it or the memory; the
        message begins with `what` and names the array.
      OSError: it cannot be opened or read.
    """
    result = {}
    with wrap_errors(what, error), open(path, "rb") as opened:
        if opened.read(2) != b"PK":
            raise error(
                f"{what}: it must be an .npz file, which numpy.savez writes, with arrays by name"
            )
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            members = file.zip.infolist()
            check_size(sum(member.file_size for member in members), what, error)
            for name, member in zip(file.files, members, strict=True):
                with wrap_errors(f"{what}: the array '{name}'", error):
                    _check_header(file.zip, member)
                    array = file[name]
                    # NumPy writes bfloat16, a type of ml_dtypes, by its size alone
                    result[name] = array.view(jnp.bfloat16) if array.dtype == "V2" else array
    return result


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise a ValueError if an array is not as large as its header says."""
    if member.compress_type not in _COMPRESSIONS:
        raise ValueError(f"compression {member.compress_type}, which NumPy does not write")
    with archive.open(member) as stream:
        if stream.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            raise ValueError("it does not begin as NumPy's arrays do")
        stream.seek(0)
        read_header = _HEADERS.get(np.lib.format.read_magic(stream))
        if read_header is None:
            return
        shape, _, dtype = read_header(stream)
        size, available = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if size != available and not dtype.hasobject:
            raise ValueError(f"{dtype}{[*shape]} takes {size:,} bytes, there are {available:,}")


def check_size(size: int, what: str, error: type[Error]) -> None:
    """Raise `error` if this many bytes are more than the machine's memory."""
    if (limit := memory()) is not None and size > limit:
        raise error(f"{what}: it holds {size:,} bytes, and the memory {limit:,}")


def memory() -> int | None:
    """Return the bytes of memory that the machine or its container has, where it tells."""
    sizes = []
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for group in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not Linux, the other version of groups, or "max"
            sizes.append(int(Path("/sys/fs/cgroup", group).read_text()))
    return min(sizes, default=None)


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to; the files written beside it take their places if nothing fails.

    A device or a pipe at `path` is written to, never replaced.
    """
    path = _check_path(path)
    replace = not _is_special(path)
    beside = path.parent if replace else None
    with tempfile.TemporaryDirectory(prefix=".jaxonnx-", dir=beside) as folder:
        yield Path(folder) / path.name
        # the file that names the others comes last
        for written in sorted(Path(folder).iterdir(), key=lambda p: p.name == path.name):
            if replace:
                replace_file(written, path.parent / written.name)
            elif written.name == path.name:
                with written.open("rb") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
            else:
                message = "several files cannot be written to what is not a regular file"
                raise OSError(errno.EINVAL, message, str(path))


def replace_file(written: Path, path: Path) -> None:
    """Move a file to its place, with the permissions of any new file.

    onnx writes external data, and safetensors its files, for the user alone.
    """
    new = written.with_name(".new")
    new.touch()
    shutil.copymode(new, written)
    new.unlink()
    os.replace(written, path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now the error that writing a file there would raise later."""
    path = _check_path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not _is_special(path):
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _check_path(path: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(path):
        raise InputError(f"a file cannot have a NUL in its path: {os.fspath(path)!r}")
    return Path(path)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
