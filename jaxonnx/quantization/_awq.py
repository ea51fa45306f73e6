"""AWQ: inputs scaled such that the weights of large ones lose less by rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, uses, uses_by_tensor
from jaxonnx._rewrite.network import Network
from jaxonnx.quantization._layer_inputs import Products, as_rows, find_products, from_rows, visit
from jaxonnx.quantization._scheme import (
    TYPES,
    Parameters,
    Quantization,
    WeightSite,
    spread_scale,
    weight_parameters,
)

_EXPONENTS = np.linspace(0, 1, 20, endpoint=False)
"""The powers of the inputs' magnitudes that are tried as scales."""
_SHARES = 1 + 0.025 * np.array([0, *(sign * i for i in range(1, 13) for sign in (1, -1))])
"""The multiples of the scales with the least error of a weight that are tried for its outputs; of
equal ones the first is taken."""
_NORMS = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
"""Normalizations, with the inputs that their result is proportional to."""


def scale_inputs(
    model: Network,
    sites: Mapping[str, WeightSite],
    examples: Sequence[Sequence[Any]],
    schemes: Mapping[str, Quantization],
) -> tuple[dict[str, np.ndarray], dict[str, Parameters]]:
    """Multiply inputs of weights by the scales at which rounding changes the outputs least.

    "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
    (arXiv:2306.00978). The inputs of weights are multiplied by s = magnitude^a, with the best a of
    a grid, and the tensors that the activation is computed with are divided by s: the weight of a
    normalization, the bias that is added to it, or the outputs of the product before. The network
    computes the same.

    Args:
      model: the network before quantization.
      sites: the weights.
      examples: batches of inputs, in the order of the model's.
      schemes: the scheme of each weight.

    Returns:
      The tensors with new values, and the scales to round weights at, by name.
    """
    values: dict[str, np.ndarray] = {}
    scales: dict[str, Parameters] = {}
    tensors = model.tensors
    by_place = {(id(u.node), u.position): u for u in uses(model.graph, tensors)}
    by_name = uses_by_tensor(model.graph, tensors)
    for group, inputs in visit(model, find_products(model, sites), examples, dict(tensors)):
        weights = {n: np.asarray(values.get(n, tensors[n])) for n in group.weights}
        hessian = inputs.hessian + np.diag(inputs.squares - np.diag(inputs.hessian))
        divided = find_divided(model.graph, model.params, group, by_place, len(inputs.magnitude))
        # a weight with other readers than the group, as one that is the embedding, too, stays
        products = {id(use.node) for use in group.uses}
        for readers in (by_name[name] for name in group.weights):
            between = {name for use in readers for name in use.node.inputs}
            last = {id(use.node) for use in readers if between.isdisjoint(use.node.outputs)}
            divided = divided if last <= products else None
        if divided is not None and all(schemes[n].weights != "fp8" for n in weights):
            s = choose_scales(weights, sites, hessian, inputs.magnitude, schemes)
            hessian = hessian / np.outer(s, s)
            for name, w in weights.items():
                weights[name] = from_rows(as_rows(w, sites[name]) * s, w, sites[name])
            for name, axis in divided:
                x = np.asarray(values.get(name, tensors[name]))
                along = s.reshape(-1, *(1,) * (x.ndim - 1 - axis))
                values[name] = x / along
                before = scales.pop(name, None)  # of a product before, whose outputs are divided
                if before is not None and before.axis is not None:
                    scale = before.scale / (along if before.block else s)
                    scales[name] = before._replace(scale=scale.astype(np.float32))
            values |= weights
        scales |= {n: fit_scales(w, sites[n], schemes[n], hessian) for n, w in weights.items()}
    return {name: x.astype(np.float32) for name, x in values.items()}, scales


def choose_scales(
    weights: Mapping[str, np.ndarray],
    sites: Mapping[str, WeightSite],
    hessian: np.ndarray,
    magnitude: np.ndarray,
    schemes: Mapping[str, Quantization],
) -> np.ndarray:
    """Return the scales of inputs, [inputs], with the least squared error of all outputs."""
    floor = max(float(magnitude.max(initial=0)), 1.0) * 1e-4
    best, least = np.ones_like(magnitude), np.inf
    for exponent in _EXPONENTS:
        s = np.maximum(magnitude, floor) ** np.float32(exponent)
        s /= np.sqrt(s.max() * s.min())
        # eight bits, so that files do not depend on the order in which batches were summed
        s = s.astype(ml_dtypes.bfloat16).astype(np.float32)
        error = 0.0
        for name, w in weights.items():
            scaled = from_rows(as_rows(w, sites[name]) * s, w, sites[name])
            # round to the nearest numbers within the full range
            scheme, kind = schemes[name], TYPES[schemes[name].weights]
            full = weight_parameters(scaled, sites[name], scheme, shares=(1,))
            scale = spread_scale(full, scaled)
            codes = kind.round(scaled / scale + kind.middle) - kind.middle
            rounded = np.clip(codes, *scheme.weight_limits) * scale
            change = as_rows(rounded - scaled, sites[name]) / s
            error += float(np.sum((change @ hessian) * change))
        if error < least:
            best, least = s, error
    return best


