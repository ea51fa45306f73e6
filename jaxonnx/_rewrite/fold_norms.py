"""BatchNormalization of inference written into the convolution before it, as deployment has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from jaxonnx._graph.bind import Graph
from jaxonnx._run.fold_norms import folds


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
    folded = folds(graph, tensors)
    convs = {node.outputs[0]: node for node in graph.nodes if node.outputs}
    norms, values = {}, {}
    for node in graph.nodes:
        weight = convs[node.inputs[0]].inputs[1] if node.index in folded.norms else ""
        if not weight or weight in keep:
            continue
        norms[node.outputs[0]], bias = node, node.inputs[2]
        w, factor = np.asarray(tensors[weight]), folded.factors[weight]
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
