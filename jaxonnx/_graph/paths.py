"""What the values of a graph are computed from."""

from collections.abc import Iterable, Sequence

from jaxonnx._graph.bind import Node


def between(nodes: Sequence[Node], names: Iterable[str], targets: Iterable[str]) -> list[Node]:
    """Return the nodes, in order, on the paths from `names` to `targets`."""
    names = set(names)
    affected, below = set(names), []
    for node in nodes:
        if not affected.isdisjoint(node.reads):
            affected.update(name for name in node.outputs if name)
            below.append(node)
    needed, path = set(targets) - names, []
    for node in reversed(below):
        if not needed.isdisjoint(node.outputs):
            needed.update(name for name in node.reads if name not in names)
            path.append(node)
    return path[::-1]
