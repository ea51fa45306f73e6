"""What is in another form in calls than in the file: changed weights, and nodes of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxonnx._graph.bind import Graph
from jaxonnx._run.fold_norms import fold_norms
from jaxonnx._run.integer_products import fuse_products
from jaxonnx._run.open_weights import drop_nodes


@dataclass(frozen=True)
class CallForm:
    """Parameters and state converted once for many inference calls (`Program.prepare_calls`)."""

    params: dict[str, Any]
    """The converted parameters."""
    state: dict[str, Any]
    """The converted state, and tensors that are results of dropped nodes."""
    changes: Changes
    """The changes of the graph that belong to these tensors."""
    reads: frozenset[str]
    """The tensors that other tensors or `changes` were computed from: to replace the value of one
    needs another conversion."""


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
