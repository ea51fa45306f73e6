"""Files that `train(on_log=...)` writes: a table, JSON lines, TensorBoard's events.

Each is a function of a step and its metrics, as any `on_log` may be, and several go together::

    train(..., on_log=[loggers.csv("log.csv"), loggers.tensorboard("runs/1")])

A run that is resumed continues its files: rows of steps after the checkpoint are dropped, because
these steps are done again.
"""

import csv as tables
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxonnx.errors import Error
from jaxonnx.save import check_writable


def csv(path: str | os.PathLike) -> "File":
    """A table with a row for each epoch: `step`, then what `history.epochs` has.

    Raises:
      OSError: the file cannot be written.
    """
    return File(path, _Table())


def jsonl(path: str | os.PathLike) -> "File":
    """A JSON object a line, for each step and each epoch, with `step` first.

    Raises:
      OSError: the file cannot be written.
    """
    return File(path, _Lines())


def tensorboard(folder: str | os.PathLike) -> "TensorBoard":
    """Scalars for TensorBoard: `step/loss`, and `epoch/...` for the numbers of an epoch.

    Raises:
      Error: the package tensorboardX is missing.
      OSError: the folder cannot be written.
    """
    return TensorBoard(folder)


class _Table:
    """Rows of epochs under one header."""

    def __init__(self):
        self._columns: list[str] | None = None

    def steps(self, text: str) -> Iterator[tuple[str, int]]:
        """Each row of a file, and its step."""
        rows = tables.DictReader(io.StringIO(text))
        self._columns = list(rows.fieldnames or ()) or None
        for row in rows:
            if None not in row.values() and None not in row:
                yield self._line(row.values()), int(row["step"])

    def head(self) -> str:
        return "" if self._columns is None else self._line(self._columns)

    def text(self, step: int, metrics: Mapping[str, Any]) -> str:
        if "epoch" not in metrics:
            return ""
        row = {"step": step, **metrics}
        if self._columns is None:
            self._columns = list(row)
            return self.head() + self._line(row.values())
        return self._line(row.get(name, "") for name in self._columns)

    def _line(self, values: Any) -> str:
        line = io.StringIO()
        tables.writer(line, lineterminator="\n").writerow(values)
        return line.getvalue()


class _Lines:
    """JSON objects."""

    def steps(self, text: str) -> Iterator[tuple[str, int]]:
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                yield line, json.loads(line)["step"]

    def head(self) -> str:
        return ""

    def text(self, step: int, metrics: Mapping[str, Any]) -> str:
        return json.dumps({"step": step, **metrics}) + "\n"


class File:
    """A text file that grows by what a form makes of each call."""

    def __init__(self, path: str | os.PathLike, form: _Table | _Lines):
        self._path = Path(path)
        self._form = form
        self._file: io.TextIOBase | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(self._path)

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        text = self._form.text(step, metrics) if self._file else None
        if text is None:
            self._open(step)
            text = self._form.text(step, metrics)
        if text and self._file:
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        """The end of a run; a later call goes on."""
        if self._file:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> None:
        """Drops what is not before `step`."""
        kept = ""
        if self._path.exists():
            found = [
                line for line, n in self._form.steps(self._path.read_text("utf-8")) if n < step
            ]
            kept = self._form.head() + "".join(found) if found else ""
        self._path.write_text(kept, "utf-8")
        self._file = self._path.open("a", encoding="utf-8")


class TensorBoard:
    """An event file in a folder."""

    def __init__(self, folder: str | os.PathLike):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise Error(
                "TensorBoard's files need tensorboardX: pip install 'jaxonnx[tensorboard]'"
            ) from error
        self._make: Callable[..., Any] = SummaryWriter
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        check_writable(self._folder / "events")
        self._writer: Any = None

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            # TensorBoard hides the events of a run before this one from this step on
            self._writer = self._make(os.fspath(self._folder), purge_step=step)
        group = "epoch" if "epoch" in metrics else "step"
        for name, value in metrics.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """The end of a run; a later call goes on."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
