"""When the state of a run is kept, and what a run goes back to."""

import jax
import jax.numpy as jnp

from jaxonnx.train import _step as step
from jaxonnx.train._checkpoint import Checkpoints, NotWritten, Position
from jaxonnx.train._record import Record
from jaxonnx.train._stopping import Interrupted, Stop
from jaxonnx.train._storage import Storage

Weights = tuple[dict[str, jax.Array], dict[str, jax.Array]] | None
"""Parameters and state."""

_RETRIES = 3
"""Times in a row that a run goes back to the same weights."""


class Keeper:
    """Keeps the state on disk, if there are checkpoints, and in memory, to roll back to.

    Args:
      every: steps between checkpoints; None is an epoch.
      rollback: whether the run goes back to what was kept when a step is not finite.
      carry: what the run starts from.
      storage: how it is stored; checkpoints have the order of the file.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | None,
        rollback: bool,
        record: Record,
        carry: step.Carry,
        storage: Storage,
    ):
        self._storage = storage
        self._checkpoints = checkpoints
        self._every = every
        self._record = record
        self._rollback = rollback
        self._at = record.step
        self._spare = step.copy(carry) if rollback else None
        self._retries = 0
        self._back = 0

    def due(self) -> bool:
        """Whether it is time inside an epoch, before the next step."""
        done = self._record.started
        return self._every is not None and done % self._every == 0 and done > self._at

    def due_after_epoch(self, best: bool, last: bool) -> bool:
        """Whether it is time after an epoch, which is the best or the last one."""
        done = self._record.step
        return done > self._at and (self._every is None or best or last or done % self._every == 0)

    def keep(
        self, at: Position, carry: step.Carry, best: Weights, score: float | None = None
    ) -> step.Carry:
        """Keeps the state after all steps under way; the carry to go on with, as `settle` has it.

        Args:
          at: the next batch.
          best: the weights of the best epoch, where the result has these.
          score: of this state, where it competes for the best; greater is better.

        Raises:
          Stop: a checkpoint could not be written, or as in `settle`.
        """
        settled = self.settle(carry)
        if settled is not carry:
            return settled
        done = self._record.step
        self._retries = 0 if done > self._back else self._retries
        self._at = done
        if self._rollback:
            self._spare = step.copy(carry)
        if self._checkpoints is not None:
            try:
                state = self._storage.view(carry), best
                self._checkpoints.save(at, state, self._record.history, score)
            except NotWritten as error:
                raise self._lost(error) from error
        return carry

    def settle(self, carry: step.Carry) -> step.Carry:
        """Waits for the steps under way; the carry after them, or what was kept.

        Raises:
          Stop: a step was not finite, and the run does not go back.
        """
        if self._record.flush():
            return carry
        what = str(self._record.trouble)
        if self._spare is None:
            raise Stop(what, self._record.step - 1)
        if self._retries == _RETRIES:
            what += f", after {_RETRIES} returns to the weights of step {self._at}"
            raise Stop(what, self._at)
        self._retries += 1
        self._record.go_back(self._at)
        self._back = self._record.step
        # the data goes on after the batch that did it, and so do the random numbers
        return step.copy(self._spare)._replace(count=jnp.int32(self._record.step))

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
          Stop: it could not be written.
        """
        if self._checkpoints is not None:
            try:
                self._checkpoints.wait()
            except NotWritten as error:
                raise self._lost(error) from error

    def leave(
        self, end: Stop | KeyboardInterrupt, at: Position, carry: step.Carry, best: Weights
    ) -> tuple[step.Carry, Stop]:
        """What a run that ends before its end leaves: the carry, and why it ends.

        An interrupted run keeps its state, unless a second Ctrl-C interrupted that or a step, whose
        carry may be lost: then there is nothing to leave.
        """
        if isinstance(end, KeyboardInterrupt):
            if any(x.is_deleted() for x in jax.tree.leaves(carry)):
                raise end
            return carry, Stop("interrupted at once", int(carry.count))
        if self._spare is not None and end.step == self._at and not carry.finite:
            carry = self._spare
        if not isinstance(end, Interrupted):
            return carry, end
        try:
            carry = self.keep(at, carry, best)
            self.finish()
        except Stop as stop:
            return carry, Stop(f"interrupted; {stop}", stop.step)
        return carry, Stop("interrupted", self._record.step)

    @property
    def where(self) -> str:
        """Where the last checkpoint is, in words to add; none if there are no checkpoints."""
        return "" if self._checkpoints is None else f"; {self._checkpoints.where}"

    def _lost(self, error: NotWritten) -> Stop:
        done = self._record.step
        return Stop(f"a checkpoint could not be written at step {done} ({error})", done)
