"""Snapshots of a run: checkpoints on disk, and a copy in memory to roll back to."""

import jax
import jax.numpy as jnp

from jaxonnx._text import format_count
from jaxonnx.errors import TrainingError
from jaxonnx.training._checkpoint import Checkpoints, NotWritten, Position
from jaxonnx.training._history import ROLLED_BACK, SKIPPED
from jaxonnx.training._reporter import Reporter
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import State, Step, copy
from jaxonnx.training._stopping import Interrupt, Interrupted, Stop

Weights = tuple[dict[str, jax.Array], dict[str, jax.Array]] | None
"""Parameters in the order of the file, and statistics."""

_RETRIES = 3
"""Consecutive rollbacks to the same weights after which the run stops."""


class Snapshots:
    """Keeps the state on disk, if there are checkpoints, and in memory, to roll back to.

    Args:
      settings: `checkpoint_every` and `nan`.
      state: of the run at its start.
      several: whether several processes make the run, which must then end together.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        settings: Settings,
        record: Reporter,
        step: Step,
        state: State,
        interrupt: Interrupt,
        several: bool = False,
    ):
        self._step = step
        self._several = several
        self._checkpoints = checkpoints
        self._every = settings.checkpoint_every
        self._record = record
        self._interrupt = interrupt
        self._rollback = settings.nan == "rollback"
        self._at = record.step
        self._spare = copy(state) if self._rollback else None
        self._retries = 0
        self._back = 0

    def due(self) -> bool:
        """Check whether to save before the next step of an epoch."""
        done = self._record.started
        return self._every is not None and done % self._every == 0 and done > self._at

    def due_after_epoch(self, best: bool, last: bool) -> bool:
        """Check whether to save after an epoch, which may be the best or the last one."""
        done = self._record.step
        return done > self._at and (self._every is None or best or last or done % self._every == 0)

    def keep(self, at: Position, state: State, best: Weights, score: float | None = None) -> State:
        """Save the state after the steps in flight; return the state to continue from.

        Args:
          at: the next batch.
          best: the weights of the best epoch, if the result is to have them.
          score: of this state (greater is better), or None if it cannot be the best.

        Raises:
          Stop: a checkpoint could not be written, or as in `settle`.
        """
        settled = self.settle(state)
        if settled is not state:
            return settled
        done = self._record.step
        self._retries = 0 if done > self._back else self._retries
        self._at = done
        if self._rollback:
            self._spare = copy(state)
        if self._checkpoints is not None:
            self._record.call_hooks("flush")
            try:
                tree = self._step.to_file(state), best
                at = at._replace(sums=self._record.sums.tolist())
                self._checkpoints.save(at, tree, self._record.history, score)
            except NotWritten as error:
                raise self._note_lost(error) from error
        return state

    def settle(self, state: State) -> State:
        """Wait for the steps in flight; return the state after them, or that to roll back to.

        Raises:
          Stop: a step was not finite, and the run does not go back.
        """
        if self._record.flush():
            return state
        what = str(self._record.trouble)
        if self._spare is None:
            raise Stop(what, self._record.step - 1)
        if self._retries == _RETRIES:
            what += f", after {_RETRIES} returns to the weights of step {self._at}"
            raise Stop(what, self._at)
        self._retries += 1
        self._record.go_back(self._at)
        self._back = self._record.step
        # batches and random numbers continue after the step that failed: they are not drawn again
        spare = copy(self._spare)
        return spare.replace(count=jnp.full_like(spare.count, self._record.step))

    def finish(self, state: State) -> None:
        """Wait for the last checkpoint at the end of a run.

        Raises:
          Stop: it could not be written, or the run got nowhere: no step was taken, or all of them
            were lost again and again.
        """
        self._wait()
        done = self._record.step
        events = self._record.history.events
        passed_over = sum(event["event"] == SKIPPED for event in events)
        if done and not (int(state.taken) and passed_over < done):
            why = events[-1]["why"] if events else "the gradient overflows at every scale so far"
            raise Stop(f"none of {format_count(done, 'step')} was applied: {why} at step {done}", 0)
        if self._retries > 1:
            back = [event for event in events if event["event"] == ROLLED_BACK][-self._retries :]
            raise Stop(
                f"{back[-1]['why']} at step {back[-1]['step']}, and {self._retries} rollbacks to "
                "the same weights made no progress",
                back[0]["to"],
            )

    def _wait(self) -> None:
        if self._checkpoints is not None:
            try:
                self._checkpoints.wait()
            except NotWritten as error:
                raise self._note_lost(error) from error

    def end_early(
        self, end: Stop | KeyboardInterrupt, at: Position, state: State, best: Weights
    ) -> tuple[State, Stop]:
        """Return the final state of a run that ends early, and the reason.

        An interrupted run saves its state, unless Ctrl-C was pressed twice.

        Args:
          end: the reason; a KeyboardInterrupt if data or a hook were interrupted.
        """
        if self._several and isinstance(end, KeyboardInterrupt):
            raise end  # this process alone cannot end the run
        at_once = self._interrupt.interrupted_twice and not self._several
        if isinstance(end, KeyboardInterrupt) or at_once:
            if any(x.is_deleted() for x in jax.tree.leaves(state)):
                raise end  # a handler of the program's own has interrupted a step
            return state, Stop("interrupted at once", int(state.count))
        if self._spare is not None and end.step == self._at and not state.finite:
            state = self._spare
        if not isinstance(end, Interrupted):
            return state, end
        try:
            state = self.keep(at, state, best)
            self._wait()
        except Stop as stop:
            return state, Stop(f"interrupted; {stop}", stop.step)
        except KeyboardInterrupt as second:  # in a hook, which is told of the last steps
            return self.end_early(second, at, state, best)
        return state, Stop("interrupted", self._record.step)

    @property
    def where(self) -> str:
        """A clause that says where the last checkpoint is; empty without checkpoints."""
        return "" if self._checkpoints is None else f"; {self._checkpoints.where}"

    def _note_lost(self, error: NotWritten) -> Exception:
        done = self._record.step
        text = f"a checkpoint could not be written at step {done} ({error})"
        return TrainingError(text) if self._several else Stop(text, done)
