"""The training loop."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import optax

from jaxonnx.model import Model
from jaxonnx.train import _step as step
from jaxonnx.train._checkpoint import Checkpoints, Position
from jaxonnx.train._data import Arrays, Stream
from jaxonnx.train._history import History
from jaxonnx.train._keeper import Keeper
from jaxonnx.train._objective import Objective
from jaxonnx.train._progress import Bar
from jaxonnx.train._record import Hook, Record
from jaxonnx.train._sparsity import sparse_numbers
from jaxonnx.train._stopping import Interrupt, Monitor, Spent, Stop
from jaxonnx.train._storage import Storage


def run(
    net: Model,
    goal: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    storage: Storage,
    data: tuple[Arrays | Stream, Arrays | Stream | None],
    watched: Monitor,
    *,
    epochs: int,
    seed: int,
    accumulate: int,
    ema: float | None,
    precision: str | None,
    nan: str,
    checkpoint_dir: str | os.PathLike | None,
    checkpoint_every: int | None,
    resume: bool,
    hooks: Sequence[Hook],
    progress: bool | None,
) -> tuple[Model, History]:
    """Runs the epochs; the arguments are those of `train`, checked.

    Args:
      goal: has a model with the parameters of `net`.
      storage: of parameters in an order that the optimizer takes.
      data: examples to train with, and those held out.

    Returns:
      `net` with the weights that the run gives, and what happened.
    """
    carry = step.start(net, optimizer, ema is not None, storage)
    history, at = History(), Position()
    fixed = step.frozen(net)
    best = None if watched.patience is None else step.copy((net.params, carry.state))
    examples, held_out = data
    with ExitStack() as stack:
        checkpoints = None
        if checkpoint_dir is not None:
            same = {"seed": seed, "accumulate": accumulate, "ema": ema, "precision": precision}
            same["batch_size"] = getattr(examples, "size", None)
            checkpoints = stack.enter_context(Checkpoints(checkpoint_dir, resume, same, fixed))
            like = storage.view(carry), best
            at, (carry, best), history = checkpoints.restore(like)
            carry = storage.store(carry)
        history.notes = list(goal.notes)

        # the first batch tells the shapes; an iterator cannot be asked for it again
        batches = examples.batches(at.epoch, at.batch) if at.epoch < epochs else iter(())
        first = next(batches, None)
        batches = batches if first is None else chain([first], batches)
        known = next(examples.batches(at.epoch)) if first is None else first
        shapes = goal.check(known)
        zeros = goal.start(shapes, known)
        for part, what in ((examples, "data"), (held_out, "validation")):
            if part is not None and part.targets is not None:
                goal.check_labels(part.targets, shapes, what)
        if held_out is not None and held_out.targets is not None:
            goal.check_validation(next(held_out.batches(0)))
        update = step.training(
            goal.model,
            goal,
            optimizer,
            seed,
            storage,
            fixed,
            accumulate=accumulate,
            ema=ema,
            skip=nan == "skip",
            precision=precision,
        )
        evaluate = step.evaluation(goal, storage, fixed)

        bar = stack.enter_context(Bar(progress, epochs, examples.steps, len(history.losses)))
        record = Record(history, hooks, bar, skip=nan == "skip")
        stack.callback(record.close)
        back = nan == "rollback"
        keeper = Keeper(checkpoints, checkpoint_every, back, record, carry, storage)
        interrupt = stack.enter_context(Interrupt())
        try:
            watched.see(history.epochs)
            watched.check(history.epochs)
            for epoch in range(at.epoch, epochs):
                began = time.perf_counter()
                for batch in batches:
                    if keeper.due():
                        carry = keeper.keep(at, carry, best)
                    if examples.targets is None:
                        goal.check_labels(batch.targets, shapes, f"a batch of epoch {epoch}")
                    carry, seen = update(carry, batch)
                    at = at._replace(batch=at.batch + 1)
                    if not record.add(seen):
                        carry = keeper.settle(carry)
                    interrupt.check()
                carry = keeper.settle(carry)
                row: dict[str, Any] = {"epoch": epoch, "step": record.step}
                row["loss"] = _mean(history.losses[at.first :])
                if held_out is not None:
                    row |= _validate(evaluate, carry, held_out, epoch, goal, (shapes, zeros))
                row |= sparse_numbers(carry.optimizer)
                record.close_epoch(row | {"seconds": time.perf_counter() - began})
                at = Position(epoch + 1, 0, record.step)
                improved = watched.see(history.epochs)
                if improved and best is not None:
                    best = step.copy((step.weights(carry, storage), carry.state))
                if keeper.due_after_epoch(improved, epoch + 1 == epochs):
                    carry = keeper.keep(at, carry, best, watched.score(row))
                watched.check(history.epochs)
                interrupt.check()
                if epoch + 1 < epochs:
                    batches = examples.batches(epoch + 1)
            keeper.finish()
        except (Stop, KeyboardInterrupt) as end:
            carry, stop = keeper.leave(end, at, carry, best)
            which = watched.chosen or f"step {stop.step}"
            history.stopped = f"{stop}; the weights are those of {which}{keeper.where}"
            history.early = isinstance(stop, Spent)
    params, state = step.weights(carry, storage), carry.state
    if best is not None and watched.chosen:
        params, state = best
    return net.replace(params=params, state={**fixed, **state}), history


def _validate(
    evaluate: Callable, carry: Any, held_out: Any, epoch: int, goal: Objective, fixed: tuple
) -> dict[str, float]:
    """The numbers of the validation data, in inference mode."""
    shapes, sums = fixed
    for number, batch in enumerate(held_out.batches(epoch)):
        if held_out.targets is None:
            if number == 0:
                goal.check_validation(batch)
            goal.check_labels(batch.targets, shapes, "a batch of validation")
        sums = evaluate(sums, carry, batch)
    return goal.row(sums)


def _mean(losses: Sequence[float]) -> float:
    """Of those that are finite."""
    finite = [value for value in losses if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")
