"""Check the header of a ModelProto: versions and names."""

from itertools import chain
from typing import Any

import onnx
from onnx import ModelProto

from jaxonnx._io.protos import all_graphs, all_nodes
from jaxonnx.errors import ModelError, UnsupportedError

_TRAINING = max(row[4] for row in onnx.helper.VERSION_TABLE if len(row) > 4)
_NEWEST = {
    "": onnx.defs.onnx_opset_version(),
    "ai.onnx": onnx.defs.onnx_opset_version(),
    "ai.onnx.ml": onnx.defs.onnx_ml_opset_version(),
    "ai.onnx.preview.training": _TRAINING,
}
"""The newest opset that the installed `onnx` has of each of its domains."""
_LARGEST = 2**31 - 1


def check(proto: ModelProto, what: str) -> None:
    """Raise an error if a file is not a model, or one that the installed `onnx` does not know.

    Raises:
      ModelError: no graph, IR version or opset, an opset that cannot be, a name that is not UTF-8.
      UnsupportedError: the IR or an opset is newer than the installed `onnx` package knows.
    """
    if not proto.HasField("graph") or not proto.ir_version:
        raise ModelError(f"{what} is not an ONNX model: it has no graph or no IR version")
    if proto.ir_version > onnx.IR_VERSION:
        raise UnsupportedError(
            f"{what} has IR version {proto.ir_version}, the installed onnx {onnx.__version__} "
            f"knows {onnx.IR_VERSION}; upgrade onnx or convert the file"
        )
    if not proto.opset_import and proto.ir_version >= 3:
        raise ModelError(f"{what} imports no operator set (opset_import is empty)")
    for entry in chain(proto.opset_import, *(f.opset_import for f in proto.functions)):
        newest = _NEWEST.get(entry.domain, _LARGEST)
        domain = f" of {entry.domain}" if entry.domain not in ("", "ai.onnx") else ""
        if not 0 <= entry.version <= _LARGEST:
            raise ModelError(f"{what} imports opset {entry.version}{domain}, which cannot be")
        if entry.version > newest:
            raise UnsupportedError(
                f"{what} uses opset {entry.version}{domain}, the installed onnx "
                f"{onnx.__version__} knows {newest}; upgrade onnx"
            )
    names = _names(proto)
    if {*map(type, names)} - {str}:  # protobuf gives a text that is not UTF-8 as bytes
        name = next(name for name in names if not isinstance(name, str))
        raise ModelError(
            f"{what} has the name {name!r}, which is not UTF-8, as the specification demands; "
            "rename it in the program that wrote the file"
        )


def _names(proto: ModelProto) -> list[Any]:
    """List the names of values, nodes, operators and domains.

    Attributes are not among them: those that an operator does not have are refused.
    """
    names: list[Any] = []
    graphs = [proto.graph]
    for info in proto.training_info:
        graphs += [info.initialization, info.algorithm]
        for entry in (*info.initialization_binding, *info.update_binding):
            names += (entry.key, entry.value)
    for function in proto.functions:
        names += (function.name, function.domain, function.overload)
        names += (*function.input, *function.output, *function.attribute)
        names += [attribute.name for attribute in function.attribute_proto]
    for owner in (proto, *proto.functions):
        names += [entry.domain for entry in owner.opset_import]
    for body in (*graphs, *proto.functions):
        for node in all_nodes(body):
            names += (node.name, node.op_type, node.domain, node.overload)
            names += node.input
            names += node.output
    for graph in chain.from_iterable(map(all_graphs, graphs)):
        names += [tensor.name for tensor in graph.initializer]
        names += [sparse.values.name for sparse in graph.sparse_initializer]
        for value in chain(graph.input, graph.output, graph.value_info):
            names.append(value.name)
            if value.type.HasField("tensor_type"):
                names += [dim.dim_param for dim in value.type.tensor_type.shape.dim]
    return names
