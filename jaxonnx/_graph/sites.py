"""Where a tensor stands in a graph, and what else the rules of what is trained ask about it.

A `Site` is one use of a tensor. Its properties are small pure functions of the use, of the tensor's
numbers and of the graph; each is evaluated when a rule first asks, and once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.known_constants import describe_constant
from jaxonnx._graph.normalizations import Normalizations
from jaxonnx._graph.uses import Use

ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Sub", "Where")
"""Operators in which a network's own tensors meet data without being declared as weights."""
_DELIMITER = re.compile(r"[./:]")
_SAMPLE = 256
"""The most numbers of a tensor that `Tensor.is_varied` compares."""
_VARIED = 0.75
"""The least share of different numbers in a sample of a learned tensor, also in half precision."""
_COMPARED = 4096
"""The most numbers of a tensor that `Tensor.irregular` compares."""
_ALIKE = 1e-3
"""The relative difference within which the norms of rows of a sinusoidal table agree."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """The numbers of a tensor of the file, or of a value that is computed from such tensors."""

    array: Any
    """Its value, on whatever device."""
    stored: bool
    """Whether it is an initializer, or computed; the others sit in Constant nodes."""

    @cached_property
    def value(self) -> np.ndarray:
        """Its value on the host."""
        return np.asarray(self.array)

    @cached_property
    def long(self) -> tuple[int, ...]:
        """The axes that are longer than one."""
        return tuple(axis for axis, size in enumerate(self.array.shape) if size != 1)

    @cached_property
    def description(self) -> str:
        """The kind of constant that its numbers are known to be; "" for any other."""
        return describe_constant(self.value)

    @cached_property
    def evenly_spaced(self) -> bool:
        """Whether the first numbers are an arithmetic sequence like 0, 1, 2, ...."""
        steps = np.diff(self.value.reshape(-1)[:_COMPARED].astype(np.float64))
        return bool(steps.size and steps[0] != 0 and np.allclose(steps, steps[0]))

    @cached_property
    def irregular(self) -> bool:
        """Whether there are more than two different numbers, and not evenly spaced."""
        several = len(np.unique(self.value.reshape(-1)[:_COMPARED])) > 2
        return several and not self.evenly_spaced

    @cached_property
    def is_varied(self) -> bool:
        """Whether most numbers of a sample differ, as learned and random ones do."""
        flat = self.value.reshape(-1)
        flat = flat[flat != 0] if flat.size > _SAMPLE else flat
        some = flat[np.linspace(0, flat.size - 1, min(flat.size, _SAMPLE)).astype(int)]
        return bool(some.size and len(np.unique(some)) >= _VARIED * some.size)

    @cached_property
    def largest(self) -> float:
        """The greatest magnitude; NaN if there is one."""
        return float(np.abs(self.value.astype(np.float64)).max(initial=0))

    @cached_property
    def rows_have_one_norm(self) -> bool:
        """Whether rows along the first or last long axis have equal norms, but for rows of zeros.

        Tables of sines and cosines of positions do, as sin^2 + cos^2 = 1.
        """
        for axis in (self.long[0], self.long[-1]):
            norms = np.linalg.norm(self.value.astype(np.float64), axis=axis)
            norms = norms[norms > 0]
            if norms.size and np.ptp(norms) <= _ALIKE * norms.max():
                return True
        return False

    @cached_property
    def linear_in_distance(self) -> bool:
        """Whether the different numbers of each head (..., queries, keys) are evenly spaced."""
        heads = self.value.reshape(-1, *self.value.shape[-2:])
        # the first row rules most tables out, without sorting all numbers of all heads
        even = _is_even(heads[0, 0]) and all(_is_even(head) for head in heads)
        return even and len(np.unique(heads[-1])) > 2


def _is_even(numbers: np.ndarray) -> bool:
    """Check whether the different numbers of an array are evenly spaced."""
    steps = np.diff(np.unique(numbers.astype(np.float64)))
    return bool(np.allclose(steps, steps[:1], 1e-3, 1e-6))


@dataclass(eq=False)
class Facts:
    """The graph around its sites; its layers are filled in before a rule asks for them."""

    graph: Graph
    normalized: Normalizations
    norms: frozenset[str]
    """The tensors that meet weights only in the computation of what divides these."""
    layers: set[int] = field(default_factory=set)
    """The indices of the nodes that have weights."""
    weights_stored: bool = False
    """Whether some weights are initializers; then Constant nodes hold none."""

    @cached_property
    def data(self) -> set[str]:
        """The values that depend on the graph's inputs."""
        return behind(self.graph.nodes, self.graph.inputs)

    @cached_property
    def behind_layers(self) -> set[str]:
        """The values that are computed from results of layers."""
        layers = [node for node in self.graph.nodes if node.index in self.layers]
        return behind(self.graph.nodes, (name for node in layers for name in node.outputs))

    @cached_property
    def before_layers(self) -> set[str]:
        """The values that layers are computed from."""
        layers = [node for node in self.graph.nodes if node.index in self.layers]
        return ancestors(self.graph.nodes, (name for node in layers for name in node.reads))

    @cached_property
    def on_inputs(self) -> dict[int, Node]:
        """The nodes with arithmetic of a tensor and an input that met no layer, by index."""
        return {node.index: node for node in self.graph.nodes if self._is_on_input(node)}

    def _is_on_input(self, node: Node) -> bool:
        fed = [name for name in node.inputs if name in self.data]
        plain = node.op.name in ("Add", "Div", "Mul", "Sub") and not node.op.domain
        return plain and len(fed) == 1 and fed[0] not in self.behind_layers

    def readers(self, node: Node, through: Collection[str] = ()) -> Iterator[str]:
        """Yield the operators that read a node's results, behind those in `through`."""
        names = [*node.outputs]
        for name in names:
            for reader in self.graph.readers.get(name, ()):
                if reader.op.name in through:
                    names += reader.outputs
                else:
                    yield reader.op.name


