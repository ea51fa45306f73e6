"""New last layers (`head=`). They come before the data is read, which is fitted to them."""

from collections.abc import Mapping
from typing import Annotated, TypedDict

import jax

from jaxonnx._arguments import Argument
from jaxonnx._rewrite.head import Classes
from jaxonnx.model import Model
from jaxonnx.training._settings import Settings

_HEADS = 2**32 - 2
"""What is folded into the seed's key for new heads."""


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


def with_heads(model: Model, settings: Settings) -> Model:
    """Return the model with the new heads of the settings.

    Raises:
      InputError: there is no such layer, or several could be meant.
    """
    if settings.head is None:
        return model
    heads = settings.head if isinstance(settings.head, Mapping) else {None: settings.head}
    key = jax.random.fold_in(jax.random.key(settings.seed), _HEADS)
    for (at, classes), rng in zip(heads.items(), jax.random.split(key, len(heads)), strict=True):
        model = model.with_head(classes, at, rng=rng)
    return model
