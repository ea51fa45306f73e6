"""The loop of a run, top to bottom: `run`, and then its rows, its batches and their checks."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.batches import Batch, DataEnded, Examples, Source
from jaxonnx._data.inputs_and_targets import is_zero_or_one
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import Error, TrainingError, warn
from jaxonnx.llm import Continuations
from jaxonnx.model import Model
from jaxonnx.training._checkpoints.snapshots import Snapshots
from jaxonnx.training._loop.history import History
from jaxonnx.training._loop.memory import EXHAUSTED, FitCheck, to_stop
from jaxonnx.training._loop.reporter import Reporter
from jaxonnx.training._loop.stopping import Interrupt, Monitor, Stop
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.ema import describe_average
from jaxonnx.training._settings.sparsity import is_dense, sparse_numbers
from jaxonnx.training._settings.statistics import Statistics, warn_of_single_values
from jaxonnx.training._step import State, Step
from jaxonnx.training._step.optimizers import rate_of

_LATE = 8
"""Batches after which labels on a device are checked, so that the host does not wait for them."""


def run(
    step: Step,
    examples: Source,
    held_out: Source | None,
    settings: Settings,
    interrupt: Interrupt,
    processes: Processes,
) -> tuple[Model, History]:
    """Run the epochs; return the trained model and the history."""
    # 1. The step, compiled at its first batch, and what follows its reports.
    monitor = Monitor(settings, step.columns(held_out is not None), step.last_phase)
    update = FitCheck(step.compile(_with_reports(step, processes), donate_argnums=0))
    reporter = Reporter(settings, examples.steps, interrupt, processes)
    state = step.init()
    with ExitStack() as stack:
        # 2. Where the run begins: at its first batch, or where its newest checkpoint is.
        snapshots = Snapshots(step, state, examples, settings, monitor, reporter, processes)
        stack.enter_context(snapshots.checkpoints or nullcontext())
        state = snapshots.restore(state)
        history, at = reporter.history, snapshots.at
        epochs = range(at.epoch, settings.epochs or 1)
        # 3. The data, checked before anything is compiled.
        batches = _Batches(step, examples, at.epoch, at.batch, epochs.stop, interrupt)
        warn_of_single_values(step, batches.first)
        batches.checks.check_data(examples, held_out)
        # 4. What ends a part of the run with a row of the history.
        close = _Rows(
            *(reporter, snapshots, monitor, batches),
            Statistics(step, examples, settings, state, interrupt),
            _Validation(step, held_out, batches, interrupt),
            Continuations(step.model, step.view, settings.samples if processes.first else None),
        )
        stack.enter_context(reporter)
        interrupt.begin()

        def is_due(done: int) -> bool:
            """Check whether a row is due within an epoch, after so many steps."""
            every = settings.validate_every
            due = done == settings.max_steps or (every is not None and done % every == 0)
            return due and done > reporter.last_row_step

        try:
            monitor.record(history.epochs)
            monitor.check()
            if settings.validate_first and not (reporter.step or history.epochs):
                state = close(state, 0)
            for epoch in epochs:
                if reporter.step == settings.max_steps:
                    break
                for batch in batches.of_epoch(epoch):
                    # 5. A step. Its report is read some steps later.
                    state = snapshots.save_if_due(state)
                    processes.step(epoch, snapshots.at.batch)
                    batch = batches.put(batch, f"a batch of epoch {epoch + 1}")
                    stop = processes.stop_flag(interrupt.presses > 0)
                    state, report = update(state, batch, step.frozen, stop)
                    state = snapshots.count_step(state, report)
                    reporter.check_interrupt()
                    # 6. A row within the epoch, for which all steps are waited for.
                    if is_due(reporter.started_steps):
                        state = snapshots.settle(state)
                    if is_due(reporter.step):  # not if steps were lost
                        count = examples.steps or snapshots.at.batch
                        ends = reporter.step == settings.max_steps
                        if ends or snapshots.at.batch == examples.steps:
                            state = snapshots.flush(state)
                            state = snapshots.settle(state)
                        state = close(state, epoch + 1, count, ends)
                    if reporter.step == settings.max_steps:
                        break
                else:
                    # 7. The end of the epoch: the batches that wait for others, and its row.
                    count, ends = snapshots.at.batch, epoch + 1 == epochs.stop
                    processes.close_epoch(epoch, count)
                    before = snapshots.settle(state)
                    state = snapshots.flush(before)
                    state = snapshots.settle(state)
                    snapshots.end_epoch(epoch)
                    # of a stream the last batch is known only now, after a row of its weights
                    is_new = reporter.step > reporter.last_row_step or state is not before
                    if is_new and (ends or not settings.validate_every):
                        state = close(state, epoch + 1, count, ends)
            snapshots.finish(state)
        except (Stop, KeyboardInterrupt, DataEnded, *EXHAUSTED) as error:
            # 8. The run ends early, with the best weights that there are.
            state = snapshots.flush(state) if isinstance(error, DataEnded) else state
            end = to_stop(error, state, processes.several)
            batches.checks.catch_up()  # wrong labels may be why a loss is not finite
            state = snapshots.end_early(end, state)
    # 9. The result.
    whole = bool(monitor.best_row) or reporter.step == reporter.last_row_step
    history.notes += close.statistics.notes(reporter.step, whole)
    history.notes += describe_average(settings, reporter.step)
    if settings.patience is not None and (notes := monitor.notes(history.epochs)):
        history.notes += notes
        warn(notes[0])
    model = snapshots.to_model(state)
    if is_dense(state.optimizer) and not monitor.best_row:
        history.notes.append(
            f"the run ended in the dense phase of sparsity: no weight is {model.sparsity}, and the "
            "model has no record of it; a shorter phase, as sparsity={..., 'dense': 0}, or to "
            "resume the run, makes them sparse"
        )
        warn(history.notes[-1])
        model = model.with_sparsity(None)
    return model, history


@dataclass
class _Rows:
    """Ends a part of a run: renews statistics, validates, reports, and saves.

    The parts are epochs, or the parts of epochs that `validate_every` and `max_steps` make.
    """

    reporter: Reporter
    snapshots: Snapshots
    monitor: Monitor
    batches: "_Batches"
    statistics: Statistics
    validate: "_Validation"
    continuations: Continuations
    began: float = field(default_factory=time.perf_counter)

    def __call__(self, state: State, epoch: int, batches: int = 0, last: bool = False) -> State:
        """Return the state to continue from.

        Args:
          epoch: from 1; 0 before the first step.
          batches: of the epoch, for statistics.
          last: the run ends here.

        Raises:
          Stop: patience ran out, or as in `Snapshots.close_row`.
        """
        reporter = self.reporter
        self.batches.checks.catch_up()
        if epoch:
            state = self.statistics.renew(state, epoch - 1, reporter.step, batches)
        numbers = self.validate(state, max(epoch - 1, 0)) | sparse_numbers(state.optimizer)
        self.continuations.write(state, epoch)
        row = reporter.add_row(epoch, numbers, time.perf_counter() - self.began)
        state = self.snapshots.close_row(state, row, last)
        self.monitor.check()
        reporter.check_interrupt()
        self.began = time.perf_counter()
        return state


def _with_reports(step: Step, together: Processes) -> Callable[..., tuple[State, Any]]:
    """Append the learning rate and the stop flag of all processes to the report of a step."""

    def update(state: State, batch: Batch, frozen: Any, stop: Any) -> tuple[State, Any]:
        state, report, sums = step.advance(state, batch, frozen)
        rate = rate_of(state.optimizer)
        report = report if rate is None else jnp.append(report, rate.astype(report.dtype))
        return state, (together.reduce_stop(report, stop), sums)

    return update


class _Batches:
    """The batches of a run, checked and on their devices.

    Args:
      epoch, batch: where the run begins.
      epochs: where it ends.

    Attributes:
      first: a batch, whose shapes the sums of validation are made for.
      checks: of batches.
    """

    def __init__(
        self, step: Step, source: Source, epoch: int, batch: int, epochs: int, interrupt: Interrupt
    ):
        self._step, self._source, self._interrupt = step, source, interrupt
        batches = source.batches(epoch, batch) if epoch < epochs else iter(())
        first = next(batches, None)
        # an iterator gives its first batch only once, so it is put back in front of the others
        self._begun = batches if first is None else chain([first], batches)
        self.first = next(source.batches(epoch)) if first is None else first
        self.checks = BatchChecks(step, self.first, source)

    def of_epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate an epoch's batches on the host (of a resumed epoch, the rest)."""
        begun, self._begun = self._begun, None
        batches = self._source.batches(epoch) if begun is None else begun
        return self._interrupt.iterate(batches)

    def put(
        self, batch: Batch, name: str, source: Source | None = None, is_scalar: bool | None = None
    ) -> Batch:
        """Check a batch and put it on the devices that share it.

        Args:
          name: of the batch, for errors.
          source: of the batch, if it is not that of the run.
          is_scalar: whether a scalar is computed of it, if it is not the loss of the run.
        """
        source = self._source if source is None else source
        if is_unchecked(source):
            self.checks(batch, name)
        if self.checks.is_scalar if is_scalar is None else is_scalar:
            batch = self._step.drop_fill(batch)
        return self._step.put(batch, source.in_shares)


