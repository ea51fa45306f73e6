"""The training loop."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._data.batches import Batch, Source
from jaxonnx._mesh.processes import Processes
from jaxonnx.model import Model
from jaxonnx.training._check_batches import BatchChecks, is_unchecked
from jaxonnx.training._checkpoint import Checkpoints, Position
from jaxonnx.training._history import History
from jaxonnx.training._memory import EXHAUSTED, FitCheck, to_stop
from jaxonnx.training._optimizers import rate_of
from jaxonnx.training._progress import Bar
from jaxonnx.training._reporter import Reporter
from jaxonnx.training._samples import Samples
from jaxonnx.training._settings import Settings
from jaxonnx.training._snapshots import Snapshots
from jaxonnx.training._sparsity import sparse_numbers
from jaxonnx.training._statistics import Statistics, warn_of_single_values
from jaxonnx.training._step import State, Step, copy
from jaxonnx.training._stopping import Interrupt, Monitor, PatienceEnded, Stop


def run(
    step: Step,
    examples: Source,
    held_out: Source | None,
    settings: Settings,
    interrupt: Interrupt,
    together: Processes,
) -> tuple[Model, History]:
    """Run the epochs; return the trained model and the history."""
    monitor = Monitor(settings.monitor, step.columns(held_out is not None), settings.patience)
    update = FitCheck(_with_reports(step, together))
    epochs, state, at = settings.epochs, step.init(), Position()
    history, phase = History(), sparse_numbers(state.optimizer).get("phase")
    best = None if settings.patience is None else copy((step.view(state), state.state))
    with ExitStack() as stack:
        checkpoints = None
        if settings.checkpoint_dir is not None:
            checkpoints = _checkpoints(step, state, examples, settings, together)
            stack.enter_context(checkpoints)
            at, (state, best), history = checkpoints.restore((step.to_file(state), best))
            state = step.from_file(state)
        if not history.epochs:
            history.phase = phase
        history.notes = [*step.notes, *(checkpoints.notes if checkpoints is not None else ())]
        batches, first = _first_batches(examples, at, epochs)
        checks = BatchChecks(step, first, examples)
        warn_of_single_values(step, first)
        statistics = Statistics(step, examples, settings, state, interrupt)
        checks.check_data(examples, held_out)
        validate = _Validation(step, held_out, checks, first, interrupt)
        samples = Samples(step, settings.samples if together.first else None)

        progress, hooks = (settings.progress, settings.hooks) if together.first else (False, ())
        bar = stack.enter_context(Bar(progress, epochs, examples.steps, len(history.losses)))
        skip, several = settings.nan == "skip", together.several
        reporter = Reporter(history, hooks, bar, interrupt, skip, several, at.sums)
        stack.callback(reporter.call_hooks, "close")
        snapshots = Snapshots(checkpoints, settings, reporter, step, state, interrupt, several)
        interrupt.begin()
        try:
            monitor.record(history.epochs)
            monitor.check(history.epochs)
            for epoch in range(at.epoch, epochs):
                began = time.perf_counter()
                for batch in interrupt.iterate(batches):
                    if snapshots.due():
                        state = snapshots.keep(at, state, best)
                    if is_unchecked(examples):
                        checks(batch, f"a batch of epoch {epoch + 1}")
                    together.step(epoch, at.batch)
                    batch = step.put(batch, examples.in_shares)
                    stop = together.stop_flag(interrupt.presses > 0)
                    state, seen = update(state, batch, step.frozen, stop)
                    at = at._replace(batch=at.batch + 1)
                    if not reporter.add(seen):
                        state = snapshots.settle(state)
                    interrupt.check(reporter.stop_requested)
                together.close_epoch(epoch, at.batch)
                state = snapshots.settle(state)
                checks.catch_up()
                state = statistics.renew(state, epoch, reporter.step, at.batch)
                row: dict[str, Any] = {"epoch": epoch + 1, "step": reporter.step}
                row |= {"loss": reporter.loss}
                row |= {"rate": history.rates[-1]} if history.rates else {}
                row |= validate(state, epoch) | sparse_numbers(state.optimizer)
                samples.write(state, epoch)
                reporter.close_epoch(row | {"seconds": time.perf_counter() - began})
                at = Position(epoch + 1)
                improved = monitor.record(history.epochs)
                history.best = monitor.best and monitor.best[0]
                if improved and best is not None:
                    best = copy((step.view(state), state.state))
                if snapshots.due_after_epoch(improved, epoch + 1 == epochs):
                    state = snapshots.keep(at, state, best, monitor.score(row))
                monitor.check(history.epochs)
                interrupt.check(reporter.stop_requested)
                if epoch + 1 < epochs:
                    batches = examples.batches(epoch + 1)
            snapshots.finish(state)
        except (Stop, KeyboardInterrupt, *EXHAUSTED) as error:
            end = to_stop(error, state, several)
            checks.catch_up()  # wrong labels may be why a loss is not finite
            state, stop = snapshots.end_early(end, at, state, best)
            which = monitor.chosen or f"step {stop.step}"
            history.stopped = f"{stop}; the weights are those of {which}{snapshots.where}"
            history.early = isinstance(stop, PatienceEnded)
    history.notes += statistics.notes(reporter.step, bool(monitor.chosen) or not at.batch)
    if best is not None and monitor.chosen:
        return step.to_model(*best), history
    return step.to_model(step.view(state), state.state), history


def _with_reports(step: Step, together: Processes) -> Callable[..., tuple[State, Any]]:
    """Append the learning rate and the stop flag of all processes to the report of a step."""

    def update(state: State, batch: Batch, frozen: Any, stop: Any) -> tuple[State, Any]:
        state, seen, sums = step.advance(state, batch, frozen)
        rate = rate_of(state.optimizer)
        seen = seen if rate is None else jnp.append(seen, rate.astype(seen.dtype))
        return state, (together.reduce_stop(seen, stop), sums)

    return update


def _checkpoints(
    step: Step, state: State, examples: Source, settings: Settings, together: Processes
) -> Checkpoints:
    """Open the checkpoint folder of a run; frozen tensors are compared, not stored."""
    assert settings.checkpoint_dir is not None
    same = {**settings.resumable, "batch_size": examples.size}
    same |= {"preprocess": examples.resumable, "data": examples.identity}
    tensors = {**step.model.params, **step.model.state}
    fixed = {n: x for n, x in tensors.items() if n not in state.params and n not in state.state}
    return Checkpoints(settings.checkpoint_dir, settings.resume, same, step.model, fixed, together)


def _first_batches(examples: Source, at: Position, epochs: int) -> tuple[Any, Batch]:
    """Return the batches of the epoch that a run begins in, and the first of them.

    An iterator gives its first batch only once, so it is put back in front of the others.
    """
    batches = examples.batches(at.epoch, at.batch) if at.epoch < epochs else iter(())
    first = next(batches, None)
    if first is None:
        return batches, next(examples.batches(at.epoch))
    return chain([first], batches), first


class _Validation:
    """Computes the validation metrics, in inference mode; none without validation data.

    Args:
      first: a batch of the training data, whose shapes the sums are made for.
    """

    def __init__(
        self,
        step: Step,
        held_out: Source | None,
        checks: BatchChecks,
        first: Batch,
        interrupt: Interrupt,
    ):
        self._interrupt = interrupt
        self._step = step
        self._held_out = held_out
        self._checks = checks
        self._sums = None if held_out is None else step.sums(first, checks.shapes)
        self._evaluate: Callable = jax.jit(step.evaluate)

    def __call__(self, state: State, epoch: int) -> dict[str, float]:
        if self._held_out is None:
            return {}
        sums = self._sums
        for batch in self._interrupt.iterate(self._held_out.batches(epoch)):
            if is_unchecked(self._held_out):
                self._checks(batch, "a batch of validation")
            batch = self._step.put(batch, self._held_out.in_shares)
            sums = self._evaluate(sums, state, batch, self._step.frozen)
        return self._step.row(sums)
