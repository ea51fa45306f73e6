"""Modules that exporters record for the nodes of a graph, and the lookup of values by name."""

import ast
import difflib

from onnx import GraphProto, NodeProto

from jaxonnx._io.protos import text
from jaxonnx.errors import InputError


def resolve(graph: GraphProto, name: str) -> str:
    """Return the value that the name of a value, a node or a PyTorch module means.

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
    known = [*scopes, *values]
    near = difflib.get_close_matches(str(name), known, n=5)
    near += [other for other in known if str(name) in other and other not in near][-5:]
    raise InputError(
        f"the graph has no value, node or module '{name}'; "
        + (f"near it are {', '.join(near)}" if near else f"it ends with {', '.join(values[-5:])}")
    )


def modules(node: NodeProto) -> list[str]:
    """Return the modules of PyTorch or scopes of TensorFlow that a node is in, outermost first.

    PyTorch's current exporter records them in the node's metadata, the older one in its name:
    '/encoder/layers.1/linear2/MatMul' is in encoder, encoder.layers.1, encoder.layers.1.linear2.
    A node of TensorFlow, 'net/dense_1/MatMul', is in net and net/dense_1.
    """
    recorded = {entry.key: text(entry.value) for entry in node.metadata_props}
    if "pkg.torch.onnx.name_scopes" in recorded:
        try:
            scopes = ast.literal_eval(recorded["pkg.torch.onnx.name_scopes"])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return []
        scopes = scopes[:-1] if isinstance(scopes, list) else []
        return [s for s in scopes if s and isinstance(s, str)]
    if "namespace" in recorded:
        # ": networks.LeNet/features: torch.nn.Sequential/features.0: torch.nn.Conv2d/conv2d: aten"
        scopes = [part.partition(":")[0] for part in recorded["namespace"].split("/")]
        return [s for s in scopes[:-1] if s]
    path: list[str] = []
    if node.name.startswith("/"):
        for part in node.name.split("/")[1:-1]:
            outer = f"{path[-1]}." if path else ""
            path.append(part if part.startswith(outer) else outer + part)
    else:
        parts = node.name.split("/")
        path = ["/".join(parts[:end]) for end in range(1, len(parts))]
    return path