@dataclass(frozen=True, eq=False)
class Site:
    """A use of a tensor, as the rules see it."""

    use: Use
    tensor: Tensor
    facts: Facts
    result_is_trained: bool = False
    """Whether data meets only a value that is computed from the tensor, and that is a weight."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.use.name

    @cached_property
    def last_name(self) -> str:
        """The last part of the tensor's name: "running_mean" of "layers.0.bn.running_mean"."""
        return _DELIMITER.split(self.name.removesuffix(":0"))[-1]

    @property
    def node(self) -> Node:
        """The node that reads the tensor."""
        return self.use.node

    @cached_property
    def operator(self) -> str:
        """The name of the node's operator in ONNX's own domain; "" in other domains."""
        return "" if self.node.op.domain else self.node.op.name

    @cached_property
    def role(self) -> str | None:
        """The role that the operator declares for this input: "param", "vector" or "state"."""
        return self.node.op.role(self.use.position)

    @property
    def in_main_graph(self) -> bool:
        """Whether the node is in the main graph, in no subgraph and no function."""
        return self.node is self.use.outer

    @property
    def others(self) -> list[str]:
        """The other inputs of the node."""
        return [name for i, name in enumerate(self.node.inputs) if i != self.use.position]

    @cached_property
    def meets_data(self) -> bool:
        """Whether the tensor is an operand of arithmetic with values that depend on inputs."""
        arithmetic = self.in_main_graph and self.operator in ARITHMETIC
        return arithmetic and not self.facts.data.isdisjoint(self.others)

    @property
    def meets_only_tensors(self) -> bool:
        """Whether the node computes with tensors only."""
        return self.in_main_graph and self.facts.data.isdisjoint(self.node.reads)

    @property
    def meets_no_data(self) -> bool:
        """Whether the node computes with tensors only, and declares no weight here."""
        return self.role in (None, "vector") and self.facts.data.isdisjoint(self.node.reads)

    @property
    def is_outer_factor(self) -> bool:
        """Whether a product repeats the tensor along the axis that it sums over."""
        form = self.node.op.form(self.use.position)
        return self.use.view.expanded and form is not None and not self.use.summed

    @property
    def is_declared_weight(self) -> bool:
        """Whether the operator declares a weight here, whose numbers are no known constant."""
        weight = self.role == "param" and self.tensor.array.size > 1
        return weight and not self.is_outer_factor and not self.tensor.description

    @property
    def is_vector(self) -> bool:
        """Whether exactly one axis is longer than one."""
        return len(self.tensor.long) == 1

    @property
    def is_table(self) -> bool:
        """Whether several axes are longer than one."""
        return len(self.tensor.long) > 1
