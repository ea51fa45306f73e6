"""Build a training step from settings."""

import math
import os
from dataclasses import replace
from typing import Any, Unpack

import jax
import optax
from onnx import ModelProto

from jaxonnx._arguments import (
    RATE,
    Optimizer,
    check_names,
    documented,
)
from jaxonnx._data.batches import Source
from jaxonnx._display import format_count, list_some
from jaxonnx._graph.types import find_without_gradient
from jaxonnx._require import takes_steps
from jaxonnx.errors import InputError, TrainingError, warn
from jaxonnx.lora import writes_apart
from jaxonnx.losses import cross_entropy, scores_tokens
from jaxonnx.model import Model, as_model, check_nodes, labels
from jaxonnx.quantization import describe_integers, record_of
from jaxonnx.training._data import check_compiles, has_own_algorithm
from jaxonnx.training._objective import find_losses, find_objective
from jaxonnx.training._objective.needs import prepare_model
from jaxonnx.training._settings import Plan, Settings, order
from jaxonnx.training._settings.order import StepArguments
from jaxonnx.training._settings.parameters import with_heads
from jaxonnx.training._settings.weight_layout import WeightLayout
from jaxonnx.training._step import Step
from jaxonnx.training._step.gradient import GradientStep
from jaxonnx.training._step.optimizers import (
    DECAYING,
    find_groups,
    find_vectors,
    fit_to_step,
    named_optimizer,
)
from jaxonnx.training._step.training_info import TrainingInfoStep

_LOSS = "softmax_cross_entropy_with_integer_labels"
_RATE_OF_REST = 1e-4
"""The learning rate of the layers below a new head, which are trained already."""


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
    check_compiles(model)
    plan = Plan(model, settings, epochs, steps_per_epoch, examples, held_out, platform)
    # 1. The model: views of settings, and what is trained.
    for change in order.MODEL:
        change(plan)
    if not plan.model.params:
        integers = [*describe_integers(plan.model.graph, plan.model.tensors)]
        if integers:
            integers.append(
                "the float model that the file was made from can be trained and quantized: "
                "jaxonnx.quantize(model, data), or jaxonnx.train(..., quantize='int8')"
            )
        reasons = integers or ["print(model) shows what the model has"]
        raise TrainingError(f"no parameter is to be trained; {'; '.join(reasons)}")
    _check_file(plan.model)
    # 2. A loss and an optimizer, if neither the settings nor the file have one.
    plan.settings, notes = _complete_settings(plan.model, plan.settings)
    settings = plan.settings
    if settings.loss is None or settings.optimizer is None:
        if names := settings.of_losses:
            raise TrainingError(
                f"{', '.join(names)}: such settings go with loss= and optimizer=, not with the "
                "algorithm of the file; its saved model continues where the run ended"
            )
        goal = find_objective(plan.model, None, settings.metrics)
        return _wrap(TrainingInfoStep(plan.model, goal, settings))
    plan.notes += notes
    # 3. The objective: losses, and metrics that fit them.
    _freeze_without_gradient(plan)
    plan.goal = find_losses(plan.model, settings.loss)
    for change in order.OBJECTIVE:
        change(plan)
    plan.goal = plan.goal.with_metrics(settings.metrics)
    plan.notes += plan.goal.notes
    # 4. The optimizer, and how it stores the parameters.
    optimizer: Any = settings.optimizer
    if takes_steps(optimizer):
        plan.updates = _count_updates(settings, plan.epochs, plan.steps_per_epoch)
        optimizer = optimizer(steps=plan.updates)
    params = plan.model.params
    plan.optimizer = fit_to_step(optimizer, params, settings.accumulate > 1)
    plan.storage = WeightLayout(params, plan.optimizer, plan.platform, settings.master)
    if platform == "onnx" and settings.sparsity is None:  # runtimes take microseconds for a node
        wide = jax.eval_shape(plan.storage.widen, params)
        plan.storage.groups = find_groups(plan.optimizer, wide)
    if narrow := plan.storage.narrow:
        types = " and ".join(sorted({dtype.name for dtype in narrow.values()}))
        plan.notes.append(
            f"{len(narrow)} {types} parameters are trained as float32 master weights and rounded "
            "for the model; master=False trains them as they are"
        )
    for change in order.OPTIMIZER:
        change(plan)
    # 5. The step.
    return _wrap(GradientStep(plan))


