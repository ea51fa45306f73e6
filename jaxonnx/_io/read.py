"""Reading a model: a checked ModelProto without its weights, and the weights as arrays."""

import ctypes
import difflib
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

from jaxonnx._io import checkpoints, external, formats, header, order
from jaxonnx._io.external import Folder
from jaxonnx._io.protos import (
    all_graphs,
    all_nodes,
    all_tensors,
    names_of_constants,
    tensor_of_constant,
)
from jaxonnx._io.records import SPARSITY, has
from jaxonnx._io.save import in_file_types
from jaxonnx._io.tensors import equal_bits, to_array, to_dense
from jaxonnx._io.ties import sources, split_shared, update_tied
from jaxonnx._io.training_checkpoints import is_training_checkpoint, read_training_checkpoint
from jaxonnx._require import require_choice
from jaxonnx.errors import InputError, ModelError

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


def read(
    source: str | os.PathLike[str] | bytes | ModelProto, checkpoint: str | None = None
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Read a model; the caller's ModelProto is left as it is.

    Returns a ModelProto whose named tensors hold no data, and these tensors: every initializer,
    every tensor of a Constant node and every Identity over one of these, by the name of the value
    (in the main graph and in subgraphs; a name that several graphs define stays where it is).
    Floating-point tensors of Constant nodes in functions have the name of the function before it.
    External data is memory-mapped.

    Args:
      checkpoint: "newest" or "best", where the source is a folder of checkpoints.

    Raises:
      InputError: the source is of another type, or `checkpoint` is neither or goes with a file.
      ModelError: not an ONNX model, or its (external) data is missing, short or inconsistent.
      SparsityError: a damaged packed file (.npz).
      UnsupportedError: the IR or an opset is newer than the installed `onnx` package knows.
    """
    folders: Sequence[Folder] = ()
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        return _checkpoint(source, "newest" if checkpoint is None else checkpoint)
    if checkpoint is not None:
        raise InputError(f"checkpoint={checkpoint!r} goes with a folder of checkpoints")
    if isinstance(source, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(source)
        what = "the ModelProto"
    elif isinstance(source, bytes | bytearray | memoryview):
        what = "the bytes"
        proto = _parse(bytes(source), what)
    elif not isinstance(source, str | os.PathLike):
        raise InputError(
            "a model is a path, the bytes of a file or a ModelProto, not of type "
            f"{type(source).__name__}"
        )
    else:
        path = _check_exists(source, "an .onnx file")
        what = f"'{path}'"
        folders = external.folders(path)
        if (read_graph := formats.of(path).graph) is None:
            raise ModelError(
                f"{what} has weights, but no graph: give it to the file of the graph, "
                f"jaxonnx.load('net.onnx', weights={str(path)!r})"
            )
        proto = read_graph(path)
    header.check(proto, what)
    repair(proto, what)
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
        return ModelProto.FromString(proto.SerializeToString()), tensors
    except (EncodeError, ValueError) as error:
        text = f"{what} has more than 2 GB besides its initializers ({error})"
        raise ModelError(text) from error


def _checkpoint(
    folder: str | os.PathLike[str], which: str
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Read the file that lies in a folder of checkpoints, with the tensors of one of them."""
    require_choice("checkpoint", which, ("newest", "best"))
    stored = checkpoints.read(folder, which)
    file = Path(folder, checkpoints.MODEL)
    if stored.adapters is not None:
        raise ModelError(
            f"'{folder}' has checkpoints of adapters: "
            f"jaxonnx.Adapters.load({os.fspath(folder)!r}).apply(jaxonnx.load({str(file)!r}))"
        )
    proto, tensors = read(file)
    for name in stored.tensors.keys() & tensors.keys():
        if tensors[name].dtype == object:
            raise ModelError(f"'{file}': '{name}' is a string, and has numbers in the checkpoints")
    values = in_file_types(stored.tensors, tensors)
    for info in proto.training_info:  # variables of the algorithm alone
        for tensor in info.algorithm.initializer:
            if tensor.name in values:
                value = values[tensor.name].astype(to_array(tensor).dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    tensors = update_tied(proto.graph, tensors, {n: v for n, v in values.items() if n in tensors})
    if has(proto, SPARSITY):
        from jaxonnx._io import packed

        packed.keep_true(proto, tensors)
    return proto, tensors


def weights_of(
    weights: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[str, dict[str, np.ndarray]]:
    """Return a label of these weights for messages, and their arrays by name.

    Args:
      weights: a file in any of the formats (of a file with a graph, its tensors), or arrays.
    """
    if isinstance(weights, Mapping):
        return "the weights", {name: _numbers(name, value) for name, value in weights.items()}
    if not isinstance(weights, str | os.PathLike):
        raise InputError(
            f"weights are a path, or arrays by name, not of type {type(weights).__name__}"
        )
    path = _check_exists(weights, "a file of weights")
    if is_training_checkpoint(path):
        checkpoint = read_training_checkpoint(path)
        return f"'{path}'", {**checkpoint.frozen, **checkpoint.params}
    read_weights = formats.of(path).weights
    return f"'{path}'", read(path)[1] if read_weights is None else read_weights(path)


def _numbers(name: str, value: Any) -> np.ndarray:
    """Return a weight that a caller has passed as an array."""
    with suppress(ValueError, TypeError):  # ragged lists, and what has no array
        array = np.asarray(value)
        if array.dtype.kind not in "OUSM":
            return array
    raise InputError(f"the weights have '{name}' of type {type(value).__name__}, not as numbers")


def replace_weights(
    graph: GraphProto,
    tensors: dict[str, np.ndarray],
    weights: str | os.PathLike[str] | Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Return `tensors` with other weights in the place of those of the same names.

    Args:
      weights: a file in any of the formats (of a file with a graph, its tensors), or arrays by
        name. Tensors that it does not have stay as they are.

    Raises:
      InputError: a name that no tensor has, or another shape or type than the tensor's.
      ModelError: the file is missing or damaged.
    """
    what, new = weights_of(weights)
    of_training = isinstance(weights, str | os.PathLike) and is_training_checkpoint(weights)
    if of_training:
        _take_inputs(graph, tensors, new)
    for name, value in new.items():
        if name not in tensors:
            near = difflib.get_close_matches(name, tensors, n=8) or sorted(tensors)
            listed = ", ".join(near[:40]) + ", ..." * (len(near) > 40)
            raise InputError(
                f"{what} has '{name}', the model does not; its tensors are called {listed}"
                if near
                else f"{what} has '{name}', and the model has no weights that could be replaced"
            )
        old = tensors[name]
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            raise InputError(
                f"{what}: '{name}' is {value.dtype}{list(value.shape)}, the model's is "
                f"{old.dtype}{list(old.shape)}"
            )
    # onnxruntime-training has the file's tensors alone, and evaluates its Identity nodes
    result = update_tied(graph, tensors, new, all_copies=of_training)
    left: dict[str, str] = {}
    for name, of in sources(graph, tensors).items():
        if name in new or result[name] is not tensors[name]:
            continue
        if of in left or (of in new and not equal_bits(new[of], tensors[of])):
            left[name] = of
    if left:
        names = ", ".join(f"'{name}' (of '{of}')" for name, of in left.items())
        warnings.warn(
            f"{what}: these tensors, which the file stores as others because their first values "
            f"are equal, are missing and keep the values of the file: {names}. Pass them as "
            "well; where two are one tensor, its value under both names",
            stacklevel=3,
        )
    return result


def _take_inputs(
    graph: GraphProto, tensors: dict[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> None:
    """Make tensors of the inputs that have new values: artifacts have their weights as inputs."""
    for value in [*graph.input]:
        if value.name in new and value.name not in tensors:
            kind = value.type.tensor_type
            dims = [max(dim.dim_value, 0) for dim in kind.shape.dim]
            graph.initializer.add(name=value.name, data_type=kind.elem_type, dims=dims)
            graph.input.remove(value)
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            tensors[value.name] = np.broadcast_to(np.zeros((), dtype), dims)  # not allocated


def _check_exists(path: str | os.PathLike[str], wanted: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"'{path}' is not a file; give the path of {wanted}")
    return path


def give_back_memory() -> None:
    """Return freed memory to the system.

    glibc would keep half the size of a large model, in the gaps that reading it left.
    """
    trim = getattr(ctypes.pythonapi, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _parse(data: bytes, what: str) -> ModelProto:
    try:
        return onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{what} are not an ONNX model, or are truncated ({error})") from error


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


def repair(proto: ModelProto, what: str) -> None:
    """Sort nodes, import com.microsoft and drop redefined Constants, in place.

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
        warnings.warn(f"{what} {text}, as onnxruntime reads it", stacklevel=4)
    order.sort(proto.graph)


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
