"""New heads: the model of a run that asks for some, and the loss and the optimizer that fit."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax

from jaxonnx.errors import TrainingError
from jaxonnx.losses import cross_entropy
from jaxonnx.model import Model, Trainable, labels
from jaxonnx.training._settings import Settings

LOSS = "softmax_cross_entropy_with_integer_labels"
RATE, RATE_OF_REST = 1e-3, 1e-4
"""Learning rates of a head, which starts anew, and of the layers that know their features."""

_HEADS = 2**32 - 2
"""What is folded into the seed's key for new heads."""


def with_heads(model: Model, settings: Settings) -> Model:
    """Return the model with the new heads of the settings.

    Raises:
      InputError: there is no such layer, or several could be meant.
    """
    if settings.head is None:
        return model
    heads = settings.head if isinstance(settings.head, Mapping) else {None: settings.head}
    key = jax.random.fold_in(jax.random.key(settings.seed), _HEADS)
    for (at, classes), one in zip(heads.items(), jax.random.split(key, len(heads)), strict=True):
        model = model.with_head(classes, at, rng=one)
    return model


def complete_settings(model: Model, settings: Settings) -> tuple[Settings, list[str]]:
    """Return settings that have a loss and an optimizer, if the model has new heads, and notes.

    Raises:
      TrainingError: a head has no loss that goes without saying.
    """
    notes = [] if settings.head is None else [head.note for head in model.heads]
    if not model.heads:
        return settings, notes
    if settings.loss is None:
        loss = {head.output: _loss(head) for head in model.heads}
        single = loss[model.heads[0].output]
        settings = replace(settings, loss=loss if len(model.outputs) > 1 else single)
        notes.append("no loss was chosen: softmax cross entropy of labels, the number of the class")
    if settings.optimizer is None:
        rates: Any = {"head": optax.adam(RATE), "rest": optax.adam(RATE_OF_REST)}
        head = {*model.head}
        optimizer = optax.multi_transform(
            rates, labels({"head": lambda name, _: name in head}, default="rest")
        )
        settings = replace(settings, optimizer=optimizer)
        notes.append(
            f"no optimizer was chosen: Adam with the rate {RATE} for the head and {RATE_OF_REST} "
            "for all else"
        )
    return settings, notes


def _loss(head: Any) -> Any:
    """Return the loss of labels for the logits of a head."""
    if head.classes > 1 and head.logits and head.axis in (-1, 1):
        return LOSS if head.axis == -1 else cross_entropy()
    what = "one output" if head.classes == 1 else "classes on another axis"
    what = what if head.logits else "probabilities"
    raise TrainingError(
        f"the head of '{head.output}' has {what}: say which loss fits the targets, with loss="
    )


def beside_adapters(model: Model, trainable: Trainable | None) -> Trainable | None:
    """Return what is trained in full beside adapters: what is chosen, and new heads."""
    head = {*model.head}
    if not head:
        return trainable
    if callable(trainable):
        return lambda name, value: name in head or trainable(name, value)
    listed = [trainable] if isinstance(trainable, str) else trainable or []
    return [*listed, *map(re.escape, head)]
