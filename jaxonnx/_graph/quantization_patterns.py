"""Find quantization that is written as several nodes.

Fake quantization is x / scale, rounded, clipped, times scale. Rounding has the derivative zero, so
that nothing in front of it would be trained. Networks that were trained through it passed gradients
straight (Bengio et al., 2013, arXiv:1308.3432), as QuantizeLinear and DequantizeLinear do here.

Of products of integers, as `quantize_dynamic` of onnxruntime writes them, DynamicQuantizeLinear,
MatMulInteger, Cast and two Mul with the scales give what DynamicQuantizeMatMul gives, bit for bit,
and so does MatMulIntegerToFloat, to which sessions of onnxruntime fuse all but the first. As that
operator, a product has a gradient, and its matrix can be adapted. Only the bound graph changes: the
file keeps its nodes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx.registry import is_known, lookup

_BETWEEN = ("Add", "Cast", "Clip", "Identity", "Max", "Min", "Sub")
"""Operators between the division, the rounding and the product: zero points and limits."""


def pass_rounding(graph: Graph, tensors: Mapping[str, Any]) -> Graph:
    """Give the Round nodes of fake quantization the straight-through gradient, the identity.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors, to compare scales.
    """
    if not any(node.op.name == "Round" for node in graph.nodes):
        return graph
    chains = _Chains(graph, tensors)
    nodes = (
        replace(node, op=replace(node.op, function=_round)) if chains.is_fake(node) else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


_MOVES = ("Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze")
_MOVES += ("Transpose", "Unsqueeze")
"""Operators whose results are numbers of their first input.

MaxPool is left out: without rounding behind it a step of LeNet takes more memory, 1.30 instead of
1.13 of the float one (2026-11-27).
"""


def find_idle_rounding(graph: Graph) -> Mapping[int, str]:
    """Find values that QuantizeLinear and DequantizeLinear do not change, if scales are scalars.

    In QDQ graphs a value that was rounded by a scale, and then moved, is rounded by the same scale
    again, so that runtimes move integers. Value and gradients are the same without.

    Returns:
      The value that equals the result of a DequantizeLinear, by the index of that node.
    """

    def find() -> dict[int, str]:
        grids: dict[str, tuple[str, ...]] = {}
        idle = {}
        for node in graph.nodes:
            if node.op.domain or not node.outputs:
                continue
            if node.op.name == "DequantizeLinear":
                before = graph.producers.get(node.inputs[0])
                if before is None or before.op.name != "QuantizeLinear" or before.op.domain:
                    continue
                grid = before.inputs[1:]
                typed = before.attributes.get("output_dtype") or node.attributes.get("output_dtype")
                if grid == node.inputs[1:] and not typed:
                    grids[node.outputs[0]] = grid
                    if grids.get(before.inputs[0]) == grid:
                        idle[node.index] = before.inputs[0]
            elif node.op.name in _MOVES and node.inputs[0] in grids:
                grids |= dict.fromkeys(node.outputs, grids[node.inputs[0]])
        return idle

    return graph.recall("idle rounding", find)


class _Chains:
    """Searches the neighbourhood of Round nodes for a division and a product by one scale."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Any]):
        self._tensors = tensors
        self._graph = graph

    def is_fake(self, node: Node) -> bool:
        """Check whether the rounded value was divided by the scale that multiplies it later."""
        if node.op.name != "Round" or node.op.domain:
            return False
        divisors = [n.inputs[1] for n in self._walk(node, self._before, ("Div",))]
        products = self._walk(node, self._behind, ("Mul",))
        return any(self._are_same(s, name) for n in products for name in n.inputs for s in divisors)

    def _walk(self, start: Node, step: Any, ends: tuple[str, ...]) -> list[Node]:
        """Return the nearest nodes of some operators, on paths through nodes of `_BETWEEN`.

        Args:
          start: the node to start from.
          step: returns the neighbours of a node in one direction.
          ends: the operators to find.
        """
        nodes, nearest, visited = [start], [], {start.index}
        for node in nodes:
            for other in step(node):
                if other.index in visited or other.op.domain:
                    continue
                visited.add(other.index)
                if other.op.name in ends:
                    nearest.append(other)
                elif other.op.name in _BETWEEN:
                    nodes.append(other)
        return nearest

    def _before(self, node: Node) -> list[Node]:
        producers = self._graph.producers
        return [producers[name] for name in node.inputs if name in producers]

    def _behind(self, node: Node) -> list[Node]:
        return [reader for name in node.outputs for reader in self._graph.readers.get(name, ())]

    def _are_same(self, first: str, second: str) -> bool:
        """Check whether two names are of one value, or of tensors with equal values."""
        if first == second:
            return True
        a, b = (self._tensors.get(name) for name in (first, second))
        return a is not None and b is not None and np.array_equal(np.asarray(a), np.asarray(b))


