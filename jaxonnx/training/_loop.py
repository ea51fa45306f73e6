"""The training loop."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.augmented import Augmented
from jaxonnx._data.batches import Batch, Examples, Stream
from jaxonnx._data.padded import Padded
from jaxonnx._data.weights import all_or_nothing
from jaxonnx._mesh.processes import Processes
from jaxonnx.errors import Error, TrainingError
from jaxonnx.model import Model
from jaxonnx.training._checkpoint import Checkpoints
from jaxonnx.training._checkpoint_metadata import Position
from jaxonnx.training._history import History
from jaxonnx.training._memory import EXHAUSTED, Fitting, to_stop
from jaxonnx.training._optimizers import rate_of
from jaxonnx.training._progress import Bar
from jaxonnx.training._reporter import Reporter
from jaxonnx.training._settings import Settings
from jaxonnx.training._snapshots import Snapshots
from jaxonnx.training._sparsity import sparse_numbers
from jaxonnx.training._step import State, Step, copy
from jaxonnx.training._stopping import Interrupt, Monitor, PatienceEnded, Stop

Data = Examples | Stream | Augmented

_LATE = 8
"""Batches whose labels lie on the device, and are not waited for before the next step."""


def run(
    step: Step,
    examples: Data,
    held_out: Data | None,
    settings: Settings,
    interrupt: Interrupt,
    together: Processes,
) -> tuple[Model, History]:
    """Run the epochs; return the model with the weights that they give, and what happened."""
    watched = Monitor(settings.monitor, step.columns(held_out is not None), settings.patience)
    update = Fitting(_with_reports(step, together))
    epochs, shared = settings.epochs, _is_stream(examples)
    state, at = step.init(), Position()
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
        shapes = step.check(_with_all_weights(first, examples))
        checks = _Checks(step, first, shapes)
        _check_whole(step, checks, shapes, examples, held_out)
        validate = None
        if held_out is not None:
            sums = step.sums(first, shapes)
            validate = _Validation(step, held_out, checks, sums, interrupt)

        progress, hooks = (settings.progress, settings.hooks) if together.first else (False, ())
        bar = stack.enter_context(Bar(progress, epochs, examples.steps, len(history.losses)))
        skip, several = settings.nan == "skip", together.several
        record = Reporter(history, hooks, bar, interrupt, skip, several)
        stack.callback(record.close)
        keeper = Snapshots(checkpoints, settings, record, step, state, interrupt, several)
        interrupt.begin()
        try:
            watched.see(history.epochs)
            watched.check(history.epochs)
            for epoch in range(at.epoch, epochs):
                began = time.perf_counter()
                for batch in interrupt.iterate(batches):
                    if keeper.due():
                        state = keeper.keep(at, state, best)
                    if _has_unchecked_labels(examples):
                        checks(batch, f"a batch of epoch {epoch + 1}")
                    together.step(epoch, at.batch)
                    batch, wish = step.put(batch, shared), together.stop_flag(interrupt.presses > 0)
                    state, seen = update(state, batch, step.frozen, wish)
                    at = at._replace(batch=at.batch + 1)
                    if not record.add(seen):
                        state = keeper.settle(state)
                    interrupt.check(record.asked)
                together.close_epoch(epoch, at.batch)
                state = keeper.settle(state)
                checks.catch_up()
                row: dict[str, Any] = {"epoch": epoch + 1, "step": record.step}
                row["loss"] = _mean(history.losses[at.first :])
                if history.rates:
                    row["rate"] = history.rates[-1]
                row |= validate(state, epoch) if validate is not None else {}
                row |= sparse_numbers(state.optimizer)
                record.close_epoch(row | {"seconds": time.perf_counter() - began})
                at = Position(epoch + 1, 0, record.step)
                improved = watched.see(history.epochs)
                history.best = watched.best and watched.best[0]
                if improved and best is not None:
                    best = copy((step.view(state), state.state))
                if keeper.due_after_epoch(improved, epoch + 1 == epochs):
                    state = keeper.keep(at, state, best, watched.score(row))
                watched.check(history.epochs)
                interrupt.check(record.asked)
                if epoch + 1 < epochs:
                    batches = examples.batches(epoch + 1)
            keeper.finish(state)
        except (Stop, KeyboardInterrupt, *EXHAUSTED) as error:
            end = to_stop(error, state, several)
            checks.catch_up()  # wrong labels may be why a loss is not finite
            state, stop = keeper.leave(end, at, state, best)
            which = watched.chosen or f"step {stop.step}"
            history.stopped = f"{stop}; the weights are those of {which}{keeper.where}"
            history.early = isinstance(stop, PatienceEnded)
    if best is not None and watched.chosen:
        return step.to_model(*best), history
    return step.to_model(step.view(state), state.state), history


def _with_reports(step: Step, together: Processes) -> Callable[..., tuple[State, jax.Array]]:
    """Return the update of a step that reports more, where there is more.

    That is the learning rate, and a wish to stop of any of several processes.
    """

    def update(state: State, batch: Batch, frozen: Any, wish: Any) -> tuple[State, jax.Array]:
        state, seen = step.update(state, batch, frozen)
        rate = rate_of(state.optimizer)
        seen = seen if rate is None else jnp.append(seen, rate.astype(seen.dtype))
        return state, together.reduce_stop(seen, wish)

    return update


def _checkpoints(
    step: Step, state: State, examples: Data, settings: Settings, together: Processes
) -> Checkpoints:
    """Open the folder of a run, whose tensors that no step changes are compared, not stored."""
    assert settings.checkpoint_dir is not None
    same = {**settings.resumable, "batch_size": getattr(examples, "size", None)}
    same |= {"preprocess": getattr(examples, "continued", None), "data": examples.identity}
    tensors = {**step.model.params, **step.model.state}
    fixed = {n: x for n, x in tensors.items() if n not in state.params and n not in state.state}
    return Checkpoints(settings.checkpoint_dir, settings.resume, same, step.model, fixed, together)


def _first_batches(examples: Data, at: Position, epochs: int) -> tuple[Any, Batch]:
    """Return the batches of the epoch that a run begins in, and one that tells their shapes.

    An iterator cannot be asked for its first batch again.
    """
    batches = examples.batches(at.epoch, at.batch) if at.epoch < epochs else iter(())
    first = next(batches, None)
    if first is None:
        return batches, next(examples.batches(at.epoch))
    return chain([first], batches), first


class _Checks:
    """Checks of batches as they come, whose shapes are checked once."""

    def __init__(self, step: Step, first: Batch, shapes: Any):
        self._step = step
        self._known = {_shapes_of(first): shapes}
        self._late: deque[tuple[Any, Any, str]] = deque()

    def __call__(self, batch: Batch, what: str) -> None:
        key = _shapes_of(batch)
        if key not in self._known:
            try:
                self._known[key] = self._step.check(batch)
            except Error as error:
                raise TrainingError(f"{what}: {error}") from error
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(batch.targets)):
            self._late.append((batch.targets, self._known[key], what))
            self.catch_up(_LATE)
        else:
            self._step.check_labels(batch.targets, self._known[key], what)

    def catch_up(self, keep: int = 0) -> None:
        """Check labels that lie on the device, but for those of the newest batches."""
        while len(self._late) > keep:
            targets, shapes, what = self._late.popleft()
            self._step.check_labels(jax.device_get(targets), shapes, what)


def _shapes_of(batch: Batch) -> tuple[Any, ...]:
    """Return what decides whether a batch fits, labels left out."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, _is_plain(batch.weight), *((x.shape, x.dtype) for x in leaves)


