"""What a run trains of a model, and how its layers behave meanwhile."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxonnx.errors import TrainingError
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.model import Model, Statistics, Trainable

_ADAPTERS = 2**32 - 1
"""What is folded into the seed's key for adapters; steps fold in their number."""


def tuned(
    model: Model,
    *,
    trainable: Trainable | None,
    lora: LoRA | Adapters | None,
    statistics: Statistics | None,
    dropout: float | Mapping[str, float] | None,
    sparsity: Any,
    remat: bool,
    seed: int,
) -> Model:
    """The model whose parameters the run trains.

    Raises:
      TrainingError: settings that exclude each other, or nothing is left to be trained.
      InputError: a choice that does not fit the model.
    """
    if statistics is not None:
        model = model.with_statistics(statistics)
    if dropout is not None:
        model = model.with_dropout(dropout)
    if lora is not None and not isinstance(lora, LoRA | Adapters):
        raise TrainingError(
            "lora must be a jaxonnx.LoRA, like LoRA(rank=8), or Adapters to go on with, and is a "
            f"{type(lora).__name__}"
        )
    if lora is not None and sparsity is not None:
        raise TrainingError(
            "lora keeps the weights as they are and sparsity makes them sparse: merge the adapters "
            "into the model first, or leave one of the two out"
        )
    if isinstance(lora, LoRA):
        key = jax.random.fold_in(jax.random.key(seed), _ADAPTERS)
        model = lora.attach(model, key, trainable=trainable)
    elif lora is not None:
        if trainable is not None:
            raise TrainingError(
                "trainable cannot be chosen for given Adapters: they hold what is trained"
            )
        model = lora.attach(model)
    elif trainable is not None:
        model = model.with_trainable(trainable)
    if not isinstance(remat, bool):
        raise TrainingError(f"remat must be True or False, and is {remat!r}")
    if remat:
        model = model.with_remat()
    if not model.params:
        raise TrainingError("no parameter is to be trained; print(model) shows what the model has")
    return model
