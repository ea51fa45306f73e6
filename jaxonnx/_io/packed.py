"""Sparse weights in files: the record of their pattern, and forms that leave out the zeros.

The record is an entry of the ModelProto's `metadata_props`, which runtimes ignore. Its axes are the
(output, input) axes of each sparse weight:

    jaxonnx.sparsity: {"method": "three_phase", "weights":
        {"fc.weight": {"pattern": "2:4", "transposable": true, "axes": [0, 1]}}}
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, SparseTensorProto, TensorProto, load_model_from_string, numpy_helper

from jaxonnx import sparse
from jaxonnx._io import records
from jaxonnx.errors import ModelError, SparsityError
from jaxonnx.sparse import Goal, Layer, Sparsity, goals, parse

KEY = records.SPARSITY
INDEX = sparse.INDEX
"""The array that every packed file has."""
_GRAPH = "jaxonnx.graph"
"""The array of a packed file that holds the ModelProto."""
_TYPES = (
    *(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE),
    TensorProto.INT8,
)
_SPARSE_IR = 6
"""The first IR version with sparse initializers."""


class Record(NamedTuple):
    """The record of sparse weights in a file, by name."""

    weights: dict[str, Goal]
    method: str = ""


def record(proto: ModelProto) -> Record:
    """Return the record of sparse weights in a file, empty in a file without sparse weights.

    Raises:
      ModelError: the entry is malformed.
    """
    return records.get(proto, KEY, _parse_record) or Record({})


def damage(proto: ModelProto) -> str:
    """Say why the record is malformed; empty if it is not."""
    return records.damage(proto, KEY, _parse_record)


def _parse_record(entry: Any) -> Record:
    weights = {}
    for name, layout in entry["weights"].items():
        output, input = layout["axes"]
        pattern = parse(str(layout["pattern"]), bool(layout["transposable"]))
        if any(type(a) is not int or a < 0 for a in (output, input)) or output == input:
            raise ValueError(f"the axes of '{name}' are {[output, input]}")
        weights[name] = Goal(pattern, (output, input))
    return Record(weights, str(entry.get("method", "")))


def find_recorded(proto: ModelProto, tensors: Mapping[str, Any]) -> Sparsity | None:
    """Return the tensors that the file records as sparse, None if none."""
    weights, method = record(proto)
    layers = tuple(
        Layer(name, tensors[name].shape, axes, "", pattern)
        for name, (pattern, axes) in weights.items()
        if name in tensors and tensors[name].ndim > max(axes)
    )
    return Sparsity(layers, method) if layers else None


def set_record(proto: ModelProto, layers: Iterable[Layer], method: str) -> None:
    """Replace the record of `proto`; remove it if no layer is sparse."""
    _write(proto, Record(goals(layers), method))


def _write(proto: ModelProto, recorded: Record) -> None:
    weights = {
        name: {"pattern": pattern.name, "transposable": pattern.transposable, "axes": axes}
        for name, (pattern, axes) in recorded.weights.items()
    }
    value = {"method": recorded.method, "weights": weights}
    records.put(proto, KEY, value if weights else None)


def keep_true(proto: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Drop weights from the record that do not have the pattern (any more)."""
    # a zero of an unsigned weight is stored as its zero point, which is one for all channels
    zeros = {
        node.input[0]: np.asarray(values[node.input[2]]).ravel()[:1]
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[2] in values
    }
    _keep(proto, lambda n, entry: n in values and _holds(values[n] != zeros.get(n, 0), entry))


def without(proto: ModelProto, names: Collection[str]) -> None:
    """Take weights out of the record."""
    _keep(proto, lambda name, _: name not in names)


def _keep(proto: ModelProto, fits: Callable[[str, Goal], bool]) -> None:
    if damage(proto):
        return  # nobody can tell what it means: it stays as it is, and `Model.warnings` says so
    weights, method = record(proto)
    _write(proto, Record({n: entry for n, entry in weights.items() if fits(n, entry)}, method))


def _holds(w: np.ndarray, entry: Goal) -> bool:
    pattern, axes = entry
    fits = w.ndim > max(axes) and not pattern.misfit(w.shape, axes)
    return fits and pattern.holds(w, axes)


def packed_nbytes(tensors: Mapping[str, Any], sparsity: Sparsity) -> int:
    """Return the bytes that the tensors take with the sparse ones packed."""
    packed = {
        name: sparse.pack(tensors[name], None, goal.pattern, axis=goal.axes[1]).nbytes
        for name, goal in goals(sparsity.layers).items()
    }
    return sum(({name: w.nbytes for name, w in tensors.items()} | packed).values())


