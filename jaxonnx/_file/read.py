"""A file, bytes or a ModelProto becomes a checked ModelProto without weights, and its tensors."""

import ctypes
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from jaxonnx._file import packed as sparse_export
from jaxonnx.errors import ModelError, UnsupportedError

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

_PACKED: dict[int, int] = {
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.UINT2: 2,
    TensorProto.INT2: 2,
    TensorProto.FLOAT6E2M3: 6,
    TensorProto.FLOAT6E3M2: 6,
}
"""Bits of the element types that share bytes."""


def read(
    source: str | os.PathLike | bytes | ModelProto,
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Reads a model; the caller's ModelProto is left as it is.

    Returns a ModelProto whose named tensors hold no data, and these tensors: every initializer,
    every tensor of a Constant node and every Identity over one of these, by the name of the value
    (in the main graph and in subgraphs; a name that several graphs define stays where it is).
    Floating-point tensors of Constant nodes in functions have the name of the function before it.
    External data is memory-mapped.

    Raises:
      ModelError: not an ONNX model, or its (external) data is missing, short or inconsistent.
      SparsityError: a damaged packed file (.npz).
      UnsupportedError: the IR or an opset is newer than the installed `onnx` package knows.
    """
    folder = None
    if isinstance(source, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(source)
        what = "the ModelProto"
    elif isinstance(source, bytes | bytearray | memoryview):
        what = "the bytes"
        proto = _parse(bytes(source), what)
    else:
        path = Path(source)
        what = f"'{path}'"
        folder = path.resolve().parent
        if not path.is_file():
            raise ModelError(f"{what} is not a file; give the path of an .onnx file")
        if path.suffix == ".npz":
            proto = sparse_export.load_packed(path)
        else:
            try:
                proto = onnx.load(path, "protobuf", load_external_data=False)
            except (DecodeError, ValueError) as error:
                raise ModelError(
                    f"{what} is not an ONNX file, or is truncated ({error})"
                ) from error
    _check_header(proto, what)
    tensors = _take_tensors(proto.graph, folder)
    if not proto.training_info:  # the graphs of an algorithm call the functions as they are
        for function in proto.functions:
            _take_constants(function, tensors)
    for info in proto.training_info:
        for graph in (info.initialization, info.algorithm):
            _inline(graph, folder)
    # Clearing fields keeps protobuf's arena; only a fresh message gives the memory back.
    return ModelProto.FromString(proto.SerializeToString()), tensors


def give_back_memory() -> None:
    """Returns freed memory to the system.

    glibc would keep half the size of a large model, in the gaps that reading it left.
    """
    trim = getattr(ctypes.pythonapi, "malloc_trim", None)
    if trim is not None:
        trim(0)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs among the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def tensor_of_constant(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node that holds one, else None."""
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                return attribute.t
    return None


def names_of_constants(function: FunctionProto) -> Iterator[tuple[str, str]]:
    """The Constant nodes of a function that hold a tensor: its name there and in the model."""
    key = function.domain, function.name, function.overload
    path = ".".join(str(part) for part in key if part)
    for node in function.node:
        if tensor_of_constant(node) is not None and node.output:
            yield node.output[0], f"{path}/{node.output[0]}"


def to_array(tensor: TensorProto, folder: Path | None = None) -> np.ndarray:
    """The value of a TensorProto; external data is memory-mapped from `folder`.

    Raises:
      ModelError: the element type is unknown, or the data does not fill the shape.
    """
    shape = tuple(tensor.dims)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        raise ModelError(
            f"tensor '{tensor.name}' has element type {tensor.data_type}, unknown to ONNX"
        ) from None
    if any(dim < 0 for dim in shape):
        raise ModelError(f"tensor '{tensor.name}' has a negative dimension: {list(shape)}")
    if tensor.data_location == TensorProto.EXTERNAL:
        data = _external(tensor, folder)
    elif tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the data of tensor '{tensor.name}' does not fit its shape {list(shape)} ({error})"
            ) from error
    if tensor.data_type == TensorProto.STRING:
        raise ModelError(f"tensor '{tensor.name}' holds strings, which must lie in string_data")
    bits = _PACKED.get(tensor.data_type, 8 * dtype.itemsize)
    expected = -(-math.prod(shape) * bits // 8)
    if data.nbytes != expected:
        raise ModelError(
            f"tensor '{tensor.name}' of shape {list(shape)}, type {dtype}, needs {expected} bytes "
            f"but has {data.nbytes}; the file is truncated or inconsistent"
        )
    if tensor.data_type in _PACKED:
        inline = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=data.tobytes())
        return numpy_helper.to_array(inline)
    return data.view(dtype).reshape(shape)


