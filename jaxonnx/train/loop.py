"""The training loop."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import optax
from onnx import ModelProto

from jaxonnx import sparse
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model, Trainable, load
from jaxonnx.train import carried, objective, settings, step
from jaxonnx.train.checkpoint import Checkpoints
from jaxonnx.train.data import source
from jaxonnx.train.history import History
from jaxonnx.train.objective import Objective
from jaxonnx.train.progress import Bar
from jaxonnx.train.record import Hook, Record
from jaxonnx.train.sparsity import forget, sparsify


@dataclass(frozen=True)
class Result:
    """What a run gives: the trained model, and what happened."""

    model: Model
    history: History

    def __str__(self) -> str:
        return str(self.history)


def train(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    *,
    loss: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    validation: Any = None,
    metrics: Any = None,
    trainable: Trainable | None = None,
    sparsity: str | Mapping[str, Any] | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    resume: bool = False,
    on_log: Hook | Sequence[Hook] | None = None,
    progress: bool | None = None,
) -> Result:
    """Trains a model and returns it with the history of the run.

    The whole step is one program, compiled once. BatchNormalization and Dropout behave as in
    training, and running statistics are renewed.

    Args:
      model: a Model, or anything that `jaxonnx.load` takes. It is not changed.
      data: `(x, y)`, or an iterable of such pairs (batches), or a function from the epoch to such
        an iterable. `x` is an array, a tuple of arrays, or a dict by input name. Arrays are
        shuffled in an order that depends on `seed` and the epoch only; iterables are taken as they
        come. A short batch is filled up with other examples of the data, which the loss ignores
        but batch statistics see.
      loss: the name of a loss in `optax.losses`, "absolute_error", one of `jaxonnx.losses` (ONNX's,
        with weights of classes and labels to ignore), or a callable `(outputs, targets)` that gives
        a scalar or has the examples along its first axis. Losses are averaged over the examples of
        the batch; a scalar loss sees the fill of a short batch as well. For a model with several
        outputs a dict of losses by output name, or of pairs (loss, weight); the targets are then a
        dict by output name, too, and the losses are added. If the file ends in the Softmax,
        LogSoftmax or Sigmoid that a named loss has inside, the loss takes the logits before it
        (`history.notes` says so); the saved model keeps the ending, and metrics see its outputs.
        Loss and optimizer may be left out for a file that carries its training_info: then its own
        algorithm runs, from the state and update count in the file (the fill of a short batch
        counts), and the resulting model carries them on.
      optimizer: any optax transformation.
      batch_size: of arrays; 32 if not given, or what the model's inputs are fixed to.
      seed: of the order of the examples and of random operators.
      validation: like `data`; evaluated in inference mode after each epoch, in order.
      metrics: what is computed on the validation data, as `validation_<name>` in the history: one
        or a list of "accuracy", "top_5" (or any number), "precision", "recall", "f1" (of classes:
        the mean over those that occur; for targets of yes and no like the outputs: the mean over
        the labels, of which one is the binary case), "mae", "mse", "r2" (the mean over the columns
        of the outputs), or functions `(outputs, targets)` that give a scalar or one value for each
        example; for several outputs a dict of these by output name. All but functions that give
        scalars are exact over the epoch. Yes is an output above 0.5, or above 0 where the loss
        takes logits and the file does not end in Sigmoid. By default the accuracy, for losses of
        labels.
      trainable: exactly these tensors are trained, as in `jaxonnx.load`: names or regular
        expressions (matched in full), or a predicate of name and value. They are the parameters of
        the resulting model.
      sparsity: "2:4", or options of `sparse.three_phase` whose phases are in epochs. By default a
        third of the epochs is dense, half have a dynamic mask, and the rest a fixed one. Embeddings
        and grouped convolutions stay dense. The saved model records what is sparse
        (`Model.sparsity`).
      checkpoint_dir: a folder for a checkpoint after each epoch; the last three are kept.
      resume: continue from the last checkpoint, if there is one; the result is then bit for bit
        that of the uninterrupted run.
      on_log: called as `on_log(step, metrics)` with the loss of each step, some steps after it was
        started (the device is never waited for), and with the numbers of each epoch, as in
        `history.epochs`; or a list of such functions.
      progress: show a progress bar; by default where the output is a terminal.

    Returns:
      `.model` and `.history`. If the loss or a gradient becomes NaN or infinite the run stops with
      a warning: the model then has the last good weights and `history.stopped` tells the step.

    Raises:
      TrainingError: data, labels, loss or settings that do not fit, before anything is compiled;
        or a later batch that does not fit those before it.
    """
    net = model if isinstance(model, Model) else load(model)
    net = net if trainable is None else net.with_trainable(trainable)
    if not net.params:
        raise TrainingError("no parameter is to be trained; print(model) shows what the model has")
    settings.check(
        epochs=epochs,
        seed=seed,
        optimizer=optimizer,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        progress=progress,
    )
    hooks = settings.hooks(on_log)
    names = [value.name for value in net.inputs]
    examples = source(data, names, _batch_size(net, data, batch_size), seed)
    held_out = None
    if validation is not None:
        size = batch_size if isinstance(validation, tuple) else None
        size = _batch_size(net, validation, size)
        held_out = source(validation, names, size, None, "validation")
    if metrics is not None and held_out is None:
        raise TrainingError("metrics are computed on validation data: pass validation= as well")
    if loss is None or optimizer is None:
        _check_carried(net, loss, optimizer, trainable, sparsity, checkpoint_dir, resume, metrics)
        net, history = carried.follow(
            net, examples, held_out, epochs=epochs, seed=seed, progress=progress
        )
        if history.stopped:
            warnings.warn(history.stopped, stacklevel=2)
        return Result(net, history)
    goal = objective.find(net, loss, metrics)
    if sparsity is not None:
        optimizer, net = sparsify(net, optimizer, sparsity, epochs, examples.steps)
    else:
        net = forget(net)

    optimizer = optax.with_extra_args_support(optimizer)
    carry, history, done = step.start(net, optimizer), History(), 0
    with ExitStack() as stack:
        checkpoints = None
        if checkpoint_dir is not None:
            checkpoints = stack.enter_context(Checkpoints(checkpoint_dir, resume))
            done, carry, history = checkpoints.restore(carry)
        history.notes = list(goal.notes)

        # the first batch tells the shapes; an iterator cannot be asked for it again
        batches = examples.batches(done)
        first = next(batches)
        batches = chain([first], batches)
        shapes = goal.check(first)
        for part, what in ((examples, "data"), (held_out, "validation")):
            if part is not None and part.targets is not None:
                goal.check_labels(part.targets, shapes, what)
        update = step.training(goal.model, goal, optimizer, seed)
        evaluate = step.evaluation(goal)

        bar = stack.enter_context(Bar(progress, epochs, examples.steps))
        record = Record(history, hooks, bar)
        for epoch in range(done, epochs):
            began, before = time.perf_counter(), record.step
            for batch in batches if epoch == done else examples.batches(epoch):
                if examples.targets is None:
                    goal.check_labels(batch.targets, shapes, f"a batch of epoch {epoch}")
                carry, seen = update(carry, batch)
                if not record.add(seen):
                    break
            if not record.flush():
                break
            row: dict[str, Any] = {"epoch": epoch, "step": record.step}
            row["loss"] = float(np.mean(history.losses[before:]))
            if held_out is not None:
                row |= _validate(evaluate, carry, held_out, epoch, goal, shapes)
            if sparsity is not None:
                numbers = sparse.metrics(carry.optimizer)
                row |= {name: numbers[name] for name in ("phase", "sparsity", "flip_rate")}
            record.close_epoch(row | {"seconds": time.perf_counter() - began})
            if checkpoints is not None:
                checkpoints.save(epoch + 1, carry, history)
    if record.trouble:
        history.stopped = f"{record.trouble}; the weights are those before it"
        warnings.warn(history.stopped, stacklevel=2)
    return Result(net.replace(params=carry.params, state=carry.state), history)


def _check_carried(net: Model, loss: Any, optimizer: Any, *settings: Any) -> None:
    """Refuses what does not go with the algorithm of a file."""
    if loss is not None or optimizer is not None or not net.proto.training_info:
        raise TrainingError(
            "training needs loss= and optimizer=; only a file that carries its training_info "
            "(jaxonnx.add_training writes one) can be trained without both"
        )
    if any(setting not in (None, False) for setting in settings):
        raise TrainingError(
            "trainable, sparsity, checkpoint_dir, resume and metrics go with loss= and optimizer=, "
            "not with the algorithm of the file; its saved model continues where the run ended"
        )


def _batch_size(model: Model, data: Any, wanted: int | None) -> int | None:
    """The size that the inputs are fixed to, or what was asked for."""
    fixed = [value.shape[0] for value in model.inputs if value.shape]
    fixed = [size for size in fixed if isinstance(size, int)]
    if not fixed or not isinstance(data, tuple):
        return wanted
    size = fixed[0]
    if wanted not in (None, size):
        raise TrainingError(
            f"batch_size={wanted}, but the model's inputs are fixed to batches of {size}; "
            "give the first dimension of its inputs a name to allow any size"
        )
    return size


def _validate(
    evaluate: Callable, carry: Any, held_out: Any, epoch: int, goal: Objective, shapes: Any
) -> dict[str, float]:
    """The numbers of the validation data, in inference mode."""
    sums: Any = None
    for batch in held_out.batches(epoch):
        if held_out.targets is None:
            goal.check_labels(batch.targets, shapes, "a batch of validation")
        sums = evaluate(goal.start(shapes, batch) if sums is None else sums, carry, batch)
    return goal.row(sums)
