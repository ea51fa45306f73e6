"""`sensitivity`: a model and data in, its errors out; and what quantizes a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from onnx import ModelProto

from jaxonnx._compare.written import compare_written, make_origin
from jaxonnx._data.batches import Source, iterate_inputs
from jaxonnx._data.kinds import open_data
from jaxonnx._require import check_arguments, require_integer
from jaxonnx._rewrite.network import hide_caches, leave, reenter, refuse_change
from jaxonnx.errors import InputError
from jaxonnx.model._convert import raise_opset
from jaxonnx.model._load import as_model
from jaxonnx.model._model import Model
from jaxonnx.model._predict import read_inputs
from jaxonnx.model._recurrent_states import add_states, inputs_alone, start_at_zeros
from jaxonnx.model._save import fill_source
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
    spell_out,
)
from jaxonnx.views import CallView


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
      batch_size: the number of examples per batch. Ignored for iterables.
      batches: the number of batches to compare outputs on.
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
    net, source = read_examples(net, data, batch_size, preprocess)
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


def read_examples(
    model: Model, data: Any, batch_size: int | None, preprocess: Any
) -> tuple[Model, Source]:
    """Read calibration data: arrays, a file, a folder of images, texts, an iterable of batches.

    Returns:
      The model, with empty caches if the data has none, and batches of its inputs.

    Raises:
      TrainingError: the data do not fit the model.
    """
    opened = open_data(data, labels=False)
    net = hide_caches(model, inputs_alone(model, opened.first_batch))
    started, _ = start_at_zeros(net, inputs_alone(net, opened.first_batch))
    options: Any = {"batch_size": batch_size, "preprocess": preprocess}
    return net, add_states(net, started, read_inputs(started, opened, per_row=False, **options))


def insert_rounding(
    model: Model,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: Literal["gptq", "awq"] | None = None,
    *,
    keep_norms: bool = False,
    bound: Bound | None = None,
    check: bool = True,
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
    converted = reenter(raise_opset(model, scheme.opset, check=check), model)
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
