"""Build a training step from settings."""

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from onnx import ModelProto

from jaxonnx._arguments import (
    Optimizer,
    StepArguments,
    check_names,
    documented,
)
from jaxonnx._data.batches import Source
from jaxonnx._data.images import preparation as images
from jaxonnx._require import takes_steps
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.lora import writes_apart
from jaxonnx.losses import find_by_output
from jaxonnx.model import Model, as_model, check_nodes
from jaxonnx.quantization import record_of
from jaxonnx.training import _objective as objective
from jaxonnx.training._accumulate import accumulate
from jaxonnx.training._class_weights import class_weights_by_index
from jaxonnx.training._fit_optimizer import fit_to_step
from jaxonnx.training._gradient_step import GradientStep
from jaxonnx.training._head import complete_settings, with_heads
from jaxonnx.training._loss_needs import prepare_model
from jaxonnx.training._mesh_step import MeshStep
from jaxonnx.training._precision import precision_notes
from jaxonnx.training._quantize import prepare
from jaxonnx.training._select_parameters import freeze_without_gradient, select_parameters
from jaxonnx.training._settings import Settings
from jaxonnx.training._sparsity import find_shared_phases, remove_sparsity, sparsify
from jaxonnx.training._step import Step
from jaxonnx.training._training_info_step import TrainingInfoStep
from jaxonnx.training._weight_layout import WeightLayout


@documented(StepArguments)
def step(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    loss: Any = None,
    optimizer: "Optimizer | str | None" = None,
    *,
    epochs: int | None = None,
    steps_per_epoch: int = 1,
    **arguments: Unpack[StepArguments],
) -> Step:
    """Build the step that `train` iterates, for a training loop of your own.

    Nothing is compiled, and no array of the model is changed or donated. Without loss and
    optimizer, it is the step of the `training_info` of the file; the parameters of its state are
    then the variables of the file.

    >>> import numpy as np
    >>> import optax
    >>> from jaxonnx import demo
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> one = step(demo.model(), loss, optax.sgd(0.1))
    >>> update, evaluate = one.jit()
    >>> batch = np.zeros((8, 1, 8, 8), np.float32), np.arange(8)
    >>> state, (value, finite) = update(one.init(), batch)
    >>> sums = evaluate(one.sums(batch), state, batch)
    >>> [*one.row(sums)]
    ['validation_loss', 'validation_accuracy']
    >>> trained = one.to_model(one.view(state), state.state)

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      loss: as in `jaxonnx.train`.
      optimizer: as in `jaxonnx.train`.
      epochs: the number of epochs of the run. `sparsity` without phase lengths divides them into
        phases. An optimizer that is a function of the number of updates needs them.
      steps_per_epoch: the number of steps per epoch, for the phases of `sparsity`.
      **arguments: those of `jaxonnx.training.StepArguments`, where each is documented.

    Raises:
      TrainingError: the settings do not fit the model.
    """
    check_names("step", StepArguments, arguments)
    settings = Settings(loss=loss, optimizer=optimizer, epochs=epochs, **arguments)
    if settings.nan == "rollback":
        raise TrainingError("nan must be stop or skip: a loop of your own keeps its own snapshots")
    if settings.statistics == "recompute":
        raise TrainingError(
            "statistics must be batch or frozen: after a loop of your own, call "
            "model.recompute_statistics(data)"
        )
    model = with_heads(as_model(model, settings.mesh), settings)
    model = prepare_model(model, loss)
    return build_step(model, settings, epochs, steps_per_epoch)


def build_step(
    model: Model,
    settings: Settings,
    epochs: int | None,
    steps_per_epoch: int | None,
    examples: Source | None = None,
    platform: str | None = None,
    held_out: Source | None = None,
) -> Step:
    """Return the step that trains a model as the settings say.

    Args:
      examples: for balanced class weights and the ranges of `quantize`.
      platform: of the run; by default that of the model's arrays.
      held_out: for the bound of `quantize`.
    """
    notes: list[str] = []
    if settings.class_weights is not None:
        losses, labels = find_by_output(settings.loss).values(), images.preparation(model).labels
        weights = class_weights_by_index(settings.class_weights, labels, examples, [*losses])
        settings = replace(settings, class_weights=weights)
    if settings.quantize is not None:
        model, *notes = prepare(model, settings, examples, epochs, steps_per_epoch, held_out)
    step = _build_local_step(model, settings, epochs, steps_per_epoch, platform)
    step.notes = (*step.notes, *notes)
    return step if settings.mesh is None else MeshStep(step, settings.mesh, settings.sharding)


