"""Passes over the graph of a step that make it quick in onnxruntime: large arrays block by block.

Runtimes that do not fuse operators read and write all of an array in each of them: an update by
Adam is twenty passes over the memory of the weights. `split_into_blocks` makes a long chain of
element-wise operators a Scan over blocks that fit the cache: one pass. `split_state` gives the
state that is updated so the shape of the blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)
from onnx.shape_inference import infer_shapes

from jaxonnx._io.protos import defined_names, subgraphs, unused_name
from jaxonnx.onnx_out._export import prune, reads, rename

LARGE = 2**18
"""The fewest elements of an array that is split: smaller ones stay in the cache with the others of
their chain."""

SLOW = 2**10
"""The fewest elements of an array that is flattened for a chain if its last axis has size one:
onnxruntime takes 45 ns an element for an operator of such an array and a scalar."""

BLOCK = 2**14, 2**16
"""The fewest and the most elements of a block."""

CHAIN = 4
"""The fewest operators of a chain that becomes a Scan."""

COMPARISONS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"}
OPERATORS = COMPARISONS | {
    *("Abs", "Add", "Div", "Exp", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Sign"),
    *("Sqrt", "Sub", "Tanh", "Where", "Erf"),
}


Kind = tuple[int, tuple[int, ...]]
"""The type of a tensor's elements, and its shape."""


def split_into_blocks(proto: ModelProto) -> ModelProto:
    """Rewrite a model so that elementwise chains on large arrays are computed block by block."""
    inferred = infer_shapes(_with_axes(proto))
    used = {*defined_names(inferred.graph)}
    result = ModelProto()
    result.CopyFrom(proto)
    _rewrite(result.graph, _kinds(inferred.graph), used)
    return result


def flatten_vectors(proto: ModelProto) -> None:
    """Compute with vectors that have other axes, (1, C, 1, 1) say, as arrays of rank 1, in place.

    Statistics and factors of channels were reshaped for each operator that reads them, which made
    a third of the nodes of a step. Here elementwise operators and sums have results of rank 1, and
    only what broadcasts a vector to an array reshapes it.
    """
    graph, used = proto.graph, {*defined_names(proto.graph)}
    kinds = _kinds(infer_shapes(_with_axes(proto)).graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    nodes: list[NodeProto] = []
    flat: dict[str, str] = {}  # the array of rank 1 with the numbers of a vector
    renamed: dict[str, str] = {}
    lists: dict[tuple[int, ...], str] = {}

    def size(name: str) -> int | None:
        """Return the size of a vector; None for anything else."""
        shape = kinds[name][1] if name in kinds else ()
        return prod(shape) if 1 < prod(shape) == max(shape) else None

    def numbers(values: Sequence[int]) -> str:
        """Return the name of a constant."""
        key = tuple(values)
        if key not in lists:
            lists[key] = unused_name("sizes", used)
            array = np.asarray(key, np.int64)
            graph.initializer.append(numpy_helper.from_array(array, lists[key]))
        return lists[key]

    def flatten(name: str) -> str:
        """Return the name of a vector as an array of rank 1."""
        if name not in flat and len(kinds[name][1]) > 1:
            flat[name] = unused_name(f"{name}.flat", used)
            kinds[flat[name]] = kinds[name][0], (prod(kinds[name][1]),)
            nodes.append(helper.make_node("Reshape", [name, numbers([-1])], [flat[name]]))
        return flat.get(name, name)

    for node in graph.node:
        (out, *others), operands = node.output, [renamed.get(n, n) for n in node.input]
        count = None if others or node.domain else size(out)
        if count is None:
            nodes.append(node)
            continue
        vectors = [name for name in operands if size(name) == count]
        shape, element = kinds[out][1], kinds[out][0]
        axes = constants.get(operands[1]) if node.op_type == "ReduceSum" and operands[1:] else None
        if node.op_type in ("Reshape", "Transpose") and operands[0] in vectors:
            flat[out] = flatten(operands[0])
        elif len(shape) > 1 and node.op_type in OPERATORS and vectors:
            if any(n not in vectors and len(kinds.get(n, (0, (1, 1)))[1]) > 1 for n in operands):
                nodes.append(node)  # an operand of one element has axes
                continue
            node.input[:] = [flatten(n) if n in vectors else n for n in operands]
        elif len(shape) > 1 and axes is not None and operands[0] in kinds:
            before = kinds[operands[0]][1]
            reduced = {axis % len(before) for axis in numpy_helper.to_array(axes)}
            rest = [axis for axis in range(len(before)) if axis not in reduced]
            if prod(before[axis] for axis in rest) != count:
                nodes.append(node)
                continue
            (channels,) = (axis for axis in rest if before[axis] > 1)
            node.input[1] = numbers([axis for axis in range(len(before)) if axis != channels])
            for attribute in node.attribute:
                attribute.i = 0 if attribute.name == "keepdims" else attribute.i
        else:
            nodes.append(node)
            continue
        if out not in flat:
            flat[out] = unused_name(f"{out}.flat", used)
            kinds[flat[out]] = element, (count,)
            node.output[0] = flat[out]
            nodes.append(node)
        if len(shape) == 1 and out not in outputs:
            renamed[out] = flat[out]
        else:
            sizes = numbers(shape)
            nodes.append(helper.make_node("Reshape", [flat[out], sizes], [out]))
    for node in nodes:
        rename(node, renamed)
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph, outputs)


