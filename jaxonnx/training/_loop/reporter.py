"""Reports of a run: the history, the hooks and the progress bar, a few steps late.

JAX dispatches steps asynchronously. Reading a loss at once would make the host wait for the device
in each step, so losses are read in groups, several steps after these were started.
"""

from collections import deque
from typing import Any

import jax
import numpy as np

from jaxonnx._mesh.processes import Processes
from jaxonnx.training._loop.history import NOT_VALIDATED, ROLLED_BACK, SKIPPED, History
from jaxonnx.training._loop.stopping import Interrupt
from jaxonnx.training._progress import Bar
from jaxonnx.training._settings import Settings

_AHEAD = 8
_BEHIND = 4
"""With more than `_AHEAD` steps in flight the host waits until `_BEHIND` are left, and reads the
losses of the rest. It never waits for the newest step, and is not woken up by every one."""

_IN_A_ROW = 10
"""Consecutive skipped steps after which the run stops."""


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
    def started(self) -> int:
        """The number of steps that were started."""
        return self.step + len(self._pending)

    @property
    def loss(self) -> float:
        """The loss of the epoch so far: the sum of all batches, divided once."""
        totals, counts = self.sums[:, self.sums[1] > 0]
        return float((totals / counts).sum()) if len(counts) else float("nan")

    def add(self, seen: Any) -> bool:
        """Append the report of a step in flight; return whether the run can go on.

        Args:
          seen: [loss, whether all is finite], then the learning rate and the stop flag, if any;
            and the numerators and denominators of the losses.
        """
        self._pending.append(seen)
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
