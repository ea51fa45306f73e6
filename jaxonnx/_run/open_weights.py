"""Weights of few bits as the floating-point numbers that calls compute with.

A file stores weights behind DequantizeLinear, or in half precision. Calls that infer, many times,
get copies of them in float32, made once (`prepare_calls`), instead of converting them in
each call. The copies take at most `COPIES` bytes; weights beyond that are converted in each call,
as are those of fewer than 8 bits and those that are scaled in blocks, which stay packed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import uses
from jaxonnx.errors import Error
from jaxonnx.lowering import is_half, is_in_memory

COPIES = 512 << 20
"""Bytes that the copies of a model take at most."""

_PRODUCTS = ("Conv", "Gemm", "MatMul")
"""Operators that multiply half precision with a weight in float32 as well."""
_TYPES = {
    *map(np.dtype, (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.float16, np.float32)),
    *map(jnp.dtype, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)),
}


@dataclass(frozen=True)
class OpenWeights:
    """Converted weights, and the nodes that need not run any more."""

    nodes: frozenset[int] = frozenset()
    """The indices of the conversion nodes that were evaluated."""
    reads: frozenset[str] = frozenset()
    """The tensors that these nodes read."""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By name: results of these nodes that other nodes read, and float32 copies of tensors in half
    precision, under the tensor's name."""


def open_weights(graph: Graph, tensors: Mapping[str, Any], fixed: Mapping[str, Any]) -> OpenWeights:
    """Evaluate Cast, DequantizeLinear and QuantizeLinear of weights, up to `COPIES` bytes.

    Args:
      graph: the bound graph; only nodes of the main graph are considered.
      tensors: the values of its named tensors.
      fixed: the values of its constants, which may be further inputs of such nodes.
    """
    converted: dict[str, np.ndarray] = {}
    nodes: dict[int, Node] = {}
    room = COPIES
    for node in graph.nodes:
        value = _result(node, tensors, converted, fixed)
        if value is not None and value.nbytes <= room:
            nodes[node.index], converted[node.outputs[0]] = node, value
            room -= value.nbytes
    read_by_others = {
        *graph.outputs,
        *(n for node in graph.nodes if node.index not in nodes for n in node.reads),
    }
    reads = {name for node in nodes.values() for name in node.reads}
    values = {name: value for name, value in converted.items() if name in read_by_others}
    values |= _widen_factors(drop_nodes(graph, nodes), {**tensors, **values}, room)
    return OpenWeights(frozenset(nodes), frozenset(reads), values)


def _result(
    node: Node,
    tensors: Mapping[str, Any],
    converted: Mapping[str, np.ndarray],
    fixed: Mapping[str, Any],
) -> np.ndarray | None:
    """Evaluate a conversion of a tensor, or of the result `converted` of another one.

    None if the node is something else, has blocks, or reads a type outside of `_TYPES`.
    """
    if (
        not (node.op.dequantizes or node.op.name in ("Cast", "QuantizeLinear"))
        or node.body is not None
        or node.attributes.get("block_size")
    ):
        return None
    first = node.inputs[0]
    if first not in tensors and first not in converted:
        return None
    arrays = ChainMap(converted, tensors, fixed)  # pyright: ignore[reportArgumentType]
    if any(name and name not in arrays for name in node.inputs):
        return None
    values = [arrays[name] if name else None for name in node.inputs]
    if not all(x is None or isinstance(x, np.ndarray) or is_in_memory(x) for x in values):
        return None
    if arrays[first].dtype not in _TYPES:
        return None
    try:
        y = node.op(*(x if x is None else np.asarray(x) for x in values), **node.attributes)
    except Error:
        return None  # a call of the model evaluates the node and raises the error
    return y if y.dtype in _TYPES else None


def _widen_factors(graph: Graph, tensors: Mapping[str, Any], room: int) -> dict[str, np.ndarray]:
    """Return float32 copies of weights in half precision that only products read directly."""
    half = {
        name: x
        for name, x in tensors.items()
        if is_half(x) and x.ndim > 1 and (isinstance(x, np.ndarray) or is_in_memory(x))
    }
    others = {
        use.name
        for use in uses(graph, half)
        if not (use.is_direct and use.node.op.name in _PRODUCTS and use.position == 1)
    }
    values = {}
    for name, x in half.items():
        if name not in others and 2 * x.nbytes <= room:  # float32 has twice the bytes
            values[name] = np.asarray(x).astype(np.float32)
            room -= 2 * x.nbytes
    return values


def drop_nodes(graph: Graph, nodes: Collection[int]) -> Graph:
    """Drop nodes from a graph; those of their results that are read become named tensors."""
    if not nodes:
        return graph
    names = [node.outputs[0] for node in graph.nodes if node.index in nodes]
    remaining = tuple(node for node in graph.nodes if node.index not in nodes)
    used = {*graph.outputs, *(name for node in remaining for name in node.reads)}
    new = (name for name in names if name in used)
    return replace(graph, nodes=remaining, weights=(*graph.weights, *new))