def _is_plain(weight: Any) -> bool:
    """Check whether weights are those of fill; what lies on a device is not waited for."""
    return isinstance(weight, np.ndarray) and all_or_nothing(weight)


def _check_whole(
    step: Step, checks: _Checks, shapes: Any, examples: Data, held_out: Data | None
) -> None:
    """Refuse data in one piece that does not fit, before anything is compiled."""
    for data, what in ((examples, "data"), (held_out, "validation")):
        if isinstance(data, Padded):
            for batch in data.batches(0):
                checks(batch, what)
        elif data is not None and data.targets is not None:
            step.check_labels(data.targets, shapes, what, getattr(data, "classes", None))
            if data is held_out:
                checks(_with_all_weights(next(data.batches(0)), data), what)


def _is_stream(data: Data) -> bool:
    """Return whether each of several processes has a share of each batch, not all of it."""
    return isinstance(data.source if isinstance(data, Augmented) else data, Stream)


def _has_unchecked_labels(data: Data) -> bool:
    """Return whether `_check_whole` has not seen all labels."""
    return data.targets is None and not isinstance(data, Padded)


def _with_all_weights(batch: Batch, data: Data) -> Batch:
    """Return a batch, for a check, with the weights of all examples where these are known."""
    weights = getattr(data, "weights", None)
    return batch if weights is None else batch._replace(weight=weights)


class _Validation:
    """The numbers of the validation data, in inference mode."""

    def __init__(
        self, step: Step, held_out: Data, checks: _Checks, sums: Any, interrupt: Interrupt
    ):
        self._interrupt = interrupt
        self._step = step
        self._held_out = held_out
        self._checks = checks
        self._sums = sums
        self._evaluate: Callable = jax.jit(step.evaluate)

    def __call__(self, state: State, epoch: int) -> dict[str, float]:
        sums = self._sums
        for batch in self._interrupt.iterate(self._held_out.batches(epoch)):
            if _has_unchecked_labels(self._held_out):
                self._checks(batch, "a batch of validation")
            batch = self._step.put(batch, _is_stream(self._held_out))
            sums = self._evaluate(sums, state, batch, self._step.frozen)
        return self._step.row(sums)


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of those that are finite."""
    finite = [value for value in losses if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")
