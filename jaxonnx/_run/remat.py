"""Where a graph is cut so that its training takes less memory.

Between two cuts nothing is kept for the gradient but the values that cross a cut; the rest is
computed again, one segment at a time (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174). With about as many segments as each has nodes, memory grows with the square root
of the depth.
"""

import math
from itertools import pairwise

from jaxonnx._graph.bind import Graph


def find_cuts(graph: Graph) -> tuple[int, ...]:
    """Choose about sqrt(nodes) positions between nodes to cut at, where few values cross.

    The nodes are divided into equal ranges; each cut is the position with the fewest crossing
    values of its range, the last one on a tie.
    """
    if any(what == "scope" for node in graph.nodes for _, what in node.op.context):
        return ()  # a Gradient node reads values of all nodes before it from the scope
    crossing = _count_crossing(graph)
    count = round(math.sqrt(len(graph.nodes)))
    bounds = [round(i * len(graph.nodes) / (count + 1)) for i in range(1, count + 2)]
    return tuple(
        min(range(a, b), key=lambda i: (_rebinds(graph, i), crossing[i], -i))
        for a, b in pairwise(bounds)
        if a < b
    )


def _rebinds(graph: Graph, position: int) -> bool:
    """Check for a Dropout that takes over the name of the value before it (`views.Dropout`)."""
    nodes = graph.nodes[position : position + 1]
    return any(not {*node.inputs}.isdisjoint(node.outputs) for node in nodes)


def _count_crossing(graph: Graph) -> list[int]:
    """Count for each position the values computed before it and read at it or after it."""
    producer, last_reader = {}, {}
    for i, node in enumerate(graph.nodes):
        producer.update((name, i) for name in node.outputs if name)
        last_reader.update((name, i) for name in node.reads)
    last_reader.update((name, len(graph.nodes)) for name in graph.outputs)
    # a value crosses the positions from its producer + 1 to its last reader: count by differences
    changes = [0] * (len(graph.nodes) + 2)
    for name, i in producer.items():
        if name in last_reader:
            changes[i + 1] += 1
            changes[last_reader[name] + 1] -= 1
    total, counts = 0, []
    for change in changes:
        total += change
        counts.append(total)
    return counts
