"""The loss and the optimizer of a run that names none."""

from dataclasses import replace
from typing import Any

import optax

from jaxonnx._arguments import RATE
from jaxonnx._data.kinds import Data
from jaxonnx._text import format_count
from jaxonnx.errors import TrainingError
from jaxonnx.llm import scores_tokens
from jaxonnx.losses import cross_entropy
from jaxonnx.model import Model, labels
from jaxonnx.training._settings import Settings
from jaxonnx.training._step.optimizers import DECAYING, find_vectors, named_optimizer

LOSS = "softmax_cross_entropy_with_integer_labels"
RATE_OF_REST = 1e-4
"""The learning rate of the layers below a new head, which are trained already."""


def has_own_algorithm(model: Model, settings: Settings) -> bool:
    """Check whether a run takes the algorithm that the file carries (`training_info`)."""
    carried = bool(model.proto.training_info) and not model.heads
    return carried and settings.loss is None and settings.optimizer is None


def choose_loss(model: Model, settings: Settings, data: Data) -> tuple[Settings, list[str]]:
    """Return settings with the usual loss of a kind of data, if they have none; a note.

    Raises:
      TrainingError: only a loss by name uses such data.
    """
    if settings.loss is not None or has_own_algorithm(model, settings):
        return settings, []
    chosen = data.choose_loss(model)
    if chosen is None:
        return settings, []
    loss, what = chosen
    return replace(settings, loss=loss), [f"loss: {loss} (default for {what})"]


def complete_settings(model: Model, settings: Settings) -> tuple[Settings, list[str]]:
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
        rates += f" for the head and {RATE_OF_REST} for other parameters" if model.heads else ""
        notes.append(f"optimizer: Adam, {rates} (default)")
    if name is None and not chosen and model.heads:
        rules: Any = {"head": optax.adam(RATE), "rest": optax.adam(RATE_OF_REST)}
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
    """Return the loss of labels for new heads, or for the only output of a network."""
    if not model.heads:
        _check_classes(model)
        return LOSS
    loss = {head.output: _loss(head) for head in model.heads}
    return loss if len(model.outputs) > 1 else loss[model.heads[0].output]


def _check_classes(model: Model) -> None:
    """Refuse to choose a loss for outputs that are not scores of classes."""
    output = model.outputs[0]
    shape = output.shape
    single = shape is not None and len(shape) > 1 and shape[-1] == 1
    if single or len(model.outputs) > 1:
        what = "has one value per example" if single else "is one of several"
        raise TrainingError(
            f"pass loss=: the output '{model.outputs[0].name}' {what}, and only labels of classes "
            "have a loss by default; others are 'squared_error', 'sigmoid_binary_cross_entropy', "
            "any of optax.losses or jaxonnx.losses, and for several outputs a dict of them by name"
        )
    if scores_tokens(model):
        raise TrainingError(
            f"pass loss=: the output '{output.name}' has a score for each token of the "
            "vocabulary. 'causal_lm' takes the tokens as labels, or none, and shifts them; "
            f"{LOSS!r} takes labels that are shifted; 'masked_lm' fills in tokens that it hides"
        )


def _loss(head: Any) -> Any:
    """Return the loss of labels for the logits of a head."""
    if head.classes > 1 and head.logits and head.axis in (-1, 1):
        return LOSS if head.axis == -1 else cross_entropy()
    what = "one output" if head.classes == 1 else "classes on another axis"
    what = what if head.logits else "probabilities"
    raise TrainingError(
        f"the head of '{head.output}' has {what}: say which loss fits the targets, with loss="
    )
