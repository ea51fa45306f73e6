"""Build a training step from settings."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

from onnx import ModelProto

from jaxonnx._arguments import (
    Optimizer,
    check_names,
    documented,
)
from jaxonnx._data.batches import Source
from jaxonnx._graph.types import find_without_gradient
from jaxonnx._require import takes_steps
from jaxonnx._text import list_some
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.lora import writes_apart
from jaxonnx.model import Model, as_model, check_nodes
from jaxonnx.quantization import record_of
from jaxonnx.training._objective import objective
from jaxonnx.training._objective.needs import prepare_model
from jaxonnx.training._settings import Settings, order
from jaxonnx.training._settings.head import with_heads
from jaxonnx.training._settings.order import StepArguments
from jaxonnx.training._settings.plan import Plan
from jaxonnx.training._step.defaults import complete_settings
from jaxonnx.training._step.gradient import GradientStep
from jaxonnx.training._step.optimizers import fit_to_step
from jaxonnx.training._step.step import Step
from jaxonnx.training._step.training_info import TrainingInfoStep
from jaxonnx.training._step.weight_layout import WeightLayout


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
    plan = Plan(model, settings, epochs, steps_per_epoch, examples, held_out, platform)
    for change in order.MODEL:
        change(plan)
    if not plan.model.params:
        raise TrainingError("no parameter is to be trained; print(model) shows what the model has")
    _check_file(plan.model)
    plan.settings, notes = complete_settings(plan.model, plan.settings)
    if plan.settings.loss is None or plan.settings.optimizer is None:
        step: Step = _build_file_step(plan)
    else:
        plan.notes += notes
        step = _build_gradient_step(plan)
    for wrap in order.STEP:
        step = wrap(step)
    return step


def _build_gradient_step(plan: Plan) -> GradientStep:
    """Return the step that minimizes the loss of a plan with its optimizer."""
    settings = plan.settings
    _freeze_without_gradient(plan)
    plan.goal = objective.find_losses(plan.model, settings.loss)
    for change in order.OBJECTIVE:
        change(plan)
    plan.goal = plan.goal.with_metrics(settings.metrics)
    plan.notes += plan.goal.notes
    optimizer: Any = settings.optimizer
    if takes_steps(optimizer):
        plan.updates = _count_updates(settings, plan.epochs, plan.steps_per_epoch)
        optimizer = optimizer(steps=plan.updates)
    params = plan.model.params
    plan.optimizer = fit_to_step(optimizer, params, settings.accumulate > 1)
    plan.storage = WeightLayout(params, plan.optimizer, plan.platform, settings.master)
    if plan.storage.narrow:
        plan.notes.append(_describe_master(plan.storage.narrow))
    for change in order.OPTIMIZER:
        change(plan)
    return GradientStep(plan)


def _build_file_step(plan: Plan) -> TrainingInfoStep:
    """Return the step of the algorithm that the file has.

    Raises:
      TrainingError: an argument does not apply to it.
    """
    if names := plan.settings.of_losses:
        raise TrainingError(
            f"{', '.join(names)}: such settings go with loss= and optimizer=, not with the "
            "algorithm of the file; its saved model continues where the run ended"
        )
    goal = objective.find(plan.model, None, plan.settings.metrics)
    return TrainingInfoStep(plan.model, goal, plan.settings)


def _freeze_without_gradient(plan: Plan) -> None:
    """Freeze the parameters that no gradient reaches.

    Raises:
      TrainingError: no parameter has a gradient.
    """
    model = plan.model
    names = () if model.program.adapts else model.params
    frozen = find_without_gradient(model.graph, names)
    if not frozen:
        return
    trained = [name for name in model.params if name not in frozen]
    if not trained:
        raise TrainingError(
            f"no output has a gradient with respect to a parameter ({list_some(frozen)}), as none "
            "has behind operators on integers: model.with_outputs(NAME) ends the graph before "
            "these, and quantize= trains weights of quantized operators"
        )
    plan.model = model.with_trainable(lambda name, _: name in trained)
    plan.notes.append(
        f"frozen, as no output has a gradient with respect to them: {list_some(frozen, '')}; "
        f"trained: {list_some(trained, '')}"
    )


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


def _describe_master(narrow: Mapping[str, Any]) -> str:
    types = " and ".join(sorted({dtype.name for dtype in narrow.values()}))
    return (
        f"{len(narrow)} {types} parameters are trained as float32 master weights and rounded for "
        "the model; master=False trains them as they are"
    )


def _count_updates(settings: Settings, epochs: int | None, steps_per_epoch: int | None) -> int:
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
