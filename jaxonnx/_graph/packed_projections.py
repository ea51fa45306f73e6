"""Find matrices that project to queries, keys and values at once."""

from collections.abc import Collection, Mapping

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, Weight


def find_packed_projections(
    graph: Graph, found: Mapping[str, Weight], used: Collection[Use]
) -> dict[str, tuple[int, int, int]]:
    """Find matrices whose outputs are queries, keys and values, in this order.

    Args:
      graph: the bound graph.
      found: the meaning of its tensors (`weights`).
      used: their uses.

    Returns:
      The numbers of outputs for queries, keys and values, by the name of the matrix.
    """
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    result = {}
    for use in used:
        place = found[use.name].matrix
        if place is None or use.passes or use.node is not use.outer:
            continue
        values, heads = [use.node.outputs[0]], None
        while values and heads is None:
            for node in readers.get(values.pop(), ()):
                if node.op.name in ("Add", "Cast", "Identity"):
                    values.append(node.outputs[0])
                packed = node.op.name == "GroupQueryAttention" and not any(node.inputs[1:3])
                heads = node if packed else heads
        if heads is not None:
            # packed outputs: count heads of queries, then shared heads of keys and of values each
            count, shared = (heads.attributes[key] for key in ("num_heads", "kv_num_heads"))
            rows, _ = place.sizes(found[use.name].shape)
            size = rows // (count + 2 * shared)
            result[use.name] = (count * size, shared * size, shared * size)
    return result
