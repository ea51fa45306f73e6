"""`quantize`, after training, and `sensitivity`, which measures its cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from onnx import ModelProto

from jaxonnx._compare.written import compare_written, make_origin, warn_unproven
from jaxonnx._data.batches import Source, iterate_inputs
from jaxonnx._data.kinds import open_data as open_kind
from jaxonnx._require import check_arguments, require_integer
from jaxonnx._rewrite.network import enter, leave, reenter, refuse_change
from jaxonnx.errors import InputError
from jaxonnx.losses import is_loss
from jaxonnx.model import (
    Model,
    add_states,
    as_model,
    fill_source,
    fit_to_batch,
    inputs_alone,
    raise_opset,
    read_inputs,
    start_at_zeros,
)
from jaxonnx.quantization import (
    Bound,
    Quantization,
    Rounding,
    Sensitivity,
    insert,
    insert_within,
    is_quantized,
    make_trials,
    measure,
    output_error,
    spell_out,
)
from jaxonnx.training._data import check_compiles, fit_to_evaluation, open_data, read_data
from jaxonnx.training._evaluate import evaluate_objective
from jaxonnx.training._loop.stopping import find_direction
from jaxonnx.training._objective import find_objective
from jaxonnx.training._objective.needs import complete_batches, prepare_model
from jaxonnx.training._settings import Settings
from jaxonnx.views import BatchAxis, CallView, FixedInputs

BATCHES = 16
"""The batches that ranges are measured on."""


def quantize(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any,
    scheme: str | Quantization = "int8",
    *,
    batch_size: int | None = None,
    batches: int = BATCHES,
    preprocess: Any = None,
    max_loss: float | None = None,
    metric: str | Callable | None = None,
    validation: Any = None,
    check: bool = True,
    method: Literal["gptq", "awq"] | None = None,
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
      batch_size: the number of examples per batch. Iterables have batches of their own.
      batches: the number of batches to calibrate on. Of data in one piece, with more examples than
        that, these are drawn at random, in each call the same; of an iterable they are the first.
      preprocess: as in `jaxonnx.train`, for folders of images and texts.
      max_loss: what may be lost, in units of `metric`: 0.005 is half a point of accuracy. Weights
        and activations stay in more bits than the scheme's, or in floating point, as far as that
        needs. The errors of single tensors (`jaxonnx.sensitivity`) say which come first. Types of
        16 bits need opset 21.
      metric: the metric of `max_loss`: a name as in `jaxonnx.evaluate`, like "accuracy", or a loss
        as in `jaxonnx.train`, a name or a function of outputs and targets. By default it is the
        squared change of the outputs relative to their squares, for which data need no targets.
      validation: the data that `metric` is evaluated on, or the share of `data` that is held out
        for it; with a `metric` 0.2 by default, else the batches that ranges are measured on.
      check: compare the file that `save` writes with the model, in onnxruntime where it is
        installed, on random inputs; and where the scheme needs a newer opset than the model's, the
        file in that opset with the model's. A warning says so where this is not possible.
      method: how weights are rounded, by their inputs on the data instead of each to the nearest
        value. The layers' outputs change less; compare the methods on held-out data.

        * "gptq" rounds the matrices of MatMul, Gemm and pointwise Conv one input at a time. The
          remaining ones make up for the error (GPTQ, arXiv:2210.17323).
        * "awq" scales inputs of MatMul and Gemm such that the weights of large ones lose less, and
          divides what computes them, such as a normalization (AWQ, arXiv:2306.00978).

        Weights that a method does not take are rounded to the nearest values.

    Returns:
      A model with the same inputs and outputs. Its parameters are those of `model`, after folding.
      With `max_loss`, its `sensitivity` has the errors of the tensors and the choices that were
      tried.

    Raises:
      InputError: the scheme does not fit the model, the model is already quantized, the data yield
        no ranges, or `max_loss` is met in floating point only (the message has the choices that
        were tried, and what the best of them loses).
      ModelError: `check` finds a difference that ties of rounding do not explain, or onnxruntime
        refuses the file; the message names the first node that differs.
      TrainingError: the data do not fit the model.
    """
    check_arguments(quantize, locals())
    require_integer("batches", batches)
    net, rule = as_model(model), Quantization.of(scheme)
    if max_loss is not None:
        rule = replace(rule, max_loss=max_loss)
    if rule.max_loss is None and (metric is not None or validation is not None):
        raise InputError("metric and validation go with max_loss, which is None")
    # 1. the network with empty caches, batches of its inputs, and data to evaluate it on
    options = {"batch_size": batch_size, "preprocess": preprocess}
    held_out = None
    if metric is not None:
        whole, source, held_out = _read_labeled(net, data, validation, metric, options, batches)
    else:
        whole, source = read_examples(net, data, batches=batches, **options)
        if validation is not None:
            _, held_out = read_examples(net, validation, **options)
    examples = [*iterate_inputs(islice(source.batches(0), batches), whole.inputs)]
    # 2. what may be lost
    bound = None
    if rule.max_loss is not None:
        if metric is not None:
            evaluate = make_evaluation(metric, held_out, whole)
        else:
            compared = held_out and [*iterate_inputs(held_out.batches(0), whole.inputs)]
            evaluate = output_error(whole, compared or examples)
        bound = Bound(rule.max_loss, evaluate, str(metric or "the outputs"))
    # 3. the ranges, the scales, and the nodes that round
    quantized = insert_rounding(whole, rule, examples, method, bound=bound, check=check)
    # 4. the file beside the network, in onnxruntime
    if check and (reason := compare_quantized(quantized, rule)):
        warn_unproven(reason)
    if net.program.find(BatchAxis) is None:
        quantized = leave(quantized, BatchAxis)
    return reenter(quantized, net)


