"""A ModelProto as a `File`: checked, repaired, and without its weights, which become arrays."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, numpy_helper

from jaxonnx._io.protocol import ALONE, Companion, File
from jaxonnx._io.protos import (
    all_graphs,
    all_nodes,
    all_tensors,
    defined_names,
    local_names,
    names_of_constants,
    sort_nodes,
    subgraphs,
    tensor_of_constant,
    unused_name,
)
from jaxonnx._io.tensors import Folder, list_folders, to_array, to_dense
from jaxonnx._io.ties import split_shared
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import ModelError, UnsupportedError, warn

_DATA_FIELDS = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
    "string_data",
    "external_data",
    "data_location",
)

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


_TRAINING = max(row[4] for row in onnx.helper.VERSION_TABLE if len(row) > 4)
_NEWEST = {
    "": onnx.defs.onnx_opset_version(),
    "ai.onnx": onnx.defs.onnx_opset_version(),
    "ai.onnx.ml": onnx.defs.onnx_ml_opset_version(),
    "ai.onnx.preview.training": _TRAINING,
}
"""The newest opset that the installed `onnx` has of each of its domains."""
_LARGEST = 2**31 - 1


def read_proto(
    proto: ModelProto,
    what: str = "the ModelProto",
    *,
    path: str | os.PathLike[str] | None = None,
    companion: Companion = ALONE,
) -> File:
    """Make a `File` of a ModelProto.

    Its tensors are every initializer, every tensor of a Constant node and every Identity over one
    of these, by the name of the value (in the main graph and in subgraphs; a name that several
    graphs define stays where it is). Floating-point tensors of Constant nodes in functions have the
    name of the function before it. External data is memory-mapped.

    Args:
      proto: the model, which is changed.
      what: its name in errors and warnings.
      path: its file, beside which external data may lie; None if it has no such data.
      companion: the files beside it.

    Raises:
      ModelError: not an ONNX model, or its (external) data is missing, short or inconsistent.
      UnsupportedError: the IR or an opset is newer than the installed `onnx` package knows.
    """
    check_arguments(read_proto, locals())
    require("proto", proto, isinstance(proto, ModelProto), "a ModelProto")
    folders = () if path is None else list_folders(Path(path))
    _check_header(proto, what)
    _repair(proto, what)
    tensors = _take_tensors(proto.graph, folders)
    if not proto.training_info:  # the graphs of an algorithm call the functions as they are
        for function in proto.functions:
            _take_constants(function, tensors, folders)
        split_shared(proto, tensors)
    for body in (proto.graph, *proto.functions):
        _inline(body, folders)
    for info in proto.training_info:
        for graph in (info.initialization, info.algorithm):
            _inline(graph, folders)
    # Clearing fields keeps protobuf's arena; only a fresh message gives the memory back.
    try:
        return File(ModelProto.FromString(proto.SerializeToString()), tensors, companion)
    except (EncodeError, ValueError) as error:
        text = f"{what} has more than 2 GB besides its initializers ({error})"
        raise ModelError(text) from error


def _take_tensors(main: GraphProto, folders: Sequence[Folder]) -> dict[str, np.ndarray]:
    """Move the data of all uniquely named tensors out of the graphs."""
    graphs = list(all_graphs(main))
    defined = Counter(name for graph in graphs for name in _definitions(graph, graph is not main))
    tensors: dict[str, np.ndarray] = {}

    def take(name: str, tensor: TensorProto) -> None:
        if defined[name] == 1:
            tensors[name] = to_array(tensor, folders)
            for field in _DATA_FIELDS:
                tensor.ClearField(field)

    for graph in graphs:
        for tensor in graph.initializer:
            take(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            tensors[sparse.values.name] = to_dense(sparse, folders)
        for node in graph.node:
            if len(node.output) != 1:
                continue
            (output,) = node.output
            constant = tensor_of_constant(node)
            if constant is not None:
                take(output, constant)
            elif node.op_type == "Identity" and node.domain in ("", "ai.onnx"):
                value = tensors.get(node.input[0]) if node.input else None
                if value is not None and defined[output] == 1:
                    tensors[output] = value
    return tensors


def _take_constants(
    function: FunctionProto, tensors: dict[str, np.ndarray], folders: Sequence[Folder]
) -> None:
    """Move floating-point tensors other than scalars out of a function's Constant nodes."""
    names = dict(names_of_constants(function))
    for node in function.node:
        constant = tensor_of_constant(node)
        name = names.get(node.output[0]) if node.output else None
        if constant is None or name is None or name in tensors:
            continue
        value = to_array(constant, folders)
        if value.size > 1 and constant.data_type in _FLOATS:
            tensors[name] = value
            for field in _DATA_FIELDS:
                constant.ClearField(field)


