"""The position of a run, and the states that it can go back to: checkpoints, a copy in memory."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._data.batches import Source
from jaxonnx._display import format_count
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.training._checkpoints import Checkpoints, NotWritten, Position
from jaxonnx.training._checkpoints.identity import describe_run
from jaxonnx.training._loop.history import ROLLED_BACK, SKIPPED
from jaxonnx.training._loop.reporter import Reporter
from jaxonnx.training._loop.stopping import Interrupted, Monitor, PatienceEnded, Stop
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.accumulate import find_accumulation
from jaxonnx.training._settings.sparsity import sparse_numbers
from jaxonnx.training._step import State, Step, copy
from jaxonnx.training._step.optimizers import rate_of

_RETRIES = 3
"""Consecutive rollbacks to the same weights after which the run stops."""


class Snapshots:
    """The position of a run, its best weights, and its states on disk and in memory.

    Args:
      state: of the run at its start.
      settings: `checkpoint_dir`, `checkpoint_every`, `resume`, `nan`, and those that a resumed run
        must share.
      monitor: chooses the best epoch.

    Raises:
      TrainingError: the checkpoint folder cannot be written, or holds another run.
    """

    def __init__(
        self,
        step: Step,
        state: State,
        examples: Source,
        settings: Settings,
        monitor: Monitor,
        reporter: Reporter,
        processes: Processes,
    ):
        self.at = Position()
        """The next batch."""
        self._step, self._monitor, self._record = step, monitor, reporter
        self._several = processes.several
        self._every = settings.checkpoint_every
        self._best = None if settings.patience is None else self._copy_weights(state)
        """The parameters, in the order of the file, and statistics of the best epoch."""
        self._rollback = settings.nan == "rollback"
        self._way = " (nan='skip' leaves out such steps)" if settings.nan == "stop" else ""
        self._range = ""
        if settings.precision == "fp16":
            self._range = "; precision='fp16' has no numbers beyond 65,504, which 'bf16' has"
        self._spare: State | None = None
        self._saved = 0
        """The step of the last snapshot."""
        self._retries = self._back = 0
        self.checkpoints: Checkpoints | None = None
        """To be entered, and left at the end of the run."""
        if settings.checkpoint_dir is not None:
            same = describe_run(step, examples, settings, state)
            tensors = {**step.model.params, **step.model.state}
            learned = {*state.params, *state.state}
            frozen = {name: x for name, x in tensors.items() if name not in learned}
            folder, resume = settings.checkpoint_dir, settings.resume
            best = settings.keep_best
            self.checkpoints = Checkpoints(
                folder, resume, same, step.model, frozen, processes, best
            )

    def restore(self, state: State) -> State:
        """Return the state of the newest checkpoint, or this one; the reporter gets its history."""
        phase, history = sparse_numbers(state.optimizer).get("phase"), self._record.history
        notes = [*self._step.notes]
        if self.checkpoints is not None:
            tree = self._tree(state)
            self.at, (state, self._best, _), history = self.checkpoints.restore(tree)
            state = self._step.from_file(state)
            notes += self.checkpoints.notes
        history.phase = history.phase if history.epochs else phase
        history.notes = notes
        self._record.resume(history, self.at.sums)
        self._saved = self._record.step
        self._spare = copy(state) if self._rollback else None
        return state

    def save_if_due(self, state: State) -> State:
        """Save the state before a step if that is due; return the state to continue from."""
        done = self._record.started_steps
        due = self._every is not None and done % self._every == 0 and done > self._saved
        return self._save(state) if due else state

    def count_step(self, state: State, report: Any) -> State:
        """Count a step in flight; return the state to continue from.

        Raises:
          Stop: as in `settle`.
        """
        self.at = self.at._replace(batch=self.at.batch + 1)
        return state if self._record.add(report) else self.settle(state)

    def flush(self, state: State) -> State:
        """Make the update of batches that wait for others (`accumulate`); `settle` checks it."""
        waiting = find_accumulation(state.optimizer)
        if waiting is None or not int(waiting.step):
            return state
        state, finite = self._step.compile(self._step.flush, donate_argnums=0)(state)
        if not finite:
            self._record.reject("the update of the last batches is not finite")
        rates = self._record.history.rates
        if (rate := rate_of(state.optimizer)) is not None and rates:
            rates[-1] = float(rate)
        return state

    def end_epoch(self, epoch: int) -> None:
        """Go to the first batch of the next epoch."""
        self.at = Position(epoch + 1)

    def close_row(self, state: State, row: dict[str, Any], last: bool) -> State:
        """Compare the weights with the best by their row, and save them if that is due.

        Args:
          last: the run ends here.

        Raises:
          Stop: a checkpoint could not be written.
        """
        history, done = self._record.history, self._record.step
        improved, best = self._monitor.record(history.epochs), self._monitor.best
        if best is not None:
            history.best, history.best_step = best["epoch"], best["step"]
        if improved and self._best is not None:
            self._best = self._copy_weights(state)
        every = self._every
        due = every is None or improved or last or done % every == 0
        if due and done > self._saved:
            return self._save(state, self._monitor.score(row))
        return state

    def _tree(self, state: State) -> tuple[State, Any, Any]:
        """Return all arrays of a checkpoint: the state, the best weights, and those of the model
        where they are not in the state."""
        others = self._step.view(state) if self._step.has_second_weights(state) else None
        return self._step.to_file(state), self._best, others

    def _copy_weights(self, state: State) -> Any:
        return copy((self._step.view(state), state.state))

    def _save(self, state: State, score: float | None = None) -> State:
        """Save the state after the steps in flight; return the state to continue from.

        Args:
          score: of this state (greater is better), or None if it cannot be the best.

        Raises:
          Stop: a checkpoint could not be written, or as in `settle`.
        """
        settled = self.settle(state)
        if settled is not state:
            return settled
        done = self._record.step
        self._retries = 0 if done > self._back else self._retries
        self._saved = done
        if self._rollback:
            self._spare = copy(state)
        if self.checkpoints is not None:
            self._record.call_hooks("flush")
            try:
                at = self.at._replace(sums=self._record.sums.tolist())
                self.checkpoints.save(at, self._tree(state), self._record.history, score)
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
        reason = str(self._record.trouble)
        if self._spare is None:
            raise Stop(f"{reason}{self._way}{self._range}", self._record.step - 1)
        if self._retries == _RETRIES:
            reason += f", after {_RETRIES} returns to the weights of step {self._saved}"
            raise Stop(f"{reason}{self._range}", self._saved)
        self._retries += 1
        self._record.go_back(self._saved)
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
            none = f"none of {format_count(done, 'step')} was applied: {why} at step {done}"
            raise Stop(f"{none}{self._range}", 0)
        if self._retries > 1:
            back = [event for event in events if event["event"] == ROLLED_BACK][-self._retries :]
            raise Stop(
                f"{back[-1]['why']} at step {back[-1]['step']}, and {self._retries} rollbacks to "
                "the same weights made no progress",
                back[0]["to"],
            )

    def _wait(self) -> None:
        if self.checkpoints is not None:
            try:
                self.checkpoints.wait()
            except NotWritten as error:
                raise self._note_lost(error) from error

    def end_early(self, error: Stop | KeyboardInterrupt, state: State) -> State:
        """Return the final state of a run that an error ends, and note why in the history.

        An interrupted run saves its state, unless Ctrl-C was pressed twice.

        Args:
          error: a KeyboardInterrupt if data or a hook were interrupted.
        """
        state, stop = self._end(error, state)
        where = "" if self.checkpoints is None else f"; {self.checkpoints.where}"
        weights = self._monitor.best_row or f"step {stop.step}"
        history = self._record.history
        history.stopped = f"{stop}; the weights are those of {weights}{where}"
        history.early = isinstance(stop, PatienceEnded)
        return state

    def _end(self, end: Stop | KeyboardInterrupt, state: State) -> tuple[State, Stop]:
        if self._several and isinstance(end, KeyboardInterrupt):
            raise end  # this process alone cannot end the run
        at_once = self._record.interrupt.interrupted_twice and not self._several
        if isinstance(end, KeyboardInterrupt) or at_once:
            if any(x.is_deleted() for x in jax.tree.leaves(state)):
                raise end  # a handler of the program's own has interrupted a step
            return state, Stop("interrupted at once", int(state.count))
        if self._spare is not None and end.step == self._saved and not state.finite:
            state = self._spare
        if not isinstance(end, Interrupted):
            return state, end
        try:
            state = self._save(state)
            self._wait()
        except Stop as stop:
            return state, Stop(f"interrupted; {stop}", stop.step)
        except KeyboardInterrupt as second:  # in a hook, which is told of the last steps
            return self._end(second, state)
        return state, Stop("interrupted", self._record.step)

    def to_model(self, state: State) -> Model:
        """Return the model with the weights of the best epoch, if they were kept, or these."""
        if self._best is not None and self._monitor.best_row:
            return self._step.to_model(*self._best)
        return self._step.to_model(self._step.view(state), state.state)

    def _note_lost(self, error: NotWritten) -> Exception:
        done = self._record.step
        text = f"a checkpoint could not be written at step {done} ({error})"
        return TrainingError(text) if self._several else Stop(text, done)
