"""Adapters, and the parameters trained beside them or alone (`lora=`, `trainable=`)."""

import re

import jax

from jaxonnx.lora import LoRA
from jaxonnx.model import Model, Trainable
from jaxonnx.quantization import select_scales
from jaxonnx.training._settings.plan import Plan

_ADAPTERS = 2**32 - 1
"""What is folded into the seed's key for adapters; steps fold in their number."""


def select_parameters(plan: Plan) -> None:
    """Select the parameters to train: of adapters, by `trainable`, or those of the model.

    Raises:
      InputError: a choice that does not fit the model.
    """
    model, lora, trainable = plan.model, plan.settings.lora, plan.settings.trainable
    if isinstance(lora, LoRA):
        key = jax.random.fold_in(jax.random.key(plan.settings.seed), _ADAPTERS)
        model = lora.attach(model, key, trainable=_with_heads(model, trainable))
    elif lora is not None:
        model = lora.attach(model)
    elif trainable is not None:
        model = select_scales(model, model.with_trainable(trainable))
    plan.model = model


def _with_heads(model: Model, trainable: Trainable | None) -> Trainable | None:
    """Return the parameters trained in full beside adapters: `trainable` and new heads."""
    head = {*model.head}
    if not head:
        return trainable
    if callable(trainable):
        return lambda name, value: name in head or trainable(name, value)
    listed = [trainable] if isinstance(trainable, str) else trainable or []
    return [*listed, *map(re.escape, head)]
