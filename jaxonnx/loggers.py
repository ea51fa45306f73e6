"""Logs that `train(on_log=...)` writes: tables, JSON lines, TensorBoard, MLflow, Weights & Biases.

Each is a function of a step and its metrics, as any `on_log` may be, and several go together::

    train(..., on_log=[loggers.csv("log.csv"), loggers.tensorboard("runs/1")])

A run that is resumed continues its files: what they have of steps after the checkpoint is dropped,
because these steps are done again. A new run replaces them. What they have of steps before a
checkpoint is on disk before the checkpoint is. Runs of MLflow and of Weights & Biases are continued
as well if they have the folder of the checkpoints, in which their identifiers are kept::

    train(..., on_log=loggers.mlflow("digits", folder="run"), checkpoint_dir="run", resume=True)
"""

import csv as tables
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from jaxonnx._files import check_writable, write_atomically
from jaxonnx._require import check_arguments
from jaxonnx.errors import Error


class Logger(Protocol):
    """A log for `on_log`; `close` is called at the end of a run, and a later call goes on."""

    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None: ...

    def close(self) -> None: ...


_MOST_METRICS = 1000
"""How many numbers MLflow takes at a time."""


def csv(path: str | os.PathLike[str]) -> Logger:
    """Log a table with a row for each epoch: `step`, then the numbers of `history.epochs`.

    Raises:
      Error: there is another file with this name.
      OSError: the file cannot be written.
    """
    check_arguments(csv, locals())
    return _Table(path)


def jsonl(path: str | os.PathLike[str]) -> Logger:
    """Log a JSON object a line for each step and epoch, `step` first; null is NaN or infinite.

    Raises:
      Error: there is another file with this name.
      OSError: the file cannot be written.
    """
    check_arguments(jsonl, locals())
    return _Lines(path)


def tensorboard(folder: str | os.PathLike[str]) -> Logger:
    """Log scalars for TensorBoard: `step/loss`, `step/rate`, and the numbers of `epoch/...`.

    Raises:
      Error: the package tensorboardX is missing.
      OSError: the folder cannot be written.
    """
    check_arguments(tensorboard, locals())
    return _Events(folder)


def wandb(project: str, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> Logger:
    """Log to a project of Weights & Biases, by the names that TensorBoard gets.

    Args:
      project: the name of the project.
      folder: where the run's identifier is kept, so that a resumed run continues the same curve:
        the folder of the checkpoints, say. None: each run is a new one.
      settings: more of `wandb.init`: `name`, `config`, `mode="offline"`, ...

    Raises:
      Error: the package wandb is missing.
      OSError: the folder cannot be written.
    """
    check_arguments(wandb, locals())
    return _WandbRun(folder, {"project": project, **settings})


def mlflow(experiment: str, *, folder: str | os.PathLike[str] | None = None) -> Logger:
    """Log to an experiment of MLflow, by the names that TensorBoard gets.

    The server is that of `mlflow.set_tracking_uri` or of MLFLOW_TRACKING_URI. The numbers of steps
    are sent with each checkpoint and at the end of each epoch.

    Args:
      experiment: its name; created if missing.
      folder: as in `wandb`.

    Raises:
      Error: the package mlflow is missing.
      OSError: the folder cannot be written.
    """
    check_arguments(mlflow, locals())
    return _MLflowRun(folder, experiment)


class _Rows(ABC):
    """A file of rows with a step each, which is replaced as a whole when a run begins."""

    def __init__(self, path: str | os.PathLike[str]):
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
    def __init__(self, path: str | os.PathLike[str]):
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
            finite = {  # JSON has neither NaN nor infinities
                name: None if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in row.items()
            }
            file.write(json.dumps(finite) + "\n")


class _Events:
    def __init__(self, folder: str | os.PathLike[str]):
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
        for name, value in _scalars(metrics):
            summary = self._scalar(name, value)
            self._writer.write_event(self._events.Event(**about, summary=summary))
        if "epoch" in metrics:
            self.flush()

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _TrackedRun(ABC):
    """A run of a service, whose identifier a folder keeps."""

    service: ClassVar[str]

    def __init__(self, folder: str | os.PathLike[str] | None):
        try:
            self._package: Any = import_module(self.service)
        except ImportError as error:
            message = f"logs of {self.service} need it: pip install {self.service}"
            raise Error(message) from error
        self._kept = None if folder is None else Path(folder, f"{self.service}_run.txt")
        self._begun = False
        if self._kept is not None:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            check_writable(self._kept)

    def __call__(self, step: int, metrics: Mapping[str, Any], /) -> None:
        if not self._begun:
            resumed = step > 1 and self._kept is not None and self._kept.exists()
            name = self._begin(self._kept.read_text("utf-8") if self._kept and resumed else None)
            if self._kept is not None and not resumed:
                with write_atomically(self._kept) as path:
                    path.write_text(name, "utf-8")
            self._begun = True
        self._log(step, dict(_scalars(metrics)))

    def close(self) -> None:
        if self._begun:
            self._end()
            self._begun = False

    @abstractmethod
    def _begin(self, name: str | None) -> str: ...

    @abstractmethod
    def _log(self, step: int, values: dict[str, float]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class _WandbRun(_TrackedRun):
    service = "wandb"

    def __init__(self, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any]):
        super().__init__(folder)
        self._settings = settings

    def _begin(self, name):
        self._run = self._package.init(**self._settings, id=name, resume="allow" if name else None)
        # steps that are done again after a checkpoint are behind those of wandb's own counter
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def _log(self, step, values):
        self._run.log({"step": step, **values})  # to a process of wandb's own, which outlives ours

    def _end(self):
        self._run.finish()


class _MLflowRun(_TrackedRun):
    service = "mlflow"

    def __init__(self, folder: str | os.PathLike[str] | None, experiment: str):
        super().__init__(folder)
        self._client = self._package.MlflowClient()
        self._experiment = experiment
        self._waiting: list[Any] = []

    def _begin(self, name):
        if name is None:
            existing = self._client.get_experiment_by_name(self._experiment)
            number = existing and existing.experiment_id
            number = number or self._client.create_experiment(self._experiment)
            name = self._client.create_run(number).info.run_id
        else:
            self._client.update_run(name, status="RUNNING")
        self._name = name
        return name

    def _log(self, step, values):
        now, metric = int(time.time() * 1000), self._package.entities.Metric
        self._waiting += [metric(name, value, now, step) for name, value in values.items()]
        if "epoch/loss" in values or len(self._waiting) > _MOST_METRICS:
            self.flush()

    def flush(self):
        while self._waiting:
            self._client.log_batch(self._name, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]

    def _end(self):
        self.flush()
        self._client.set_terminated(self._name)


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a step or an epoch, by the names that services get."""
    group = "epoch" if "epoch" in metrics else "step"
    for name, value in metrics.items():
        if isinstance(value, int | float) and name not in ("epoch", "step"):
            yield f"{group}/{name}", value
