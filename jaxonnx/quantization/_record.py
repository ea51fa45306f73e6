"""The record of what is rounded in a file, and the tensors that the file declares.

While a network is trained its weights are float tensors in front of a QuantizeLinear, so that the
graph computes with what it will have when it is deployed. The record says which values become
initializers when the file is saved (`fold`): integer weights, scales, and int32 biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper

from jaxonnx._io import records
from jaxonnx.quantization._qoperators import Opened


@dataclass(frozen=True)
class Bias:
    """A bias that is stored as int32, whose scale is that of the activation times the weight's."""

    name: str
    """The bias in floating point."""
    stored: str
    """The int32 tensor in the saved file."""
    scale: str
    """The scale of the int32 tensor in the saved file."""
    scales: tuple[str, str]
    """The scales of the activation and of the weight."""


@dataclass(frozen=True)
class Record:
    """The record of quantized tensors in a file's metadata; all fields are names of values."""

    folds: tuple[str, ...] = ()
    """Computed values that become initializers when the file is saved."""
    scales: tuple[str, ...] = ()
    """The scales of weights and activations."""
    names: Mapping[str, str] = field(default_factory=dict)
    """From each integer weight to the float tensor that it is rounded from."""
    biases: tuple[Bias, ...] = ()
    """The biases that are stored as int32."""
    opened: tuple[Opened, ...] = ()
    """Nodes that were operators on quantized tensors, and are so again in the saved file."""
    norms: tuple[str, ...] = ()
    """The outputs of BatchNormalizations that the saved file has in the scales of weights."""
    idle: tuple[str, ...] = ()
    """The results of Relu and Clip that the saved file lacks where a QuantizeLinear behind them has
    their limits."""
    positive: tuple[str, ...] = ()
    """Values whose Relu, if there was one, the file lacks: zero is the least of their integers."""
    folded: bool = False
    """Whether the file is a saved one, in which integers are initializers."""
    learned: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """From each scale that is trained to its initial value and to the parameter that changes it."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Record:
        """Parse the record from its JSON entry.

        Raises:
          KeyError, TypeError, ValueError: it is malformed.
        """
        biases = (
            Bias(**{**bias, "scales": (bias["scales"][0], bias["scales"][1])})
            for bias in entry["biases"]
        )
        lists = tuple(entry["folds"]), tuple(entry["scales"])
        opened = tuple(Opened(*map(str, fields)) for fields in entry.get("opened", ()))
        norms = tuple(map(str, entry.get("norms", ())))
        learned = {name: (pair[0], pair[1]) for name, pair in entry.get("learned", {}).items()}
        idle, positive = (tuple(map(str, entry.get(key, ()))) for key in ("idle", "positive"))
        names, folded = dict(entry["names"]), bool(entry["folded"])
        parts = tuple(biases), opened, norms, idle, positive, folded, learned
        return cls(*lists, names, *parts)

    def write(self, proto: ModelProto) -> None:
        """Replace the record of a file."""
        fields = asdict(self)
        for name in ("idle", "positive", "learned"):
            if not fields[name]:
                del fields[name]
        records.put(proto, records.QUANTIZATION, fields)


def record_of(proto: ModelProto) -> Record | None:
    """Return the record of quantized tensors, None if the file has no record."""
    return records.get(proto, records.QUANTIZATION, Record.read)


class StoredTypes(NamedTuple):
    """The types that the QuantizeLinear nodes of a file round to, by NumPy's names."""

    weights: set[str]
    activations: set[str]
    blocks: set[int]
    """The block sizes of weights; 0 stands for weights without blocks."""


def stored_types(proto: ModelProto, tensors: Mapping[str, Any]) -> StoredTypes:
    """Return the types that a file rounds to; its weights are float tensors (not folded)."""
    entry = record_of(proto) or Record()
    types = StoredTypes(set(), set(), set())
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        point = tensors.get(node.input[2]) if len(node.input) > 2 else np.uint8(0)
        options = {part.name: helper.get_attribute_value(part) for part in node.attribute}
        if kind := options.get("output_dtype"):
            name = helper.tensor_dtype_to_np_dtype(kind).name
        else:
            name = "uint8" if point is None else np.dtype(point.dtype).name
        weight = node.output[0] in entry.names
        (types.weights if weight else types.activations).add(name)
        if weight:
            types.blocks.add(options.get("block_size", 0))
    return types


def declare(name: str, value: np.ndarray) -> TensorProto:
    """Return a TensorProto with the type and shape of `value`, without data (`save` fills it)."""
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    return TensorProto(name=name, data_type=kind, dims=value.shape)


def remove_tensor(graph: GraphProto, name: str) -> None:
    """Remove a tensor: its initializer and graph input, or the node (Constant, Identity) of it."""
    for entries_of, defines in _OWNERS:
        for i, entry in reversed([*enumerate(entries_of(graph))]):
            if defines(entry, name):
                del entries_of(graph)[i]


_OWNERS: tuple[tuple[Callable[[GraphProto], Any], Callable[[Any, str], bool]], ...] = (
    (lambda graph: graph.initializer, lambda entry, name: entry.name == name),
    (lambda graph: graph.input, lambda entry, name: entry.name == name),
    (lambda graph: graph.sparse_initializer, lambda entry, name: entry.values.name == name),
    (lambda graph: graph.node, lambda entry, name: name in entry.output),
)
"""The fields of a graph that can define a tensor, and how an entry of each is matched by name."""
