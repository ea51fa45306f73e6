"""Find normalization layers that are written as arithmetic.

Older exports and converters write LayerNormalization and the like as ReduceMean, Sub, Mul, Sqrt and
Div, and BatchNormalization of inference as arithmetic with its constants. Factors of the normalized
values are scales and their addends biases, also with several axes; stored means and variances are
statistics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._graph.bind import Graph, Node

_SAME = ("Abs", "Cast", "Clip", "Expand", "Identity", "Max", "Neg", "Relu", "Reshape", "Squeeze")
_SAME += ("Transpose", "Unsqueeze")
_ALL = 99
"""Stands for the number of axes of a mean over all axes."""


class Part(NamedTuple):
    """The role of a value in a normalization."""

    kind: str
    """One of "mean", "square", "variance", "deviation", "inverse" (1 / deviation), "normalized" and
    "shift" (mean / deviation)."""
    axes: int
    """The number of axes that the mean is over; 0 for a square."""


@dataclass
class Normalizations:
    """The tensors that the spelled-out normalizations of a graph read."""

    learned: dict[str, int] = field(default_factory=dict)
    """Scales and biases, with the number of axes over which the mean goes."""
    statistics: set[str] = field(default_factory=set)
    """Stored means and variances, and the epsilon that is added to a variance."""
    values: set[str] = field(default_factory=set)
    """The values from the input up to its multiplication with a scale."""


def normalizations(graph: Graph, tensors: Mapping[str, Any]) -> Normalizations:
    """Find the tensors that spelled-out normalizations of the main graph read.

    Args:
      graph: the bound graph.
      tensors: the values of its named tensors.
    """
    if not any(node.op.name in ("Pow", "ReduceL2", "Sqrt") for node in graph.nodes):
        return Normalizations()
    walk = _Walk({**graph.initializers, **tensors})
    for node in graph.nodes:
        part = walk.step(node) if not node.op.domain and node.inputs and node.outputs else None
        if part is not None:
            walk.parts[node.outputs[0]] = part
    scales = {name: axes for name, axes in walk.factors.values() if name not in walk.statistics}
    centered = {
        n.outputs[0] for n in graph.nodes if n.op.name == "Sub" and {*n.inputs} & {*walk.parts}
    }
    return Normalizations(walk.biases | scales, walk.statistics, centered.union(walk.parts))


@dataclass
class _Walk:
    """The state of a walk over the nodes; dictionaries are by the name of a value."""

    tensors: Mapping[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    """The roles of values."""
    roots: dict[str, str] = field(default_factory=dict)
    """The tensor that the value is a view of, possibly with a scalar added."""
    factors: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The tensor that was multiplied into the value, and the axes of the mean."""
    epsilons: dict[str, str] = field(default_factory=dict)
    """The scalar that was added to give the value."""
    biases: dict[str, int] = field(default_factory=dict)
    """The biases found, with the axes of the mean (`Normalizations.learned`)."""
    statistics: set[str] = field(default_factory=set)
    """The statistics found."""

    def step(self, node: Node) -> Part | None:
        """Return the role of a node's result; None if it is not part of a normalization."""
        name, inputs = node.op.name, node.inputs
        first, second = (self.parts.get(x) for x in (*inputs[:2], "", "")[:2])
        if name in ("ReduceMean", "ReduceSum", "GlobalAveragePool", "ReduceSumSquare", "ReduceL2"):
            return self._mean(node, first)
        if name in _SAME:
            if root := self._tensor(inputs[0]):
                self.roots[node.outputs[0]] = root
            return first
        if name == "Reciprocal":
            return _as("inverse", first, "deviation")
        if name == "Sqrt":
            return _as("deviation", self._variance(inputs[0]), "variance")
        if name == "Pow":
            exponent = self._number(inputs[1])
            kind = {0.5: "deviation", -0.5: "inverse"}.get(exponent or 0.0)
            if kind:
                return _as(kind, self._variance(inputs[0]), "variance")
            return Part("square", 0) if exponent == 2 else None
        if name == "Mul":
            return self._mul(node, first, second)
        if name == "Div":
            if second is not None and second.kind == "deviation":
                kind = "normalized" if self._number(inputs[0]) is None else "inverse"
                return Part(kind, second.axes)
            return first if self._number(inputs[1]) is not None else None
        if name == "Add":
            return self._add(node, first, second)
        return self._sub(inputs, first, second) if name == "Sub" else None

    def _tensor(self, name: str) -> str:
        """Return the tensor with several elements that a value is or is a view of; else ""."""
        root = self.roots.get(name, name)
        return root if np.size(self.tensors.get(root, 0)) > 1 else ""

    def _number(self, name: str) -> float | None:
        """Return a constant with one element as a float; None for other values."""
        value = self.tensors.get(name)
        single = value is not None and np.size(value) == 1 and value.dtype.kind not in "cO"
        return float(np.reshape(value, ())) if single else None

    def _variance(self, name: str) -> Part | None:
        """Return the variance under a root: a computed one, or a stored one plus epsilon."""
        stored = self.roots.get(name, "")
        self.statistics.add(self.epsilons.get(name, ""))
        if name not in self.parts and self._tensor(name) and stored:
            self.statistics.add(stored)
            return Part("variance", 1)
        return self.parts.get(name)

    def _mean(self, node: Node, first: Part | None) -> Part | None:
        """Return the role of a reduction: a variance if squares are averaged, else a mean."""
        if node.inputs[0] in self.tensors:
            return None
        axes = node.attributes.get("axes")
        if axes is None and len(node.inputs) > 1:
            axes = self.tensors.get(node.inputs[1])
        count = (
            1 if node.op.name == "GlobalAveragePool" else _ALL if axes is None else np.size(axes)
        )
        if node.op.name == "ReduceL2":
            return Part("deviation", count)
        squared = node.op.name == "ReduceSumSquare" or (first is not None and first[0] == "square")
        return Part("variance" if squared else "mean", count)

    def _mul(self, node: Node, first: Part | None, second: Part | None) -> Part | None:
        """Return the role of a product; note a tensor that scales normalized values."""
        a, b = node.inputs
        if a == b:
            return Part("square", 0)
        for other, part in ((a, second), (b, first)):
            if part is None:
                continue
            if self._number(other) is not None:
                return part
            if part.kind in ("inverse", "normalized") and (tensor := self._tensor(other)):
                self.factors[node.outputs[0]] = tensor, part.axes
                return part
            if part.kind == "inverse":
                # times a mean it is a shift; times anything else it normalizes
                shift = _as("shift", self.parts.get(other), "mean")
                return shift or Part("normalized", part.axes)
        return None

    def _add(self, node: Node, first: Part | None, second: Part | None) -> Part | None:
        for other, name, part in (
            (node.inputs[0], node.inputs[1], second),
            (node.inputs[1], node.inputs[0], first),
        ):
            if self._number(other) is not None:
                self.epsilons[node.outputs[0]] = other
                if tensor := self._tensor(name):
                    self.roots[node.outputs[0]] = tensor
                return part
            if part is not None and part.kind == "normalized" and (tensor := self._tensor(other)):
                self.biases[tensor] = part.axes
        return None

    def _sub(self, inputs: tuple[str, ...], first: Part | None, second: Part | None) -> Part | None:
        if second is None:
            return None
        if first is not None and first.kind == "variance":
            return first  # var = E[x^2] - E[x]^2
        if second.kind in ("shift", "inverse"):
            if inputs[1] in self.factors:  # bias - stored mean * inverse deviation
                self.statistics.add(self.factors[inputs[1]][0])
            if tensor := self._tensor(inputs[0]):
                self.biases[tensor] = second.axes
            return first
        return None


def _as(kind: str, part: Part | None, required: str) -> Part | None:
    """Return a part with the kind `kind` if it has the kind `required`; else None."""
    return Part(kind, part.axes) if part is not None and part.kind == required else None
