"""The parameters that are trained (`head=`, `lora=`, `trainable=`).

New last layers come before the data is read, which is fitted to them.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypedDict

import jax

from jaxonnx._arguments import Argument
from jaxonnx._arrays import make_key
from jaxonnx._rewrite.head import Classes
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.model import Model, Trainable
from jaxonnx.quantization import select_scales
from jaxonnx.training._settings import Plan, Settings

_ADAPTERS, _HEADS = 2**32 - 1, 2**32 - 2
"""Numbers to fold into the seed's key for adapters, and for new heads; steps fold in their own."""


class HeadArguments(TypedDict, total=False):
    """New last layers."""

    head: Annotated[
        Classes | Mapping[str, Classes] | None,
        Argument(form="N|OUTPUT=N...", words="Replace the last layer, with this number of classes"),
    ]
    """A new last layer: the number of classes, or their names.

    For one of several outputs, pass a dict by output name. The weights are drawn with `seed`, and a
    Softmax or Sigmoid at the end is removed (`Model.with_head`). `history.notes` lists what was
    replaced. The default loss is then softmax cross entropy with integer labels, the default
    optimizer Adam with a learning rate of 0.001 for the head and 0.0001 for the other parameters.
    With `lora`, all weights of the head are trained."""


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


def with_heads(model: Model, settings: Settings) -> Model:
    """Return the model with the new heads of the settings.

    Raises:
      InputError: there is no such layer, or several could be meant.
    """
    if settings.head is None:
        return model
    heads = settings.head if isinstance(settings.head, Mapping) else {None: settings.head}
    key = jax.random.fold_in(make_key(settings.seed), _HEADS)
    for (at, classes), rng in zip(heads.items(), jax.random.split(key, len(heads)), strict=True):
        model = model.with_head(classes, at, rng=rng)
    return model


def select_parameters(plan: Plan) -> None:
    """Select the parameters to train: of adapters, by `trainable`, or those of the model.

    Raises:
      InputError: a choice that does not fit the model.
    """
    model, lora, trainable = plan.model, plan.settings.lora, plan.settings.trainable
    lora = LoRA(lora) if isinstance(lora, int) else lora
    if isinstance(lora, LoRA):
        key = jax.random.fold_in(make_key(plan.settings.seed), _ADAPTERS)
        model = lora.attach(model, key, trainable=_find_trained_in_full(model, trainable))
    elif lora is not None:
        model = lora.attach(model)
    elif trainable is not None:
        model = select_scales(model, model.with_trainable(trainable))
    plan.model = model


def _find_trained_in_full(model: Model, trainable: Trainable | None) -> Trainable | None:
    """Return the parameters trained in full beside adapters: `trainable` and new heads."""
    head = {*model.head}
    if not head:
        return trainable
    if callable(trainable):
        return lambda name, value: name in head or trainable(name, value)
    listed = [trainable] if isinstance(trainable, str) else trainable or []
    return [*listed, *map(re.escape, head)]
