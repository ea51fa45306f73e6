"""Where the compiling of a program stops, and the parts that it was compiled to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._run.fold_norms import fold_norms
from jaxonnx._run.integer_products import fuse_products
from jaxonnx._run.open_weights import drop_nodes
from jaxonnx.errors import StaticError

FIXING = 64
"""The most elements of an input (scalar or vector) that is fixed while compiling."""

NOWHERE = -1
"""The index of no node: a cut there leaves all nodes to the compiled part."""


@dataclass(frozen=True)
class Changes:
    """Changes of a graph that go with converted tensors, as indices of nodes; hashable."""

    products: frozenset[int] = frozenset()
    """QuantizeLinear nodes behind products that are computed with integers."""
    opened: frozenset[int] = frozenset()
    """Nodes that are dropped because their results are tensors now."""
    norms: frozenset[int] = frozenset()
    """BatchNormalizations that are folded into the convolution before them."""

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with these changes."""
        # each of the three was found on the graph that the ones before it give
        graph = drop_nodes(fuse_products(graph, self.products), self.opened)
        return fold_norms(graph, self.norms)


UNCHANGED = Changes()
"""No changes: the graph and its tensors are those of the file."""


@dataclass(frozen=True)
class Parts:
    """A graph that is split into a compiled part and a rest that is evaluated node by node."""

    compiled: Any
    """The jitted function of the first part."""
    boundary: tuple[str, ...]
    """The values that the compiled part passes to the rest."""
    rest: Graph | None
    """The rest; None if the whole graph is compiled."""


@dataclass(frozen=True)
class Plan:
    """Facts learned from past calls: where compiling must stop, and the compiled parts."""

    cuts: frozenset[int]
    """Indices of nodes that need the value of something that is traced while compiling."""
    fixed: frozenset[str] = frozenset()
    """Inputs whose values are constants of the compiled functions."""
    fixes: bool = True
    """Whether to fix an input where that helps before cutting the graph."""
    parts: Mapping[tuple, Parts] = field(default_factory=dict)
    """The compiled parts, by the key that `make_key` returns."""

    def fix_or_cut(self, error: StaticError, arrays: Mapping[str, Any]) -> Plan:
        """Return a plan under which a node that needs a known value can be evaluated.

        Small inputs that the value depends on are fixed; else the graph is cut at the node.

        Raises:
          StaticError: the error itself, if neither is possible.
        """
        small = all(np.ndim(arrays[n]) <= 1 and np.size(arrays[n]) <= FIXING for n in error.inputs)
        if error.inputs and small and self.fixes:
            return replace(self, fixed=self.fixed.union(error.inputs))
        if error.index is None or error.index in self.cuts:
            raise error
        return replace(self, cuts=self.cuts | {error.index}, parts={})


def make_key(changes: Changes, others: frozenset[str], fixed: Mapping[str, np.ndarray]) -> tuple:
    """Return the key of compiled parts.

    Args:
      changes: the changes of the graph.
      others: the names of inputs that are not arrays.
      fixed: the values of the fixed inputs.
    """
    values = ((name, v.dtype.str, v.shape, v.tobytes()) for name, v in sorted(fixed.items()))
    return (changes, others, *values)


def split(
    graph: Graph, cuts: Collection[int], others: Collection[str], constant: Collection[str]
) -> tuple[Graph, Graph | None]:
    """Split a graph where compiling must stop: the compiled part, and the rest or None.

    Args:
      graph: the bound graph.
      cuts: indices of nodes that cannot be compiled.
      others: names of inputs that are not arrays.
      constant: names of tensors and inputs whose values are known while compiling.
    """
    if not cuts and not others:
        return graph, None
    outside, constant = set(others), set(constant)
    before: list[Node] = []
    after: list[Node] = []
    for node in graph.nodes:
        if node.index in cuts or not outside.isdisjoint(node.reads):
            outside.update(node.outputs)
            after.append(node)
        elif constant.issuperset(node.reads):
            # Evaluated in both parts: the rest needs its result as a known value, which a
            # result of the compiled part would not be.
            constant.update(node.outputs)
            before.append(node)
            after.append(node)
        else:
            before.append(node)
    computed = {name for node in before for name in node.outputs} - constant
    needed = {name for node in after for name in node.reads} | {*graph.outputs}
    boundary = tuple(sorted(computed & needed))
    first = replace(graph, nodes=tuple(before), outputs=boundary)
    return first, replace(graph, nodes=tuple(after))


def has_dynamic_results(node: Node) -> bool:
    """Check whether a node, or one in its subgraphs, has results without a static shape."""
    inner = (n for graph in node.subgraphs for n in graph.nodes)
    return node.op.dynamic or any(map(has_dynamic_results, inner))