def _parse(data: bytes, what: str) -> ModelProto:
    try:
        return onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{what} are not an ONNX model, or are truncated ({error})") from error


def _check_header(proto: ModelProto, what: str) -> None:
    if not proto.HasField("graph") or not proto.ir_version:
        raise ModelError(f"{what} is not an ONNX model: it has no graph or no IR version")
    if proto.ir_version > onnx.IR_VERSION:
        raise UnsupportedError(
            f"{what} has IR version {proto.ir_version}, the installed onnx {onnx.__version__} "
            f"knows {onnx.IR_VERSION}; upgrade onnx or convert the file"
        )
    if not proto.opset_import and proto.ir_version >= 3:
        raise ModelError(f"{what} imports no operator set (opset_import is empty)")
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise UnsupportedError(
                f"{what} uses opset {entry.version}, the installed onnx {onnx.__version__} knows "
                f"{newest}; upgrade onnx or convert the file with onnx.version_converter"
            )


def _take_tensors(main: GraphProto, folder: Path | None) -> dict[str, np.ndarray]:
    """Moves the data of all uniquely named tensors out of the graphs."""
    graphs = list(_all_graphs(main))
    defined = Counter(name for graph in graphs for name in _definitions(graph))
    tensors: dict[str, np.ndarray] = {}

    def take(name: str, tensor: TensorProto) -> None:
        if defined[name] == 1:
            tensors[name] = to_array(tensor, folder)
            for field in _DATA_FIELDS:
                tensor.ClearField(field)
        elif tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(numpy_helper.from_array(to_array(tensor, folder), tensor.name))

    for graph in graphs:
        for tensor in graph.initializer:
            take(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            tensors[sparse.values.name] = to_dense(sparse, folder)
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


def _take_constants(function: FunctionProto, tensors: dict[str, np.ndarray]) -> None:
    """Moves floating-point tensors, but no scalars, out of the Constant nodes of a function."""
    names = dict(names_of_constants(function))
    for node in function.node:
        constant = tensor_of_constant(node)
        name = names.get(node.output[0]) if node.output else None
        if constant is None or name is None or name in tensors:
            continue
        value = to_array(constant)
        if value.size > 1 and constant.data_type in _FLOATS:
            tensors[name] = value
            for field in _DATA_FIELDS:
                constant.ClearField(field)


def _inline(main: GraphProto, folder: Path | None) -> None:
    """Reads the external data of a graph whose tensors stay where they are."""
    for graph in _all_graphs(main):
        constants = filter(None, map(tensor_of_constant, graph.node))
        for tensor in (*graph.initializer, *constants):
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(to_array(tensor, folder), tensor.name))


def _all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _all_graphs(inner)


def _definitions(graph: GraphProto) -> Iterator[str]:
    """Each name that the graph gives a value to, once for each definition."""
    initialized = {tensor.name for tensor in graph.initializer}
    yield from initialized
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (value.name for value in graph.input if value.name not in initialized)
    yield from (name for node in graph.node for name in node.output if name)


def to_dense(sparse: onnx.SparseTensorProto, folder: Path | None = None) -> np.ndarray:
    """A SparseTensorProto as an array (IR: indices are linear, or one row per value)."""
    values, indices = to_array(sparse.values, folder), to_array(sparse.indices, folder)
    shape = tuple(sparse.dims)
    try:
        dense = np.zeros(shape, values.dtype)
        flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        dense.reshape(-1)[flat] = values
    except (ValueError, TypeError, IndexError, MemoryError) as error:
        raise ModelError(
            f"sparse tensor '{sparse.values.name}': indices {list(indices.shape)} do not fit "
            f"{values.size} values in shape {list(shape)} ({error})"
        ) from error
    return dense


def _external(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """The bytes of external data as a read-only memory map (IR.md, "External Tensor Data")."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(
            f"tensor '{tensor.name}' lies in external file '{location}'; load the model by its "
            "path, or read the data first with onnx.load_external_data_for_model"
        )
    path = (folder / location).resolve()
    if not location or not path.is_relative_to(folder):
        raise ModelError(
            f"tensor '{tensor.name}' points to '{location}', outside the model's folder; "
            "external data must lie beside or below the model"
        )
    if not path.is_file():
        raise ModelError(
            f"tensor '{tensor.name}' needs the external file '{path}', which does not exist; "
            "copy it beside the model"
        )
    size = path.stat().st_size
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
    except ValueError as error:
        raise ModelError(f"tensor '{tensor.name}': bad external data entry ({error})") from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"tensor '{tensor.name}' needs bytes {offset} to {offset + length} of '{path}', "
            f"which has {size}; the file is truncated"
        )
    if length == 0:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset, (length,))
