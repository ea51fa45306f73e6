"""Cross-layer equalization: channels of consecutive layers get ranges of the same size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx.model import Model
from jaxonnx.quantization._sites import WeightSite, find_weights

_HOMOGENEOUS = ("Identity", "Dropout", "Relu", "LeakyRelu", "MaxPool")
"""Operators with f(s x) = s f(x) for s > 0, channel by channel."""
_SWEEPS = 20


class Pair(NamedTuple):
    """Two layers, of which only the second reads the result of the first."""

    first: str
    """The weight of the first layer."""
    bias: str
    """The bias of the first layer; "" if there is none."""
    output: int
    """The axis of the first weight along its outputs."""
    second: str
    """The weight of the second layer."""
    input: int
    """The axis of the second weight along the same channels."""


def equalize_channels(model: Model) -> Model:
    """Return the model with rescaled channels, which computes the same function.

    The outputs of a layer are divided by factors that the next layer multiplies its weights with,
    so that each channel has the same greatest weight in both ("Data-Free Quantization Through
    Weight Equalization and Bias Correction", arXiv:1906.04721). Layers are Conv and Gemm with Relu,
    LeakyRelu, MaxPool or nothing between them.
    """
    params = {name: np.asarray(x) for name, x in model.params.items()}
    pairs = _find_pairs(model.graph, find_weights(model.graph, model.tensors), params)
    # A layer belongs to two pairs, with the layers before and after it, so that equalizing one pair
    # upsets the other: repeat. The fixed point of `factor` is before == after.
    for _ in range(_SWEEPS):
        for pair in pairs:
            one, two = params[pair.first], params[pair.second]
            before, after = _greatest(one, pair.output), _greatest(two, pair.input)
            some = (before > 0) & (after > 0)
            factor = np.ones_like(before)
            factor[some] = np.sqrt(before[some] / after[some])
            params[pair.first] = one / _along(factor, one, pair.output)
            params[pair.second] = two * _along(factor, two, pair.input)
            if pair.bias:
                params[pair.bias] = params[pair.bias] / factor
    changed = {name for pair in pairs for name in (pair.first, pair.bias, pair.second) if name}
    return model.replace(params={**model.params, **{n: jnp.asarray(params[n]) for n in changed}})


def _greatest(w: np.ndarray, axis: int) -> np.ndarray:
    """Return the greatest |w| of each channel along `axis`."""
    return np.abs(w).max(axis=tuple(i for i in range(w.ndim) if i != axis))


def _along(factor: np.ndarray, w: np.ndarray, axis: int) -> np.ndarray:
    """Reshape a vector so that it broadcasts along `axis` of a weight."""
    return factor.reshape(-1, *(1,) * (w.ndim - 1 - axis))


def _find_pairs(
    graph: Graph, sites: Mapping[str, WeightSite], params: Mapping[str, np.ndarray]
) -> list[Pair]:
    """Find the pairs of layers with only homogeneous operators between them."""
    times = Counter(name for node in graph.nodes for name in node.reads)
    times.update(graph.outputs)
    readers = {name: node for node in graph.nodes for name in node.inputs}
    layers = {n.outputs[0]: n for n in graph.nodes if _is_layer(n, sites, params, times)}
    pairs = []
    for value, one in layers.items():
        while times[value] == 1 and value in readers and _is_homogeneous(readers[value]):
            value = readers[value].outputs[0]
        two = layers.get(readers[value].outputs[0]) if value in readers else None
        if times[value] != 1 or two is None or two.inputs[0] != value:
            continue
        (first, *rest), second = one.inputs[1:], two.inputs[1]
        # a depthwise kernel [C, 1, ...] has its input channels along the output axis
        depthwise = two.attributes.get("group", 1) > 1
        axis = sites[second].output if depthwise else sites[second].input
        bias = rest[0] if rest else ""
        pairs.append(Pair(first, bias, sites[first].output, second, axis))
    return pairs


def _is_homogeneous(node: Node) -> bool:
    return node.op.name in _HOMOGENEOUS and not node.op.domain and node.body is None


def _is_layer(
    node: Node,
    sites: Mapping[str, WeightSite],
    params: Mapping[str, np.ndarray],
    times: Mapping[str, int],
) -> bool:
    """Check that a node is a Conv or Gemm whose weight and bias no other node reads.

    Grouped convolutions are accepted only if they are depthwise: otherwise an input channel does
    not have one slice of the weight.
    """
    if node.op.name not in ("Conv", "Gemm") or node.op.domain or node.attributes.get("transA"):
        return False
    own = [name for name in node.inputs[1:] if name]
    if own[0] not in sites or not all(name in params and times[name] == 1 for name in own):
        return False
    w, group = params[own[0]], node.attributes.get("group", 1)
    channels = (w.shape[sites[own[0]].output],)
    return group in (1, *channels) and all(params[name].shape == channels for name in own[1:])
