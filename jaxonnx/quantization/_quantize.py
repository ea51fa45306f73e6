"""`quantize`: calibrates a model and inserts QuantizeLinear; `prepare` does so for training."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.inliner
from onnx import ModelProto

from jaxonnx._data.batches import Source
from jaxonnx._io.protos import opset_of
from jaxonnx._network import refuse_change
from jaxonnx._require import check_arguments, require_integer
from jaxonnx._rewrite.fold_norms import fold_norms, folded_outputs
from jaxonnx._rewrite.fold_rounded_norms import flip_negative_scales
from jaxonnx._rewrite.moving_ranges import Schedule, insert_schedule
from jaxonnx._rewrite.quantize import Record, Writer, learn_scales, record_of, stored_types
from jaxonnx.errors import InputError
from jaxonnx.model import (
    Model,
    as_model,
    is_quantized,
    load,
    open_quantized,
    with_computed,
    with_file,
    without_schedule,
)
from jaxonnx.quantization._awq import scale_inputs
from jaxonnx.quantization._gptq import round_weights
from jaxonnx.quantization._ranges import (
    Parameters,
    calibrate,
    fit_bias,
    read_examples,
    weight_parameters,
)
from jaxonnx.quantization._rounding import learn_rounding
from jaxonnx.quantization._scheme import Quantization, make_schedule
from jaxonnx.quantization._sensitivity import choose_types, measure
from jaxonnx.quantization._sites import Sites, WeightSite, find_sites
from jaxonnx.views import EmptyCaches

_BATCHES = 16
"""The batches that ranges are measured on."""
_COMPARED, _NOISE = 4, 1.25
"""The batches that calibrations are compared on, and the ratio of errors that is no noise."""


def quantize(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    scheme: str | Quantization = "int8",
    *,
    batch_size: int | None = None,
    batches: int = _BATCHES,
    method: Literal["round", "gptq", "awq"] | None = None,
    preprocess: Any = None,
) -> Model:
    """Quantize weights and activations of a model, with ranges calibrated on data.

    The result has QuantizeLinear and DequantizeLinear nodes (QDQ), which onnxruntime, TensorRT and
    others read from the file that `save` writes. BatchNormalization is folded into the convolution
    before it. The parameters stay float32 until the model is saved, and every call computes with
    the rounded values. Labels are not needed. `jaxonnx.train(..., quantize=)` recovers the accuracy
    that rounding costs.

    >>> import numpy as np, jaxonnx
    >>> from jaxonnx import demo
    >>> x = np.random.default_rng(0).random((64, 1, 8, 8), np.float32)
    >>> model = jaxonnx.quantize(demo.model(), x, "int8")
    >>> len(model.to_onnx().SerializeToString()) < len(demo.model().to_onnx().SerializeToString())
    True

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      data: inputs in any form that `Model.predict` accepts, or texts as in `jaxonnx.train`.
        Targets are ignored. Caches of decoders that are not in the data are empty.
      scheme: "int8", "int4", ... or a `jaxonnx.Quantization`.
      batch_size: the number of examples per batch. Ignored for iterables.
      batches: the number of batches to calibrate on.
      method: how weights are rounded, by their inputs on the data instead of each to the nearest
        value. The layers' outputs change less; compare the methods on held-out data.

        * "gptq" rounds the matrices of MatMul, Gemm and pointwise Conv one input at a time. The
          remaining ones make up for the error (GPTQ, arXiv:2210.17323).
        * "awq" scales inputs of MatMul and Gemm such that the weights of large ones lose less, and
          divides what computes them, such as a normalization (AWQ, arXiv:2306.00978).
        * "round" learns for each weight of a Conv, ConvTranspose, Gemm or MatMul whether to round
          up or down, and corrects the mean of biases (AdaRound, arXiv:2004.10568).

        Weights that a method does not take are rounded to the nearest values.
      preprocess: as in `jaxonnx.train`, for folders of images and texts.

    Returns:
      A model with the same inputs and outputs. Its parameters are those of `model`, after folding.

    Raises:
      InputError: the scheme does not fit the model, the model is already quantized, or the data
        yield no ranges.
      TrainingError: the data do not fit the model.
    """
    check_arguments(quantize, locals())
    require_integer("batches", batches)
    net = as_model(model)
    whole, source = read_examples(net, data, batch_size, preprocess)
    examples = [batch.inputs for batch in islice(source.batches(0), batches)]
    quantized = _insert(whole, Quantization.of(scheme), examples, method)
    _compare_with_minmax(whole, quantized, Quantization.of(scheme), examples)
    return _hide_caches(quantized, net)


def prepare(
    model: Model,
    scheme: str | Quantization,
    source: Source | None,
    epochs: int | None,
    steps_per_epoch: int | None,
) -> tuple[Model, str]:
    """Return a model for quantization-aware training, and a note for the history.

    A model that is already quantized keeps its nodes and starts from its own scales.

    Args:
      source: the data to calibrate on.
      epochs, steps_per_epoch: the length of the run; None if not known.

    Raises:
      InputError: there are no data to calibrate on, or the model is quantized to other dtypes than
        those of the scheme.
      Error: the quantized model cannot be saved.
    """
    named, scheme, model = scheme, Quantization.of(scheme), without_schedule(model)
    entry = record_of(model.proto)
    if entry is not None and not entry.folded:
        note = "training goes on with the scales of the quantized model"
        _check_types(model, named)
    elif is_quantized(model):
        model, count = open_quantized(model)
        kinds = _check_types(model, named)
        note = (
            f"the file is quantized: {count} of its tensors are trained at its own scales, "
            f"weights in its own types ({', '.join(kinds)})"
        )
    elif source is None:
        raise InputError(
            "quantize: a step has no data to measure ranges on; pass the model that "
            "jaxonnx.quantize(model, data) returns"
        )
    else:
        if scheme.reduce_range:
            raise InputError(
                "reduce_range is for jaxonnx.quantize: weights that are trained leave the range"
            )
        examples = [batch.inputs for batch in islice(source.batches(0), _BATCHES)]
        model = _insert(model, scheme, examples, keep_norms=True)
        entry = _record(model)
        weights = len(entry.names)
        activations = "no activations"
        if scheme.activations is not None:
            activations = f"{len(entry.scales) - weights} activations to {scheme.activations}"
        types = " and ".join(sorted(stored_types(model.proto, model.tensors).weights))
        note = (
            f"{weights} weights are rounded to {types} and {activations}, in training as in the "
            "saved file"
        )
    schedule = make_schedule(scheme, epochs, steps_per_epoch)
    if schedule is not None:
        proto, state, count = insert_schedule(model.proto, model.graph, model.tensors, schedule)
        model = with_computed(model, proto, {}, {}, state)
        note += _describe(schedule, count)
    if scheme.learn is not None:
        proto, constants, params = learn_scales(model.proto, model.tensors)
        model = with_computed(model, proto, constants, params)
    model.to_onnx()  # what the file cannot have is refused now, not after the training
    return model, note


def _describe(schedule: Schedule, count: int) -> str:
    """Return the part of the note that says when `count` ranges move and when rounding begins."""
    end = "the end" if schedule.freeze is None else f"step {schedule.freeze:,}"
    moved = f"; {count} ranges follow the data until {end}" if schedule.decay is not None else ""
    return moved + (f"; rounding begins at step {schedule.start + 1:,}" if schedule.start else "")


def select_scales(before: Model, after: Model) -> Model:
    """Return `after` with the scales trained that `before` trains, and no others.

    A selection of parameters to train (`trainable=`) names weights and biases; scales, which the
    quantization adds, follow the scheme instead.

    Args:
      before: the quantized model.
      after: the same with a selection of its parameters.
    """
    entry = record_of(before.proto)
    if entry is None:
        return after
    changes = [name for scale in entry.scales if (name := f"{scale}_change") in before.params]
    hidden = {part for scale in entry.scales for part in (scale, f"{scale}_initial", *changes)}
    chosen = {*(name for name in after.params if name not in hidden), *changes}
    return after.with_trainable(lambda name, _: name in chosen)


def _record(model: Model) -> Record:
    entry = record_of(model.proto)
    assert entry is not None
    return entry


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
        raise InputError(
            f"quantize= names weights of {_describe_types(wanted)}, but the file is quantized "
            f"already, to weights of {' '.join([stored, *blocks])} and activations of "
            f"{' and '.join(activations) or 'floating point'}: name these to train it at its own "
            "scales, or quantize the file in floating point that it was made of"
        )
    return weights


def _describe_types(scheme: Quantization) -> str:
    """Return the types of a scheme in words, for an error."""
    blocks = f" in blocks of {scheme.block}" if scheme.block else ""
    return f"{scheme.weights}{blocks} and activations of {scheme.activations or 'floating point'}"


def _insert(
    model: Model,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: str | None = None,
    *,
    keep_norms: bool = False,
) -> Model:
    """Calibrate a model and insert QuantizeLinear and DequantizeLinear by a scheme.

    Args:
      model: a model in floating point. If its caches are empty (`Model.without_cache`), they are so
        for the calibration, and inputs and outputs of the result.
      scheme: what is quantized, and how.
      examples: calibration data, batches of inputs in the order of the model's.
      method: as in `quantize`.
      keep_norms: keep a BatchNormalization, for training, if the weight of the convolution before
        it has a scale for each output channel; `fold` writes it into these scales. All others are
        folded into the weights at once.

    Raises:
      InputError: the model is quantized already or has adapters, or the scheme does not fit it.
    """
    refuse_change(model, "the types")
    if record_of(model.proto) is not None or is_quantized(model):
        raise InputError(
            "the model is quantized already: jaxonnx.load(path, dequantize=True) has it in "
            "floating point, and jaxonnx.train(..., quantize=) trains it at its own scales"
        )
    unfolded, hides_caches = (
        _with_opset(model, scheme.opset),
        model.program.find(EmptyCaches) is not None,
    )
    model = _fold_norms(unfolded)
    whole = model.without_cache() if hides_caches else model
    tensors = model.tensors
    types = _value_types(whole, examples[0])
    where = model.graph, tensors, types, model._places
    left_out = model._factors, model.program.constants
    sites = find_sites(*where, scheme, *left_out)
    schemes = dict.fromkeys(sites.weights, scheme)
    if scheme.bits == "auto":
        schemes = _choose_types(whole, sites.weights, examples, scheme)
        chosen = replace(scheme, where=lambda name, _: name in schemes, skip=None)
        sites = find_sites(*where, chosen, *left_out)
    squares: dict[str, np.ndarray] = {}
    if method == "awq":
        values, squares = scale_inputs(whole, sites.weights, examples, schemes)
        model, whole = _with_values(model, values), _with_values(whole, values)
        tensors = model.tensors
    ranges = calibrate(whole, sites.values, sites.shared, examples, scheme)
    # `calibrate` leaves attention masks out. A node that reads one stays in floating point with all
    # of its inputs: runtimes compute with integers only where every input is quantized
    masked = {output for (output, _), name in sites.reads.items() if name not in ranges}
    reads = {place: name for place, name in sites.reads.items() if place[0] not in masked}
    norms = folded_outputs(unfolded.graph, unfolded.tensors) if keep_norms else {}
    norms = {name: pair for name, pair in norms.items() if _scales_channels(sites, name, schemes)}
    if norms:
        model = _fold_norms(unfolded, norms)
        outputs = [norm for _, norm in norms.values()]
        model = _with_values(model, flip_negative_scales(model.graph, outputs, model.tensors))
        tensors = model.tensors
        convs = {norm: conv for conv, norm in norms.values()}
        reads = {(convs.get(node, node), i): name for (node, i), name in reads.items()}
    writer = Writer(model.proto, {*tensors, *(value.name for value in model.inputs)})
    writer.keep_norms(norm for _, norm in norms.values())
    biases = {bias.weight: bias for bias in sites.biases if bias.value in ranges}

    def fit(name: str, squares: np.ndarray | None) -> Parameters:
        """Choose the scales of a weight, by the mean squares of its inputs where they are known."""
        w = np.asarray(tensors[name])
        parameters = weight_parameters(w, sites.weights[name], schemes[name], squares)
        if bias := biases.get(name):
            parameters = fit_bias(parameters, tensors[bias.name], float(ranges[bias.value].scale))
        return parameters

    scales: dict[str, Parameters] = {}
    if method == "gptq":
        values, scales = round_weights(whole, sites.weights, examples, schemes, fit)
        model = _with_values(model, values)
    scales = {n: scales[n] if n in scales else fit(n, squares.get(n)) for n in sites.weights}
    for name, parameters in scales.items():
        writer.quantize_weight(name, parameters)
    writer.quantize_values(reads, ranges, sites.shared)
    writer.quantize_outputs((n for n in sites.outputs if n in ranges), ranges)
    writer.store_biases((b.name, b.value, b.weight) for b in sites.biases if b.value in ranges)
    if method == "round":
        values = learn_rounding(whole, sites, scales, examples, schemes)
        learned = {name: jnp.asarray(value) for name, value in values.items()}
        model = model.replace(params={**model.params, **learned})
    return with_file(model, writer.finish(), writer.added)


def _compare_with_minmax(
    model: Model, quantized: Model, scheme: Quantization, examples: Sequence[Sequence[Any]]
) -> None:
    """Warn if a calibration that clips has outputs further from the float ones than "minmax"."""
    if scheme.activations is None or scheme.calibration in ("minmax", "mse"):
        return
    plain = _insert(model, replace(scheme, calibration="minmax"), examples)
    used = examples[:_COMPARED]
    found, least = (_measure_distances(model, net, used) for net in (quantized, plain))
    if (found > _NOISE * least).all():
        warnings.warn(
            f"calibration={scheme.calibration!r} changes the outputs on the calibration data by "
            f"{found.mean():.2%}, 'minmax' by {least.mean():.2%} (root mean square, of that of "
            "the outputs): pass calibration='minmax' or 'mse'",
            stacklevel=3,
        )


def _measure_distances(
    model: Model, quantized: Model, examples: Sequence[Sequence[Any]]
) -> np.ndarray:
    """Measure the change of floating-point outputs of each batch, relative to their size."""
    other = _hide_caches(quantized, model)
    distances = []
    for inputs in examples:
        pairs = [*zip(*(jax.tree.leaves(net(*inputs)) for net in (model, other)), strict=True)]
        floats = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)]
        change = sum(float(jnp.square(x - y).sum()) for x, y in floats)
        size = sum(float(jnp.square(x).sum()) for x, _ in floats)
        distances.append(np.sqrt(change / size) if size else 0.0)
    return np.array(distances)


def _hide_caches(model: Model, before: Model) -> Model:
    """Return a model with empty caches if the one that it was made of has them."""
    return model if before.program.find(EmptyCaches) is None else model.without_cache()


def _scales_channels(sites: Sites, weight: str, schemes: Mapping[str, Quantization]) -> bool:
    """Check whether a weight gets a scale for each output channel, along its first axis."""
    site = sites.weights.get(weight)
    return site is not None and site.output == 0 and schemes[weight].per_channel


def _choose_types(
    model: Model,
    sites: Mapping[str, WeightSite],
    examples: Sequence[Sequence[Any]],
    scheme: Quantization,
) -> dict[str, Quantization]:
    """Choose int8 or int4 for each weight by its error alone (`bits="auto"`).

    Returns:
      A scheme for each weight; weights that stay float32 are left out.
    """
    kinds = ("int8", "int4")
    schemes: dict[str, Quantization] = {
        kind: replace(scheme, weights=kind, bits=None, size=None) for kind in kinds
    }
    sites = {name: site for name, site in sites.items() if name in model.params}
    errors = measure(model, sites, examples[:4], schemes)
    sizes = {name: int(model.params[name].size) for name in sites}
    types = choose_types(errors, sizes, scheme.size or 1)
    return {name: schemes[kind] for name, kind in types.items() if kind is not None}


def _value_types(model: Model, inputs: Sequence[Any]) -> dict[str, np.dtype]:
    """Return the dtypes of the values of the main graph that are arrays, by abstract evaluation.

    Args:
      inputs: one batch, in the order of the model's inputs.
    """
    names = [value.name for value in model.inputs]
    results = [name for node in model.graph.nodes for name in node.outputs if name]
    program = model.program.with_values(results)

    def evaluate(params, state, inputs):
        outputs = program.evaluate(params, state, dict(zip(names, inputs, strict=True)))
        return [x if isinstance(x, jax.Array | np.ndarray) else None for x in outputs]

    shapes = jax.eval_shape(evaluate, model.params, model.state, tuple(inputs))
    types = {
        name: np.dtype(x.dtype)
        for name, x in zip(results, shapes[len(model.graph.outputs) :], strict=True)
        if x is not None
    }
    given = {n: np.dtype(jnp.result_type(x)) for n, x in zip(names, inputs, strict=True)}
    return types | given


def _fold_norms(model: Model, keep: Collection[str] = ()) -> Model:
    """Fold each BatchNormalization into the convolution before it."""
    proto, values = fold_norms(model.proto, model.graph, model.tensors, keep)
    net = _with_values(with_file(model, proto), values)
    return net.with_outputs(net.graph.outputs)  # drops the statistics that no node reads any more


def _with_values(model: Model, values: Mapping[str, np.ndarray]) -> Model:
    """Replace the values of some parameters, state or constants."""
    new = {name: jnp.asarray(value) for name, value in values.items()}
    params, state = (
        {name: new.get(name, x) for name, x in group.items()}
        for group in (model.params, model.state)
    )
    constants = {n: values.get(n, x) for n, x in model.program.constants.items()}
    program = dataclasses.replace(model.program, constants=constants)
    return dataclasses.replace(model, params=params, state=state, program=program)


def _with_opset(model: Model, opset: int) -> Model:
    """Convert the model to an opset if its own is older.

    Raises:
      InputError: the installed onnx does not have the opset, or cannot convert the model.
    """
    if opset_of(model.proto) >= opset:
        return model
    if onnx.defs.onnx_opset_version() < opset:
        raise InputError(
            f"the scheme needs opset {opset}, and the installed onnx {onnx.__version__} has "
            f"{onnx.defs.onnx_opset_version()}: update it, or choose another type"
        )
    try:
        proto = model.to_onnx()
        if proto.functions:  # the converter drops them; the inliner converts them with known types
            typed = onnx.shape_inference.infer_shapes(proto)
            proto = onnx.inliner.inline_local_functions(typed, convert_version=True)
        proto = onnx.version_converter.convert_version(proto, opset)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the scheme needs opset {opset}, the file has {opset_of(model.proto)}, and ONNX's "
            f"converter does not take it: {error}"
        ) from error
    net = replace(load(proto), folder=model.folder)
    inlined = net.params.keys() - model.tensors.keys()  # constants of functions have new names
    return net.with_trainable(lambda name, _: name in model.params or name in inlined)
