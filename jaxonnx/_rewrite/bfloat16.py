"""The file of a network in bfloat16.

What is computed from weights is bfloat16 where ONNX's specification admits it. Normalizations,
softmax and losses stay float32, and so does what depends on no weight: positions, masks, scaled
pixels. Casts stand where both meet, one for each value.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx._io.build import names as names_of
from jaxonnx._io.build import unused_name
from jaxonnx._io.order import reads
from jaxonnx._io.protos import all_nodes, all_tensors, opset_of, subgraphs, tensor_of_constant

OPSET = 22
"""The opset that admits bfloat16 in Conv, pooling, recurrences and most of the other operators."""

_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
_TYPED = ("dtype", "to")
"""Attributes that name the type of a result."""
_VIEWS = ("Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_KEPT = {
    *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
    *("LRN", "LpNormalization", "MeanVarianceNormalization", "RMSNormalization"),
    *("Hardmax", "LogSoftmax", "ReduceLogSumExp", "Softmax", "SoftmaxCrossEntropyLoss"),
    *("CumSum", "DequantizeLinear", "NegativeLogLikelihoodLoss", "QuantizeLinear"),
}
"""Operators that stay in float32: what they sum or divide needs more than 8 bits."""


class _Places(NamedTuple):
    """The float32 values of a node that can be bfloat16."""

    inputs: AbstractSet[str] = frozenset()
    outputs: AbstractSet[str] = frozenset()


def to_bfloat16(
    proto: ModelProto,
    floats: AbstractSet[str],
    learned: Collection[str],
    keep: Collection[str],
    keep_inputs: bool,
) -> Collection[str]:
    """Convert a file without functions to bfloat16, in place.

    Args:
      proto: the file.
      floats: the names of the main graph's values that are float32.
      learned: the names of tensors that are weights.
      keep: names of nodes, of values and of operators that stay in float32.
      keep_inputs: leave inputs and outputs of the graph as they are.

    Returns:
      Operators that would be converted, but that the opset of the file does not admit in bfloat16.
    """
    graph, old = proto.graph, set[str]()
    version = opset_of(proto)
    reached, places = {*learned}, list[_Places]()
    for node in graph.node:
        place = _Places()
        if not reached.isdisjoint(node.input):
            if not {node.name, node.op_type, *node.output} & {*keep}:
                place = _find_places(node, version, floats)
                if not place.inputs and _find_places(node, max(OPSET, version), floats).inputs:
                    old.add(node.op_type)
            reached |= floats & {*node.output}
        places.append(place)
    wanted = set() if keep_inputs else {value.name for value in graph.output}
    for i, node in reversed([*enumerate(graph.node)]):
        if node.op_type in _VIEWS and wanted.isdisjoint(node.output):
            places[i] = _Places()  # it is read in float32
        wanted |= places[i].inputs
    _shrink_masks(graph)
    _rewrite(graph, floats, places, keep_inputs)
    return old


def _find_places(node: NodeProto, version: int, floats: AbstractSet[str]) -> _Places:
    """Find the float32 values of a node that the specification admits in bfloat16."""
    is_typed = any(attribute.name in _TYPED for attribute in node.attribute)
    if node.domain not in ("", "ai.onnx") or node.op_type in _KEPT or is_typed:
        return _Places()
    try:
        schema = onnx.defs.get_schema(node.op_type, version)
    except onnx.defs.SchemaError:
        return _Places()
    inputs, outputs = (
        {
            name
            for i, name in enumerate(names)
            if name in floats and "tensor(bfloat16)" in formals[min(i, len(formals) - 1)].types
        }
        for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs))
    )
    return _Places(inputs, outputs) if inputs and not [*subgraphs(node)] else _Places()


def _shrink_masks(graph: GraphProto) -> None:
    """Replace finite numbers that a Cast to bfloat16 would make infinite.

    They are attention masks. Of a row that is masked as a whole, softmax would give NaN.
    """
    for tensor in all_tensors(graph):
        if tensor.data_type == TensorProto.FLOAT:
            x = numpy_helper.to_array(tensor)
            beyond = np.isfinite(x) & (np.abs(x) > _LARGEST)
            if beyond.any():
                x = np.where(beyond, np.copysign(np.float32(_LARGEST), x), x)
                tensor.CopyFrom(numpy_helper.from_array(x, tensor.name))


def _rewrite(
    graph: GraphProto, floats: AbstractSet[str], places: Sequence[_Places], keep_inputs: bool
) -> None:
    """Give values their types and names, and add the Casts between them, in place."""
    pairs = [*zip(graph.node, places, strict=True)]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {n.output[0]: t for n in graph.node if (t := tensor_of_constant(n)) is not None}
    ends = {value.name for value in graph.output}
    wide = (ends if keep_inputs else set()).union(*(reads(n) - p.inputs for n, p in pairs)) & floats
    half = set().union(*(place.inputs for place in places))
    exposed = {value.name for value in (*graph.input, *graph.output)} & floats
    # bfloat16 values with the names of the file, and all that are not the result of a Cast
    plain = ((half - wide) & constants.keys()) | (set() if keep_inputs else exposed - {*constants})
    native = plain & {*constants, *(value.name for value in graph.input)}
    native = native.union(*(place.outputs for place in places))
    for name in plain & constants.keys():
        x = numpy_helper.to_array(constants[name]).astype(ml_dtypes.bfloat16)
        constants[name].CopyFrom(numpy_helper.from_array(x, constants[name].name))

    used = {*names_of(graph)}
    new = {
        name: unused_name(name + ("_float32" if name in plain else "_bfloat16"), used)
        for name in sorted(floats)
    }

    def name_of(name: str, is_half: bool) -> str:
        return name if is_half == (name in plain) else new.get(name, name)

    def casts(names: Iterable[str]) -> Iterator[NodeProto]:
        for name in names:
            is_half = name in native
            if name in (wide if is_half else half | (plain & ends)):
                x, y = name_of(name, is_half), name_of(name, not is_half)
                kind = TensorProto.FLOAT if is_half else TensorProto.BFLOAT16
                yield helper.make_node("Cast", [x], [y], f"{y}_cast", to=kind)

    nodes = [*casts(dict.fromkeys(v.name for v in (*graph.input, *graph.initializer)))]
    for node, place in pairs:
        outputs = [*node.output]
        for inner in subgraphs(node):
            for names in (reader.input for reader in all_nodes(inner)):
                names[:] = [name_of(name, False) for name in names]
        node.input[:] = [name_of(name, name in place.inputs) for name in node.input]
        node.output[:] = [name_of(name, name in native) for name in outputs]
        nodes += [node, *casts(outputs)]
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in plain or (value.name in native and value.name not in exposed):
            value.name = name_of(value.name, True)
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    del graph.node[:]
    graph.node.extend(nodes)
