"""Writing parameters back into the ModelProto."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from jaxonnx._io.protos import (
    all_nodes,
    find_without_statistics,
    names_of_constants,
    opset_of,
    subgraphs,
    tensor_of_constant,
    trains,
)
from jaxonnx._io.records import SPARSITY, has
from jaxonnx._io.tensors import equal_bits
from jaxonnx._io.ties import merge_shared, restore_duplicates


def to_onnx(
    proto: ModelProto,
    values: Mapping[str, np.ndarray],
    params: Collection[str],
    state: Collection[str],
    *,
    repeat: bool = False,
    adapted: Collection[str] = (),
) -> ModelProto:
    """Return a copy of `proto` with the values of its named tensors, in inference form.

    A file that carries its training (`training_info`) keeps its form. Each parameter becomes an
    initializer of its own, also where the file had it in a Constant node or as an Identity over
    another initializer; such an Identity stays where the two are still equal, unless `repeat`.

    Copies of the `adapted` tensors, which get other values inside of the graph, stay nodes that
    read these.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    repeat = repeat or has(proto, SPARSITY)
    _fill(result.graph, values, params, state, repeat)
    restore_duplicates(result.graph, {n: x for n, x in values.items() if n not in adapted})
    merge_shared(result.graph)
    for function in result.functions:
        names = dict(names_of_constants(function))
        for node in function.node:
            constant = tensor_of_constant(node)
            name = names.get(node.output[0], "") if node.output else ""
            if constant is not None and name in values:
                _set(constant, values[name])
    if result.ir_version < 4:
        # declare every initializer as an input too, as IR version 3 demands
        inputs = {value.name for value in result.graph.input}
        for tensor in result.graph.initializer:
            if tensor.name not in inputs:
                result.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
    opset = opset_of(proto)
    # A training algorithm of the file's own may read what inference form would remove.
    for node in [] if proto.training_info else _find_training(result.graph):
        _infer(node, opset)
    if has(result, SPARSITY):
        from jaxonnx._io.packed import keep_true

        keep_true(result, values)
    return result


def in_file_types(
    values: Mapping[str, Any], originals: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return values as NumPy arrays, in 64 bits where the file has them.

    `originals` are the file's 64-bit tensors; an unchanged one comes back exactly as it was.
    """
    arrays = {name: np.asarray(value) for name, value in values.items()}
    for name in originals.keys() & arrays.keys():
        array, original = arrays[name], originals[name]
        unchanged = np.array_equal(original.astype(array.dtype), array, equal_nan=True)
        arrays[name] = original if unchanged else array.astype(original.dtype)
    return arrays


def training_nodes(graph: GraphProto) -> list[str]:
    """Return the BatchNormalization and Dropout nodes that the file runs in training mode."""
    return [f"{node.op_type} '{node.name or node.output[0]}'" for node in _find_training(graph)]


def _fill(graph: GraphProto, values, params, state, repeat: bool) -> None:
    for tensor in graph.initializer:
        if tensor.name in values:
            _set(tensor, values[tensor.name])
    for sparse in list(graph.sparse_initializer):
        name = sparse.values.name
        if name in params:
            graph.sparse_initializer.remove(sparse)
            graph.initializer.append(numpy_helper.from_array(values[name], name))
    for node in list(graph.node):
        for inner in subgraphs(node):
            _fill(inner, values, params, state, repeat)
        name = node.output[0] if node.output else ""
        if name not in values:
            continue
        of = values.get(node.input[0]) if node.op_type == "Identity" else None
        apart = of is not None and not equal_bits(values[name], of)
        if of is not None and not apart and not repeat:
            continue
        constant = tensor_of_constant(node)
        if name in params or apart or (constant is None and name in state):
            graph.node.remove(node)
            graph.initializer.append(numpy_helper.from_array(values[name], name))
        elif constant is not None:
            _set(constant, values[name])


def _set(tensor: TensorProto, value: np.ndarray) -> None:
    new = numpy_helper.from_array(value, tensor.name)
    if not tensor.name:
        new.ClearField("name")
    if tensor.doc_string:
        new.doc_string = tensor.doc_string
    tensor.CopyFrom(new)


def _find_training(graph: GraphProto) -> list[NodeProto]:
    """Return the nodes in training mode, but for normalizations without running statistics."""
    fixed = find_without_statistics(graph)
    nodes = (node for node in all_nodes(graph) if node.domain in ("", "ai.onnx"))
    return [node for node in nodes if _is_training(node) and node.output[0] not in fixed]


def _is_training(node: NodeProto) -> bool:
    if node.op_type == "BatchNormalization":
        return trains(node)
    return node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2])


def _infer(node: NodeProto, opset: int) -> None:
    """Put a BatchNormalization or Dropout node into inference mode."""
    if node.op_type == "Dropout":
        del node.input[2:]
        return
    for attribute in list(node.attribute):
        if attribute.name == "training_mode":
            node.attribute.remove(attribute)
    if opset < 7:
        for attribute in list(node.attribute):
            if attribute.name == "is_test":
                node.attribute.remove(attribute)
        node.attribute.append(onnx.helper.make_attribute("is_test", 1))
    del node.output[1:]
