"""Write files atomically."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxonnx.errors import InputError


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to; the files written beside it take their places if nothing fails.

    A device or a pipe at `path` is written to, never replaced.
    """
    path = _possible(path)
    replace = not _is_special(path)
    beside = path.parent if replace else None
    with tempfile.TemporaryDirectory(prefix=".jaxonnx-", dir=beside) as folder:
        yield Path(folder) / path.name
        # the file that names the others comes last
        for written in sorted(Path(folder).iterdir(), key=lambda p: p.name == path.name):
            if replace:
                os.replace(written, path.parent / written.name)
            elif written.name == path.name:
                with written.open("rb") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
            else:
                message = "several files cannot be written to what is not a regular file"
                raise OSError(errno.EINVAL, message, str(path))


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now the error that writing a file there would raise later."""
    path = _possible(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not _is_special(path):
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _possible(path: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(path):
        raise InputError(f"a file cannot have a NUL in its path: {os.fspath(path)!r}")
    return Path(path)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
