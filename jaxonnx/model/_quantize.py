"""`quantize` and `sensitivity`: a model and data in, a quantized model or its errors out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

from onnx import ModelProto

from jaxonnx._data.batches import Source
from jaxonnx._data.images.folder import list_folder
from jaxonnx._data.ragged import PLAIN
from jaxonnx._data.rows import Rows, open_rows
from jaxonnx._data.texts import read_texts
from jaxonnx._require import check_arguments, require_integer
from jaxonnx._rewrite.network import refuse_change
from jaxonnx.errors import InputError
from jaxonnx.model._convert import raise_opset
from jaxonnx.model._load import as_model
from jaxonnx.model._model import Model
from jaxonnx.model._predict import hide_caches, read_inputs
from jaxonnx.quantization import (
    Quantization,
    Rounding,
    Sensitivity,
    find_weights,
    insert,
    is_quantized,
    measure,
)
from jaxonnx.views import EmptyCaches

_BATCHES = 16
"""The batches that ranges are measured on."""


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
    whole, source = _read_examples(net, data, batch_size, preprocess)
    examples = [batch.inputs for batch in islice(source.batches(0), batches)]
    return _hide_caches(insert_rounding(whole, Quantization.of(scheme), examples, method), net)


def sensitivity(
    model: Model | str | os.PathLike | bytes | ModelProto,
    data: Any,
    types: Sequence[str] = ("int8", "int4"),
    *,
    batch_size: int | None = None,
    batches: int = 4,
    preprocess: Any = None,
) -> Sensitivity:
    """Measure the error of the outputs when one weight at a time is quantized or made sparse.

    Each weight is rounded with one scale per channel, while all other weights and all activations
    stay in floating point. Labels are not needed. The errors of several weights add up
    approximately.

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
      batch_size: the number of examples per batch. Ignored for iterables.
      batches: the number of batches to compare outputs on.
      preprocess: as in `jaxonnx.train`, for folders of images and texts.

    Returns:
      The errors of all weights of Conv, ConvTranspose, Gemm, MatMul, RNN, GRU and LSTM. The error
      of a pattern is infinite for a weight whose shape does not fit it.

    Raises:
      InputError: the model has no such weight, or there is no such dtype or pattern.
      TrainingError: the data do not fit the model.
    """
    check_arguments(sensitivity, locals())
    require_integer("batches", batches)
    net = as_model(model)
    net, source = _read_examples(net, data, batch_size, preprocess)
    chosen = net.params.keys() - net._factors
    sites = {n: s for n, s in find_weights(net.graph, net.tensors).items() if n in chosen}
    if not sites:
        raise InputError(
            "the model has no weight that can be quantized; print(model) lists its tensors"
        )
    examples = [batch.inputs for batch in islice(source.batches(0), batches)]
    schemes = {kind: None if ":" in kind else Quantization.of(kind) for kind in types}
    errors = measure(net, sites, examples, schemes)
    return Sensitivity(errors, {name: int(net.params[name].size) for name in sites})


def _read_examples(
    model: Model, data: Any, batch_size: int | None, preprocess: Any
) -> tuple[Model, Source]:
    """Read calibration data: arrays, a file, a folder of images, texts, an iterable of batches.

    Returns:
      The model, with empty caches if the data has none, and batches of its inputs.

    Raises:
      TrainingError: the data do not fit the model.
    """
    net, padding = hide_caches(model, data), PLAIN
    data = open_rows(data, "data")
    if isinstance(data, Rows):
        data, _, padding, *_ = read_texts(data, None, net, preprocess, PLAIN)
    else:
        data = list_folder(data, net, preprocess)
    return net, read_inputs(net, data, batch_size, padding)


def insert_rounding(
    model: Model,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: Literal["round", "gptq", "awq"] | None = None,
    *,
    keep_norms: bool = False,
) -> Model:
    """Round a model by a scheme (`quantization.insert`), in an opset that has its types.

    Raises:
      InputError: the model is quantized already or has adapters, or the scheme does not fit it.
    """
    refuse_change(model, "the types")
    if model.program.find(Rounding) is not None or is_quantized(model):
        raise InputError(
            "the model is quantized already: jaxonnx.load(path, dequantize=True) has it in "
            "floating point, and jaxonnx.train(..., quantize=) trains it at its own scales"
        )
    converted = _hide_caches(raise_opset(model, scheme.opset), model)
    return insert(converted, scheme, examples, method, keep_norms=keep_norms)


def _hide_caches(model: Model, before: Model) -> Model:
    """Return a model with empty caches if the one that it was made of has them."""
    return model if before.program.find(EmptyCaches) is None else model.without_cache()
