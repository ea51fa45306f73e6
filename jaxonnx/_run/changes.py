"""What is in another form in calls than in the file: changed weights, and nodes of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxonnx._graph.bind import Graph
from jaxonnx._run.fold_norms import fold_norms
from jaxonnx._run.integer_products import fuse_products
from jaxonnx._run.open_weights import drop_nodes


class Adaption(Protocol):
    """A change of weights that is trained in their place: a pure function of all tensors."""

    @property
    def params(self) -> tuple[str, ...]:
        """The tensors that are parameters once the change is merged into them."""
        ...

    def __call__(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the values of the graph's tensors; a changed matrix may be a `LowRank`."""
        ...

    @property
    def stored(self) -> tuple[str, ...]:
        """The changed tensors that are stored in few bits, into which nothing can be merged."""
        ...

    def factors(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
        """Return for each changed tensor the meaning of its axes, and a and b of its change a b.

        Their shapes are (..., inputs, rank) and (..., rank, outputs).
        """
        ...

    def without_factors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that are none of the adapters."""
        ...


@dataclass(frozen=True)
class CallForm:
    """Parameters and state in the form for calls."""

    params: dict[str, Any]
    state: dict[str, Any]
    changes: Changes
    """Of the graph."""
    reads: frozenset[str]
    """The tensors that cannot be replaced any more."""


@dataclass(frozen=True)
class Changes:
    """What of a graph is in the form of its tensors: the indices of nodes."""

    products: frozenset[int] = frozenset()
    """QuantizeLinear behind products that are computed with integers."""
    opened: frozenset[int] = frozenset()
    """Nodes whose results are tensors."""
    norms: frozenset[int] = frozenset()
    """BatchNormalizations that are in the weights before them."""

    def __call__(self, graph: Graph) -> Graph:
        graph = drop_nodes(fuse_products(graph, self.products), self.opened)
        return fold_norms(graph, self.norms)


UNCHANGED = Changes()
"""The graph and its tensors are those of the file."""
