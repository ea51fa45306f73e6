"""A new last layer: the classes of another problem on the features of the same network.

The layer keeps its node, its name and its attributes; its weight, its bias and other tensors
with one number for each class get other lengths. A tensor that another node reads as well, or that
is computed, stays as it is, and the layer gets one of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, ValueInfoProto, helper

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph, Node, bind
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io import records
from jaxonnx._io.protos import all_graphs, all_nodes, declare, defined_names, unused_name
from jaxonnx._require import require
from jaxonnx._rewrite.last_layer import ENDINGS, LastLayer, Shape, find_last_layer
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx.errors import InputError

Classes = int | Sequence[str]
"""The number of classes, or their names."""


@dataclass(frozen=True)
class Head:
    """A last layer that replaces another one."""

    output: str
    """The output of the graph that has the classes."""
    classes: int
    """The number of classes."""
    axis: int
    """The axis of the classes in the output; -1 if it is the last one."""
    logits: bool
    """Whether the output is unnormalized: no Softmax, LogSoftmax or Sigmoid is behind the layer."""
    tensors: tuple[str, ...]
    """The names of the tensors to initialize."""
    note: str
    """A note for the user on replaced layers and omitted outputs."""


@dataclass(frozen=True)
class NewLastLayer:
    """A file with a new last layer."""

    proto: ModelProto
    tensors: dict[str, np.ndarray]
    """The tensors to initialize, filled with zeros."""
    constants: dict[str, np.ndarray]
    """New shape arguments (of Reshape, Expand, Resize) that contain the number of classes."""
    head: Head


def replace_head(
    proto: ModelProto,
    graph: Graph,
    tensors: Mapping[str, Any],
    trained: Collection[str],
    classes: Classes,
    at: str | None,
    *,
    ending: bool,
) -> NewLastLayer:
    """Replace a model's last layer by one with another number of outputs.

    Other outputs of the graph that are computed from the layer are dropped. Nodes and tensors that
    only they needed stay in the file, for `outputs.cut` to remove.

    Args:
      proto: the file.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      trained: the names of its parameters.
      classes: the number of classes, or their names, which are written into the file's record.
      at: the output to take the last layer of, or a value, node or module of the layer itself.
      ending: keep a Softmax, LogSoftmax or Sigmoid behind the layer.

    Raises:
      InputError: there is no layer that can be replaced, or there are several, which the message
        names.
    """
    count, labels = _count_classes(classes)
    evaluated = evaluate_shapes(proto, graph, tensors)
    types, fixed = ({}, frozenset()) if evaluated is None else (evaluated.values, evaluated.known)
    # ONNX's shape inference fills in what the evaluation on shapes did not reach
    missing = [n for node in graph.nodes for n in node.outputs if n and n not in types]
    if missing:
        kinds = infer_types(proto, tensors, missing).items()
        types = {n: to_value(ValueInfoProto(name=n, type=t)) for n, t in kinds} | {**types}
    shapes = {name: value.shape for name, value in types.items() if value.shape is not None}
    shapes |= {name: tuple(value.shape) for name, value in tensors.items()}
    layer = find_last_layer(proto.graph, graph, shapes, fixed, at, ending)
    checkable = evaluated is not None and layer.output in evaluated.values
    change = HeadChange(proto, graph, tensors, trained, types, shapes, layer, count, checkable)
    change.collect(ending)
    result = _write_changes(proto, graph, change)
    if checkable:
        _check_output(result, tensors, change)
    # record the names of the classes; the new tensors are no sparse weights
    entry = records.get(result, records.IMAGE, dict) or {}
    entry = {key: value for key, value in entry.items() if key != "labels"}
    records.put(result, records.IMAGE, entry | ({"labels": labels} if labels else {}) or None)
    if records.has(result, records.SPARSITY):
        from jaxonnx._io.packed import without  # imports jaxonnx.sparse

        without(result, change.fresh)
    axis = -1 if change.axis == change.rank - 1 else change.axis
    logits = change.ending is None or not ending
    note = _describe_change(proto, graph, change)
    head = Head(layer.output, count, axis, logits, (*change.fresh,), note)
    return NewLastLayer(result, change.fresh, change.constants, head)


def _count_classes(classes: Classes) -> tuple[int, list[str]]:
    """Return the number of classes, and their names if there are any."""
    if isinstance(classes, int | np.integer) and not isinstance(classes, bool) and classes >= 1:
        return int(classes), []
    names: Any = [] if isinstance(classes, str) or not isinstance(classes, Sequence) else classes
    fits = names and all(isinstance(name, str) for name in names)
    require("a head", classes, fits, "the number of classes or their names")
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise InputError(f"the names of classes must differ, and {repeated[0]!r} comes twice")
    return len(names), [*names]


def _write_changes(proto: ModelProto, graph: Graph, change: HeadChange) -> ModelProto:
    """Return a copy of the file with the changes applied."""
    result = ModelProto()
    result.CopyFrom(proto)
    main, output = result.graph, change.layer.output
    nodes = {node.output[0]: node for node in main.node if node.output}
    # 1. inputs with other values
    for (first, position), name in change.inputs.items():
        nodes[first].input[position] = name
    # 2. the path behind the layer: `reads` maps each of its values to the nearest one before it
    # that stays; the last node that stays gets the name of the output
    dropped = {node.outputs[0] for node in change.left}
    value = change.layer.node.outputs[0]
    reads = {value: value}
    for node, _ in change.layer.path:
        value = value if node.outputs[0] in dropped else node.outputs[0]
        reads[node.outputs[0]] = value
    # 3. nodes behind the layer that the output does not need compute the other outputs
    changed = behind(graph.nodes, change.layer.node.outputs)
    removed = dropped | (changed - ancestors(graph.nodes, reads))
    for i, node in reversed([*enumerate(main.node)]):
        results = {*node.output} - {""}
        if results and results <= removed:
            del main.node[i]
    for node in main.node:
        for i, name in enumerate(node.input):
            if name in reads:
                node.input[i] = output if reads[name] == value else reads[name]
        if value in node.output:
            node.output[0] = output
    # 4. declared types of values behind the layer have the old number of classes
    stale = {*changed, *change.fresh} - {output}
    for values in (main.value_info, main.output):
        for i, entry in reversed([*enumerate(values)]):
            if entry.name in stale:
                del values[i]
    for i, entry in reversed([*enumerate(main.quantization_annotation)]):
        if entry.tensor_name in stale:
            del main.quantization_annotation[i]
    for entry in (*main.value_info, *main.output):
        dims = entry.type.tensor_type.shape.dim
        if entry.name == output and len(dims) == change.rank:
            dims[change.axis].Clear()
            dims[change.axis].dim_value = change.count
    # 5. the new tensors
    for name, array in {**change.fresh, **change.constants}.items():
        _define(main, name, array)
    return result


def _define(graph: GraphProto, name: str, value: np.ndarray) -> None:
    """Declare a tensor as an initializer of the shape of `value`, without data.

    An initializer keeps its place; a sparse initializer or the nodes that computed it are removed.
    """
    for entry in graph.input:
        if entry.name == name:
            kind = entry.type.tensor_type.elem_type
            entry.CopyFrom(helper.make_tensor_value_info(name, kind, value.shape))
    for tensor in graph.initializer:
        if tensor.name == name:
            tensor.dims[:] = value.shape
            return
    for sparse in [s for s in graph.sparse_initializer if s.values.name == name]:
        graph.sparse_initializer.remove(sparse)
    for node in [n for n in graph.node if name in n.output]:
        graph.node.remove(node)
    graph.initializer.append(declare(name, value))


def _check_output(result: ModelProto, tensors: Mapping[str, Any], change: HeadChange) -> None:
    """Check by an evaluation on shapes that only the axis of the classes changed in the output.

    Raises:
      InputError: the output has another shape, or the graph cannot be evaluated any more.
    """
    tensors = {**tensors, **change.fresh, **change.constants}
    shapes = evaluate_shapes(result, bind(result, result.graph, tensors.keys()), tensors)
    layer = change.layer
    expected = [*change.shapes[layer.output]]
    expected[change.axis] = change.count
    value = None if shapes is None else shapes.values.get(layer.output)
    if value is None or value.shape != tuple(expected):
        nodes = ", ".join(node.label for node, _ in layer.path) or layer.node.label
        raise InputError(
            f"the output '{layer.output}' does not follow when the last layer has {change.count} "
            f"outputs in place of {change.old}; behind it are {nodes}. model.with_outputs"
            f"({layer.node.outputs[0]!r}) ends the graph before them"
        )


def _describe_change(proto: ModelProto, graph: Graph, change: HeadChange) -> str:
    """Describe the replaced layers and omitted outputs for the user."""
    layer = change.layer
    shapes = ", ".join(f"{name} {[*value.shape]}" for name, value in change.fresh.items())
    parts = [
        f"{layer.node.label} is a new layer with {change.count} outputs in place of {change.old}: "
        + shapes
    ]
    endings = [node.op.name for node in change.left if node.op.name in ENDINGS]
    if endings:
        parts.append(f"the {endings[0]} at the end is left out, '{layer.output}' has logits")
    if len(change.left) > len(endings):
        parts.append("its results are not rounded to integers")
    dropped = behind(graph.nodes, layer.node.outputs) - {layer.output}
    if outputs := [name for name in graph.outputs if name in dropped]:
        parts.append(f"outputs computed from the old one are left out: {', '.join(outputs)}")
    if proto.training_info:
        parts.append("the training_info of the file, which trains the old one, is left out")
    return "; ".join(parts)


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
        self._used = {*defined_names(self.proto.graph), *self.tensors}
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
        # 1. the weight of the layer, and its bias
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
        # 2. the nodes behind it, each with the axis that its outputs become there
        for node, data in layer.path:
            before, after = self._shape(node.inputs[data]), self._shape(node.outputs[0])
            for i, name in enumerate(node.inputs):
                if name and i != data and i not in node.op.static:
                    self._resize_operand(node, i, axis - len(before))
            new_axis = _follow_axis(node, axis, before, after, self.tensors)
            if new_axis is None and node.op.view and axis == len(before) - 1:
                # behind all others, as exporters write what is behind indices of rows
                reads = any(self._reads_classes(node.inputs[i]) for i in node.op.static)
                new_axis = len(after) - 1 if reads else None
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
        # 3. The calibrated ranges of the old outputs do not fit new ones: pairs of QuantizeLinear
        # and DequantizeLinear are left out. A QuantizeLinear alone makes the output an integer one.
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

    def _reads_classes(self, target: str) -> bool:
        """Check whether a shape takes the number of classes from that of the layer's result."""
        (result,), nodes = self.layer.node.outputs, self.graph.nodes
        axis, rank = self.layer.axis(len(self._shape(result))), len(self._shape(result))
        computed = ancestors(nodes, [target])
        sizes = {n.outputs[0] for n in nodes if n.op.name == "Shape" and n.inputs == (result,)}
        return any(
            node.op.name == "Gather"
            and node.inputs[0] in sizes
            and node.outputs[0] in computed
            and np.array_equal(np.ravel(self.tensors.get(node.inputs[1], ())) % rank, [axis])
            for node in nodes
        )

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
            checked = target is not None or self.checkable
            if name and not checked and not self._reads_classes(name):
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
    if node.op.name in ("Gather", "GatherND"):  # of indices that choose no classes
        return axis - len(before) + len(after)
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
