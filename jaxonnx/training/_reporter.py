"""What a run reports: losses read late, in the history, in hooks and on the progress bar."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx.training._arguments import Hook
from jaxonnx.training._history import NOT_VALIDATED, ROLLED_BACK, SKIPPED, History
from jaxonnx.training._progress import Bar
from jaxonnx.training._stopping import Interrupt

_AHEAD = 8
_BEHIND = 4
"""Once more steps than `_AHEAD` are under way, the host waits until `_BEHIND` are, and reads the
losses of the others: it never waits for the newest, and is not woken up by each."""

_IN_A_ROW = 10
"""Steps that are skipped one after the other before the run stops."""


class Reporter:
    """Reads what steps report into the history, some steps after they were started.

    Args:
      history: what happened before, which is continued.
      hooks: called with the number of a step and its metrics.
      skip: whether steps that are not finite are passed over.
      wishes: whether the last number of a step is not zero if a process wants to stop.
    """

    def __init__(
        self,
        history: History,
        hooks: Sequence[Hook],
        bar: Bar,
        interrupt: Interrupt,
        skip: bool = False,
        wishes: bool = False,
    ):
        self.history = history
        self.trouble: str | None = None
        """What was not finite, and at which step, once something was not and is not skipped."""
        self._hooks = hooks
        self._interrupt = interrupt
        self._bar = bar
        self.asked: bool | None = False if wishes else None
        """Whether a process wanted to stop before one of the steps that were read."""
        self._skip = skip
        self._skipped = 0
        self._pending: deque[jax.Array] = deque()

    @property
    def step(self) -> int:
        """The steps whose loss was read."""
        return len(self.history.losses)

    @property
    def started(self) -> int:
        """The steps that were started."""
        return self.step + len(self._pending)

    def add(self, seen: jax.Array) -> bool:
        """Take [loss, whether all is finite] of a step under way; return if the run can go on.

        A learning rate may follow the two numbers.
        """
        self._pending.append(seen)
        if len(self._pending) > _AHEAD:
            self._read(_BEHIND)
        self._bar.show(self.history)
        return self.trouble is None

    def flush(self) -> bool:
        """Wait for all steps; return whether the run can go on."""
        return self._read(0)

    def go_back(self, to: int) -> None:
        """Note that the run goes on with the weights of step `to`."""
        why, _, _ = (self.trouble or "").rpartition(" at step ")
        event = {"step": self.step, "event": ROLLED_BACK, "why": why, "to": to}
        self.history.events.append(event)
        self.trouble = None

    def close_epoch(self, row: dict[str, Any]) -> None:
        """Take the numbers of an epoch."""
        self.history.epochs.append(row)
        for name, value in row.items():
            validated = name.startswith("validation_") and name.endswith("loss")
            if validated and not np.isfinite(value):
                event = {"step": self.step, "event": NOT_VALIDATED}
                self.history.events.append(event | {"why": f"{name}, {value}, is not finite"})
        self._tell(row)
        self._bar.show(self.history)

    def close(self) -> None:
        """Close the hooks that can be closed."""
        for hook in self._hooks:
            if callable(close := getattr(hook, "close", None)):
                close()

    def _read(self, keep: int) -> bool:
        if len(self._pending) > keep:
            jax.block_until_ready(self._pending[-1 - keep])
        while len(self._pending) > keep and self.trouble is None:
            value, finite, *rate = np.asarray(self._pending.popleft()).tolist()
            if self.asked is not None:
                self.asked = self.asked or bool(rate.pop())
            self.history.losses.append(value)
            self.history.rates += rate
            self._tell(dict(zip(("loss", "rate"), (value, *rate), strict=False)))
            self._skipped = 0 if finite else self._skipped + 1
            if not finite:
                what = "the gradient or the update" if np.isfinite(value) else f"the loss, {value},"
                self._not_finite(what)
        return self.trouble is None

    def _not_finite(self, what: str) -> None:
        what = f"{what} is not finite"
        if self._skip:
            self.history.events.append({"step": self.step, "event": SKIPPED, "why": what})
            what = f"{what} in {_IN_A_ROW} steps one after the other, the last"
        if not self._skip or self._skipped == _IN_A_ROW:
            self.trouble = f"{what} at step {self.step}"
            # without skip the steps that were started since change nothing
            self._pending.clear()

    def _tell(self, metrics: dict[str, Any]) -> None:
        for hook in self._hooks:
            with self._interrupt.interruptible():
                hook(self.step, dict(metrics))
