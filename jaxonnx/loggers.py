"""Files that `train(on_log=...)` writes: a table, JSON lines, TensorBoard's events.

Each is a function of a step and its metrics, as any `on_log` may be, and several go together::

    train(..., on_log=[loggers.csv("log.csv"), loggers.tensorboard("runs/1")])

A run that is resumed continues its files: what they have of steps after the checkpoint is dropped,
because these steps are done again. A new run replaces them. What they have of steps before a
checkpoint is on disk before the checkpoint is.
"""

import csv as tables
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from jaxonnx._atomic_write import check_writable, write_atomically
from jaxonnx._require import check_arguments
from jaxonnx.errors import Error


class Logger(Protocol):
    """A log for `on_log`; `close` is called at the end of a run, and a later call goes on."""

    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None: ...

    def close(self) -> None: ...


def csv(path: str | os.PathLike) -> Logger:
    """Log a table with a row for each epoch: `step`, then the numbers of `history.epochs`.

    Raises:
      Error: there is another file with this name.
      OSError: the file cannot be written.
    """
    check_arguments(csv, locals())
    return _Table(path)


def jsonl(path: str | os.PathLike) -> Logger:
    """Log a JSON object a line for each step and epoch, `step` first; null is NaN or infinite.

    Raises:
      Error: there is another file with this name.
      OSError: the file cannot be written.
    """
    check_arguments(jsonl, locals())
    return _Lines(path)


def tensorboard(folder: str | os.PathLike) -> Logger:
    """Log scalars for TensorBoard: `step/loss`, `step/rate`, and the numbers of `epoch/...`.

    Raises:
      Error: the package tensorboardX is missing.
      OSError: the folder cannot be written.
    """
    check_arguments(tensorboard, locals())
    return _Events(folder)


class _Rows(ABC):
    """A file of rows with a step each, which is replaced as a whole when a run begins."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._begun = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(self._path)
        try:
            self._rows = self._read() if self._path.exists() else []
        except (KeyError, TypeError, ValueError) as error:
            raise Error(
                f"'{path}' exists, and is not the log of a run; pass another name"
            ) from error

    @abstractmethod
    def _read(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _write(self, file: Any, rows: list[dict[str, Any]]) -> None: ...

    def _begin(self, step: int) -> None:
        if not self._begun:
            self._begun = True
            self._rows = [row for row in self._rows if int(row["step"]) < step]
            self._replace()

    def _replace(self) -> None:
        with (
            write_atomically(self._path) as path,
            path.open("w", encoding="utf-8", newline="") as file,
        ):
            self._write(file, self._rows)


class _Table(_Rows):
    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None:
        self._begin(step)
        if "epoch" in metrics:
            self._rows.append({"step": step, **metrics})
            self._replace()

    def close(self) -> None:
        self._begun = False

    def _read(self):
        with self._path.open(encoding="utf-8", newline="") as file:
            rows = list(tables.DictReader(file))
        for row in rows:
            int(row["step"])
        return rows

    def _write(self, file, rows):
        columns = {name: None for row in rows for name in row}
        writer = tables.DictWriter(file, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class _Lines(_Rows):
    def __init__(self, path: str | os.PathLike):
        self._file: Any = None
        super().__init__(path)

    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None:
        if self._file is None:
            self._begin(step)
            self._rows.clear()
            self._file = self._path.open("a", encoding="utf-8")
        self._write(self._file, [{"step": step, **metrics}])
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._begun = None, False
            self._rows = self._read()

    def _read(self):
        lines = self._path.read_text("utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        for row in rows:
            int(row["step"])
        return rows

    def _write(self, file, rows):
        for row in rows:
            finite = {n: None if _odd(value) else value for n, value in row.items()}
            file.write(json.dumps(finite) + "\n")


class _Events:
    def __init__(self, folder: str | os.PathLike):
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise Error(
                "TensorBoard's files need tensorboardX: pip install 'jaxonnx[tensorboard]'"
            ) from error
        self._make, self._scalar, self._events = EventsWriter, summary.scalar, cast(Any, event_pb2)
        self._folder = Path(folder)
        self._writer: Any = None
        self._folder.mkdir(parents=True, exist_ok=True)
        check_writable(self._folder / "events")

    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None:
        about = {"step": step, "wall_time": time.time()}
        if self._writer is None:
            # TensorBoard reads files in the order of their names, in which the writer puts the
            # time: numbers stay in order when the clock steps back or a second has two files
            number = sum("tfevents" in file.name for file in self._folder.iterdir())
            # a SummaryWriter would write in a thread, which lags behind checkpoints
            self._writer = self._make(os.fspath(self._folder / f"events.{number:06d}"))
            # TensorBoard hides what earlier files of the folder have from this step on
            log = self._events.SessionLog
            start = self._events.Event(**about, session_log=log(status=log.START))
            self._writer.write_event(start)
        group = "epoch" if "epoch" in metrics else "step"
        for name, value in metrics.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                summary = self._scalar(f"{group}/{name}", value)
                self._writer.write_event(self._events.Event(**about, summary=summary))
        if group == "epoch":
            self.flush()

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
