"""Repair files that are off the specification and that onnxruntime runs, and say so."""

import warnings
from collections import defaultdict

from onnx import GraphProto, ModelProto

from jaxonnx._io import order
from jaxonnx._io.protos import all_graphs, all_nodes

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
