"""What a run reports: losses read late, in the history, in hooks and on the progress bar."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx.train.history import History
from jaxonnx.train.progress import Bar

_LAG = 8
"""Steps under way when the host reads the oldest loss: it never waits for the newest."""

Hook = Callable[[int, dict[str, Any]], None]


class Record:
    """Reads what steps report into the history, some steps after they were started.

    Args:
      history: what happened before, which is continued.
      hooks: called with the number of a step and its metrics.
    """

    def __init__(self, history: History, hooks: Sequence[Hook], bar: Bar):
        self.history = history
        self.trouble: str | None = None
        """What was not finite, and at which step, once something was not and is not skipped."""
        self._hooks = hooks
        self._bar = bar
        self._pending: deque[jax.Array] = deque()

    @property
    def step(self) -> int:
        """The steps whose loss was read."""
        return len(self.history.losses)

    def add(self, seen: jax.Array) -> bool:
        """Takes [loss, whether all is finite] of a step under way; whether the run can go on."""
        self._pending.append(seen)
        return self._read(_LAG)

    def flush(self) -> bool:
        """Waits for all steps; whether the run can go on."""
        return self._read(0)

    def close_epoch(self, row: dict[str, Any]) -> None:
        """Takes the numbers of an epoch."""
        self.history.epochs.append(row)
        self._tell(row)
        self._bar.show(self.history)

    def _read(self, keep: int) -> bool:
        while len(self._pending) > keep and self.trouble is None:
            value, finite = np.asarray(self._pending.popleft())
            self.history.losses.append(float(value))
            self._tell({"loss": float(value)})
            if not finite:
                what = "the gradient" if np.isfinite(value) else f"the loss, {value},"
                self._not_finite(f"{what} is not finite at step {self.step}")
        self._bar.show(self.history)
        return self.trouble is None

    def _not_finite(self, what: str) -> None:
        # the steps that were started since have changed nothing
        self.trouble = what
        self._pending.clear()

    def _tell(self, metrics: dict[str, Any]) -> None:
        for hook in self._hooks:
            hook(self.step, dict(metrics))
