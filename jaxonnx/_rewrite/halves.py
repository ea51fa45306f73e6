"""What onnxruntime's converter to float16 lacks: functions, `value_float`, Casts in bodies.

It knows values by their names alone, and puts each Cast into the main graph.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto
from onnx.helper import make_attribute
from onnx.numpy_helper import from_array, to_array

from jaxonnx._io.protos import (
    all_graphs,
    all_nodes,
    local_names,
    rename_reads,
    subgraphs,
    tensor_of_constant,
    unused_name,
)
from jaxonnx._rewrite.opset import inline


def prepare_to_halve(proto: ModelProto) -> ModelProto:
    """Return a file without functions, in which no two values have the same name.

    Constants of Python's numbers (`value_float`) become tensors.
    """
    proto = inline(proto)
    tensors = {tensor.name for tensor in proto.graph.initializer}  # whose types the tensors say
    values = [value for value in proto.graph.value_info if value.name not in tensors]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(values)
    _separate_names(proto.graph, local_names(proto.graph))
    for node in all_nodes(proto.graph):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                numbers = attribute.f if attribute.name == "value_float" else [*attribute.floats]
                tensor = from_array(np.asarray(numbers, np.float32))
                attribute.CopyFrom(make_attribute("value", tensor))
    return proto


def constants_of_bodies(graph: GraphProto) -> Iterator[tuple[str, Any]]:
    """Yield the names of tensors within subgraphs, and their arrays."""
    for body in [*all_graphs(graph)][1:]:
        yield from ((tensor.name, to_array(tensor)) for tensor in body.initializer)
        for node in body.node:
            if (tensor := tensor_of_constant(node)) is not None:
                yield node.output[0], to_array(tensor)


def move_casts(graph: GraphProto) -> None:
    """Move each Cast of a value of a subgraph from the main graph to that subgraph, in place."""
    homes = {name: body for body in all_graphs(graph) for name in local_names(body)}
    moved = True
    while moved:  # a Cast may read another's result
        moved = False
        for i, node in reversed([*enumerate(graph.node)]):
            body = homes.get(node.input[0], graph) if node.op_type == "Cast" else graph
            if body is graph:
                continue
            places = [j for j, n in enumerate(body.node) if node.input[0] in n.output]
            body.node.insert(max(places, default=-1) + 1, node)
            homes[node.output[0]], moved = body, True
            del graph.node[i]
            for j, value in reversed([*enumerate(graph.value_info)]):
                if value.name == node.output[0]:
                    del graph.value_info[j]


def _separate_names(graph: GraphProto, used: set[str]) -> None:
    """Number values of subgraphs whose names other graphs have, too, in place."""
    for node in graph.node:
        for body in subgraphs(node):
            pairs = ((name, unused_name(name, used)) for name in sorted(local_names(body)))
            new = {name: other for name, other in pairs if name != other}
            for inner in body.node:
                rename_reads(inner, new)
                inner.output[:] = [new.get(name, name) for name in inner.output]
            for value in (*body.input, *body.output, *body.value_info, *body.initializer):
                value.name = new.get(value.name, value.name)
            for sparse in body.sparse_initializer:
                sparse.values.name = new.get(sparse.values.name, sparse.values.name)
            _separate_names(body, used)
