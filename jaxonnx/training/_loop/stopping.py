"""Stop a run early: patience and Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from jaxonnx._require import describe
from jaxonnx.errors import TrainingError
from jaxonnx.training._settings import Settings

T = TypeVar("T")
_END: Any = object()

_SMALLER = ("loss", "mae", "mse", "perplexity")
"""Endings of the names of metrics that are better when smaller."""
_GREATER = ("accuracy", "dice", "f1", "iou", "precision", "r2", "recall", "roc_auc")
"""... and when greater; so is `top_5`, with any number."""


class Stop(Exception):
    """Raised to end a run, whose result is what was reached; the message is the reason.

    Args:
      step: the weights are those after this one.
    """

    def __init__(self, why: str, step: int = 0):
        super().__init__(why)
        self.step = step


class Interrupted(Stop):
    """Raised when Ctrl-C was pressed."""


class PatienceEnded(Stop):
    """Raised when patience runs out."""


class Interrupt:
    """Defers Ctrl-C to the next step boundary, once a run has begun.

    Before `begin`, Ctrl-C raises KeyboardInterrupt as usual. After it, `check` raises `Interrupted`
    between two steps. A second Ctrl-C ends the run without another checkpoint. It raises
    KeyboardInterrupt only within `interruptible`, around data and hooks, which belong to the user
    and may block: anywhere else it could lose the weights of a step or cut off a checkpoint.

    A nested `Interrupt` enters the outer one, so that the command line cannot be interrupted while
    it writes the result of a run. Outside of the main thread, where Python handles no signals, and
    where the program has installed its own handler, an `Interrupt` does nothing.

    Args:
      early: the handler of SIGINT until a run has begun, of which the process's own handler may be
        one already; by default it raises KeyboardInterrupt.
    """

    def __init__(self, early: Callable[[int, FrameType | None], Any] | None = None):
        self.presses = 0
        self._early = signal.default_int_handler if early is None else early
        self._begun = self._open = False
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        before = signal.getsignal(signal.SIGINT)
        outer = getattr(before, "__self__", None)
        if isinstance(outer, Interrupt):
            return outer
        if before in (signal.default_int_handler, self._early):
            self._before = before
            signal.signal(signal.SIGINT, self._handle_signal)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle_signal:
            signal.signal(signal.SIGINT, self._before)

    @property
    def interrupted_twice(self) -> bool:
        """Whether there was a second Ctrl-C."""
        return self.presses > 1

    def begin(self) -> None:
        """Defer Ctrl-C from now on."""
        self._begun = True

    def check(self, agreed: bool | None = None) -> None:
        """Raise `Interrupted` if Ctrl-C was pressed here, or (`agreed`) in any process."""
        if self.presses if agreed is None else agreed:
            raise Interrupted("interrupted")

    def iterate(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items; a second Ctrl-C raises KeyboardInterrupt while the next one is made."""
        items = iter(items)
        while True:
            with self.interruptible():
                item = next(items, _END)
            if item is _END:
                return
            yield item

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise KeyboardInterrupt for a second Ctrl-C, also for an earlier one."""
        self._open = True
        try:
            if self.interrupted_twice:
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        if not self._begun:
            self._early(number, frame)
        elif self._open and self.interrupted_twice:
            self._open = False
            raise KeyboardInterrupt


class Monitor:
    """Tracks the best row of the history, and the number of rows since the last improvement.

    Args:
      settings: `monitor`, `patience`, `min_improvement` and `validate_every`.
      columns: the metrics of this run.
      last_phase: the phase of sparsity that the run ends in, with which none before it compares.
    """

    def __init__(self, settings: Settings, columns: list[str], last_phase: int = 3):
        default = "validation_loss" if "validation_loss" in columns else "loss"
        monitor = default if settings.monitor is None else settings.monitor
        name = monitor[0] if isinstance(monitor, tuple) and monitor else monitor
        if isinstance(name, str) and name not in columns:
            hint = (
                "" if "validation_loss" in columns else "; pass validation= for validation metrics"
            )
            raise TrainingError(
                f"monitor={name!r} is not a metric of this run; available: "
                f"{', '.join(columns)}{hint}"
            )
        self.name, self._sign = find_direction(monitor)
        self._last_phase = last_phase
        self._patience, self._least = settings.patience, settings.min_improvement
        self._unit = "epoch" if settings.validate_every is None else "step"
        self.best: dict[str, Any] | None = None
        """The best row."""
        self._counted: dict[str, Any] | None = None
        """The row of the last improvement that counts."""
        self._since = 0
        """The number of rows after it."""

    def record(self, rows: list[dict[str, Any]]) -> bool:
        """Check whether the last of these rows is the best; NaN never is."""
        self.best = self._counted = None
        for row in rows:
            self._since += 1
            if np.isnan(self._value(row)):
                continue
            if self._improves(row, self.best):
                self.best = row
            if self._improves(row, self._counted, self._least):
                self._counted, self._since = row, 0
        return bool(rows) and self.best is rows[-1]

    def check(self) -> None:
        """Raise `PatienceEnded` if the last improvement is at least `patience` rows ago."""
        row = self._counted
        if self._patience is not None and row is not None and self._since >= self._patience:
            where = f"{'in' if self._unit == 'epoch' else 'at'} {self._unit} {row[self._unit]}"
            least = f" by {self._least:g}" if self._least else ""
            raise PatienceEnded(
                f"{self.name} was {self._value(row):.6g} {where}, and not better{least} in the "
                f"{self._patience} after it"
            )

    @property
    def best_row(self) -> str:
        """The row whose weights the result has, in words, if it has the best ones."""
        if self._patience is None or self.best is None:
            return ""
        return f"{self._unit} {self.best[self._unit]}, the best"

    def notes(self, rows: list[dict[str, Any]]) -> list[str]:
        """Return a note for the history if no row of the run could be the best.

        Args:
          rows: those of the history.
        """
        values = [row[self.name] for row in rows if self.name in row]
        if not values or not all(map(np.isnan, values)):
            return []
        return [
            f"{self.name}, which chooses the best weights, was NaN in all of {len(values)} rows of "
            "the history: no epoch is the best, and the weights are the last ones"
        ]

    def score(self, row: dict[str, Any]) -> float | None:
        """Return the score of a row (greater is better), or None if it cannot be the best."""
        value = self._value(row)
        return None if np.isnan(value) else -self._sign * value

    def _improves(self, row: Any, before: Any, least: float = 0.0) -> bool:
        if before is None:
            return True
        gain = self._sign * (self._value(before) - self._value(row))
        return gain > 0 and gain >= least

    def _value(self, row: dict[str, Any]) -> float:
        in_last = row.get("phase", self._last_phase) == self._last_phase
        return row.get(self.name, np.nan) if in_last else np.nan


def find_direction(monitor: Any) -> tuple[str, int]:
    """Return the name of a metric, and 1 if smaller is better, else -1."""
    if isinstance(monitor, tuple) and len(monitor) == 2 and monitor[1] in ("min", "max"):
        return monitor[0], 1 if monitor[1] == "min" else -1
    expected = 'a name like "validation_loss", or a pair of a name and "min" or "max"'
    if not isinstance(monitor, str):
        raise TrainingError(f"monitor must be {expected}, got {describe(monitor)}")
    if monitor.endswith(_SMALLER):
        return monitor, 1
    if monitor.endswith(_GREATER) or monitor.rpartition("top_")[2].isdigit():
        return monitor, -1
    raise TrainingError(
        f"monitor={monitor!r} does not say whether smaller is better: "
        f'pass ({monitor!r}, "min") or ({monitor!r}, "max")'
    )
