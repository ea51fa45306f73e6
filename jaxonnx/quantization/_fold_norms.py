"""BatchNormalization in the convolution before it, as deployment has it.

In a file of floats its factor is in the weights (`fold_norms`). Weights that are trained through
rounding are another case.

A scale per output channel is free to take in another factor per output channel. So training keeps
the BatchNormalization, with statistics of the batch, behind the product with the rounded weight,
and the saved file has its factor f = scale / sqrt(var + epsilon) in the scales of the weight: the
integers stay those that were trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import GraphProto, ModelProto

from jaxonnx._graph.bind import Graph
from jaxonnx._run.fold_norms import folds, read_names


def fold_norms(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], keep: Collection[str] = ()
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Fold BatchNormalization into the convolution before it, in a file (see `_run.fold_norms`).

    Args:
      proto: the file.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      keep: the weights of convolutions whose BatchNormalization stays.

    Returns:
      The new file, and new values of the convolutions' weights (output channels first) and of the
      tensors that were the B of a BatchNormalization and now are the bias of its convolution. The
      file still has the initializers of scale, mean and variance, which no node reads.
    """
    folded, norms, values = folds(graph, tensors), {}, {}
    for weight, (_, output) in folded_outputs(graph, tensors).items():
        if weight in keep:
            continue
        norms[output] = node = graph.producers[output]
        bias, w, factor = node.inputs[2], np.asarray(tensors[weight]), folded.factors[weight]
        values[weight] = w * factor.reshape(-1, *(1,) * (w.ndim - 1))
        values[bias] = np.asarray(folded.biases[bias])
    before = {node.inputs[0]: node for node in norms.values()}
    result = ModelProto()
    result.CopyFrom(proto)
    nodes = result.graph.node
    for i, node in reversed([*enumerate(nodes)]):
        if node.output and node.output[0] in norms:
            del nodes[i]
    for node in nodes:
        if node.output and node.output[0] in before:
            norm = before[node.output[0]]
            node.input[2:] = [norm.inputs[2]]
            node.output[0] = norm.outputs[0]
    return result, values


def folded_outputs(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the pairs that `fold_norms` folds.

    Returns:
      By the name of a convolution's weight: the output of the convolution, and that of its
      BatchNormalization.
    """
    norms = folds(graph, tensors).norms
    convs = {node.outputs[0]: node for node in graph.nodes if node.outputs}
    return {
        convs[node.inputs[0]].inputs[1]: (node.inputs[0], node.outputs[0])
        for node in graph.nodes
        if node.index in norms
    }


def flip_negative_scales(
    graph: Graph, norms: Collection[str], tensors: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return values that make the scales of BatchNormalizations positive, for the same function.

    Where a scale is negative, so become the channel's weight, mean and bias of the convolution.
    Otherwise the saved file would have the negated integers, and -128 has no counterpart in int8.
    A pair that shares one of these tensors with another node stays as it is.

    Args:
      graph: the main graph, bound.
      norms: the outputs of the BatchNormalizations, each of which follows a convolution.
      tensors: the values of its named tensors.
    """
    times = Counter(read_names(graph))
    values = {}
    for name in norms:
        x, scale, _, mean, _ = graph.producers[name].inputs[:5]
        conv = graph.producers[x]
        names = (scale, mean, *conv.inputs[1:])
        sign = np.where(np.asarray(tensors[scale]) < 0, -1, 1)
        if any(times[each] > 1 for each in names):
            continue
        for each in names:
            x = np.asarray(tensors[each])
            values[each] = x * sign.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    return values


def fold_rounded_norms(
    graph: GraphProto, norms: Iterable[str], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Fold BatchNormalizations into the scales of quantized weights and biases of convolutions.

    Args:
      graph: a graph whose integer weights are initializers; its nodes are changed in place.
      norms: the outputs of the BatchNormalizations.
      values: of the initializers.

    Returns:
      New values of scales, biases (which have the name of the BatchNormalization's B), and integer
      weights, which change their sign where f < 0.
    """
    makers = {name: node for node in graph.node for name in node.output}
    changed: dict[str, np.ndarray] = {}
    for name in norms:
        norm = makers[name]
        conv = makers[norm.input[0]]
        dequantize = makers[conv.input[1]]
        stored, scale, *point = dequantize.input
        # the factor and the shift by channel, in float64; the shift is stored in the file's type
        epsilon = next((part.f for part in norm.attribute if part.name == "epsilon"), 1e-5)
        gain, b, mean, var = (values[n].astype(np.float64) for n in norm.input[1:5])
        factor = gain / np.sqrt(var + epsilon)
        bias = sum(values[n].astype(np.float64) for n in conv.input[2:])
        shift = ((bias - mean) * factor + b).astype(values[norm.input[2]].dtype)
        # a scale of 0 has no inverse, which the scale of an int32 bias needs: the integers are 0
        width = np.where(factor == 0, 1, np.abs(factor))
        changed[scale] = (values[scale] * width).astype(values[scale].dtype)
        changed[stored] = _turn(values[stored], np.sign(factor), *(values[n] for n in point))
        changed[norm.input[2]] = shift
        conv.input[2:] = [norm.input[2]]
        conv.output[0] = name
        graph.node.remove(norm)
    return changed


def _turn(stored: np.ndarray, sign: np.ndarray, point: np.ndarray | None = None) -> np.ndarray:
    """Multiply the distances of integers (outputs, ...) from their zero point by -1, 0 or 1."""
    if (sign == 1).all():
        return stored
    rows = (-1, *(1,) * (stored.ndim - 1))
    middle = np.float32(0) if point is None else point.astype(np.float32).reshape(rows)
    moved = middle + sign.astype(np.float32).reshape(rows) * (stored.astype(np.float32) - middle)
    integer = jnp.issubdtype(stored.dtype, jnp.integer)
    limits = (ml_dtypes.iinfo if integer else ml_dtypes.finfo)(stored.dtype)
    # 127 for the 128 that an int8 of -128 would become
    return np.clip(moved, np.float32(limits.min), np.float32(limits.max)).astype(stored.dtype)
