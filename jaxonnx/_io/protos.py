"""Graphs as protos: walks over nodes and tensors, names of values, and edits.

`Writer` makes a graph, `Editor` changes the main graph of a copy of a file; the other edits are in
place.
"""

import ast
import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
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


def defined_names(graph: GraphProto) -> Iterator[str]:
    """Yield every name that a graph or one of its subgraphs defines."""
    for inner in all_graphs(graph):
        yield from (value.name for value in inner.input)
        yield from (tensor.name for tensor in inner.initializer)
        yield from (sparse.values.name for sparse in inner.sparse_initializer)
        for node in inner.node:
            yield from node.output


def local_names(graph: GraphProto) -> set[str]:
    """Return the names that a graph defines itself."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node))


def reads(node: NodeProto) -> set[str]:
    """Return the names that a node reads, also in its subgraphs from around them."""
    names = {*node.input} - {""}
    for graph in subgraphs(node):
        local = local_names(graph)
        names |= {value.name for value in graph.output} - local
        names |= {name for inner in graph.node for name in reads(inner)} - local
    return names


def count_readers(graph: GraphProto) -> Counter[str]:
    """Count the nodes and outputs of a graph that read each value."""
    readers = Counter(name for node in graph.node for name in reads(node))
    readers.update(value.name for value in graph.output)
    return readers


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
    named = (node for node in graph.node if node.op_type == "BatchNormalization")
    norms = [node for node in named if node.domain in ("", "ai.onnx")]
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

    def is_without(norm: NodeProto) -> bool:
        statistics = norm.input[_MEAN:]
        if norm.input[0] not in data or not data.isdisjoint(statistics):
            return True
        never_moves = any(a.name == "momentum" and a.f == 1 for a in norm.attribute)
        return trains(norm) and (never_moves or constants.issuperset(statistics))

    whole = (norm for norm in norms if len(norm.input) == _MEAN + 2 and norm.output)
    return {norm.output[0] for norm in whole if is_without(norm)}


def trains(norm: NodeProto) -> bool:
    """Check whether a BatchNormalization is in training mode, by its attribute or its outputs."""
    flag = any(a.name == "training_mode" and a.i for a in norm.attribute)
    return flag or sum(map(bool, norm.output)) > 1


# Edits.


class Writer:
    """A graph whose new names are unused in the model; `used` is shared by its writers."""

    def __init__(self, name: str, used: set[str]):
        self.graph: GraphProto = GraphProto(name=name)
        self.used = used

    def fresh(self, name: str) -> str:
        """Return an unused name: `name`, or `name_2` and so on if another writer has it."""
        return unused_name(name, self.used)

    def node(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append a node with one output, called like `name`; return the output's name."""
        output = self.fresh(name or operator.lower())
        self.nodes(operator, inputs, [output], **attributes)
        return output

    def nodes(
        self, operator: str, inputs: Iterable[str], outputs: Iterable[str], **attributes: Any
    ) -> None:
        """Append a node with these outputs."""
        self.graph.node.append(helper.make_node(operator, [*inputs], [*outputs], **attributes))

    def constant(self, name: str, value: Any, dtype: Any) -> str:
        """Append an initializer called like `name`; return its name."""
        name = self.fresh(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def output(self, name: str, value: Any) -> None:
        """Declare an output with the shape and dtype of `value`."""
        kind = onnx_type(value.dtype)
        self.graph.output.append(helper.make_tensor_value_info(name, kind, value.shape))


class Editor:
    """Edits the main graph of a copy of a file: unused names, new nodes, new and removed tensors.

    Args:
      proto: the file.
      taken: names that new values must not have, besides those of the file's values.

    Attributes:
      proto: the copy.
      graph: its main graph.
      added: the tensors that it gets, by name; the graph declares them without data.
    """

    def __init__(self, proto: ModelProto, taken: Iterable[str] = ()):
        self.proto = ModelProto()
        self.proto.CopyFrom(proto)
        self.graph = self.proto.graph
        self.added: dict[str, np.ndarray] = {}
        self._used = {*taken, *defined_names(self.graph)}

    def unused_name(self, name: str) -> str:
        """Return an unused name: `name`, or `name_2` and so on."""
        return unused_name(name, self._used)

    def add_node(
        self, operator: str, inputs: Iterable[str], output: str, name: str, **options: Any
    ) -> str:
        """Append a node with one output; return the output's name."""
        self.graph.node.append(helper.make_node(operator, [*inputs], [output], name, **options))
        return output

    def add_tensor(self, name: str, value: Any) -> str:
        """Declare an initializer, without data; return its name."""
        self.added[name] = np.asarray(value)
        self.graph.initializer.append(declare(name, self.added[name]))
        return name

    def finish(self) -> ModelProto:
        """Sort the nodes and return the file."""
        sort_nodes(self.graph)
        return self.proto


def unused_name(name: str, used: set[str]) -> str:
    """Return `name`, or `name_2` and so on if that is in `used`, which it joins."""
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}_{number}"
    used.add(free)
    return free


def declare(name: str, value: np.ndarray) -> TensorProto:
    """Return a TensorProto with the type and shape of `value`, without data (`save` fills it)."""
    return TensorProto(name=name, data_type=onnx_type(value.dtype), dims=value.shape)


def remove_values(graph: GraphProto, names: Iterable[str]) -> None:
    """Remove values of these names: initializers, graph inputs, and nodes that compute them."""
    removed = {*names}

    def remove(entries: Any, names_of: Callable[[Any], Iterable[str]]) -> None:
        for i, entry in reversed([*enumerate(entries)]):
            if not removed.isdisjoint(names_of(entry)):
                del entries[i]

    remove(graph.initializer, lambda tensor: [tensor.name])
    remove(graph.input, lambda value: [value.name])
    remove(graph.sparse_initializer, lambda sparse: [sparse.values.name])
    remove(graph.node, lambda node: node.output)


def onnx_type(dtype: Any) -> int:
    """Return the TensorProto.DataType of a NumPy dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def sort_nodes(graph: GraphProto) -> None:
    """Sort the nodes of a main graph, in place.

    The specification demands sorted nodes, but onnxruntime takes others (in main graphs alone), so
    that there are files that have them. What is sorted, or has a cycle, stays as it is.
    """
    position = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    before = [{position[n] for n in reads(node) if n in position} for node in graph.node]
    if all(max(places, default=-1) < i for i, places in enumerate(before)):
        return
    after: list[list[int]] = [[] for _ in before]
    for i, places in enumerate(before):
        for place in places:
            after[place].append(i)
    waiting = [len(places) for places in before]
    ready = [i for i, count in enumerate(waiting) if not count]  # ascending: a heap already
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for i in after[order[-1]]:
            waiting[i] -= 1
            if not waiting[i]:
                heapq.heappush(ready, i)
    if len(order) == len(before):
        nodes = [*graph.node]
        del graph.node[:]
        graph.node.extend(nodes[i] for i in order)


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


def rename_reads(node: NodeProto, new: Mapping[str, str]) -> None:
    """Let a node, and its subgraphs, read other values, in place; its results keep their names."""
    node.input[:] = [new.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        captured = {old: name for old, name in new.items() if old not in local_names(graph)}
        for inner in graph.node:
            rename_reads(inner, captured)
        for value in graph.output:
            value.name = captured.get(value.name, value.name)
