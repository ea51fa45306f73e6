"""Decoders as training reads them: whole sequences, without caches, and logits alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxonnx.model import Model
from jaxonnx.training._losses import find

LOGITS = "logits"
"""The output of language models that exporters and runtimes agree on."""


def read_whole_sequences(model: Model, loss: Any, data: Any = None) -> Model:
    """Return a decoder without its caches, and for a loss of next tokens with its logits only.

    Logits are of all steps where the file gives those of the last one (`prune_lm_head`). Other
    models, and those whose caches are in the data, are returned as they are. `restore_inputs` takes
    it back.
    """
    if not _has_caches(model, data):
        model = model.without_cache()
    names = [value.name for value in model.outputs]
    if is_next_token(loss) and LOGITS in names:
        model = replace(model, program=model.program.only({LOGITS}).with_all_steps(LOGITS))
    return model


def restore_inputs(model: Model) -> Model:
    """Return a model with all inputs and outputs of its file."""
    return replace(model, program=model.program.restore())


def is_next_token(loss: Any) -> bool:
    """Return whether the only loss is one of next tokens."""
    if isinstance(loss, Mapping):
        if len(loss) != 1:
            return False
        (loss,) = loss.values()
        loss = loss[0] if isinstance(loss, tuple) and loss else loss
    return loss is not None and find(loss).next_token


def _has_caches(model: Model, data: Any) -> bool:
    """Return whether the inputs of data are more than those without caches."""
    if not isinstance(data, Mapping):
        inputs = data[0] if isinstance(data, tuple) and data else None
        if not isinstance(inputs, Mapping):
            return isinstance(inputs, tuple) and len(inputs) == len(model.inputs)
        data = inputs
    without = {value.name for value in model.without_cache().inputs}
    return any(value.name in data for value in model.inputs if value.name not in without)
