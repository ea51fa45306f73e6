"""Why a run ends before its last epoch: no progress any more, or somebody's wish."""

import signal
import threading
from types import FrameType
from typing import Any

import numpy as np

from jaxonnx.errors import TrainingError

_SMALLER = ("loss", "mae", "mse")
"""Endings of names of what is better when smaller."""
_GREATER = ("accuracy", "f1", "precision", "r2", "recall")
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


class Spent(Stop):
    """Raised when patience runs out."""


class Interrupt:
    """Takes the first Ctrl-C as a wish, which `check` fulfils between two steps.

    A second one is a KeyboardInterrupt at once. Outside of the main thread, where Python handles no
    signals, it does nothing.
    """

    def __enter__(self) -> "Interrupt":
        self._asked = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._ask)
            else:  # what the program has set itself stays
                self._before = None
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise `Interrupted` if it was asked for."""
        if self._asked:
            raise Interrupted("interrupted")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, self._before)


class Monitor:
    """Which epoch was the best, and how many have passed since.

    Args:
      monitor: a number of the rows of an epoch, or a pair of it and "min" or "max".
      columns: what the rows will have.
      patience: epochs without a better one after which `check` stops the run, if it is not None.
    """

    def __init__(
        self, monitor: str | tuple[str, str] | None, columns: list[str], patience: int | None
    ):
        default = "validation_loss" if "validation_loss" in columns else "loss"
        monitor = default if monitor is None else monitor
        self.name, self._sign = _direction(monitor)
        if self.name not in columns:
            hint = "" if "validation_loss" in columns else "; validation= gives more"
            raise TrainingError(
                f"monitor={self.name!r} is no number of this run, which has {', '.join(columns)}"
                f"{hint}"
            )
        self.patience = patience
        self.best: tuple[int, float] | None = None
        """The best epoch and its value."""

    def see(self, rows: list[dict[str, Any]]) -> bool:
        """Return whether the last of these epochs is the best; NaN never is."""
        self.best = None
        for row in rows:
            value = self._value(row)
            if self.best is None or self._sign * value < self._sign * self.best[1]:
                self.best = self.best if np.isnan(value) else (row["epoch"], value)
        return bool(rows) and self.best is not None and self.best[0] == rows[-1]["epoch"]

    def check(self, rows: list[dict[str, Any]]) -> None:
        """Raise `Spent` when the best epoch is too long ago."""
        if self.patience is not None and self.best is not None:
            epoch, value = self.best
            if rows[-1]["epoch"] - epoch >= self.patience:
                raise Spent(
                    f"{self.name} was {value:.6g} in epoch {epoch}, and not better in the "
                    f"{self.patience} after it"
                )

    @property
    def chosen(self) -> str:
        """The epoch whose weights the result has, in words, if it has the best ones."""
        if self.patience is None or self.best is None:
            return ""
        return f"epoch {self.best[0]}, the best"

    def score(self, row: dict[str, Any]) -> float | None:
        """Return a score; greater is better, None does not compete."""
        value = self._value(row)
        return None if np.isnan(value) else -self._sign * value

    def _value(self, row: dict[str, Any]) -> float:
        # a fixed mask is what a sparse run ends with; no phase before it compares with that
        return row.get(self.name, np.nan) if row.get("phase", 3) == 3 else np.nan


def _direction(monitor: Any) -> tuple[str, int]:
    """Return the name, and 1 for what is better when smaller or -1."""
    if isinstance(monitor, tuple) and len(monitor) == 2 and monitor[1] in ("min", "max"):
        return monitor[0], 1 if monitor[1] == "min" else -1
    if not isinstance(monitor, str):
        raise TrainingError(
            'monitor must be a name like "validation_loss", or a pair of a name and "min" or '
            f'"max", and is {monitor!r}'
        )
    if monitor.endswith(_SMALLER):
        return monitor, 1
    if monitor.endswith(_GREATER) or monitor.rpartition("top_")[2].isdigit():
        return monitor, -1
    raise TrainingError(
        f"monitor={monitor!r} does not say whether smaller is better: "
        f'pass ({monitor!r}, "min") or ({monitor!r}, "max")'
    )
