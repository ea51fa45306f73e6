"""What holds the number of a layer's outputs: its weight and bias, and the nodes behind it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto, helper

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.values import Value
from jaxonnx._io.build import names, unused_name
from jaxonnx._io.protos import all_graphs, all_nodes
from jaxonnx._rewrite.last_layer import ENDINGS, Last, Shape
from jaxonnx.errors import InputError

_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_TARGETS = ("Expand", "Reshape", "Resize")
"""Operators with an input that holds the shape of their result."""


@dataclass
class Change:
    """The changes that a layer with another number of outputs makes necessary."""

    proto: ModelProto
    graph: Graph
    tensors: Mapping[str, Any]
    trained: Collection[str]
    types: Mapping[str, Value]
    shapes: Mapping[str, Shape]
    layer: Last
    count: int
    sure: bool
    """Whether the shapes behind the layer can be checked in the end."""
    axis: int = 0
    """The axis of the classes in the output."""
    rank: int = 0
    """The rank of the output."""
    fresh: dict[str, np.ndarray] = field(default_factory=dict)
    """The tensors that start anew, by name."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """New shapes for nodes that take one."""
    inputs: dict[tuple[str, int], str] = field(default_factory=dict)
    """New names at inputs of nodes, by a node's first output and the position."""
    axes: dict[int, int] = field(default_factory=dict)
    """The axis of the classes in the result of each node, by its index."""
    ending: Node | None = None
    """The node that makes probabilities of the classes at the very end."""
    left: list[Node] = field(default_factory=list)
    """Nodes behind the layer that are left out."""

    def __post_init__(self) -> None:
        nodes = [*all_nodes(self.proto.graph)]
        outputs = [value.name for graph in all_graphs(self.proto.graph) for value in graph.output]
        self._reads = Counter([*outputs, *(name for node in nodes for name in node.input)])
        self._used = {*names(self.proto.graph), *self.tensors}
        self._producers = {name: node for node in self.graph.nodes for name in node.outputs}
        # 64-bit tensors have the type of the file, not that of JAX
        self._types = {name: value.dtype for name, value in self.tensors.items()} | {
            tensor.name: helper.tensor_dtype_to_np_dtype(tensor.data_type)
            for tensor in self.proto.graph.initializer
        }
        weight = self.shapes[self.layer.node.inputs[self.layer.weight]]
        self.old: Any = weight[self.layer.matrix.output]

    def follow(self, ending: bool) -> None:
        """Note the changes from the layer to the output.

        Raises:
          InputError: a node does not keep the outputs of the layer apart.
        """
        layer, node = self.layer, self.layer.node
        self._renew(node, layer.weight, layer.matrix.output)
        rank = len(self._shape(node.outputs[0]))
        axis = layer.axis(rank)
        for i, name in enumerate(node.inputs):
            shape = self.shapes.get(name, ())
            place = 0 if layer.convolves else len(shape) - rank + axis
            if i not in (layer.data, layer.weight) and shape[place : place + 1] == (self.old,):
                self._renew(node, i, place)
        for node, data in layer.path:
            before, after = self._shape(node.inputs[data]), self._shape(node.outputs[0])
            for i, name in enumerate(node.inputs):
                if name and i != data and i not in node.op.static:
                    self._lengthen(node, i, axis - len(before))
            place = _follow_axis(node, axis, before, after, self.tensors)
            if place is None:
                raise InputError(
                    f"{node.label}, between the last layer and the output '{layer.output}', does "
                    f"not keep its {self.old} outputs apart; model.with_outputs"
                    f"({layer.node.outputs[0]!r}) ends the graph before it"
                )
            axis = self.axes[node.index] = place
            self._target(node, axis, len(after))
            if node.op.name in _ROUNDING:
                self.left.append(node)
        if len(self.left) % 2:
            raise InputError(
                f"the output '{layer.output}' is rounded to integers: take the file from before "
                "quantization"
            )
        self.ending = self._find_ending()
        if self.ending is not None and not ending:
            self.left.append(self.ending)
        self.axis, self.rank = axis, len(self._shape(layer.output))

    def _shape(self, name: str) -> Shape:
        if name not in self.shapes:
            raise InputError(
                f"the shape of '{name}', behind the last layer, is not known: declare the shapes "
                "of the inputs, or export the network again"
            )
        return self.shapes[name]

    def _renew(self, node: Node, position: int, axis: int) -> None:
        """Put a tensor at an input whose axis has one place for each new class."""
        name = node.inputs[position]
        own = self._find_own_tensor(name, axis)
        if own is not None:
            root, axis = own
            shape, dtype = self.tensors[root].shape, self.tensors[root].dtype
        else:
            kind = "bias" if node.op.form(position) is None else "weight"
            root = unused_name(f"{node.outputs[0]}.{kind}", self._used)
            shape = self.shapes[name]
            dtype = self._types.get(name) or self.types[name].dtype
            self.inputs[node.outputs[0], position] = root
        new: Any = [self.count if a == axis else d for a, d in enumerate(shape)]
        self.fresh[root] = np.zeros(new, dtype)

    def _find_own_tensor(self, name: str, axis: int) -> tuple[str, int] | None:
        """Return the tensor that a value shows, and its axis, if nothing else reads it."""
        while self._reads[name] == 1:
            if name in self.tensors:
                real = jnp.issubdtype(self.tensors[name].dtype, jnp.floating)
                return (name, axis) if real else None
            node = self._producers[name]
            if node.op.name not in ("Cast", "Identity", "Transpose"):
                return None
            if node.op.name == "Transpose":
                rank = len(self.shapes[name])
                axis = node.attributes.get("perm", range(rank)[::-1])[axis]
            name = node.inputs[0]
        return None

    def _lengthen(self, node: Node, position: int, axis: int) -> None:
        """Put a new tensor in the place of one with a number for each class.

        `axis` is that of the classes, counted from the end.
        """
        name = node.inputs[position]
        shape, role = self.shapes.get(name, ()), node.op.role(position)
        place = len(shape) + axis if node.op.pointwise else 0 if len(shape) == 1 and role else -1
        if place < 0 or place >= len(shape) or shape[place] != self.old:
            return
        if self.old == 1 and name not in self.trained:  # a scalar that belongs to no class
            return
        if role is None:
            raise InputError(
                f"{node.label}, behind the last layer, has a number for each of its {self.old} "
                f"outputs in '{name}', and what it should be for others is not known; model"
                f".with_outputs({self.layer.node.outputs[0]!r}) ends the graph before it"
            )
        self._renew(node, position, place)

    def _target(self, node: Node, axis: int, rank: int) -> None:
        """Put another constant at an input that holds the shape of the result."""
        for position in sorted(node.op.static) if node.op.name in _TARGETS else ():
            name = node.inputs[position] if position < len(node.inputs) else ""
            target = self.tensors.get(name)
            if name and target is None and not self.sure:
                raise InputError(
                    f"{node.label}, behind the last layer, takes a shape that is computed: whether "
                    "it holds the number of classes is not known"
                )
            if (
                isinstance(target, np.ndarray)
                and target.dtype.kind == "i"
                and target.shape == (rank,)
                and target[axis] == self.old
            ):
                new = target.copy()
                new[axis] = self.count
                name = unused_name(f"{node.outputs[0]}.shape", self._used)
                self.inputs[node.outputs[0], position] = name
                self.constants[name] = new

    def _find_ending(self) -> Node | None:
        """Return the last node but for views, if it makes probabilities of the classes."""
        for node, _ in reversed(self.layer.path):
            if node.op.name in ENDINGS and not node.op.domain:
                axis, rank = self.axes[node.index], len(self.shapes[node.outputs[0]])
                over = node.attributes.get("axis", -1 if node.op.since >= 13 else 1) % rank
                return node if node.op.name == "Sigmoid" or over == axis else None
            if not node.op.view and node.op.name != "Dropout":
                return None
        return None


def _follow_axis(
    node: Node, axis: int, before: Shape, after: Shape, tensors: Mapping[str, Any]
) -> int | None:
    """Return the axis of the classes behind a node; None if it does not keep them apart."""
    if node.op.name == "Transpose":
        return [*node.attributes.get("perm", range(len(before))[::-1])].index(axis)
    if node.op.view and before != after:
        tail = _size(before[axis + 1 :])
        fits = (
            i for i, d in enumerate(after) if d == before[axis] and _size(after[i + 1 :]) == tail
        )
        return next(fits, None)
    if len(before) == len(after):
        return axis if before[axis] == after[axis] else None
    if node.op.name.startswith("Reduce"):
        axes = node.attributes.get("axes")
        if axes is None and len(node.inputs) > 1:
            axes = tensors.get(node.inputs[1])
        reduced = {axis} if axes is None else {int(a) % len(before) for a in axes}
        return None if axis in reduced else axis - sum(a < axis for a in reduced)
    return None


def _size(dims: Shape) -> tuple[int, list[str]]:
    """Return the product of dimensions, and the open ones among them."""
    return math.prod(d for d in dims if isinstance(d, int)), [
        str(d) for d in dims if not isinstance(d, int)
    ]
