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
    """Return positions between nodes, about sqrt(nodes) of them, where few values cross.

    Each is the one with the fewest values in its share of the nodes, the last one on a tie.
    """
    if any(what == "scope" for node in graph.nodes for _, what in node.op.context):
        return ()  # a Gradient node looks at all that was computed before it
    crossing = _count_crossing(graph)
    count = round(math.sqrt(len(graph.nodes)))
    bounds = [round(i * len(graph.nodes) / (count + 1)) for i in range(1, count + 2)]
    return tuple(
        min(range(a, b), key=lambda i: (crossing[i], -i)) for a, b in pairwise(bounds) if a < b
    )


def _count_crossing(graph: Graph) -> list[int]:
    """Count for each position the values made before it and read at it or after it."""
    made, read = {}, {}
    for i, node in enumerate(graph.nodes):
        made.update((name, i) for name in node.outputs if name)
        read.update((name, i) for name in node.reads)
    read.update((name, len(graph.nodes)) for name in graph.outputs)
    changes = [0] * (len(graph.nodes) + 2)
    for name, i in made.items():
        if name in read:
            changes[i + 1] += 1
            changes[read[name] + 1] -= 1
    total, counts = 0, []
    for change in changes:
        total += change
        counts.append(total)
    return counts
