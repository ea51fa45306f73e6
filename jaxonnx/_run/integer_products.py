"""Compute products between DequantizeLinear and QuantizeLinear with integers, in inference.

A convolution or matrix product of two dequantized tensors, of which only a QuantizeLinear reads the
result, is one of integers, which is exact and quicker; onnxruntime computes it so, too.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._run.fold_norms import read_names
from jaxonnx.lowering import FAST_INT8, is_in_memory
from jaxonnx.registry import lookup

_BYTES = (np.int8, np.uint8)
_PRODUCTS = {"Conv": "QLinearConv", "MatMul": "QLinearMatMul"}
_SINCE = 10
"""The opset of both integer products, whose meaning did not change for integers of 8 bits."""


def integer_products(
    graph: Graph, tensors: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[frozenset[int], frozenset[str]]:
    """Find products between DequantizeLinear and QuantizeLinear to compute with integers.

    Args:
      graph: the bound graph.
      tensors: the values of its named tensors.
      constants: the values of its constants.

    Returns:
      The indices of the QuantizeLinear nodes behind the products, and the names of the tensors
      (those of biases) whose values the decision depends on.
    """
    arrays = ChainMap({**tensors}, {**constants})
    times, producers = Counter(read_names(graph)), graph.producers
    indices, decisive = set(), set()
    for node in graph.nodes if FAST_INT8 else ():
        product = producers.get(node.inputs[0]) if node.op.name == "QuantizeLinear" else None
        if product is None or product.op.name not in _PRODUCTS or product.op.domain:
            continue
        sources = [producers.get(name) for name in product.inputs if name]
        single = times[product.outputs[0]] == 1 and product.outputs[0] not in graph.outputs
        if single and _is_integer(product, node, sources, arrays):
            indices.add(node.index)
            decisive.update(name for d in sources[2:] if d is not None for name in d.inputs)
    return frozenset(indices), frozenset(decisive)


def _is_integer(
    product: Node, quantize: Node, sources: list[Node | None], arrays: Mapping[str, Any]
) -> bool:
    """Check whether the integer operator computes the same as a product between its neighbours.

    Operands and result are of 8 bits with one float32 scale (the weight may have one per output)
    and a zero point; a bias is int32 with the product of both scales as its scale.

    Args:
      product: the Conv or MatMul.
      quantize: the QuantizeLinear that reads its result.
      sources: the producers of its inputs; a DequantizeLinear each, if it is such a product.
      arrays: the values of tensors and constants.
    """
    nodes = [*sources, quantize]
    if len(sources) < 2 or any(node is None for node in nodes):
        return False
    scales = []
    for i, node in enumerate(nodes):
        assert node is not None
        x, scale, zero = (*(arrays.get(name) for name in node.inputs), None, None)[:3]
        per_tensor = not any(node.attributes.get(key) for key in ("block_size", "output_dtype"))
        here = all(v is None or isinstance(v, np.ndarray) or is_in_memory(v) for v in (scale, zero))
        dequantizes = node.op.name == "DequantizeLinear" or node is quantize
        if not (per_tensor and here and dequantizes) or scale is None or scale.dtype != np.float32:
            return False
        scales.append(np.asarray(scale))
        if i == 2 and node is not quantize:  # the bias, whose scale is implicit in QLinearConv
            units = scales[0] * scales[1]
            shifted = zero is not None and np.asarray(zero).any()
            if shifted or x is None or x.dtype != np.int32 or scales[2].size not in (1, units.size):
                return False
            if not np.allclose(scales[2].ravel(), units.ravel(), rtol=1e-5, atol=0):
                return False
            continue
        if zero is None or zero.dtype not in _BYTES:
            return False
        if i == 1:  # the weight, scaled by its outputs
            rank = None if x is None else x.ndim
            axis = node.attributes.get("axis", 1)
            outputs = (0,) if product.op.name == "Conv" else (1, -1)
            if x is None or (scale.size > 1 and axis not in outputs):
                return False
            if product.op.name == "MatMul" and rank != 2:
                return False
        elif scale.size > 1:
            return False
    return True


def fuse_products(graph: Graph, indices: Collection[int]) -> Graph:
    """Replace the QuantizeLinear nodes with the integer products that `integer_products` found."""
    if not indices:
        return graph
    producers, nodes, parts = graph.producers, [], set()
    for node in graph.nodes:
        if node.index in indices:
            product = producers[node.inputs[0]]
            x, w, *bias = (producers[name] for name in product.inputs if name)
            op = lookup("", _PRODUCTS[product.op.name], _SINCE)
            assert op is not None
            inputs = (*x.inputs, *w.inputs, *node.inputs[1:], *(b.inputs[0] for b in bias))
            parts.update(n.index for n in (product, x, w, *bias))
            node = replace(
                product, op=op, inputs=inputs, reads=inputs, outputs=node.outputs, index=node.index
            )
        nodes.append(node)
    # The float products and their DequantizeLinear nodes go unless something else reads them; to
    # drop a product can leave its operands unread, hence the loop.
    while True:
        needed = {*graph.outputs, *(name for node in nodes for name in node.reads)}
        remaining = [n for n in nodes if n.index not in parts or not needed.isdisjoint(n.outputs)]
        if len(remaining) == len(nodes):
            return replace(graph, nodes=(*remaining,))
        nodes = remaining
