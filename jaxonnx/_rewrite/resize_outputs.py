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
from jaxonnx._rewrite.last_layer import ENDINGS, LastLayer, Shape
from jaxonnx.errors import InputError

_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_TARGETS = ("Expand", "Reshape", "Resize")
"""Operators with an input that holds the shape of their result."""


@dataclass
class HeadChange:
    """The changes to a file that give its last layer another number of outputs.

    Nodes are named by their first output, as `head` writes the changes into another ModelProto.
    """

    proto: ModelProto
    graph: Graph
    tensors: Mapping[str, Any]
    trained: Collection[str]
    types: Mapping[str, Value]
    shapes: Mapping[str, Shape]
    layer: LastLayer
    count: int
    """The new number of outputs."""
    checkable: bool
    """Whether the output's shape can be checked by an evaluation on shapes afterwards."""
    axis: int = 0
    """The axis of the classes in the output."""
    rank: int = 0
    """The rank of the output."""
    fresh: dict[str, np.ndarray] = field(default_factory=dict)
    """The tensors to initialize, by name, filled with zeros."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """New shape arguments of nodes, by name."""
    inputs: dict[tuple[str, int], str] = field(default_factory=dict)
    """New names of inputs, by node and position."""
    axes: dict[int, int] = field(default_factory=dict)
    """The axis of the classes in the result of each node behind the layer, by node index."""
    ending: Node | None = None
    """The Softmax, LogSoftmax or Sigmoid over the classes at the end, if there is one."""
    left: list[Node] = field(default_factory=list)
    """Nodes behind the layer that are left out."""

    def __post_init__(self) -> None:
        nodes = [*all_nodes(self.proto.graph)]
        outputs = [value.name for graph in all_graphs(self.proto.graph) for value in graph.output]
        self._reads = Counter([*outputs, *(name for node in nodes for name in node.input)])
        self._used = {*names(self.proto.graph), *self.tensors}
        # 64-bit tensors have the type of the file, not that of JAX
        self._types = {name: value.dtype for name, value in self.tensors.items()} | {
            tensor.name: helper.tensor_dtype_to_np_dtype(tensor.data_type)
            for tensor in self.proto.graph.initializer
        }
        weight = self.shapes[self.layer.node.inputs[self.layer.weight]]
        self.old: Any = weight[self.layer.matrix.output]

    def collect(self, ending: bool) -> None:
        """Collect the changes from the layer to the output.

        Args:
          ending: keep the Softmax, LogSoftmax or Sigmoid at the end.

        Raises:
          InputError: a node mixes the outputs of the layer, or has a number for each of them that
            cannot be initialized; or the output is rounded to integers.
        """
        layer, node = self.layer, self.layer.node
        self._replace_tensor(node, layer.weight, layer.matrix.output)
        rank = len(self._shape(node.outputs[0]))
        axis = layer.axis(rank)
        # the layer's own bias: (outputs,) of a convolution, else broadcast against the result, so
        # that axes are counted from the end
        for i, name in enumerate(node.inputs):
            shape = self.shapes.get(name, ())
            own_axis = 0 if layer.convolves else len(shape) - rank + axis
            lengths = shape[own_axis : own_axis + 1]
            if i not in (layer.data, layer.weight) and lengths == (self.old,):
                self._replace_tensor(node, i, own_axis)
        for node, data in layer.path:
            before, after = self._shape(node.inputs[data]), self._shape(node.outputs[0])
            for i, name in enumerate(node.inputs):
                if name and i != data and i not in node.op.static:
                    self._resize_operand(node, i, axis - len(before))
            new_axis = _follow_axis(node, axis, before, after, self.tensors)
            if new_axis is None:
                raise InputError(
                    f"{node.label}, between the last layer and the output '{layer.output}', does "
                    f"not keep its {self.old} outputs apart; model.with_outputs"
                    f"({layer.node.outputs[0]!r}) ends the graph before it"
                )
            axis = self.axes[node.index] = new_axis
            self._resize_target(node, axis, len(after))
            if node.op.name in _ROUNDING:
                self.left.append(node)
        # The calibrated ranges of the old outputs do not fit new ones: pairs of QuantizeLinear and
        # DequantizeLinear are left out. A QuantizeLinear alone makes the output an integer one.
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
        """Return the shape of a value.

        Raises:
          InputError: it is not known.
        """
        if name not in self.shapes:
            raise InputError(
                f"the shape of '{name}', behind the last layer, is not known: declare the shapes "
                "of the inputs, or export the network again"
            )
        return self.shapes[name]

    def _replace_tensor(self, node: Node, position: int, axis: int) -> None:
        """Replace the tensor at an input by zeros, with `count` numbers along `axis`.

        The tensor keeps its name if nothing else reads it; else the input gets a new one.
        """
        name = node.inputs[position]
        tensor_axis = self._find_own_tensor(name, axis)
        if tensor_axis is not None:
            root, axis = tensor_axis
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
        """Return the tensor that a value is a Cast or Transpose of, and the same axis of it.

        None if something else reads the tensor or a value between, or it is not floating-point.
        """
        while self._reads[name] == 1:
            if name in self.tensors:
                real = jnp.issubdtype(self.tensors[name].dtype, jnp.floating)
                return (name, axis) if real else None
            node = self.graph.producers[name]
            if node.op.name not in ("Cast", "Identity", "Transpose"):
                return None
            if node.op.name == "Transpose":
                rank = len(self.shapes[name])
                axis = node.attributes.get("perm", range(rank)[::-1])[axis]
            name = node.inputs[0]
        return None

    def _resize_operand(self, node: Node, position: int, axis: int) -> None:
        """Replace the operand of a node behind the layer if it has a number for each class.

        Args:
          axis: the axis of the classes in the data, counted from the end (negative).
        """
        name = node.inputs[position]
        shape, role = self.shapes.get(name, ()), node.op.role(position)
        # operands of elementwise operators broadcast from the last axis; parameters of others (the
        # scale of a normalization) are vectors
        own_axis = len(shape) + axis if node.op.pointwise else 0 if len(shape) == 1 and role else -1
        if own_axis < 0 or own_axis >= len(shape) or shape[own_axis] != self.old:
            return
        if self.old == 1 and name not in self.trained:  # a scalar that belongs to no class
            return
        if role is None:
            raise InputError(
                f"{node.label}, behind the last layer, has a number for each of its {self.old} "
                f"outputs in '{name}', and what it should be for others is not known; model"
                f".with_outputs({self.layer.node.outputs[0]!r}) ends the graph before it"
            )
        self._replace_tensor(node, position, own_axis)

    def _resize_target(self, node: Node, axis: int, rank: int) -> None:
        """Replace a constant input that is the shape of the node's result.

        Args:
          axis: the axis of the classes in the result.
          rank: the rank of the result.
        """
        for position in sorted(node.op.static) if node.op.name in _TARGETS else ():
            name = node.inputs[position] if position < len(node.inputs) else ""
            target = self.tensors.get(name)
            if name and target is None and not self.checkable:
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
        """Return the Softmax, LogSoftmax or Sigmoid over the classes at the end of the path.

        Views and Dropout may follow it; None if another operator does.
        """
        for node, _ in reversed(self.layer.path):
            if node.op.name in ENDINGS and not node.op.domain:
                # before opset 13, Softmax is over all axes from `axis`, 1 by default
                axis, rank = self.axes[node.index], len(self.shapes[node.outputs[0]])
                over = node.attributes.get("axis", -1 if node.op.since >= 13 else 1) % rank
                return node if node.op.name == "Sigmoid" or over == axis else None
            if not node.op.view and node.op.name != "Dropout":
                return None
        return None


def _follow_axis(
    node: Node, axis: int, before: Shape, after: Shape, tensors: Mapping[str, Any]
) -> int | None:
    """Return the axis of the classes in a node's result; None if the node mixes the classes.

    Args:
      axis: their axis in the node's data.
      before, after: the shapes of the data and of the result.
      tensors: known values, among them the axes of reductions.
    """
    if node.op.name == "Transpose":
        return [*node.attributes.get("perm", range(len(before))[::-1])].index(axis)
    if node.op.view and before != after:
        # in C order an axis survives a Reshape if as many elements lie behind it as before
        tail = _size(before[axis + 1 :])
        fitting = (
            i for i, d in enumerate(after) if d == before[axis] and _size(after[i + 1 :]) == tail
        )
        return next(fitting, None)
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
    """Return the product of the known dimensions, and the symbolic ones among them."""
    return math.prod(d for d in dims if isinstance(d, int)), [
        str(d) for d in dims if not isinstance(d, int)
    ]
