"""Ancestors and descendants of values in a graph."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from jaxonnx._graph.bind import Graph, Node


def behind(nodes: Sequence[Node], names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """Return `names` and all values computed from them, without following those in `without`."""
    values = {*names} - {""}
    for node in nodes:
        if not values.isdisjoint(node.reads):
            values.update(name for name in node.outputs if name and name not in without)
    return values


def ancestors(
    nodes: Sequence[Node], names: Iterable[str], without: Collection[str] = ()
) -> set[str]:
    """Return `names` and all values they are computed from, without following `without`."""
    values = {*names} - {""}
    for node in reversed(nodes):
        if not values.isdisjoint(node.outputs):
            values.update(name for name in node.reads if name not in without)
    return values


def find_between(nodes: Sequence[Node], names: Iterable[str], targets: Iterable[str]) -> list[Node]:
    """Return the nodes, in order, on the paths from `names` to `targets`."""
    names = {*names}
    affected = behind(nodes, names)
    below = [node for node in nodes if not affected.isdisjoint(node.reads)]
    path = ancestors(below, {*targets} - names, names)
    return [node for node in below if not path.isdisjoint(node.outputs)]


def select_part(graph: Graph, names: Sequence[str]) -> Graph:
    """Return the part of a graph that computes values from its tensors alone, as its outputs."""
    needed = ancestors(graph.nodes, names)
    nodes = tuple(node for node in graph.nodes if needed.issuperset(node.outputs))
    return replace(graph, nodes=nodes, outputs=(*names,))


def find_boundary(graph: Graph, sources: Iterable[str], others: Iterable[str]) -> set[str]:
    """Return the values computed from some inputs alone that the rest of a graph reads.

    Sizes are left to the rest: there they are known while compiling, which a given value is not.

    Args:
      graph: the graph.
      sources: the inputs that the values may depend on.
      others: the inputs that the rest depends on as well.
    """
    alone, dependent = {*sources}, behind(graph.nodes, others)
    for node in graph.nodes:
        is_alone = dependent.isdisjoint(node.reads) and node.op.name not in ("Shape", "Size")
        if is_alone and not alone.isdisjoint(node.reads):
            alone.update(node.outputs)
    rest = ancestors(graph.nodes, {*graph.outputs} - alone, alone)
    reads = {name for n in graph.nodes if not rest.isdisjoint(n.outputs) for name in n.reads}
    return alone & (reads | {*graph.outputs})