def insert_rounding(
    model: Model,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: Literal["gptq", "awq"] | None = None,
    *,
    keep_norms: bool = False,
    bound: Bound | None,
    check: bool,
) -> Model:
    """Round a model by a scheme (`quantization.insert`), in an opset that has its types.

    Args:
      bound: what may be lost, if the scheme has `max_loss`.
      check: compare the file in a newer opset with the model's.

    Raises:
      InputError: the model is quantized already or has adapters, or the scheme does not fit it.
      ModelError: the file computes something else in the opset of the scheme.
    """
    refuse_change(model, "the types")
    if model.program.find(Rounding) is not None or is_quantized(model):
        raise InputError(
            "the model is quantized already: jaxonnx.load(path, dequantize=True) has it in "
            "floating point, and jaxonnx.train(..., quantize=) trains it at its own scales"
        )
    converted = raise_opset(model, scheme.opset, check=check)
    if converted is not model:  # its inputs may be fixed, and mapped
        calls = (v for v in model.program.views if isinstance(v, CallView) and v.stays)
        converted = enter(converted, *calls)
    converted = reenter(converted, model)
    if scheme.activations is not None and scheme.dialect == "onnxruntime":
        converted = spell_out(converted)
    if bound is not None:
        return insert_within(converted, scheme, examples, method, bound, keep_norms=keep_norms)
    return insert(converted, scheme, examples, method, keep_norms=keep_norms)


def compare_quantized(model: Model, scheme: Quantization) -> str:
    """Compare the file of a quantized model with the model, by onnxruntime.

    Returns:
      Why it was not compared; "" if it was.

    Raises:
      ModelError: onnxruntime refuses the file, and not the one that was loaded; or it computes
        something else, as of a node.
    """
    whole = leave(model, CallView)
    return compare_written(
        "the quantized file",
        whole.to_onnx,
        make_origin(whole, partial(fill_source, whole)),
        rounded=True,
        optimized=scheme.dialect == "onnxruntime",
    )


def read_examples(
    model: Model, data: Any, batch_size: int | None, preprocess: Any, batches: int | None = None
) -> tuple[Model, Source]:
    """Read calibration data: arrays, a file, a folder of images, texts, an iterable of batches.

    Args:
      batches: how many stand for all data; None: all of them are read.

    Returns:
      The model, with empty caches if the data has none, mapped over a batch if it takes one
      example; and batches of its inputs.

    Raises:
      TrainingError: the data do not fit the model.
    """
    check_compiles(model)
    opened = open_kind(data, labels=False)
    net = prepare_model(model, None, inputs_alone(model, opened.first_batch))
    started, _ = fit_to_batch(net, inputs_alone(net, opened.first_batch))
    examples = read_inputs(
        started, opened, per_row=False, batch_size=batch_size, preprocess=preprocess
    )
    examples = examples if batches is None else examples.sample(batches)
    mapped = started.program.find(BatchAxis)
    if mapped is not None and mapped is not net.program.find(BatchAxis):
        net = enter(net, mapped)
    return net, add_states(net, started, examples)


def _read_labeled(
    net: Model, data: Any, validation: Any, metric: Any, options: Any, batches: int
) -> tuple[Model, Source, Any]:
    """Read calibration data, and data with targets that a metric is evaluated on.

    Returns:
      The model, fitted to the data; batches of its inputs; batches with targets.
    """
    split = validation is None or isinstance(validation, int | float)
    share = 0.2 if validation is None else validation
    loss = metric if is_loss(metric) else None
    settings = Settings(validation=share if split else None, loss=loss, **options)
    labeled = open_data(data if split else validation, settings)
    fitted = fit_to_evaluation(net, settings, labeled.data.first_batch)
    sources = read_data(fitted, settings, labeled, training=split)
    if split:
        open_ = _free_states(sources.model, net)
        return open_, add_states(open_, sources.model, sources.examples), sources.held_out
    return *read_examples(net, data, batches=batches, **options), sources.examples


