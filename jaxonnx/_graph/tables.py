"""Find inputs that index rows of a table: tokens, positions, token types.

Gather counts negative indices from the end, and what an index beyond the table gives is not defined
(here NaN, or zeros). In the data of a training either is a mistake.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph, Node

_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators whose result has the numbers of their first input."""


def count_rows(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of the table that an input has indices of, by input.

    Inputs that are no such indices are left out; of several tables the smallest counts.
    """
    counts: dict[str, int] = {}
    for _, name, rows in find_lookups(graph, {name: name for name in graph.inputs}, tensors):
        counts[name] = min(rows, counts.get(name, rows))
    return counts


def find_lookups(
    graph: Graph, inputs: dict[str, str], tensors: Mapping[str, Any]
) -> Iterator[tuple[Node, str, int]]:
    """Yield the nodes that read rows of a table by an input, subgraphs included.

    Args:
      inputs: from each value that has the numbers of an input to that input; it is extended.

    Yields:
      The node, the input, and the number of rows.
    """
    shapes = {name: np.shape(tensor) for name, tensor in tensors.items()}
    for node in graph.nodes:
        for inner in node.subgraphs:
            yield from find_lookups(inner, {**inputs}, tensors)
        kind, first = node.op.name, node.inputs[0] if node.inputs else ""
        if kind in _VIEWS and first in inputs and node.body is None:
            inputs[node.outputs[0]] = inputs[first]
        elif node.op.same_axes and first in shapes:
            shapes[node.outputs[0]] = shapes[first]
        elif kind == "Transpose" and len(shapes.get(first, ())) == 2:  # a tied layer of logits
            if [*(node.attributes.get("perm") or (1, 0))] == [0, 1]:
                continue
            shapes[node.outputs[0]] = shapes[first][::-1]
        elif kind == "Reshape" and first in shapes:
            # the codes of an output layer, as the rows of its embedding
            target = tensors.get("".join(node.inputs[1:2]))
            if isinstance(target, np.ndarray) and target.size and target[0] == shapes[first][0]:
                shapes[node.outputs[0]] = (*map(int, target),)
        form = node.op.form(0) if node.op.like == "Gather" else None
        if form is None or node.attributes.get(form.rows, 0) != 0:
            continue
        table, index, *_ = node.inputs
        if index in inputs and shapes.get(table):
            yield node, inputs[index], shapes[table][0]
