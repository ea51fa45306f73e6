"""Find the projections of a transformer by role: attention, MLP, output layer.

A projection is a product with a weight. It is one of attention if no other projection lies between
it and an attention, before it (queries, keys, values) or behind it (outputs); the head gives the
logits; all others are of the perceptrons.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import uses

Role = Literal["attention", "mlp", "all-linear"]
ROLES = get_args(Role)

_ATTENTIONS = (
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "SparseAttention"),
    *("DecoderMaskedMultiHeadAttention", "PagedAttention", "LinearAttention", "FlexAttention"),
    *("PackedAttention", "PackedMultiHeadAttention"),
)
_PRODUCTS = ("MatMul", "FusedMatMul", "Einsum")
"""The operators of a decomposed attention, around a Softmax."""
_KEEPS_LOGITS = (
    *("Add", "Mul", "Div", "Tanh", "Cast", "Identity", "Reshape", "Transpose", "Slice", "Gather"),
    *("Softmax", "LogSoftmax"),
)
"""Operators that may stand between the head and the output."""


def find_projections(
    graph: Graph, tensors: Mapping[str, Any], names: Collection[str], role: Role
) -> set[str]:
    """Select the weights of projections with a role.

    The branches of an If are taken as networks of their own, since some decoders have one with a
    past and one without.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.
      names: the weights to select from.
      role: "attention", "mlp", or "all-linear" for both.
    """
    matrices = [
        use
        for use in uses(graph, tensors)
        if use.name in names and not use.passes
        # neither a lookup table nor the kernel of a convolution
        if use.matrix is None or not (use.matrix.lookup or use.matrix.kernel)
    ]
    chosen = _select(graph, [(u.name, u.outer) for u in matrices if u.outer.op.name != "If"], role)
    for branch in (b for node in graph.nodes if node.op.name == "If" for b in node.subgraphs):
        inside = {node.index for node in branch.nodes}
        products = [(use.name, use.node) for use in matrices if use.node.index in inside]
        chosen |= _select(branch, products, role)
    return chosen


def _select(graph: Graph, products: Collection[tuple[str, Node]], role: Role) -> set[str]:
    """Return the weights that have a role in all their uses.

    Args:
      graph: the graph.
      products: the name of a weight and the node of the graph that multiplies by it.
      role: the role.
    """
    places: dict[str, list[Node]] = {}
    for name, node in products:
        places.setdefault(name, []).append(node)
    weighted = {node.index for _, node in products}
    edges = _Edges(graph, weighted)
    attentions = edges.find_attentions()
    near = edges.reach(attentions, edges.sources) | edges.reach(attentions, edges.readers)
    near |= attentions
    head = _find_head(graph, weighted)
    inner = {
        "attention": weighted & near,
        "mlp": weighted - near - head,
        "all-linear": weighted - head,
    }[role]
    return {
        name for name, readers in places.items() if all(node.index in inner for node in readers)
    }


class _Edges:
    """The edges between the nodes of a graph, for searches that stop at projections.

    Attributes:
      sources: for the index of each node, those of the producers of its inputs.
      readers: for the index of each node, those of the readers of its outputs.
    """

    def __init__(self, graph: Graph, weighted: Collection[int]):
        self._nodes = graph.nodes
        self._weighted = weighted
        self.sources: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
        self.readers: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
        for node in graph.nodes:
            if node.op.name in ("Shape", "Size"):  # these read no features
                continue
            for name in node.reads:
                if source := graph.producers.get(name):
                    self.sources[node.index].add(source.index)
                    self.readers[source.index].add(node.index)

    def reach(self, start: Collection[int], edges: Mapping[int, set[int]]) -> set[int]:
        """Return the nodes that can be reached along `edges` without passing through a projection.

        Projections that are reached are included.
        """
        reached: set[int] = set()
        waiting = [*start]
        while waiting:
            at = waiting.pop()
            if at not in self._weighted or at in start:
                waiting += edges[at] - reached
                reached |= edges[at]
        return reached

    def find_attentions(self) -> set[int]:
        """Return the attentions: their operators, or the products before and behind a Softmax."""
        attentions = {node.index for node in self._nodes if node.op.name in _ATTENTIONS}
        plain = {n.index for n in self._nodes if n.op.name in _PRODUCTS} - {*self._weighted}
        for node in self._nodes:
            if node.op.name == "Softmax":
                before = plain & self.reach({node.index}, self.sources)
                behind = plain & self.reach({node.index}, self.readers)
                # without both products it is a Softmax over classes or experts
                if before and behind:
                    attentions |= before | behind
        return attentions


def _find_head(graph: Graph, weighted: set[int]) -> set[int]:
    """Return the projections whose result reaches an output through `_KEEPS_LOGITS` alone."""
    head, waiting, visited = set(), [*graph.outputs], set()
    while waiting:
        node = graph.producers.get(waiting.pop())
        if node is None or node.index in visited:
            continue
        visited.add(node.index)
        if node.index in weighted:
            head.add(node.index)
        elif node.op.name in _KEEPS_LOGITS:
            waiting += node.inputs
    return head
