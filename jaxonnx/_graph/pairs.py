"""Find pairs of matrix products for tensor parallelism: split by outputs, then by inputs.

Between the two products each device keeps its own features, and only the second one adds up over
all devices (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053). In an attention block the first
products are those of queries, keys and values; in a perceptron those before the activation.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxonnx._axes import Matrix
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import uses, weights

_PRODUCTS = ("Einsum", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")
_BETWEEN = (
    *("Attention", "BiasGelu", "DecoderMaskedMultiHeadAttention", "Einsum", "Expand", "FastGelu"),
    *("FusedMatMul", "Gather", "Gelu", "GroupQueryAttention", "MatMul", "MultiHeadAttention"),
    *("QuickGelu", "RotaryEmbedding", "Slice", "Softmax", "Split", "Tile"),
)
"""Operators, besides pointwise ones and views, that may stand between the products of a pair."""

_SIZES = ("Shape", "Size")
"""Operators that read only the shape of their input."""

_Products = frozenset[int]
"""A set of products, by the index of their node."""


@dataclass
class _Weights:
    """The tensors of the main graph that only one node reads."""

    products: dict[int, tuple[str, Matrix]] = field(default_factory=dict)
    """The weight of each product and the meaning of its axes, by the index of the node."""
    vectors: list[tuple[int, str, int]] = field(default_factory=list)
    """(index of the node, name, the only axis that is longer than one)"""


def pairs(graph: Graph, tensors: Mapping[str, Any]) -> list[dict[str, int]]:
    """Find pairs of products that devices can share.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.

    Returns:
      For each pair, the axis to split each of its weights and biases along, by name. For a
      quantized matrix it is an axis of the matrix, not of its tensor.
    """
    read = _collect_weights(graph, tensors)
    shapes = {name: weight.shape for name, weight in weights(graph, tensors).items()}
    before, lost = _trace_products(graph, read.products.keys())
    # the products that each product leads to
    leads: dict[int, set[int]] = {}
    for sink in read.products:
        for source in before[sink]:
            leads.setdefault(source, set()).add(sink)
    result: list[dict[str, int]] = []
    used: set[int] = set()
    for sink, (name, matrix) in read.products.items():
        sources = before[sink]
        # every use of the sources' results must end in this product
        if not sources or sources & (lost | used) or any(leads[s] != {sink} for s in sources):
            continue
        used |= {sink, *sources}
        first = [read.products[source] for source in sources]
        split = {name: matrix.input} | {name: matrix.output for name, matrix in first}
        for index, name, axis in read.vectors:
            # a bias of a source, or a vector that acts on features between sources and sink
            if index in read.products and index not in sources:
                continue
            beside = {index} if index in sources else before[index]
            matrices = (read.products[source] for source in beside)
            sizes = {shapes[member][matrix.output] for member, matrix in matrices}
            if beside and beside <= sources and sizes == {tensors[name].shape[axis]}:
                split[name] = axis
        result.append(split)
    return result


def _collect_weights(graph: Graph, tensors: Mapping[str, Any]) -> _Weights:
    """Collect the weights and vectors that are used once, whole, by a node of the main graph."""
    read = [use for use in uses(graph, tensors) if not use.passes]
    count = Counter(use.name for use in read)
    result = _Weights()
    for use in read:
        if count[use.name] > 1 or use.node is not use.outer or use.view.part:
            continue
        matrix, shape = use.matrix, tensors[use.name].shape
        long = [axis for axis, size in enumerate(shape) if size > 1]
        if matrix is not None:
            plain = not (matrix.lookup or matrix.grouped or matrix.kernel or matrix.batch)
            if plain and use.node.op.like in _PRODUCTS:
                result.products[use.node.index] = use.name, matrix
        elif len(long) == 1 and math.prod(shape) > 1:
            result.vectors.append((use.node.index, use.name, long[0]))
    return result


def _trace_products(graph: Graph, products: Any) -> tuple[dict[int, _Products], _Products]:
    """Follow the results of products through nodes that may stand between the two of a pair.

    Returns:
      The products whose results reach each node, by its index; and the products whose results also
      reach an output or a node that mixes features.
    """
    empty: _Products = frozenset()
    reached: dict[str, _Products] = {}
    before: dict[int, _Products] = {}
    lost = empty
    for node in graph.nodes:
        arrives = empty.union(*(reached.get(name, empty) for name in node.reads))
        before[node.index] = arrives
        if node.index in products:
            leaves = frozenset({node.index})
        elif node.op.name in _SIZES:
            leaves = empty
        elif _is_between(node):
            leaves = arrives
        else:
            leaves, lost = empty, lost | arrives
        reached.update(dict.fromkeys(node.outputs, leaves))
    return before, lost.union(*(reached.get(name, empty) for name in graph.outputs))


def _is_between(node: Node) -> bool:
    passes = node.op.pointwise or node.op.view or node.op.name in _BETWEEN
    return passes and node.body is None and not node.subgraphs