class BatchChecks:
    """The checks of a run; each shape of batches is checked once.

    Args:
      first: a batch of the training data.

    Attributes:
      shapes: the result of `Step.check` for that batch.
      is_scalar: whether the loss is a scalar, and does not take what fills a batch.

    Raises:
      TrainingError: the batch does not fit.
    """

    def __init__(self, step: Step, first: Batch, examples: Source):
        self._step = step
        self.shapes = step.check(_with_all_weights(first, examples))
        self.is_scalar = step.counts_fill(first, self.shapes, metrics=False)
        self._checked = {_signature(first): self.shapes}
        self._late: deque[tuple[Any, Any, str]] = deque()

    def __call__(self, batch: Batch, what: str) -> None:
        """Check a batch; labels on a device are checked some batches later."""
        key = _signature(batch)
        if key not in self._checked:
            try:
                self._checked[key] = self._step.check(batch)
            except Error as error:
                raise TrainingError(f"{what}: {error}") from error
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(batch.targets)):
            self._late.append((batch.targets, self._checked[key], what))
            self.catch_up(_LATE)
        else:
            self._step.check_labels(batch.targets, self._checked[key], what)

    def catch_up(self, keep: int = 0) -> None:
        """Check the labels that are on a device, except those of the newest batches."""
        while len(self._late) > keep:
            targets, shapes, what = self._late.popleft()
            self._step.check_labels(jax.device_get(targets), shapes, what)

    def check_data(self, examples: Source, held_out: Source | None) -> None:
        """Refuse data in one piece that does not fit, before anything is compiled."""
        for data, what in ((examples, "data"), (held_out, "validation")):
            if data is None or is_unchecked(data):
                continue
            if self.is_scalar and isinstance(data, Examples):
                short = [weight for _, weight in data.rows_of_batches(0, 0) if not weight.all()]
                if short:
                    first = next(data.batches(0))
                    for weight in short:
                        self._step.drop_fill(first._replace(weight=weight))
            if data.checks_batches:
                for batch in data.batches(0):
                    self(batch, what)
                continue
            self._step.check_labels(data.targets, self.shapes, what, data.classes)
            if data is held_out:
                self(_with_all_weights(next(data.batches(0)), data), what)


