"""Files that are written whole or not at all."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | os.PathLike) -> Iterator[Path]:
    """Give a path to write to; the files written beside it take their places if nothing fails."""
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=".jaxonnx-", dir=path.parent) as folder:
        yield Path(folder) / path.name
        # the file that names the others comes last
        for written in sorted(Path(folder).iterdir(), key=lambda p: p.name == path.name):
            os.replace(written, path.parent / written.name)


def check_writable(path: str | os.PathLike) -> None:
    """Raise now the OSError that writing a file there would raise later."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass
