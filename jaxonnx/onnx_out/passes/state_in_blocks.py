"""The state of a step in the shape of the blocks that renew it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from jaxonnx._io.protos import subgraphs
from jaxonnx.onnx_out._export import reads


class _Branch:
    """A branch of an If, with the node that computes each tensor and the nodes that read it."""

    def __init__(self, graph: GraphProto):
        self.graph = graph
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in reads(node):
                self.readers.setdefault(name, []).append(node)


def split_state(proto: ModelProto, state: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Give tensors of the state the shape of the blocks that a Scan updates, in place.

    A step whose update is conditional updates the optimizer's state in one branch of an If, by a
    Scan over blocks between two Reshapes, and returns it unchanged in the other. Runtimes copy a
    result that is a Reshape of another tensor. A tensor that only such a Scan reads can have the
    shape of the blocks in the file itself.

    Args:
      proto: the step, after `split_into_blocks`.
      state: for each input of the state the output with its new value.

    Returns:
      The new shapes of the tensors that changed, inputs and outputs, by name.
    """
    graph, shapes = proto.graph, {}
    reading = Counter(name for node in graph.node for name in reads(node))
    for node in graph.node:
        if node.op_type == "If":
            branches = [_Branch(inner) for inner in subgraphs(node)]
            results = {name: i for i, name in enumerate(node.output)}
            for name in [n for n in state if state[n] in results and reading[n] == 1]:
                if (shape := _hoist_reshapes(branches, name, results[state[name]])) is not None:
                    shapes[name] = shapes[state[name]] = shape
    for value in (*graph.input, *graph.output):
        if value.name in shapes:
            _declare(value, shapes[value.name])
    return shapes


def _hoist_reshapes(branches: list[_Branch], name: str, result: int) -> tuple[int, ...] | None:
    """Remove the Reshapes around the Scan that updates a tensor in one branch of an If.

    Args:
      branches: both branches.
      name: the tensor.
      result: the number of the If's output that is its new value.

    Returns:
      The shape of the Scan's blocks; None if the branches do not have this form.
    """
    ends = [branch.makers[branch.graph.output[result].name] for branch in branches]
    keeps = [end.op_type == "Identity" and end.input[0] == name for end in ends]
    if sorted(keeps) != [False, True]:
        return None
    # in the branch `one`: name -> Reshape (into) -> Scan -> Reshape (back) -> Identity (end)
    first, other = (branches[keeps.index(side)] for side in (False, True))
    end, (into, *more) = ends[keeps.index(False)], first.readers.get(name, [None])
    back = first.makers.get(end.input[0]) if end.op_type == "Identity" else None
    if more or into is None or back is None or len(other.readers[name]) != 1:
        return None
    if not into.op_type == back.op_type == "Reshape" or first.readers[back.output[0]] != [end]:
        return None
    scan, sizes = first.makers.get(back.input[0]), first.makers.get(into.input[1])
    if scan is None or scan.op_type != "Scan" or sizes is None:
        return None
    places = [i for i, read in enumerate(scan.input) if read == into.output[0]]
    if len(places) != 1:
        return None
    scan.input[places[0]], end.input[0] = name, back.input[0]
    first.graph.node.remove(into)
    first.graph.node.remove(back)
    shape = tuple(helper.get_node_attr_value(sizes, "value_ints"))
    for branch in branches:
        _declare(branch.graph.output[result], shape)
    return shape


def _declare(value: ValueInfoProto, shape: Sequence[int]) -> None:
    """Set the shape of a declared tensor."""
    kind = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))
