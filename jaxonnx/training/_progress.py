"""The progress bar of a run, in a terminal or a notebook."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxonnx._progress import Cell
from jaxonnx.training._loop.history import History
from jaxonnx.training._settings import Settings

_SECONDS, _SECONDS_IN_NOTEBOOK = 0.1, 0.5
"""Seconds between two drawings of the bar: one costs as much as a small step."""
_SECONDS_OF_LINES = 10.0
"""Seconds between two lines, without a terminal or a notebook."""


class Bar:
    """One bar over all steps of a run, with rate and remaining time.

    Args:
      show: None shows the bar where the output is a terminal or a notebook. Elsewhere a line is
        written now and then, and, if it is true, the last state of the bar.
      settings: `epochs` and `max_steps`.
      steps: the steps of an epoch, where known.
      done: steps of the run that were done before.
    """

    def __init__(self, show: bool | None, settings: Settings, steps: int | None, done: int = 0):
        console = Console()
        visible = console.is_terminal or console.is_jupyter
        self._shown = visible if show is None else show
        self._lines = not visible and show is not False
        self._epochs, self._last = settings.epochs, settings.max_steps
        self._steps = steps
        self._done = self._first = done
        self._began: float | None = None
        self._drawn = time.perf_counter() if self._lines else 0.0
        self._history: History | None = None
        self._cell = Cell()
        self._in_notebook = console.is_jupyter
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[progress.remaining]{task.fields[told]}"),
            console=console,
            disable=not self._shown or self._in_notebook,
        )
        self._task = self._progress.add_task("compiling", completed=done, total=None, told="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self._history is not None:
            self._draw(self._history)
        if not self._progress.disable:  # older releases of rich would print an empty line
            self._progress.stop()

    def show(self, history: History) -> None:
        """Show the state after some step."""
        if not self._shown and not self._lines:
            return
        self._history, now = history, time.perf_counter()
        if self._began is None:  # the first step is compiled
            self._began, self._first = now, len(history.losses)
        pause = _SECONDS_IN_NOTEBOOK if self._in_notebook else _SECONDS
        if now - self._drawn > (_SECONDS_OF_LINES if self._lines else pause):
            self._drawn = now
            line = self._draw(history)
            if self._lines and history.losses:
                print(line, flush=True)

    def _draw(self, history: History) -> str:
        """Draw the bar, if it is shown; return what it says."""
        self._done = len(history.losses)
        row = history.epochs[-1] if history.epochs else {}
        if self._steps is None and row.get("epoch"):
            self._steps = -(-row["step"] // row["epoch"])
        epoch = -(-self._done // self._steps) if self._steps else int(self._done > 0)
        limited = self._steps is None and self._last is not None  # by steps, in unknown epochs
        description = f"epoch {epoch}" if limited else f"epoch {epoch}/{self._epochs}"
        parts = [*_numbers(history, row), *self._speed()]
        line = ", ".join([description, *parts])
        if self._in_notebook:
            self._cell.draw(self._done, self._total, line)
        else:
            self._progress.update(
                self._task,
                completed=self._done,
                total=self._total,
                description=description,
                told=", ".join(parts),
            )
        return line

    @property
    def _total(self) -> int | None:
        whole = None if self._steps is None or self._epochs is None else self._epochs * self._steps
        return min((n for n in (whole, self._last) if n is not None), default=None)

    def _speed(self) -> list[str]:
        """Return rate and remaining time, once they are known."""
        done = self._done - self._first
        if self._began is None or not done:
            return []
        rate = done / max(time.perf_counter() - self._began, 1e-9)
        parts = [f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"]
        left = None if self._total is None else self._total - self._done
        return parts if not left or left < 0 else [*parts, f"{_clock(left / rate)} left"]


def _numbers(history: History, row: dict[str, Any]) -> list[str]:
    parts = [f"loss {value:.4g}" for value in history.losses[-1:]]
    parts += [f"rate {value:.3g}" for value in history.rates[-1:]]
    metrics = [name for name in row if name.startswith("validation_")]
    if "validation_accuracy" in row:
        return [*parts, f"accuracy {row['validation_accuracy']:.2%}"]
    return parts + [f"{name.replace('_', ' ')} {row[name]:.4g}" for name in metrics[:1]]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
