"""Where the tensors of a graph stand: at which input of which node, and how it sees their axes."""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxonnx._graph.bind import Graph, Node

_SAME_AXES = ("Cast", "CastLike", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Views that leave the axes as they are; all but Transpose mix them."""


@dataclass(frozen=True)
class Use:
    """A tensor at an input of a node, directly or behind views (Transpose, Reshape, Cast, ...)."""

    name: str
    node: Node
    position: int
    axes: tuple[int, ...] | None
    """The tensor's own axes in the order in which the node sees them; None behind a Reshape."""


def uses(graph: Graph, tensors: Mapping[str, Any]) -> Iterator[Use]:
    """Every use of the named tensors, in the order of the nodes.

    Subgraphs and the bodies of functions are seen as well. Tensors are any that have `ndim`.
    """

    def walk(graph: Graph, behind: ChainMap) -> Iterator[Use]:
        """`behind` tells which tensor a name is a view of, and how."""
        for name in tensors.keys() & graph.weights:
            behind[name] = name, tuple(range(tensors[name].ndim))
        for node in graph.nodes:
            for i, name in enumerate(node.inputs):
                if behind.get(name):
                    yield Use(behind[name][0], node, i, behind[name][1])
            if node.op.view and behind.get(node.inputs[0]):
                root, axes = behind[node.inputs[0]]
                behind[node.outputs[0]] = root, _viewed(node, axes)
            for inner in node.graphs.values():
                for g in inner if isinstance(inner, list) else [inner]:
                    yield from walk(g, behind.new_child(dict.fromkeys(g.inputs)))
            if node.body is not None:
                given = (behind.get(name) for name in node.inputs)
                inner = dict(zip(node.body.inputs, given, strict=False))
                for local, name in node.body.lifted.items():
                    if name in tensors:
                        inner[local] = name, tuple(range(tensors[name].ndim))
                yield from walk(node.body, ChainMap(inner))

    return walk(graph, ChainMap())


def _viewed(node: Node, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if axes is None or node.op.name in _SAME_AXES:
        return axes
    if node.op.name == "Transpose":
        return tuple(axes[i] for i in node.attributes.get("perm", range(len(axes))[::-1]))
    return None


@dataclass(frozen=True)
class Layout:
    """A weight as a linear map: what each of its own axes means."""

    output: int
    input: int
    kernel: tuple[int, ...] = ()
    """The window of a convolution."""
    batch: tuple[int, ...] = ()
    """Axes along which there are separate maps: directions of an LSTM, experts."""
    lookup: bool = False
    """Rows are read, as in an embedding, and no product is formed."""

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the matrix: outputs, and inputs at every place of the kernel."""
        return shape[self.output], math.prod(shape[a] for a in (self.input, *self.kernel))


def layout(use: Use) -> Layout | None:
    """What the axes of a weight mean where it is used; None where it is no factor of a product."""
    if use.axes is None or len(use.axes) < 2:
        return None
    name, rank, get = use.node.op.name, len(use.axes), use.node.attributes.get
    place = None
    if name in ("Conv", "FusedConv") and use.position == 1:
        place = Layout(0, 1, tuple(range(2, rank)))
    elif name == "ConvTranspose" and use.position == 1:
        place = Layout(1, 0, tuple(range(2, rank)))
    elif name in ("Gemm", "FusedGemm", "MatMul", "FusedMatMul") and use.position < 2:
        # the first factor is summed over its last axis, the second over the one before
        last = (use.position == 0) != bool(get("transB" if use.position else "transA", 0))
        output, input = (rank - 2, rank - 1) if last else (rank - 1, rank - 2)
        place = Layout(output, input, batch=tuple(range(rank - 2)))
    elif name in ("GRU", "LSTM", "RNN") and use.position in (1, 2):
        place = Layout(1, 2, batch=(0,))
    elif name == "Gather" and use.position == 0 and rank == 2:
        row = get("axis", 0) % 2
        place = Layout(1 - row, row, lookup=True)
    if place is None:
        return None
    own = use.axes
    return Layout(
        own[place.output],
        own[place.input],
        tuple(own[a] for a in place.kernel),
        tuple(own[a] for a in place.batch),
        place.lookup,
    )


def layouts(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, Layout]:
    """The layout of every weight, by its first use that has one."""
    found: dict[str, Layout] = {}
    for use in uses(graph, tensors):
        if use.name not in found and (place := layout(use)) is not None:
            found[use.name] = place
    return found