def _build_local_step(
    model: Model,
    settings: Settings,
    epochs: int | None,
    steps_per_epoch: int | None,
    platform: str | None,
) -> Step:
    model = select_parameters(model, settings)
    _check_file(model)
    settings, notes = complete_settings(model, settings)
    if settings.loss is None or settings.optimizer is None:
        _check_file_algorithm(settings)
        return TrainingInfoStep(model, objective.find(model, None, settings.metrics), settings)
    model, frozen = freeze_without_gradient(model)
    weights: Any = settings.class_weights  # by number: `build_step`
    smoothing = settings.label_smoothing
    goal = objective.find(model, settings.loss, settings.metrics, weights, smoothing)
    goal = replace(goal, notes=(*notes, *frozen, *goal.notes))
    optimizer: Any = settings.optimizer
    updates = None
    if takes_steps(optimizer):
        updates = _updates(settings, epochs, steps_per_epoch)
        optimizer = optimizer(steps=updates)
    optimizer = fit_to_step(optimizer, model.params, settings.accumulate > 1)
    storage = WeightLayout(model.params, optimizer, platform, settings.master)
    if settings.accumulate > 1:
        divided = [name != "none" for name in goal.denominators]
        optimizer = accumulate(optimizer, settings.accumulate, divided)
    if storage.narrow:
        goal = replace(goal, notes=(*goal.notes, _master_note(storage.narrow)))
    if settings.precision:
        notes = precision_notes(settings.precision, storage.platform)
        goal = replace(goal, notes=(*goal.notes, *notes))
    structured: frozenset[str] = frozenset()
    if settings.sparsity is None:
        model, notes = remove_sparsity(model)
    else:
        optimizer, model, structured, notes = sparsify(
            model, optimizer, settings, epochs, steps_per_epoch, storage
        )
    goal = replace(goal, notes=(*goal.notes, *notes))
    step = GradientStep(model, goal, optimizer, storage, settings, structured)
    step.updates = updates
    step.phases = find_shared_phases(settings.sparsity, epochs)
    return step


def _check_file(model: Model) -> None:
    """Refuse before the training what `save` would refuse after it.

    That can be a file with integers, or with adapters beside them; others are written as they are.
    Adapters can also be merged, or saved apart, so that there is a warning.
    """
    if not writes_apart(model):
        if record_of(model.proto) is not None:
            model.to_onnx()
        return
    try:
        check_nodes(model)
    except InputError as error:
        message = f"save(path) will refuse the trained model in its default form: {error}"
        warnings.warn(message, stacklevel=5)


def _master_note(narrow: Mapping[str, Any]) -> str:
    types = " and ".join(sorted({dtype.name for dtype in narrow.values()}))
    return (
        f"{len(narrow)} {types} parameters are trained as float32 master weights and rounded for "
        "the model; master=False trains them as they are"
    )


def _updates(settings: Settings, epochs: int | None, steps_per_epoch: int | None) -> int:
    """Return the number of updates of a run, whose epochs end with one."""
    if steps_per_epoch is None and settings.max_steps is not None:
        return math.ceil(settings.max_steps / settings.accumulate)
    if epochs is None or steps_per_epoch is None:
        raise TrainingError(
            "a schedule depends on the updates of the run, whose number is not known: "
            "pass arrays, or an iterable with a length (to step: epochs= and steps_per_epoch=), or "
            "an optimizer that knows them"
        )
    steps = min(epochs * steps_per_epoch, settings.max_steps or epochs * steps_per_epoch)
    whole, rest = divmod(steps, max(steps_per_epoch, 1))
    in_epoch, last = (math.ceil(n / settings.accumulate) for n in (steps_per_epoch, rest))
    return max(1, whole * in_epoch + last)


def _check_file_algorithm(settings: Settings) -> None:
    """Refuse arguments that do not apply to the algorithm of a file."""
    if names := settings.of_losses:
        raise TrainingError(
            f"{', '.join(names)}: such settings go with loss= and optimizer=, not with the "
            "algorithm of the file; its saved model continues where the run ended"
        )
