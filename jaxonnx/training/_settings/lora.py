"""Adapters, and the parameters trained beside them or alone (`lora=`, `trainable=`)."""

import re
from typing import Annotated, TypedDict

import jax

from jaxonnx._arguments import Argument
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.model import Model, Trainable
from jaxonnx.quantization import select_scales
from jaxonnx.training._settings import Plan

_ADAPTERS = 2**32 - 1
"""What is folded into the seed's key for adapters; steps fold in their number."""


class LoraArguments(TypedDict, total=False):
    """Which parameters are trained."""

    trainable: Annotated[
        Trainable | None,
        Argument(
            form="NAME...",
            excludes=("lora: Adapters",),
            reason="cannot be combined with Adapters, which determine what is trained",
            needs_loss=True,
        ),
    ]
    """The tensors to train: names of tensors, modules or nodes, or regular expressions.

    Wildcards and predicates of name and value are accepted as well (`Model.with_trainable`). These
    tensors are the parameters of the resulting model. With `lora` they are trained in addition to
    the adapters."""
    lora: Annotated[
        LoRA | Adapters | int | None,
        Argument(
            form="N",
            expected="a jaxonnx.LoRA, like LoRA(rank=8), a rank, or Adapters to continue with",
            excludes=("sparsity",),
            reason="cannot be combined with sparsity: merge the adapters into the model first, or "
            "leave one of the two out",
            needs_loss=True,
            words="Train adapters of this rank instead of the weights",
        ),
    ]
    """Train low-rank adapters instead of the weights: a `jaxonnx.LoRA`, or its rank.

    The adapters of the resulting model are merged into its weights. `result.lora` has the adapters
    alone: save them with `Adapters.save`, or pass them here to continue training."""


def select_parameters(plan: Plan) -> None:
    """Select the parameters to train: of adapters, by `trainable`, or those of the model.

    Raises:
      InputError: a choice that does not fit the model.
    """
    model, lora, trainable = plan.model, plan.settings.lora, plan.settings.trainable
    lora = LoRA(lora) if isinstance(lora, int) else lora
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
