"""Walks over graphs: names of values, tensors of Constant nodes, norms without statistics."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

UNNAMED = re.compile(r"val_\d+|onnx::\w+_\d+|/.*Constant(_\d+)?_output_0")
"""Names that PyTorch's exporters give to tensors that have none in the network."""
PREFIX = "encoder."
"""The prefix that the encoder's tensors have where the files of an encoder and its decoder are one
graph."""
_SEVERAL = (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)


def text(value: Any) -> str:
    """Return a text of a file; protobuf gives one that is not UTF-8 as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def own_name(name: str) -> str:
    """Return the name that a tensor has in its file."""
    return name.removeprefix(PREFIX)


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


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and the subgraphs within it, outer ones first."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def all_nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph or a body, each before those of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def all_tensors(main: GraphProto | FunctionProto) -> Iterator[TensorProto]:
    """Yield the tensors of attributes and initializers, also of subgraphs."""
    graphs = [main] if isinstance(main, GraphProto) else []
    sparse = []
    for node in all_nodes(main):
        graphs += subgraphs(node)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type in _SEVERAL:
                yield from attribute.tensors
                sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
    for graph in graphs:
        yield from graph.initializer
        sparse += graph.sparse_initializer
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def opset_of(proto: ModelProto | FunctionProto) -> int:
    """Return the version of ONNX's own operators that a file imports; 1 where it names none."""
    return next((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), 1)


def tensor_of_constant(node: NodeProto) -> TensorProto | None:
    """Return the tensor of a Constant node that holds one and nothing else, else None."""
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) == 1:
        (attribute,) = node.attribute
        if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
            return attribute.t
    return None


def names_of_constants(function: FunctionProto) -> Iterator[tuple[str, str]]:
    """Yield two names for each tensor of a function's Constant nodes: its own and the model's."""
    key = function.domain, function.name, function.overload
    path = ".".join(str(part) for part in key if part)
    for node in function.node:
        if tensor_of_constant(node) is not None and node.output:
            yield node.output[0], f"{path}/{node.output[0]}"


def value_names(main: GraphProto) -> set[str]:
    """Return all names of values in a graph and its subgraphs."""
    names: set[str] = set()
    for graph in all_graphs(main):
        names |= {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        names |= {sparse.values.name for sparse in graph.sparse_initializer}
        names.update(name for node in graph.node for name in (*node.input, *node.output))
    return names - {""}


def rename_values(
    main: GraphProto, new: Callable[[str], str], of_node: Callable[[str], str] = str
) -> None:
    """Give all values and nodes of a graph and its subgraphs other names, in place."""
    for graph in all_graphs(main):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = new(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = new(sparse.values.name)
        for note in graph.quantization_annotation:
            note.tensor_name = new(note.tensor_name)
            for entry in note.quant_parameter_tensor_names:
                entry.value = new(entry.value)
        for node in graph.node:
            node.name = of_node(node.name)
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]


_MEAN = 3
"""The first of the two inputs for running statistics."""


def find_without_statistics(graph: GraphProto) -> set[str]:
    """Return the first outputs of the BatchNormalization nodes without running statistics.

    These compute what the file says, in training and in inference alike: nodes of

    * a weight, which belong to the computation of that weight (timm's StdConv2d);
    * a mean or variance that the graph computes from its inputs (PyTorch's `batch_norm` without
      running statistics, of a known batch size);
    * training mode with a momentum of one, so that the statistics never change;
    * training mode with Constant nodes in the place of statistics, where initializers hold the
      weights.
    """
    norms = [n for n in graph.node if n.op_type == "BatchNormalization" and _is_onnx(n)]
    if not norms:
        return set()
    tensors = {tensor.name for tensor in graph.initializer}
    data = {value.name for value in graph.input if value.name not in tensors}
    constants: set[str] = set()
    for node in graph.node:
        inner = (n for g in subgraphs(node) for n in all_nodes(g))
        if not data.isdisjoint([*node.input, *(name for n in inner for name in n.input)]):
            data.update(node.output)
        if tensors and tensor_of_constant(node) is not None:
            constants.update(node.output)
    return {
        norm.output[0]
        for norm in norms
        if len(norm.input) == _MEAN + 2 and norm.output
        if norm.input[0] not in data
        or not data.isdisjoint(norm.input[_MEAN:])
        or (trains(norm) and (_never_moves(norm) or constants.issuperset(norm.input[_MEAN:])))
    }


def trains(norm: NodeProto) -> bool:
    """Check whether a BatchNormalization is in training mode, by its attribute or its outputs."""
    flag = any(a.name == "training_mode" and a.i for a in norm.attribute)
    return flag or sum(map(bool, norm.output)) > 1


def _is_onnx(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx")


def _never_moves(norm: NodeProto) -> bool:
    return any(a.name == "momentum" and a.f == 1 for a in norm.attribute)
