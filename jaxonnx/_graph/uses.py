"""Where the tensors of a graph are used: at which input of which node, and as what."""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxonnx._axes import Matrix
from jaxonnx._graph.bind import Graph, Node
from jaxonnx.errors import Error

_SAME_AXES = ("Cast", "CastLike", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Views that leave the axes as they are."""


@dataclass(frozen=True)
class Use:
    """A tensor at an input of a node, directly or behind views (Transpose, Reshape, Cast, ...)."""

    name: str
    node: Node
    position: int
    axes: tuple[int | None, ...] | None
    """The tensor's own axes in the order in which the node sees them, with None for those of length
    one that it sees besides; None as a whole behind a Reshape that mixes axes or is not known."""
    rank: int
    """The tensor's rank."""
    outer: Node
    """The node of the main graph that the node is or lies in."""

    @property
    def matrix(self) -> Matrix | None:
        """What the tensor's own axes mean here; None if it is not a factor, or is reshaped."""
        form = self.node.op.form(self.position)
        if form is None or self.axes is None:
            return None
        place = form.axes(len(self.axes), self.node.attributes, self.position)
        return None if place is None else place.of(self.axes, self.rank)

    @property
    def dense(self) -> str:
        """Why a tensor that is used like this cannot be sparse; empty if it can."""
        form, place = self.node.op.form(self.position), self.matrix
        where = f"input {self.position} of {self.node.op.name}"
        if form is not None and self.axes is None:
            return f"reshaped before {where}, so that its axes are not known"
        if place is None or place.lookup:
            return f"{where}, no factor of a matrix product"
        return "a grouped convolution" if place.grouped else ""


def uses(graph: Graph, tensors: Mapping[str, Any]) -> Iterator[Use]:
    """Yield every use of the named tensors, in the order of the nodes.

    Subgraphs and the bodies of functions are included. Tensors are anything with a shape; NumPy
    arrays among them also tell the target shapes of Reshape and the like.
    """

    def walk(graph: Graph, behind: ChainMap, outer: Node | None) -> Iterator[Use]:
        """Yield the uses in one graph; `behind` maps names to the tensors that they view."""
        for name in tensors.keys() & graph.weights:
            behind[name] = name, tuple(range(len(tensors[name].shape)))
        for node in graph.nodes:
            top = outer or node
            for i, name in enumerate(node.inputs):
                if behind.get(name):
                    root, axes = behind[name]
                    yield Use(root, node, i, axes, len(tensors[root].shape), top)
            if node.op.view and behind.get(node.inputs[0]):
                root, axes = behind[node.inputs[0]]
                others = [tensors.get(name) for name in node.inputs[1:]]
                behind[node.outputs[0]] = root, _viewed(node, axes, tensors[root].shape, others)
            for inner in node.graphs.values():
                for g in inner if isinstance(inner, list) else [inner]:
                    yield from walk(g, behind.new_child(dict.fromkeys(g.inputs)), top)
            if node.body is not None:
                passed = (behind.get(name) for name in node.inputs)
                inner = dict(zip(node.body.inputs, passed, strict=False))
                for local, name in node.body.lifted.items():
                    if name in tensors:
                        inner[local] = name, tuple(range(len(tensors[name].shape)))
                yield from walk(node.body, ChainMap(inner), top)

    return walk(graph, ChainMap(), None)


def _viewed(
    node: Node, axes: tuple[int | None, ...] | None, shape: tuple[int, ...], others: Sequence[Any]
) -> tuple[int | None, ...] | None:
    """Return a tensor's own axes as seen behind one more view; `others` are its other inputs."""
    if axes is None or node.op.name in _SAME_AXES:
        return axes
    if node.op.name == "Transpose":
        return tuple(axes[i] for i in node.attributes.get("perm", range(len(axes))[::-1]))
    if not all(isinstance(value, np.ndarray) for value in others):
        return None
    # Reshape, Flatten, Squeeze, Unsqueeze: followed where only axes of length one come and go
    before = tuple(1 if a is None else shape[a] for a in axes)
    try:
        after = node.op.function(np.zeros(before, np.int8), *others, **node.attributes).shape
    except (Error, ValueError):  # a shape that does not fit: running the graph says so
        return None
    if after == before:
        return axes
    kept = [a for a, n in zip(axes, before, strict=True) if n != 1]
    if [n for n in after if n != 1] != [n for n in before if n != 1]:
        return None
    return tuple(None if n == 1 else kept.pop(0) for n in after)


@dataclass(frozen=True)
class Weight:
    """The meaning of a tensor to all the operators that read it."""

    matrix: Matrix | None
    """What its axes mean, by the first use that tells; None if it is not a matrix."""
    start: float | None
    """The value that it starts from; None if it is drawn at random."""
    dense: str
    """Why it cannot be sparse; empty where every use is a product in which it can."""


def weights(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, Weight]:
    """Return what each tensor is to the operators that read it, in the order of first use.

    LoRA, `reinitialize`, sparsity and the summary all go by this.
    """
    read: dict[str, list[Use]] = {}
    for use in uses(graph, tensors):
        passed = use.node.body is not None or (use.node.op.view and use.position == 0)
        read.setdefault(use.name, []).extend([] if passed else [use])
    return {
        name: _weight(tensors[name].shape, read.get(name, ()))
        for name in dict.fromkeys([*read, *tensors])
    }


def _weight(shape: tuple[int, ...], used: Sequence[Use]) -> Weight:
    matrix = next((place for use in used if (place := use.matrix) is not None), None)
    start = None
    if matrix is None:
        trained = [use for use in used if use.node.op.role(use.position) is not None]
        start = trained[0].node.op.start(trained[0].position) if trained else None
        if start is None and math.prod(shape) == max(shape, default=1):
            start = 0.0  # a vector of which nothing is said is a bias
    reasons = [use.dense for use in used] or ["no factor of a matrix product"]
    return Weight(matrix, start, next(filter(None, reasons), ""))
