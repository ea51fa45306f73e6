"""Sort nodes topologically; find and rename what they read, in their subgraphs too."""

import heapq
from collections import Counter
from collections.abc import Mapping

from onnx import GraphProto, NodeProto

from jaxonnx._io.protos import subgraphs


def sort(graph: GraphProto) -> None:
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
        local = _local_names(graph)
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
        captured = {old: name for old, name in new.items() if old not in _local_names(graph)}
        for inner in graph.node:
            rename_reads(inner, captured)
        for value in graph.output:
            value.name = captured.get(value.name, value.name)


def _local_names(graph: GraphProto) -> set[str]:
    """Return the names that a graph defines itself."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node))
