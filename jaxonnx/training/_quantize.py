"""Prepare quantization-aware training: round a model, and train its scales or move its ranges."""

from __future__ import annotations

from itertools import islice
from typing import Any

from jaxonnx._data.batches import Source
from jaxonnx._rewrite.network import leave
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.model import Model, insert_rounding
from jaxonnx.quantization import (
    MovingRanges,
    Quantization,
    is_quantized,
    learn_scales,
    make_schedule,
    move_ranges,
    open_quantized,
    record_of,
    stored_types,
)
from jaxonnx.training._sequences import read_whole_sequences
from jaxonnx.training._settings import Settings
from jaxonnx.views import PackedRows

_BATCHES = 16
"""The batches that ranges are measured on."""


def prepare(
    model: Model,
    settings: Settings,
    source: Source | None,
    epochs: int | None,
    steps_per_epoch: int | None,
) -> tuple[Model, str]:
    """Return a model that rounds as `quantize` says, with the inputs that it had, and a note.

    A model that is already quantized keeps its nodes and starts from its own scales.

    Args:
      source: the data to calibrate on.
      epochs, steps_per_epoch: the length of the run; None if not known.

    Raises:
      InputError: there are no data to calibrate on, or the model is quantized to other dtypes than
        those of the scheme.
      TrainingError: rows have several texts.
    """
    scheme: Any = settings.quantize
    rounded, note = _round(leave(model, MovingRanges), scheme, source)
    schedule = make_schedule(Quantization.of(scheme), epochs, steps_per_epoch)
    if schedule is not None:
        rounded, count = move_ranges(rounded, schedule)
        note += schedule.describe(count)
    if Quantization.of(scheme).learn is not None:
        rounded = learn_scales(rounded)
    inputs = {value.name: value for value in model.inputs}
    rounded = read_whole_sequences(rounded, settings.loss, inputs)
    if model.program.find(PackedRows) is not None and rounded.program.find(PackedRows) is None:
        raise TrainingError("preprocess={'pack': True} cannot be combined with quantize")
    return rounded, note


def _round(model: Model, scheme: str | Quantization, source: Source | None) -> tuple[Model, str]:
    """Return a model whose weights are rounded at their own scales or by a scheme, and a note."""
    entry, settings = record_of(model.proto), Quantization.of(scheme)
    if entry is not None and not entry.folded:
        _check_types(model, scheme)
        return model, "training goes on with the scales of the quantized model"
    if is_quantized(model):
        model, count = open_quantized(model)
        kinds = ", ".join(_check_types(model, scheme))
        return model, (
            f"the file is quantized: {count} of its tensors are trained at its own scales, "
            f"weights in its own types ({kinds})"
        )
    if source is None:
        raise InputError(
            "quantize: a step has no data to measure ranges on; pass the model that "
            "jaxonnx.quantize(model, data) returns"
        )
    if settings.reduce_range:
        raise InputError(
            "reduce_range is for jaxonnx.quantize: weights that are trained leave the range"
        )
    examples = [batch.inputs for batch in islice(source.batches(0), _BATCHES)]
    model = insert_rounding(model, settings, examples, keep_norms=True)
    entry, activations = record_of(model.proto), "no activations"
    assert entry is not None
    weights = len(entry.names)
    if settings.activations is not None:
        activations = f"{len(entry.scales) - weights} activations to {settings.activations}"
    types = " and ".join(sorted(stored_types(model.proto, model.tensors).weights))
    return model, (
        f"{weights} weights are rounded to {types} and {activations}, in training as in the "
        "saved file"
    )


def _check_types(model: Model, scheme: str | Quantization) -> list[str]:
    """Check that a quantized model has the types of a scheme.

    A scheme given by name, like "int8", is compared by the type of weights alone.

    Returns:
      The types of the model's weights, sorted.

    Raises:
      InputError: the scheme names other types.
    """
    stored_in = stored_types(model.proto, model.tensors)
    wanted = Quantization.of(scheme)
    weights, activations = (sorted(kinds) for kinds in (stored_in.weights, stored_in.activations))
    same = wanted.weights in weights
    if isinstance(scheme, Quantization):
        same = same and (wanted.activations in (activations or [None]))
        same = same and (wanted.block is None or stored_in.blocks == {wanted.block})
    if not same:
        blocks = [f"in blocks of {n}" for n in sorted(stored_in.blocks) if n]
        stored = " and ".join(weights or ["nothing"])
        asked = f" in blocks of {wanted.block}" if wanted.block else ""
        raise InputError(
            f"quantize= names weights of {wanted.weights}{asked} and activations of "
            f"{wanted.activations or 'floating point'}, but the file is quantized already, "
            f"to weights of {' '.join([stored, *blocks])} and activations of "
            f"{' and '.join(activations) or 'floating point'}: name these to train it at its own "
            "scales, or quantize the file in floating point that it was made of"
        )
    return weights
