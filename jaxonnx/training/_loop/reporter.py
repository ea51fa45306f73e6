"""Reports of a run: the history, the hooks and the progress bar, a few steps late.

JAX dispatches steps asynchronously. Reading a loss at once would make the host wait for the device
in each step, so losses are read in groups, several steps after these were started.
"""

import time
from collections import deque
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxonnx._display import Cell
from jaxonnx._mesh.processes import Processes
from jaxonnx.training._loop.history import NOT_VALIDATED, ROLLED_BACK, SKIPPED, History
from jaxonnx.training._loop.stopping import Interrupt
from jaxonnx.training._settings import Settings

_AHEAD = 8
_BEHIND = 4
"""With more than `_AHEAD` steps in flight the host waits until `_BEHIND` are left, and reads the
losses of the rest. It never waits for the newest step, and is not woken up by every one."""

_IN_A_ROW = 10
"""Consecutive skipped steps after which the run stops."""

_SECONDS, _SECONDS_IN_NOTEBOOK = 0.1, 0.5
"""Seconds between two drawings of the bar: one costs as much as a small step."""
_SECONDS_OF_LINES = 10.0
"""Seconds between two lines, without a terminal or a notebook."""


class Reporter:
    """Reads the reports of steps into the history, the hooks and the progress bar.

    Of several processes the first one alone has hooks and a bar; their reports end with the stop
    flag of all of them. Entering it shows the bar.

    Args:
      settings: `epochs`, `max_steps`, `progress`, `on_log` and `nan`.
      steps: the steps of an epoch, where known.
    """

    def __init__(
        self, settings: Settings, steps: int | None, interrupt: Interrupt, processes: Processes
    ):
        self.history = History()
        self.sums = np.zeros((2, 1))
        """The numerators and denominators of the epoch's losses."""
        self.trouble: str | None = None
        """The first step that was not finite and is not skipped, in words; None if all were."""
        self.interrupt = interrupt
        self._hooks = settings.hooks if processes.first else ()
        self._shows = settings.progress if processes.first else False
        self._settings, self._steps = settings, steps
        self._stop_requested: bool | None = False if processes.several else None
        """Whether the stop flag was set in a report that was read; None without the flag."""
        self._skip = settings.nan == "skip"
        self._skipped = 0
        self._pending: deque[Any] = deque()

    def __enter__(self) -> "Reporter":
        self._bar = Bar(self._shows, self._settings, self._steps, self.step)
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.call_hooks("close")
        finally:
            self._bar.__exit__(*error)

    def resume(self, history: History, sums: Any) -> None:
        """Continue a history, whose epoch has these sums of losses so far."""
        self.history, self.sums = history, np.asarray(sums, np.float64)

    @property
    def step(self) -> int:
        """The number of steps whose report was read."""
        return len(self.history.losses)

    @property
    def last_row_step(self) -> int:
        """The step of the last row of the history."""
        return self.history.epochs[-1]["step"] if self.history.epochs else 0

    @property
    def started_steps(self) -> int:
        """The number of steps that were started."""
        return self.step + len(self._pending)

    @property
    def loss(self) -> float:
        """The loss of the epoch so far: the sum of all batches, divided once."""
        totals, counts = self.sums[:, self.sums[1] > 0]
        return float((totals / counts).sum()) if len(counts) else float("nan")

    def add(self, report: Any) -> bool:
        """Append the report of a step in flight; return whether the run can go on.

        Args:
          report: [loss, whether all is finite], then the learning rate and the stop flag, if any;
            and the numerators and denominators of the losses.
        """
        self._pending.append(report)
        if len(self._pending) > _AHEAD:
            self._read(_BEHIND)
        self._bar.show(self.history)
        return self.trouble is None

    def check_interrupt(self) -> None:
        """Raise `Interrupted` if Ctrl-C was pressed, in whichever process."""
        self.interrupt.check(self._stop_requested)

    def flush(self) -> bool:
        """Wait for all steps and read their reports; return whether the run can go on."""
        return self._read(0)

    def reject(self, what: str) -> None:
        """Record a step that was not finite: as skipped, or as the end of the run.

        Args:
          what: is not finite, in words.
        """
        if self._skip:
            self.history.events.append({"step": self.step, "event": SKIPPED, "why": what})
            what = f"{what} in {_IN_A_ROW} steps one after the other, the last"
        if not self._skip or self._skipped == _IN_A_ROW:
            self.trouble = f"{what} at step {self.step}"
            # without skip the steps that were started since change nothing
            self._pending.clear()

    def go_back(self, to: int) -> None:
        """Record that the run continues from the weights of step `to`."""
        why, _, _ = (self.trouble or "").rpartition(" at step ")
        event = {"step": self.step, "event": ROLLED_BACK, "why": why, "to": to}
        self.history.events.append(event)
        self.trouble = None

    def add_row(self, epoch: int, numbers: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Append a row to the history: the loss since the last one, the rate, and other numbers.

        Args:
          epoch: from 1; 0 before the first step, where there is no loss.
        """
        row: dict[str, Any] = {"epoch": epoch, "step": self.step}
        row |= {"loss": self.loss} if epoch else {}
        row |= {"rate": self.history.rates[-1]} if self.history.rates else {}
        row |= {**numbers, "seconds": seconds}
        self.history.epochs.append(row)
        self.sums = np.zeros((2, 1))
        for name, value in row.items():
            validated = name.startswith("validation_") and name.endswith("loss")
            if validated and not np.isfinite(value):
                event = {"step": self.step, "event": NOT_VALIDATED}
                self.history.events.append(event | {"why": f"{name}, {value}, is not finite"})
        self._log(row)
        self._bar.show(self.history)
        return row

    def call_hooks(self, name: str) -> None:
        """Call the method `name`, "flush" or "close", of hooks that have it."""
        for hook in self._hooks:
            if callable(method := getattr(hook, name, None)):
                method()

    def _read(self, keep: int) -> bool:
        if len(self._pending) > keep:
            jax.block_until_ready(self._pending[-1 - keep])
        while len(self._pending) > keep and self.trouble is None:
            report, sums = map(np.asarray, self._pending.popleft())
            value, finite, *rate = report.tolist()
            if self._stop_requested is not None:
                self._stop_requested = self._stop_requested or bool(rate.pop())
            self.history.losses.append(value)
            self.history.rates += rate
            self._log(dict(zip(("loss", "rate"), (value, *rate), strict=False)))
            if np.isfinite(value):
                self.sums = self.sums + sums
            self._skipped = 0 if finite else self._skipped + 1
            if not finite:
                what = f"the loss, {value}, is not finite"
                if np.isfinite(value):
                    what = "the gradient or the update is not finite"
                self.reject(what)
            elif not sums[1].any():
                why = "no example or label of the batch counts"
                self.history.events.append({"step": self.step, "event": SKIPPED, "why": why})
        return self.trouble is None

    def _log(self, metrics: dict[str, Any]) -> None:
        for hook in self._hooks:
            with self.interrupt.interruptible():
                hook(self.step, dict(metrics))


class Bar:
    """One bar over all steps of a run, in a terminal or a notebook, with rate and remaining time.

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
        """Draw the bar, if it is shown; return its text."""
        self._done = len(history.losses)
        row = history.epochs[-1] if history.epochs else {}
        if self._steps is None and row.get("epoch"):
            self._steps = -(-row["step"] // row["epoch"])
        epoch = -(-self._done // self._steps) if self._steps else int(self._done > 0)
        limited = self._steps is None and self._last is not None  # by steps, in unknown epochs
        description = f"epoch {epoch}" if limited else f"epoch {epoch}/{self._epochs}"
        parts = [f"loss {value:.4g}" for value in history.losses[-1:]]
        parts += [f"rate {value:.3g}" for value in history.rates[-1:]]
        if "validation_accuracy" in row:
            parts.append(f"accuracy {row['validation_accuracy']:.2%}")
        elif (name := next((n for n in row if n.startswith("validation_")), None)) is not None:
            parts.append(f"{name.replace('_', ' ')} {row[name]:.4g}")
        parts += self._describe_speed()
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

    def _describe_speed(self) -> list[str]:
        """Return rate and remaining time, once they are known."""
        done = self._done - self._first
        if self._began is None or not done:
            return []
        rate = done / max(time.perf_counter() - self._began, 1e-9)
        parts = [f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"]
        left = None if self._total is None else self._total - self._done
        return parts if not left or left < 0 else [*parts, f"{_clock(left / rate)} left"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