def _wrap(step: Step) -> Step:
    """Wrap a step as the settings say: split it over a mesh."""
    for wrap in order.STEP:
        step = wrap(step)
    return step


def _complete_settings(model: Model, settings: Settings) -> tuple[Settings, list[str]]:
    """Return settings that have a loss and an optimizer, unless the file has its own, and notes.

    Raises:
      TrainingError: a head, or the network, has no loss that goes without saying.
    """
    notes = [] if settings.head is None else [head.note for head in model.heads]
    if has_own_algorithm(model, settings):
        return settings, notes
    if settings.loss is None:
        settings = replace(settings, loss=_usual_loss(model))
        notes.append("loss: softmax cross entropy of integer labels (default)")
    name, chosen = settings.optimizer, settings.of_optimizer
    if name is None and not chosen:
        rates = f"learning rate {RATE}"
        rates += f" for the head and {_RATE_OF_REST} for other parameters" if model.heads else ""
        notes.append(f"optimizer: Adam, {rates} (default)")
    if name is None and not chosen and model.heads:
        rules: Any = {"head": optax.adam(RATE), "rest": optax.adam(_RATE_OF_REST)}
        head = {*model.head}
        parts = labels({"head": lambda name, _: name in head}, default="rest")
        settings = replace(settings, optimizer=optax.multi_transform(rules, parts))
    elif name is None or isinstance(name, str):
        spared = find_vectors(model)
        rule = named_optimizer(name or "adam", spared, **chosen)
        if spared and (name in DECAYING or chosen.get("weight_decay")):
            notes.append(
                f"weight decay leaves out {format_count(len(spared), 'tensor')}: biases, "
                "normalizations and other vectors"
            )
        settings = replace(settings, optimizer=rule, **dict.fromkeys(chosen))
    return settings, notes


def _usual_loss(model: Model) -> Any:
    """Return the loss of labels for new heads, or for the only output of a network.

    Raises:
      TrainingError: there are several outputs, or they are not scores of classes.
    """
    if model.heads:
        loss = {head.output: _loss(head) for head in model.heads}
        return loss if len(model.outputs) > 1 else loss[model.heads[0].output]
    output = model.outputs[0]
    shape = output.shape
    single = shape is not None and len(shape) > 1 and shape[-1] == 1
    if single or len(model.outputs) > 1:
        what = "has one value per example" if single else "is one of several"
        raise TrainingError(
            f"pass loss=: the output '{output.name}' {what}, and only labels of classes "
            "have a loss by default; others are 'squared_error', 'sigmoid_binary_cross_entropy', "
            "any of optax.losses or jaxonnx.losses, and for several outputs a dict of them by name"
        )
    if scores_tokens(model):
        raise TrainingError(
            f"pass loss=: the output '{output.name}' has a score for each token of the "
            "vocabulary. 'causal_lm' takes the tokens as labels, or none, and shifts them; "
            f"{_LOSS!r} takes labels that are shifted; 'masked_lm' fills in tokens that it hides"
        )
    return _LOSS


def _loss(head: Any) -> Any:
    """Return the loss of labels for the logits of a head."""
    if head.classes > 1 and head.logits and head.axis in (-1, 1):
        return _LOSS if head.axis == -1 else cross_entropy()
    what = "one output" if head.classes == 1 else "classes on another axis"
    what = what if head.logits else "probabilities"
    raise TrainingError(
        f"the head of '{head.output}' has {what}: say which loss fits the targets, with loss="
    )


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
        trains = ", and quantize= trains weights of quantized operators"
        raise TrainingError(
            f"no output has a gradient with respect to a parameter ({list_some(frozen)}), as none "
            "has behind operators on integers: model.with_outputs(NAME) ends the graph before "
            f"these{'' if plan.settings.quantize else trains}"
        )
    plan.model = model.with_trainable(lambda name, _: name in trained)
    plan.notes.append(
        f"frozen, as no output has a gradient with respect to them: {list_some(frozen, '')}; "
        f"trained: {list_some(trained, '')}"
    )


def _check_file(model: Model) -> None:
    """Check before training that `save` can write the result.

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
        warn(message)


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
