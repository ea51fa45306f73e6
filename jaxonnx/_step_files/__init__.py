"""The files of exported steps: tensors that the graphs of a folder have in common.

They are stored once, and referred to by offset.
"""

from collections.abc import Collection, Mapping
from hashlib import sha256

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx._io.protos import all_graphs, defined_names, unused_name

MODEL = "model.onnx"
"""The network itself, whose weights the graphs refer to."""
REST = "shared.data"
"""Tensors that the network lacks: weights in another order, the initial values of a state."""

_LEAST = 1024
"""The bytes of a tensor from which on it is referred to."""
_ALIGNED = 64


Places = Mapping[str, Mapping[str, int]]
"""The "offset" of each tensor's data in the bytes of a file, and the number of its "bytes"."""


def share_tensors(
    protos: Mapping[str, ModelProto], text: bytes, places: Places
) -> tuple[bytes, dict[str, list[str]]]:
    """Make large initializers of graphs references to the files `MODEL` and `REST`, in place.

    Args:
      protos: the graphs by name.
      text: the bytes of `MODEL`.
      places: of tensors in it.

    Returns:
      The bytes of `REST`, and the files that each graph refers to.
    """
    positions, view = {}, memoryview(text)  # by digests: the contents would be a second copy
    for at, size in (place.values() for place in places.values()):
        if size >= _LEAST:
            positions[sha256(view[at : at + size]).digest()] = MODEL, at
    rest, files = bytearray(), {}
    for key, proto in protos.items():
        _derive_tensors(proto.graph, positions)
        used = set()
        for graph in all_graphs(proto.graph):
            for tensor in graph.initializer:
                data = tensor.raw_data
                if len(data) < _LEAST:
                    continue
                digest = sha256(data).digest()
                if digest not in positions:
                    rest += bytes(-len(rest) % _ALIGNED)
                    positions[digest] = REST, len(rest)
                    rest += data
                file, at = positions[digest]
                used.add(file)
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for entry, value in (("location", file), ("offset", at), ("length", len(data))):
                    tensor.external_data.add(key=entry, value=str(value))
        files[key] = sorted(used)
    return bytes(rest), files


def _derive_tensors(graph: GraphProto, positions: Collection[bytes]) -> None:
    """Compute large initializers by a node of smaller ones, or of those of `MODEL`, in place.

    These are transposed weights, and tables of small integers (masks, indices). Runtimes compute
    such nodes once, when they load the graph.

    Args:
      graph: without those of its nodes.
      positions: the digests of the tensors that are stored already.
    """
    used, nodes = {*defined_names(graph)}, []
    for tensor in graph.initializer:
        if len(tensor.raw_data) < _LEAST or sha256(tensor.raw_data).digest() in positions:
            continue
        x, name = numpy_helper.to_array(tensor), tensor.name
        stored = unused_name(f"{name}.stored", used)
        if x.ndim == 2 and sha256(x.T.tobytes()).digest() in positions:
            nodes.append(helper.make_node("Transpose", [stored], [name], perm=[1, 0]))
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(x.T), stored))
            continue
        with np.errstate(invalid="ignore"):
            narrow = [x.astype(dtype) for dtype in (np.uint8, np.uint16)]
            fits = [y for y in narrow if y.astype(x.dtype).tobytes() == x.tobytes()]
        if fits and 2 * fits[0].nbytes <= len(tensor.raw_data):
            nodes.append(helper.make_node("Cast", [stored], [name], to=tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(fits[0], stored))
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)


def shorten_constants(proto: ModelProto) -> None:
    """Make outputs that are arrays of one number ConstantOfShape nodes, in place."""
    graph, used = proto.graph, {*defined_names(proto.graph)}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        x = numpy_helper.to_array(tensors[node.input[0]])
        if x.dtype.kind in "fiub" and x.size > 16 and x.tobytes() == x.flat[:1].tobytes() * x.size:
            shape = unused_name(f"{node.output[0]}.shape", used)
            value = numpy_helper.from_array(x.reshape(-1)[:1])
            nodes.append(helper.make_node("Constant", [], [shape], value_ints=x.shape))
            node = helper.make_node("ConstantOfShape", [shape], [*node.output], value=value)
        nodes.append(node)
    inputs = {name for node in nodes for name in node.input}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors[name] for name in tensors if name in inputs)