@jax.custom_jvp
def _rint(x):
    return jnp.rint(x)


@_rint.defjvp
def _rint_jvp(primals, tangents):
    return _rint(*primals), tangents[0]


def _round(x):
    return np.rint(x) if is_known(x) else _rint(x)


_FUSED = lookup("com.microsoft", "DynamicQuantizeMatMul", 1)


class _Group(NamedTuple):
    """The nodes of a dynamically quantized matrix product."""

    last: Node
    """The node whose output is the product."""
    label: str
    """The label of the node that multiplies matrices."""
    parts: tuple[Node, ...]
    """The other nodes."""
    inputs: tuple[str, ...]
    """The inputs of a DynamicQuantizeMatMul that computes the same."""


def fuse_integer_products(graph: Graph, tensors: Collection[str]) -> Graph:
    """Replace dynamically quantized products with stored matrices by DynamicQuantizeMatMul.

    Other nodes of a group are dropped if nothing else reads them.

    Args:
      graph: the bound main graph.
      tensors: the names of its tensors.
    """
    if not any(node.op.name == "DynamicQuantizeLinear" for node in graph.nodes):
        return graph
    candidates = (_find_group(node, graph.producers, tensors) for node in graph.nodes)
    groups = {group.last.index: group for group in candidates if group is not None}
    nodes = []
    for node in graph.nodes:
        if (group := groups.get(node.index)) is not None:
            inputs = group.inputs
            while not inputs[-1]:  # omitted inputs at the end
                inputs = inputs[:-1]
            reads = tuple(dict.fromkeys(filter(None, inputs)))
            assert _FUSED is not None
            node = replace(
                node, label=group.label, op=_FUSED, inputs=inputs, attributes={}, reads=reads
            )
        nodes.append(node)
    parts = {node.index for group in groups.values() for node in group.parts}
    times = Counter([*graph.outputs, *(name for node in nodes for name in node.reads)])
    remaining = []
    for node in reversed(nodes):  # backwards: dropping a part can leave an earlier part unread
        if node.index in parts and not any(times[name] for name in node.outputs):
            times.subtract(node.reads)
        else:
            remaining.append(node)
    return replace(graph, nodes=(*reversed(remaining),))


def _find_group(
    last: Node, producers: Mapping[str, Node], tensors: Collection[str]
) -> _Group | None:
    """Return the group whose last node this is; None if it is not one."""

    def find_producer(name: str, kind: str) -> Node | None:
        node = producers.get(name)
        return node if node is not None and _is(node, kind) else None

    if _is(last, "MatMulIntegerToFloat", "com.microsoft"):
        a, b, a_scale, b_scale, zero, *others = (*last.inputs, "", "")[: len(last.inputs) + 2]
        quantize = find_producer(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or (a, a_scale, zero) != quantize.outputs:
            return None
        inputs = (quantize.inputs[0], b, b_scale, *others)
        return _Group(last, last.label, (quantize,), inputs)
    if not _is(last, "Mul"):
        return None
    for first, second in (last.inputs, last.inputs[::-1]):
        cast, scales = find_producer(first, "Cast"), find_producer(second, "Mul")
        product = cast and find_producer(cast.inputs[0], "MatMulInteger")
        if cast is None or scales is None or product is None:
            continue
        a, b, *zeros = product.inputs
        quantize = find_producer(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or cast.attributes["to"] != TensorProto.FLOAT:
            continue
        others = [name for name in scales.inputs if name != quantize.outputs[1]]
        # outputs of DynamicQuantizeLinear: y, y_scale, y_zero_point
        if (a, *zeros[:1]) == quantize.outputs[::2] and len(others) == 1:
            inputs = (quantize.inputs[0], b, others[0], *zeros[1:])
            return _Group(last, product.label, (quantize, product, cast, scales), inputs)
    return None


def _is(node: Node, name: str, domain: str = "") -> bool:
    return node.op.name == name and node.op.domain == domain and node.body is None