def _mask(w: Any, entry: Goal) -> np.ndarray | None:
    """Return a mask of the pattern that covers all nonzeros, so that a kept weight may be 0.

    None if the search finds no such mask; packing then fills groups up along one axis.
    """
    sizes = w.astype(np.float32) if w.dtype == np.int8 else w
    mask = np.asarray(sparse.mask(sizes, entry.pattern, axes=entry.axes))
    return mask if not np.asarray(w)[~mask].any() else None


def to_sparse_initializers(proto: ModelProto) -> None:
    """Turn the recorded weights of the main graph into `sparse_initializer`s (linear indices).

    Raises:
      SparsityError: nothing is recorded, or the IR version of the file does not have them.
    """
    weights = _require_record(proto).weights
    if proto.ir_version < _SPARSE_IR:
        raise SparsityError(
            f"sparse initializers came with IR version {_SPARSE_IR}, the file has "
            f"{proto.ir_version}: save it with the zeros in place"
        )
    graph = proto.graph
    inputs = {value.name for value in graph.input}  # these may be overridden: they stay
    for tensor in [t for t in graph.initializer if t.name in weights and t.name not in inputs]:
        w = numpy_helper.to_array(tensor)
        mask = _mask(w, weights[tensor.name])
        nonzero = (w != 0) | np.signbit(w)  # -0.0 comes back as it was
        nonzero = np.flatnonzero(nonzero if mask is None else nonzero | mask)
        graph.sparse_initializer.append(
            SparseTensorProto(
                values=numpy_helper.from_array(w.reshape(-1)[nonzero], tensor.name),
                indices=numpy_helper.from_array(nonzero.astype(np.int64), f"{tensor.name}.indices"),
                dims=w.shape,
            )
        )
        graph.initializer.remove(tensor)


def save_packed(proto: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a `.npz` with the graph and its tensors, the recorded ones packed (`sparse.save`).

    Raises:
      SparsityError: nothing is recorded.
    """
    weights = _require_record(proto).weights
    tensors, masks, layers = {}, {}, []
    for tensor in proto.graph.initializer:
        if tensor.data_type not in _TYPES or not tensor.HasField("raw_data"):
            continue
        name = tensor.name
        tensors[name] = w = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        if name in weights:
            mask = _mask(w, weights[name])
            masks[name] = w != 0 if mask is None else mask
            layers.append(Layer(name, w.shape, weights[name].axes, "", weights[name].pattern))
    tensors[_GRAPH] = np.frombuffer(proto.SerializeToString(), np.uint8)
    sparse.save(path, tensors, masks, layers=layers)


def load_packed(path: str | os.PathLike[str]) -> ModelProto:
    """Load the ModelProto of a file that `save_packed` wrote.

    Raises:
      SparsityError: the file is truncated, not one of these, or inconsistent.
      ModelError: it has weights only, or a graph that is not a ModelProto.
    """
    tensors = _load(path)
    if _GRAPH not in tensors:
        raise ModelError(
            f"'{path}' has weights, but no graph: give it to the file of the graph, "
            f"jaxonnx.load('net.onnx', weights={str(path)!r})"
        )
    try:
        proto = load_model_from_string(tensors.pop(_GRAPH).tobytes())
    except DecodeError as error:
        raise ModelError(f"the graph in '{path}' is damaged ({error})") from error
    for tensor in proto.graph.initializer:
        if tensor.name in tensors:
            tensor.raw_data = tensors[tensor.name].tobytes()
    return proto


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Load the weights of a packed file as dense arrays, whether or not it has a graph.

    Raises:
      SparsityError: the file is truncated, not one of these, or inconsistent.
    """
    tensors = _load(path)
    tensors.pop(_GRAPH, None)
    return tensors


def _load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    tensors, packed = sparse.load(path)
    with jax.enable_x64(True):  # weights may be float64
        return tensors | {name: np.asarray(sparse.unpack(p)) for name, p in packed.items()}


def _require_record(proto: ModelProto) -> Record:
    entry = record(proto)
    if not entry.weights:
        raise SparsityError(
            "the model has no weights that are recorded as sparse: train it with sparsity=, or "
            "record weights that are sparse already with jaxonnx.sparse.record(model)"
        )
    return entry