def _inline(main: GraphProto | FunctionProto, folders: Sequence[Folder]) -> None:
    """Read the external data that a graph still has into its tensors."""
    for tensor in all_tensors(main):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(numpy_helper.from_array(to_array(tensor, folders), tensor.name))


def _definitions(graph: GraphProto, nested: bool) -> Iterator[str]:
    """Yield each name that the graph gives a value to, once for each definition.

    An input of a body is one even if an initializer has its name: the node always passes it.
    """
    initialized = {tensor.name for tensor in graph.initializer}
    yield from initialized
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (value.name for value in graph.input if nested or value.name not in initialized)
    yield from (name for node in graph.node for name in node.output if name)


# Repair files that are off the specification and that onnxruntime runs, and say so.

_CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own operators, all of version 1."""


def _repair(proto: ModelProto, what: str) -> None:
    """Sort nodes, import com.microsoft, drop redefined Constants, copy outer outputs, in place.

    Args:
      proto: the model.
      what: what warnings call it.
    """
    texts = []
    imported = {entry.domain for entry in proto.opset_import}
    if _CONTRIB not in imported and any(n.domain == _CONTRIB for n in all_nodes(proto.graph)):
        proto.opset_import.add(domain=_CONTRIB, version=1)
        texts.append(f"uses {_CONTRIB} without an import: version 1 is meant, and saved")
    texts += [
        f"has several Constant nodes that define '{name}': the last one counts, and alone is saved"
        for graph in all_graphs(proto.graph)
        for name in _drop_redefined_constants(graph)
    ]
    for text in texts:
        warn(f"{what} {text}, as onnxruntime reads it")
    if copied := _copy_outer_outputs(proto):
        warn(
            f"{what} has subgraphs that return values of a graph around them: "
            f"{', '.join(copied)}. onnxruntime refuses that; an Identity in between is saved"
        )
    sort_nodes(proto.graph)


def _drop_redefined_constants(graph: GraphProto) -> list[str]:
    """Keep the last of several Constant nodes of one name, in the place of the first.

    Returns:
      The names that several Constant nodes define, and no other node.
    """
    makers: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(graph.node):
        for name in filter(None, node.output):
            makers[name].append(i)
    several = {
        name: places
        for name, places in makers.items()
        if len(places) > 1 and all(graph.node[i].op_type == "Constant" for i in places)
    }
    for first, *_, last in several.values():
        graph.node[first].CopyFrom(graph.node[last])
    for place in sorted((i for places in several.values() for i in places[1:]), reverse=True):
        del graph.node[place]
    return [*several]


def _copy_outer_outputs(proto: ModelProto) -> list[str]:
    """Let subgraphs return copies of values that a graph around them defines.

    PyTorch wrote such branches of If until 2022. Neither onnxruntime nor the checker takes them.

    Returns:
      The names of these values.
    """
    graphs = [
        proto.graph,
        *(g for i in proto.training_info for g in (i.initialization, i.algorithm)),
    ]
    bodies = [*graphs, *proto.functions]
    used = {name for graph in graphs for name in defined_names(graph)}
    used |= {name for body in bodies for node in all_nodes(body) for name in node.output}
    copied = []
    for node in [node for body in bodies for node in all_nodes(body)]:
        for graph in subgraphs(node):
            defined = local_names(graph)
            for value in (v for v in graph.output if v.name and v.name not in defined):
                copied.append(value.name)
                copy = unused_name(f"{value.name}.copy", used)
                graph.node.add(op_type="Identity", input=[value.name], output=[copy])
                value.name = copy
    return [*dict.fromkeys(copied)]


# Check the header: versions and names.


def _check_header(proto: ModelProto, what: str) -> None:
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
