"""Parameters and graph in the form for many inference calls, converted once.

`save` and training never see it. The graph changes in two steps:

1. A convolution or matrix product of two dequantized tensors, of which only a QuantizeLinear reads
   the result, becomes one of integers, which is exact and quicker; onnxruntime computes it so, too.
2. Weights that the file stores behind DequantizeLinear, or in half precision, become copies in
   float32, of at most `COPIES` bytes. Weights beyond that are converted in each call, as are those
   of fewer than 8 bits and those that are scaled in blocks, which stay packed.

Last, weights that only convolutions read get the axis order that is best on their platform.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import graph_tensors
from jaxonnx._graph.uses import uses
from jaxonnx._run.program import Program
from jaxonnx.errors import Error
from jaxonnx.lowering import FAST_INT8, KernelFirst, is_half, is_in_memory, placed_as, store
from jaxonnx.registry import lookup

COPIES = 512 << 20
"""Bytes that the float32 copies of a model's weights take at most."""


@dataclass(frozen=True)
class Changes:
    """Changes of a graph that go with converted tensors, as indices of nodes; hashable.

    The second was found on the graph that the first gives.
    """

    products: frozenset[int] = frozenset()
    """QuantizeLinear nodes behind products that are computed with integers."""
    opened: frozenset[int] = frozenset()
    """Nodes that are dropped because their results are tensors now."""

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with these changes."""
        return drop_nodes(fuse_products(graph, self.products), self.opened)


@dataclass(frozen=True)
class CallForm:
    """Parameters and state converted once for many inference calls (`prepare_calls`)."""

    params: dict[str, Any]
    """The converted parameters."""
    state: dict[str, Any]
    """The converted state, and tensors that are results of dropped nodes."""
    changes: Changes
    """The changes of the graph that belong to these tensors."""
    reads: frozenset[str]
    """The tensors that other tensors or `changes` were computed from: to replace the value of one
    needs another conversion."""


def prepare_calls(
    program: Program, params: Mapping[str, Any], state: Mapping[str, Any]
) -> CallForm:
    """Convert parameters and state once for many inference calls.

    On top of `prepare_tensors`, quantized and half-precision weights are converted to floating
    point, and products between DequantizeLinear and QuantizeLinear become integer ones.
    """
    tensors, changes = {**state, **params}, Changes()
    reads: frozenset[str] = frozenset()
    if not program.adapts:
        constants = {**program.graph.initializers, **program.constants}
        products, decisive = find_integer_products(program.graph, tensors, constants)
        opened = open_weights(fuse_products(program.graph, products), tensors, constants)
        for name, x in opened.values.items():
            tensors[name] = placed_as(tensors[name], x) if name in tensors else jnp.asarray(x)
        changes = Changes(products, opened.nodes)
        reads = decisive | opened.reads
    converted = prepare_tensors(program, tensors, changes(program.graph))
    new_params = {name: converted.pop(name) for name in params}
    if program.sparse:
        from jaxonnx.sparse import pack_matrix

        new_params |= {n: pack_matrix(new_params[n], axis) for n, axis in program.sparse.items()}
    return CallForm(new_params, converted, changes, reads)


def prepare_tensors(
    program: Program,
    tensors: Mapping[str, jax.Array],
    graph: Graph | None = None,
) -> dict[str, Any]:
    """Convert parameters or state once for programs that run many times.

    Weights that only convolutions read get the axis order that is best on the platform that
    they are on (`lowering.store`).

    Args:
      program: a program that reads them.
      tensors: the tensors.
      graph: the graph that reads them, if it is not that of the program.
    """
    if program.adapts:
        return {**tensors}
    used = [
        (use.name, use.node.op.takes(use.position, KernelFirst))
        for use in uses(graph or program.graph, tensors)
        if not (use.passes and use.node.op.per_axis)  # work on any order of axes
    ]
    others = {name for name, is_kernel in used if not is_kernel}
    return store(tensors, {name for name, _ in used} - others)


def read_names(graph: Graph) -> Iterator[str]:
    """Yield each read of a graph, repeatedly: names that outputs and nodes read, and the tensors
    that subgraphs and bodies of functions use."""
    yield from graph.outputs
    for node in graph.nodes:
        yield from node.reads
        for inner in (*node.subgraphs, *([] if node.body is None else [node.body])):
            yield from graph_tensors(inner)


# 1. Products of integers.

_BYTES = (np.int8, np.uint8)
_PRODUCTS = {"Conv": "QLinearConv", "MatMul": "QLinearMatMul"}
_SINCE = 10
"""The opset of both integer products, whose meaning did not change for integers of 8 bits."""


def find_integer_products(
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


# 2. Weights in float32.

_MULTIPLIES_HALF = ("Conv", "Gemm", "MatMul")
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
        if not (use.is_direct and use.node.op.name in _MULTIPLIES_HALF and use.position == 1)
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
