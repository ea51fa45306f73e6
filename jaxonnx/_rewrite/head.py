"""A new last layer: the classes of another problem on the features of the same network.

The layer keeps its node, its name and its attributes; its weight, its bias and what else has one
number for each class become tensors of other lengths. A tensor that something else reads as well,
or that is computed, stays with that, and the layer gets one of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.values import to_value
from jaxonnx._io import records
from jaxonnx._require import require
from jaxonnx._rewrite.last_layer import ENDINGS, find_last_layer
from jaxonnx._rewrite.resize_outputs import HeadChange
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
    at: str | None = None,
    *,
    ending: bool = False,
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
    _update_records(result, labels, change.fresh)
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


def _update_records(result: ModelProto, labels: list[str], fresh: Collection[str]) -> None:
    """Record the names of the classes; remove the new tensors from the record of sparse weights."""
    entry = records.get(result, records.IMAGE, dict) or {}
    entry = {key: value for key, value in entry.items() if key != "labels"}
    records.put(result, records.IMAGE, entry | ({"labels": labels} if labels else {}) or None)
    if records.has(result, records.SPARSITY):
        from jaxonnx._io.packed import without  # imports jaxonnx.sparse

        without(result, fresh)


def _write_changes(proto: ModelProto, graph: Graph, change: HeadChange) -> ModelProto:
    """Return a copy of the file with the changes applied."""
    result = ModelProto()
    result.CopyFrom(proto)
    main, output = result.graph, change.layer.output
    nodes = {node.output[0]: node for node in main.node if node.output}
    for (first, position), name in change.inputs.items():
        nodes[first].input[position] = name
    # `reads` maps each value of the path to the nearest one before it that stays; the last node
    # that stays gets the name of the output
    left = {node.outputs[0] for node in change.left}
    value = change.layer.node.outputs[0]
    reads = {value: value}
    for node, _ in change.layer.path:
        value = value if node.outputs[0] in left else node.outputs[0]
        reads[node.outputs[0]] = value
    # nodes behind the layer that the output does not need compute the other outputs
    changed = behind(graph.nodes, change.layer.node.outputs)
    removed = left | (changed - ancestors(graph.nodes, reads))
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
    # declared types of values behind the layer have the old number of classes
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
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    graph.initializer.append(TensorProto(name=name, data_type=kind, dims=value.shape))


def _check_output(result: ModelProto, tensors: Mapping[str, Any], change: HeadChange) -> None:
    """Check by an evaluation on shapes that only the axis of the classes changed in the output.

    Raises:
      InputError: the output has another shape, or the graph cannot be evaluated any more.
    """
    tensors = {**tensors, **change.fresh, **change.constants}
    shapes = evaluate_shapes(result, bind(result, result.graph, tensors.keys()), tensors)
    layer = change.layer
    wanted = [*change.shapes[layer.output]]
    wanted[change.axis] = change.count
    value = None if shapes is None else shapes.values.get(layer.output)
    if value is None or value.shape != tuple(wanted):
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