def _free_states(model: Model, before: Model) -> Model:
    """Return a model whose recurrent states are inputs again, as they are of the one before."""
    fixed = model.program.find(FixedInputs)
    if fixed is None or fixed is before.program.find(FixedInputs):
        return model
    at = [view is fixed for view in model.program.views].index(True)
    views = (*model.program.views[:at], *model.program.views[at + 2 :])  # with their outputs
    return replace(model, program=replace(model.program, views=views))


def make_evaluation(metric: Any, examples: Any, before: Model) -> Callable[[Model], float]:
    """Return a function that evaluates a metric or loss of a model, where greater is worse.

    Models that differ in their tensors only are compiled once. Recurrent states that the examples
    lack start at zeros.

    Args:
      before: the model in floating point, with which a loss may compare.
    """
    goals: dict[int, tuple[Any, Any]] = {}
    if is_loss(metric):
        batch = next(examples.batches(0))
        start, _ = start_at_zeros(before, (batch.inputs, batch.targets))
        _, examples = complete_batches(prepare_model(start, metric), metric, [None, examples], 0)

    def evaluate(model: Model) -> float:
        program = model.program
        if id(program) not in goals:
            batch = next(examples.batches(0))
            model, _ = start_at_zeros(model, (batch.inputs, batch.targets))
            if is_loss(metric):
                goal = find_objective(prepare_model(model, metric), metric, ())
            else:
                goal = find_objective(prepare_model(model, None), None, [metric])
            goals[id(program)] = program, goal  # the program lives as long as its id is a key
        _, goal = goals[id(program)]
        like = replace(goal.model, params=model.params, state=model.state)
        (value,) = evaluate_objective(goal, examples, (), False, like).values()
        if not isinstance(value, float):
            raise InputError(f"metric={metric!r} is a table: pass a metric that is a number")
        return value if is_loss(metric) else find_direction(metric)[1] * value

    return evaluate


def sensitivity(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any,
    types: Sequence[str] = ("int8", "int4"),
    *,
    activations: Sequence[str] = (),
    batch_size: int | None = None,
    batches: int = 4,
    preprocess: Any = None,
) -> Sensitivity:
    """Measure the error of the outputs when one tensor at a time is quantized or made sparse.

    Each weight is rounded with one scale per channel, while all other weights and all activations
    stay in floating point; likewise each activation. Labels are not needed. The errors of several
    tensors add up approximately.

    >>> import numpy as np, jaxonnx
    >>> from jaxonnx import demo
    >>> x = np.random.default_rng(0).random((32, 1, 8, 8), np.float32)
    >>> found = jaxonnx.sensitivity(demo.mlp(), x, ("int8", "int4", "2:4"))
    >>> found.errors["body_weight"]["int8"] < found.errors["body_weight"]["int4"]
    True

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      data: inputs in any form that `Model.predict` accepts, or texts as in `jaxonnx.train`.
      types: dtypes of weights like "int8", or sparsity patterns like "2:4".
      activations: dtypes of activations like "uint8". The inputs of layers are rounded as
        `jaxonnx.quantize` rounds them, in ranges measured on the same batches.
      batch_size: the number of examples per batch. Iterables have batches of their own.
      batches: the number of batches to compare outputs on, chosen as in `quantize`.
      preprocess: as in `jaxonnx.train`, for folders of images and texts.

    Returns:
      The errors of all weights of Conv, ConvTranspose, Gemm, MatMul, RNN, GRU and LSTM, and of the
      activations. The error of a pattern is infinite for a weight whose shape does not fit it.

    Raises:
      InputError: the model has no such weight, or there is no such dtype or pattern.
      TrainingError: the data do not fit the model.
    """
    check_arguments(sensitivity, locals())
    require_integer("batches", batches)
    net = as_model(model)
    net, source = read_examples(net, data, batch_size, preprocess, batches)
    examples = [*iterate_inputs(islice(source.batches(0), batches), net.inputs)]
    schemes = {kind: None if ":" in kind else Quantization.of(kind) for kind in types}
    if not activations:  # the errors are those of files whose weights alone are rounded
        schemes = {k: s and replace(s, activations=None) for k, s in schemes.items()}
    scheme = Quantization(activations=activations[0] if activations else None)  # type: ignore[arg-type]
    trials = make_trials(net, scheme, schemes, activations, examples)
    sites = {name: site for name, site in trials.sites.items() if name in net.params}
    kinds = dict.fromkeys(sites, types) | dict.fromkeys(trials.levels, activations)
    errors = measure(trials.network, kinds, trials.change, examples)
    return Sensitivity(errors, {name: trials.sizes[name] for name in kinds})
