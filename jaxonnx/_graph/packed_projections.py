"""Find matrices that have the outputs of several projections: queries, keys and values, say."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, Weight


def find_packed_projections(
    graph: Graph, meanings: Mapping[str, Weight], used: Collection[Use], tensors: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Find matrices whose outputs a GroupQueryAttention or a Split takes apart.

    Args:
      graph: the bound graph.
      meanings: the meaning of its tensors (`weights`).
      used: their uses.
      tensors: their values.

    Returns:
      The numbers of outputs for each part (queries, keys and values, in this order, of an
      attention), by the name of the matrix.
    """
    result = {}
    for use in used:
        place = meanings[use.name].matrix
        if place is None or use.passes or use.node is not use.outer:
            continue
        rows, _ = place.sizes(meanings[use.name].shape)
        values: list[str] = [use.node.outputs[0]]
        while values and use.name not in result:
            for node in graph.readers.get(values.pop(), ()):
                if node.op.name in ("Add", "Cast", "Identity"):
                    values.append(node.outputs[0])
                if sizes := _part_sizes(node, rows, tensors):
                    result[use.name] = sizes
    return result


def _part_sizes(node: Node, rows: int, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of outputs that a node takes apart; empty if it takes none apart."""
    if node.op.name == "GroupQueryAttention" and not any(node.inputs[1:3]):
        # packed outputs: count heads of queries, then shared heads of keys and of values each
        count, shared = (node.attributes[key] for key in ("num_heads", "kv_num_heads"))
        size = rows // (count + 2 * shared)
        return count * size, shared * size, shared * size
    if node.op.name == "Split" and node.attributes.get("axis", 0) in (-1, 2):
        sizes = tensors.get(node.inputs[1]) if len(node.inputs) > 1 else None
        equal = [rows // len(node.outputs)] * len(node.outputs)
        parts = (*(equal if sizes is None else np.asarray(sizes).tolist()),)
        return parts if sum(parts) == rows else ()
    return ()
