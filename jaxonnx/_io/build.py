"""Edit graphs: append nodes under unused names, sort them, find and rename their inputs."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jaxonnx._io.protos import all_graphs, subgraphs


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
        self._used = {*taken, *names(self.graph)}

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


def declare(name: str, value: np.ndarray) -> TensorProto:
    """Return a TensorProto with the type and shape of `value`, without data (`save` fills it)."""
    return TensorProto(name=name, data_type=onnx_type(value.dtype), dims=value.shape)


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


def unused_name(name: str, used: set[str]) -> str:
    """Return `name`, or `name_2` and so on if that is in `used`, which it joins."""
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}_{number}"
    used.add(free)
    return free


def onnx_type(dtype: Any) -> int:
    """Return the TensorProto.DataType of a NumPy dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def names(graph: GraphProto) -> Iterator[str]:
    """Yield every name that a graph or one of its subgraphs defines."""
    for inner in all_graphs(graph):
        yield from (value.name for value in inner.input)
        yield from (tensor.name for tensor in inner.initializer)
        yield from (sparse.values.name for sparse in inner.sparse_initializer)
        for node in inner.node:
            yield from node.output


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


def rename_reads(node: NodeProto, new: Mapping[str, str]) -> None:
    """Let a node, and its subgraphs, read other values, in place; its results keep their names."""
    node.input[:] = [new.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        captured = {old: name for old, name in new.items() if old not in local_names(graph)}
        for inner in graph.node:
            rename_reads(inner, captured)
        for value in graph.output:
            value.name = captured.get(value.name, value.name)


def local_names(graph: GraphProto) -> set[str]:
    """Return the names that a graph defines itself."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node))
