"""The state of a step in the shape of the blocks that renew it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from jaxonnx._io.protos import subgraphs
from jaxonnx.onnx_out._export import reads


class _Branch:
    """A branch of an If, and which of its nodes make and read a tensor."""

    def __init__(self, graph: GraphProto):
        self.graph = graph
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in reads(node):
                self.readers.setdefault(name, []).append(node)


def split_state(proto: ModelProto, state: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Let tensors of a state have the shape of blocks; return the shapes of those that have it now.

    These are the ones that only a Scan in a branch reads and renews: runtimes copy a result that is
    a Reshape of another tensor.

    Args:
      state: the name of the result that renews each tensor.
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
    """Take the Reshapes of a tensor and of its renewal out of the branch with a Scan."""
    ends = [branch.makers[branch.graph.output[result].name] for branch in branches]
    keeps = [end.op_type == "Identity" and end.input[0] == name for end in ends]
    if sorted(keeps) != [False, True]:
        return None
    one, other = (branches[keeps.index(side)] for side in (False, True))
    end, (into, *more) = ends[keeps.index(False)], one.readers.get(name, [None])
    back = one.makers.get(end.input[0]) if end.op_type == "Identity" else None
    if more or into is None or back is None or len(other.readers[name]) != 1:
        return None
    if not into.op_type == back.op_type == "Reshape" or one.readers[back.output[0]] != [end]:
        return None
    scan, sizes = one.makers.get(back.input[0]), one.makers.get(into.input[1])
    if scan is None or scan.op_type != "Scan" or sizes is None:
        return None
    places = [i for i, read in enumerate(scan.input) if read == into.output[0]]
    if len(places) != 1:
        return None
    scan.input[places[0]], end.input[0] = name, back.input[0]
    one.graph.node.remove(into)
    one.graph.node.remove(back)
    shape = tuple(helper.get_node_attr_value(sizes, "value_ints"))
    for branch in branches:
        _declare(branch.graph.output[result], shape)
    return shape


def _declare(value: ValueInfoProto, shape: Sequence[int]) -> None:
    kind = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))
