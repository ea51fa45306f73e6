"""Find the BatchNormalization nodes that have no running statistics."""

from onnx import GraphProto, NodeProto

from jaxonnx._io.protos import all_nodes, subgraphs, tensor_of_constant

_MEAN = 3
"""The first of the two inputs for running statistics."""


def find_without_statistics(graph: GraphProto) -> set[str]:
    """Return the first outputs of the BatchNormalization nodes without running statistics.

    These compute what the file says, in training and in inference alike: nodes of

    * a weight, which belong to the computation of that weight (timm's StdConv2d);
    * a mean or variance that the graph computes from its inputs (PyTorch's `batch_norm` without
      running statistics, of a known batch size);
    * training mode with a momentum of one, so that the statistics never change;
    * training mode with Constant nodes in the place of statistics, where initializers hold the
      weights.
    """
    norms = [n for n in graph.node if n.op_type == "BatchNormalization" and _is_onnx(n)]
    if not norms:
        return set()
    tensors = {tensor.name for tensor in graph.initializer}
    data = {value.name for value in graph.input if value.name not in tensors}
    constants: set[str] = set()
    for node in graph.node:
        inner = (n for g in subgraphs(node) for n in all_nodes(g))
        if not data.isdisjoint([*node.input, *(name for n in inner for name in n.input)]):
            data.update(node.output)
        if tensors and tensor_of_constant(node) is not None:
            constants.update(node.output)
    return {
        norm.output[0]
        for norm in norms
        if len(norm.input) == _MEAN + 2 and norm.output
        if norm.input[0] not in data
        or not data.isdisjoint(norm.input[_MEAN:])
        or (trains(norm) and (_never_moves(norm) or constants.issuperset(norm.input[_MEAN:])))
    }


def trains(norm: NodeProto) -> bool:
    """Check whether a BatchNormalization is in training mode, by its attribute or its outputs."""
    flag = any(a.name == "training_mode" and a.i for a in norm.attribute)
    return flag or sum(map(bool, norm.output)) > 1


def _is_onnx(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx")


def _never_moves(norm: NodeProto) -> bool:
    return any(a.name == "momentum" and a.f == 1 for a in norm.attribute)