def _with_axes(proto: ModelProto) -> ModelProto:
    """Copy the small int64 initializers (axes, sizes) into the subgraphs that read them.

    ONNX's shape inference does not see initializers of an outer graph, and would not know the
    results of a Reshape or Slice in a branch. The copy is for inference only.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    small = {
        tensor.name: tensor
        for tensor in proto.graph.initializer
        if tensor.data_type == TensorProto.INT64 and len(tensor.dims) == 1 and tensor.dims[0] < 9
    }

    def fill(graph: GraphProto) -> None:
        for node in graph.node:
            for inner in subgraphs(node):
                names = {name for other in inner.node for name in reads(other)}
                inner.initializer.extend(small[name] for name in sorted(names & small.keys()))
                fill(inner)

    fill(result.graph)
    return result


def _kinds(graph: GraphProto) -> dict[str, Kind]:
    """Return the element type and shape of each tensor whose shape is known, in subgraphs too."""
    kinds = {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
            kinds[value.name] = kind.elem_type, tuple(d.dim_value for d in kind.shape.dim)
    for node in graph.node:
        for inner in subgraphs(node):
            kinds |= _kinds(inner)
    return kinds


def _rewrite(graph: GraphProto, kinds: dict[str, Kind], used: set[str]) -> None:
    """Replace the chains of a graph and of the branches of its Ifs, in place."""
    for node in graph.node:
        if node.op_type == "If":
            for inner in subgraphs(node):
                _rewrite(inner, kinds, used)
    outputs = {value.name for value in graph.output}
    nodes = [*graph.node]
    if not (chains := _chains(nodes, kinds)):
        return
    readers = Counter(name for node in nodes for name in reads(node))
    chained = {id(node) for chain in chains for node in chain}
    result = [node for node in nodes if id(node) not in chained]
    for chain in chains:
        within = Counter(name for node in chain for name in reads(node))
        results = {node.output[0] for node in chain}
        needed = outputs.union(name for name in results if readers[name] > within[name])
        result += _chain_in_blocks(chain, needed, kinds, used)
    result = _sort_nodes(result)
    del graph.node[:]
    graph.node.extend(result)


def _chains(nodes: Sequence[NodeProto], kinds: dict[str, Kind]) -> list[list[NodeProto]]:
    """Return groups of connected elementwise operators on large arrays of one shape.

    A group becomes one node, so that no path may leave it through other operators and come back: it
    would be a cycle. For each shape a tensor has a depth: the most times that a path from the
    inputs to it leaves operators of this shape. Operators join a group only at equal depth.
    """
    depths: dict[str, Counter] = {}  # of a tensor, by shape
    groups: dict[str, list[NodeProto]] = {}  # the group that computes a tensor
    for node in nodes:
        detours: Counter = Counter()
        shape = _shape(node, kinds)
        for name in reads(node):
            same = shape is not None and name in groups and kinds[name][1] == shape
            for other, depth in depths.get(name, {}).items():
                leaves = name in groups and kinds[name][1] == other and not same
                detours[other] = max(detours[other], depth + leaves)
        if shape is not None:
            detours[shape] += 0
            chain = [node]
            for name in dict.fromkeys(node.input):
                before = groups.get(name)
                if before is None or before is chain or kinds[name][1] != shape:
                    continue
                if depths[name][shape] == detours[shape]:
                    before.extend(chain)
                    for other in chain:
                        groups[other.output[0]] = before
                    chain = before
            groups[node.output[0]] = chain
        for name in node.output:
            depths[name] = Counter(detours)
            if shape is not None:
                depths[name][shape] = detours[shape]
    chains = {id(chain): chain for chain in groups.values() if len(chain) >= CHAIN}
    return list(chains.values())


def _shape(node: NodeProto, kinds: dict[str, Kind]) -> tuple[int, ...] | None:
    """Return the shape of a node's result if the node can be in a chain, else None.

    It must be elementwise, with a large result, and each operand of that shape or a scalar.
    """
    if node.domain or node.op_type not in OPERATORS or node.output[0] not in kinds:
        return None
    shape = kinds[node.output[0]][1]
    if _block(shape) is None:
        return None
    operands = [kinds.get(name) for name in node.input]
    fits = all(k is not None and (k[1] == shape or prod(k[1]) == 1) for k in operands)
    return shape if fits else None


def _block(shape: Sequence[int]) -> int | None:
    """Return the size of a block that divides an array; None if the array is not split.

    A slow small array (see `SLOW`) is one block.
    """
    size, (least, most) = prod(shape), BLOCK
    if size < LARGE:
        return size if size >= SLOW and len(shape) > 1 and shape[-1] == 1 else None
    return next(
        (size // n for n in range(-(-size // most), size // least + 1) if size % n == 0), None
    )


def _chain_in_blocks(
    chain: Sequence[NodeProto], needed: set[str], kinds: dict[str, Kind], used: set[str]
) -> list[NodeProto]:
    """Return the nodes that compute a chain by a Scan over blocks, or flattened as one block.

    Args:
      chain: its nodes.
      needed: the results of the chain that other nodes or the graph's outputs read.
      kinds: types and shapes of all tensors.
      used: all names; new ones are added.
    """
    shape = kinds[chain[0].output[0]][1]
    block = _block(shape) or 1
    chain = _sort_nodes(chain)
    inner = {node.output[0] for node in chain}
    operands = dict.fromkeys(name for node in chain for name in node.input if name not in inner)
    whole = [name for name in operands if kinds[name][1] == shape]
    results = [node.output[0] for node in chain if node.output[0] in needed]
    # operands of one element with axes, (1, 1) say: within a block of rank 1 they must have rank 1
    ranked = [name for name in operands if kinds[name][1] not in ((), shape)]
    scanned = block < prod(shape)
    rows = [prod(shape) // block, block] if scanned else [block]
    sizes = [
        helper.make_node("Constant", [], [unused_name("sizes", used)], value_ints=values)
        for values in (rows, [*shape], *([[1]] if ranked else []))
    ]
    into, back, *unit = (node.output[0] for node in sizes)  # sizes of blocks, of arrays, [1]
    rows_of = {name: unused_name(f"{name}.rows", used) for name in (*whole, *results)}
    names = (
        {name: unused_name(f"{name}.block", used) for name in rows_of} if scanned else {**rows_of}
    )
    names |= {name: unused_name(f"{name}.single", used) for name in ranked}

    def reshape_node(name: str, sizes: str, other: str) -> NodeProto:
        return helper.make_node("Reshape", [name, sizes], [other])

    def value_info(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(names[name], kinds[name][0], [block])

    body = GraphProto(name=unused_name("block", used))
    body.input.extend(map(value_info, whole))
    body.output.extend(map(value_info, results))
    for node in chain:
        copy = body.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
    before = [reshape_node(name, into, rows_of[name]) for name in whole]
    before += [reshape_node(name, unit[0], names[name]) for name in ranked]
    after = [reshape_node(rows_of[name], back, name) for name in results]
    if not scanned:
        return [*sizes, *before, *body.node, *after]
    inputs, outputs = ([rows_of[name] for name in part] for part in (whole, results))
    scan = helper.make_node("Scan", inputs, outputs, body=body, num_scan_inputs=len(whole))
    return [*sizes, *before, scan, *after]


def _sort_nodes(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """Sort nodes topologically: each comes after the nodes whose results it reads.

    A depth-first search with a stack of its own: graphs are deeper than Python recurses.
    """
    nodes = list(nodes)
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    result: list[NodeProto] = []
    state = [0] * len(nodes)  # 0: not visited, 1: waits for its inputs, 2: done

    for start in range(len(nodes)):
        stack = [start]
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            before = [makers[n] for n in sorted(reads(nodes[i])) if n in makers]
            open_ = [j for j in before if state[j] == 0]
            if state[i] == 0 and open_:
                state[i] = 1
                stack.extend(open_)
                continue
            state[i] = 2
            result.append(nodes[stack.pop()])
    return result


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
    places = [i for i, source in enumerate(scan.input) if source == into.output[0]]
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
