"""Training through the rounding of weights and activations (`quantize=`)."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, TypedDict

from jaxonnx._arguments import Argument
from jaxonnx._data.batches import Source, iterate_inputs
from jaxonnx._rewrite.network import leave
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.model import Model
from jaxonnx.quantization import (
    Bound,
    MovingRanges,
    Quantization,
    Rounding,
    is_quantized,
    learn_scales,
    make_schedule,
    move_ranges,
    open_quantized,
    record_of,
    stored_types,
)
from jaxonnx.training._objective.needs import prepare_model
from jaxonnx.training._quantize import BATCHES, insert_rounding, make_evaluation
from jaxonnx.training._settings import Plan, Settings
from jaxonnx.views import PackedRows


class QuantizeArguments(TypedDict, total=False):
    """Weights and activations in few bits."""

    quantize: Annotated[
        str | Quantization | None,
        Argument(
            form="TYPE|FIELD=X,...",
            resume=True,
            needs_loss=True,
            words="Quantization-aware training: int8, int4, or fields of Quantization like "
            "weights=int4,block=32",
        ),
    ]
    """Quantization-aware training: "int8", "int4", ... or a `jaxonnx.Quantization`.

    Ranges are calibrated on the first batches of the data, as in `jaxonnx.quantize`. Then weights
    and scales are trained with the given loss, with straight-through gradients of the rounding.
    With `Quantization(learn="ranges")`, ranges follow the data instead; `Quantization(start=)`
    delays the rounding by some epochs. BatchNormalization is folded into convolutions first. The
    saved model has integer weights. A file that is already quantized is trained with its own scales
    and saved in its own form."""


def quantize_weights(plan: Plan) -> None:
    """Make the model round as `quantize` says, with the inputs that it had.

    A model that is already quantized keeps its nodes and starts from its own scales.

    Raises:
      InputError: there are no data to calibrate on, or the model is quantized to other dtypes than
        those of the scheme.
      TrainingError: rows have several texts.
    """
    if plan.settings.quantize is None:
        return
    model, settings, scheme = plan.model, plan.settings, Quantization.of(plan.settings.quantize)
    rounded, note = _round(leave(model, MovingRanges), settings, plan.examples, plan.held_out)
    schedule = make_schedule(scheme, plan.epochs, plan.steps_per_epoch)
    if schedule is not None:
        rounded, count = move_ranges(rounded, schedule)
        note += schedule.describe(count)
    if scheme.learn is not None:
        rounded = learn_scales(rounded)
    inputs = {value.name: value for value in model.inputs}
    rounded = prepare_model(rounded, settings.loss, inputs)
    if model.program.find(PackedRows) is not None and rounded.program.find(PackedRows) is None:
        raise TrainingError("preprocess={'pack': True} cannot be combined with quantize")
    plan.model = rounded
    plan.notes.append(note)


def _round(
    model: Model, arguments: Settings, source: Source | None, held_out: Source | None
) -> tuple[Model, str]:
    """Return a model whose weights are rounded at their own scales or by a scheme, and a note."""
    scheme: Any = arguments.quantize
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
    examples = [*iterate_inputs(islice(source.batches(0), BATCHES), model.inputs)]
    bound = None
    if settings.max_loss is not None:
        if arguments.loss is None:
            raise InputError("quantize: max_loss needs loss=, which it limits the change of")
        evaluate = make_evaluation(arguments.loss, held_out or source, model)
        bound = Bound(settings.max_loss, evaluate, "the loss")
    model = insert_rounding(
        model, settings, examples, keep_norms=True, bound=bound, check=arguments.check
    )
    entry, activations = record_of(model.proto), "no activations"
    assert entry is not None
    weights = len(entry.names)
    if settings.activations is not None:
        activations = f"{len(entry.scales) - weights} activations to {settings.activations}"
    types = " and ".join(sorted(stored_types(model.proto, model.tensors).weights))
    note = (
        f"{weights} weights are rounded to {types} and {activations}, in training as in the "
        "saved file"
    )
    rounding = model.program.find(Rounding)
    if rounding is not None and rounding.clipped:
        name, most = max(rounding.clipped.items(), key=lambda pair: pair[1])
        note += f"; the ranges clip at most {most:.2%} of the numbers of an activation ({name!r})"
    if model.sensitivity is not None:
        last = model.sensitivity.trials[-1]
        note += (
            f"; {len(model.sensitivity.wider_types)} tensors have more bits than that, so that the "
            f"rounding changes the loss by {last.loss:.4g}, at most {settings.max_loss:g}"
        )
    return model, note


def _check_types(model: Model, scheme: str | Quantization) -> list[str]:
    """Check that a quantized model has the types of a scheme.

    A scheme given by name, like "int8", is compared by the type of weights alone.

    Returns:
      The types of the model's weights, sorted.

    Raises:
      InputError: the scheme names other types.
    """
    stored_in = stored_types(model.proto, model.tensors)
    expected = Quantization.of(scheme)
    weights, activations = (sorted(kinds) for kinds in (stored_in.weights, stored_in.activations))
    same = expected.weights in weights
    if isinstance(scheme, Quantization):
        dequantized = {x for node in model.graph.nodes if node.op.dequantizes for x in node.outputs}
        readers = {n.op.name for x in dequantized for n in model.graph.readers.get(x, ())}
        # recurrences read activations in floating point under every scheme
        fits = expected.activations in (activations or [None])
        same = same and (fits or (not activations and readers <= {"GRU", "LSTM", "RNN"}))
        same = same and (expected.block is None or stored_in.blocks == {expected.block})
    if not same:
        blocks = [f"in blocks of {n}" for n in sorted(stored_in.blocks) if n]
        stored = " and ".join(weights or ["nothing"])
        blocks_of_scheme = f" in blocks of {expected.block}" if expected.block else ""
        raise InputError(
            f"quantize= names weights of {expected.weights}{blocks_of_scheme} and activations of "
            f"{expected.activations or 'floating point'}, but the file is quantized already, "
            f"to weights of {' '.join([stored, *blocks])} and activations of "
            f"{' and '.join(activations) or 'floating point'}: name these to train it at its own "
            "scales, or quantize the file in floating point that it was made of"
        )
    return weights
