"""Find fake quantization that is written as arithmetic: x / scale, rounded, clipped, times scale.

Rounding has the derivative zero, so that nothing in front of it would be trained. Networks that
were trained through it passed gradients straight (Bengio et al., 2013, arXiv:1308.3432), as
QuantizeLinear and DequantizeLinear do here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx.registry import is_known

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

    What was rounded by a scale, and then moved, is rounded by the same scale again in QDQ graphs,
    so that runtimes move integers. Value and gradients are the same without.

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
        nodes, nearest, seen = [start], [], {start.index}
        for node in nodes:
            for other in step(node):
                if other.index in seen or other.op.domain:
                    continue
                seen.add(other.index)
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