def fit_scales(
    w: np.ndarray, site: WeightSite, scheme: Quantization, hessian: np.ndarray
) -> Parameters:
    """Choose the scales of blocks by the squared error of the outputs: the paper's clip search.

    Blocks follow each other, each beside the errors of those before it, which its own may cancel.
    """
    result = weight_parameters(w, site, scheme, np.diag(hessian))
    if not result.block:
        return result
    kind, limits = TYPES[scheme.weights], scheme.weight_limits
    rows, scale = as_rows(w, site), as_rows(result.scale, site).copy()
    errors = np.zeros_like(rows)
    for i in range(scale.shape[1]):
        block = slice(i * result.block, (i + 1) * result.block)
        part, first = rows[:, block], scale[:, i : i + 1].copy()
        pull = 2 * errors @ hessian[:, block]
        least = np.full(len(rows), np.inf)
        for share in _SHARES:
            step = (share * first).astype(np.float32)
            change = np.clip(kind.round(part / step + kind.middle) - kind.middle, *limits) * step
            change -= part
            error = ((change @ hessian[block, block] + pull) * change).sum(1)
            better = error < least
            least, scale[better, i] = np.where(better, error, least), step[better, 0]
            errors[better, block] = change[better]
    return result._replace(scale=from_rows(scale, w, site))


def find_divided(
    graph: Graph,
    params: Mapping[str, Any],
    group: Products,
    by_place: Mapping[tuple[int, int], Use],
    size: int,
) -> list[tuple[str, int]] | None:
    """Find the parameters, each with its axis, that divide an activation if they are divided.

    Args:
      group: the products that read the activation.
      by_place: the uses of tensors, by the identity of the node and the position.
      size: the number of inputs, along the last axis of the activation.

    Returns:
      None where there are several activations, another node than the products reads it, or it is
      not proportional to parameters that nothing else reads.
    """
    if len(group.activations) != 1:
        return None
    activation, nodes = group.activations[0], [use.node for use in group.uses]
    gemms = all(node.op.name == "Gemm" for node in nodes)
    in_rows = activation.axis == -1 or (activation.axis == 1 and gemms)
    readers = {id(node) for node in graph.readers[activation.name]}
    if not in_rows or not readers <= {id(node) for node in nodes}:
        return None

    def vector(node: Node, i: int) -> list[tuple[str, int]] | None:
        """Return an input that is a parameter of this size, which no other node reads."""
        name = node.inputs[i]
        alone = name in params and len(graph.readers[name]) == 1
        return [(name, 0)] if alone and params[name].shape == (size,) else None

    def outputs(node: Node) -> list[tuple[str, int]] | None:
        """Return the weight of a product, with the axis of its outputs."""
        use = by_place.get((id(node), 1))
        if use is None or use.matrix is None or not use.is_direct or use.name not in params:
            return None
        axis, shape = use.matrix.output, params[use.name].shape
        alone = len(graph.readers[use.name]) == 1 and len(shape) == 2
        return [(use.name, axis)] if alone and shape[axis] == size else None

    def follow(name: str) -> list[tuple[str, int]] | None:
        """Find the parameters that a value is proportional to along its last axis."""
        node = graph.producers.get(name)
        if node is None or name in graph.outputs or name != node.outputs[0]:
            return None
        if node.body is not None or len({*node.inputs}) < len(node.inputs):
            return None

        def inner(i: int) -> list[tuple[str, int]] | None:
            return follow(node.inputs[i]) if len(graph.readers[node.inputs[i]]) == 1 else None

        kind = node.op.name
        if kind in _NORMS:
            places = [i for i in _NORMS[kind] if i < len(node.inputs) and node.inputs[i]]
            parts = [vector(node, i) for i in places]
        elif kind == "Mul":
            parts = [vector(node, 1) or vector(node, 0) or inner(1) or inner(0)]
        elif kind == "Add":
            bias = 0 if node.inputs[0] in params else 1
            parts = [vector(node, bias), inner(1 - bias)]
        elif kind == "Relu":
            parts = [inner(0)]
        elif kind in ("MatMul", "Gemm"):
            parts = [outputs(node)]
            parts += [vector(node, 2)] if len(node.inputs) > 2 and node.inputs[2] else []
        else:
            return None
        return None if None in parts else [pair for part in parts for pair in part or ()]

    return follow(activation.name)