def is_unchecked(data: Source) -> bool:
    """Check whether the targets of data are known only batch by batch."""
    return data.targets is None and not data.checks_batches


def _signature(batch: Batch) -> tuple[Any, ...]:
    """Return structure, shapes and dtypes of a batch: all that checks depend on but labels."""
    leaves, structure = jax.tree.flatten(batch)
    # weights that only mark examples that fill a batch; a device is not waited for
    is_fill = isinstance(batch.weight, np.ndarray) and is_zero_or_one(batch.weight)
    return structure, is_fill, *((x.shape, x.dtype) for x in leaves)


def _with_all_weights(batch: Batch, data: Source) -> Batch:
    """Return a batch with the weights of all examples where these are known, for a check."""
    return batch if data.weights is None else batch._replace(weight=data.weights)


class _Validation:
    """Computes the validation metrics, in inference mode; none without validation data."""

    def __init__(
        self, step: Step, held_out: Source | None, batches: _Batches, interrupt: Interrupt
    ):
        self._step, self._held_out, self._batches = step, held_out, batches
        self._interrupt = interrupt
        first = batches.first, batches.checks.shapes
        self._sums = None if held_out is None else step.sums(*first)
        self._is_scalar = batches.checks.is_scalar or (
            held_out is not None and step.counts_fill(*first, metrics=True)
        )
        self._evaluate: Callable = step.compile(step.evaluate)

    def __call__(self, state: State, epoch: int) -> dict[str, float]:
        if self._held_out is None:
            return {}
        sums = self._sums
        for batch in self._interrupt.iterate(self._held_out.batches(epoch)):
            name = "a batch of validation"
            batch = self._batches.put(batch, name, self._held_out, self._is_scalar)
            sums = self._evaluate(sums, state, batch, self._step.frozen)
        return self._step.row(sums)
