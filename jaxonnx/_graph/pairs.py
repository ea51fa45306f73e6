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

_PRODUCTS = (
    *("DynamicQuantizeMatMul", "Einsum", "FusedGemm", "FusedMatMul", "Gemm", "MatMul"),
    *("MatMulBnb4", "MatMulIntegerToFloat", "MatMulNBits"),
)
_BETWEEN = (
    *("Attention", "BiasGelu", "DecoderMaskedMultiHeadAttention", "Einsum", "Expand", "FastGelu"),
    *("FusedMatMul", "Gather", "Gelu", "GroupQueryAttention", "MatMul", "MultiHeadAttention"),
    *("QuickGelu", "RotaryEmbedding", "Slice", "Softmax", "Split", "Tile"),
)
"""Operators, besides pointwise ones and views, that may stand between the products of a pair."""

_SIZES = ("Shape", "Size")
"""Operators that read no features."""

_Products = frozenset[int]
"""Products by the index of their node."""


@dataclass
class _Weights:
    """What the nodes of the main graph read of tensors that nothing else reads."""

    products: dict[int, tuple[str, Matrix]] = field(default_factory=dict)
    vectors: list[tuple[int, str, int]] = field(default_factory=list)
    """(index of the node, name, the only axis that is longer than one)"""


def pairs(graph: Graph, tensors: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return for each pair the tensors that are split, weights and biases, and along which axis.

    Axes of matrices in few bits are the matrix's.
    """
    read = _read(graph, tensors)
    shapes = {name: weight.shape for name, weight in weights(graph, tensors).items()}
    before, lost = _flow(graph, read.products.keys())
    leads: dict[int, set[int]] = {}
    for sink in read.products:
        for source in before[sink]:
            leads.setdefault(source, set()).add(sink)
    result: list[dict[str, int]] = []
    used: set[int] = set()
    for sink, (name, matrix) in read.products.items():
        sources = before[sink]
        if not sources or sources & (lost | used) or any(leads[s] != {sink} for s in sources):
            continue
        used |= {sink, *sources}
        first = [read.products[source] for source in sources]
        split = {name: matrix.input} | {name: matrix.output for name, matrix in first}
        for index, name, axis in read.vectors:
            if index in read.products and index not in sources:
                continue
            beside = {index} if index in sources else before[index]
            matrices = (read.products[source] for source in beside)
            sizes = {shapes[own][matrix.output] for own, matrix in matrices}
            if beside and beside <= sources and sizes == {tensors[name].shape[axis]}:
                split[name] = axis
        result.append(split)
    return result


def _read(graph: Graph, tensors: Mapping[str, Any]) -> _Weights:
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
            if plain and use.node.op.name in _PRODUCTS:
                result.products[use.node.index] = use.name, matrix
        elif len(long) == 1 and math.prod(shape) > 1:
            result.vectors.append((use.node.index, use.name, long[0]))
    return result


def _flow(graph: Graph, products: Any) -> tuple[dict[int, _Products], _Products]:
    """Return the products whose results reach each node, and those that reach anything else.

    They reach it through nodes that may stand between the products of a pair.
    """
    nothing: _Products = frozenset()
    reached: dict[str, _Products] = {}
    before: dict[int, _Products] = {}
    lost = nothing
    for node in graph.nodes:
        arrives = nothing.union(*(reached.get(name, nothing) for name in node.reads))
        before[node.index] = arrives
        if node.index in products:
            leaves = frozenset({node.index})
        elif node.op.name in _SIZES:
            leaves = nothing
        elif _is_between(node):
            leaves = arrives
        else:
            leaves, lost = nothing, lost | arrives
        reached.update(dict.fromkeys(node.outputs, leaves))
    return before, lost.union(*(reached.get(name, nothing) for name in graph.outputs))


def _is_between(node: Node) -> bool:
    known = node.op.pointwise or node.op.view or node.op.name in _BETWEEN
    return known and node.body is None and not node.subgraphs
