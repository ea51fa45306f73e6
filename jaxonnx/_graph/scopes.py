"""Modules that exporters record for the nodes of a graph, and the lookup of values by name."""

import difflib

from onnx import GraphProto

from jaxonnx._io.protos import modules
from jaxonnx.errors import InputError


def resolve(graph: GraphProto, name: str) -> str:
    """Return the value that a name stands for: of a value, a node or a PyTorch module.

    A node stands for its first output, a module for the first output of its last node.

    Raises:
      InputError: there is none; the message has similar names.
    """
    values = [output for node in graph.node for output in node.output if output]
    if name in values:
        return name
    for node in graph.node:
        if name == node.name:
            return node.output[0]
    for node in reversed(graph.node):
        if name in modules(node):
            return node.output[0]
    scopes = dict.fromkeys(scope for node in graph.node for scope in modules(node))
    candidates = [*scopes, *values]
    near = difflib.get_close_matches(str(name), candidates, n=5)
    near += [other for other in candidates if str(name) in other and other not in near][-5:]
    raise InputError(
        f"the graph has no value, node or module '{name}'; "
        + (f"near it are {', '.join(near)}" if near else f"it ends with {', '.join(values[-5:])}")
    )
