"""The last matrix product before an output, and the nodes between the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onnx import GraphProto

from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import PRODUCTS
from jaxonnx._graph.select import resolve
from jaxonnx._weights import Matrix
from jaxonnx.errors import InputError

ENDINGS = {"Softmax": "Softmax", "LogSoftmax": "Softmax", "Sigmoid": "Sigmoid"}
"""Operators that turn logits into (log-)probabilities at the end of a network, each with the
function that a loss on logits computes itself in its place."""

_CONVOLUTIONS = ("Conv", "ConvTranspose", "FusedConv")
_PRODUCTS = ("FusedGemm", "FusedMatMul", "Gemm", "MatMul", *_CONVOLUTIONS)

_LISTED = 5
"""The most layers that an error lists."""

Shape = tuple[int | str | None, ...]


def find_ending(graph: Graph, output: str) -> Node | None:
    """Return the node of `ENDINGS` that gives an output."""
    for node in reversed(graph.nodes):
        if node.outputs and node.outputs[0] == output:
            if node.op.name == "Identity" and not node.op.domain:
                output = node.inputs[0]
            else:
                return node if node.op.name in ENDINGS and not node.op.domain else None
    return None


def normalizes(ending: Node, axes: Collection[int], shape: Shape | None) -> bool:
    """Check whether an ending makes probabilities along one of these axes; a Sigmoid has none.

    Args:
      ending: as `find_ending` returns it.
      axes: -1 or 1.
      shape: that of the output, where it is known.
    """
    if ending.op.name == "Sigmoid":
        return True
    axis = ending.attributes.get("axis", -1 if ending.op.since >= 13 else 1)
    if shape is None:
        return axis in axes and ending.op.since >= 13
    rank = len(shape)
    # before opset 13 all axes from `axis` on were one
    alone = ending.op.since >= 13 or axis % rank == rank - 1
    return alone and axis % rank in {other % rank for other in axes}


@dataclass(frozen=True)
class LastLayer:
    """The last matrix product or convolution before an output."""

    output: str
    """The output of the graph."""
    node: Node
    """The product or convolution."""
    data: int
    """The position of its input that is computed from the model's inputs."""
    weight: int
    """The position of the weight."""
    matrix: Matrix
    """Which axes of the weight are its inputs and outputs, as the node reads it."""
    path: tuple[tuple[Node, int], ...]
    """The nodes from the layer to the output, in order, each with the position of the input that is
    the result of the node before."""

    @property
    def values(self) -> set[str]:
        """The names of the results of the layer and of the nodes behind it."""
        return {node.outputs[0] for node in (self.node, *(node for node, _ in self.path))}

    @property
    def convolves(self) -> bool:
        """Whether the layer is a convolution, whose outputs are axis 1 of its result."""
        return self.node.op.name in _CONVOLUTIONS

    def axis(self, rank: int) -> int:
        """Return the axis of the layer's outputs in its result, which has this rank."""
        if self.convolves:
            return 1
        # a weight that is the left factor (position 0) has its outputs in the rows of the result
        return rank - 1 if self.weight else rank - 2


def find_last_layer(
    proto: GraphProto,
    graph: Graph,
    shapes: Mapping[str, Shape],
    constants: Collection[str],
    at: str | None,
    ending: bool,
) -> LastLayer:
    """Find the last layer of a graph: the last product of data and a weight before its output.

    Args:
      proto: the main graph.
      graph: the same, bound.
      shapes: the shapes of values and tensors, as far as they are known.
      constants: the names of values that depend on nothing but the shapes of inputs.
      at: which layer, if outputs have different ones: an output, or a value, node or module.
      ending: if several outputs belong to the layer (logits and probabilities), take the one that
        is computed last instead of the first.

    Raises:
      InputError: no output has such a layer, or outputs have different ones and `at` is None.
    """
    if at in graph.outputs:
        return _trace_back(graph, shapes, constants, at)
    layers: list[LastLayer] = []
    errors: list[str] = []
    for output in graph.outputs:
        try:
            layers.append(_trace_back(graph, shapes, constants, output))
        except InputError as error:
            errors.append(str(error))
    if at is not None:
        value = resolve(proto, at)
        layers = [layer for layer in layers if value in layer.values]
        if not layers:
            raise InputError(
                f"'{at}' is not a last layer, because later nodes mix its outputs: model"
                f".with_outputs({at!r}) ends the graph there, and that model can have another head"
            )
    if not layers:
        raise InputError("; ".join(errors))
    if len({layer.node.index for layer in layers}) > 1:
        described = []  # the label of each, and its numbers of inputs and outputs
        for layer in layers:
            weight = shapes[layer.node.inputs[layer.weight]]
            ends = f"{weight[layer.matrix.input]} -> {weight[layer.matrix.output]}"
            described.append(f"'{layer.output}' has {layer.node.label}, {ends}")
        raise InputError(
            "several layers could be the last one: name the output that is meant, "
            "model.with_head(number, at=NAME) or train(..., head={NAME: number}). "
            + "; ".join(described)
        )
    return sorted(layers, key=lambda layer: len(layer.path))[-1 if ending else 0]


def _trace_back(
    graph: Graph, shapes: Mapping[str, Shape], constants: Collection[str], output: str
) -> LastLayer:
    """Follow the data from an output back to the nearest layer.

    Raises:
      InputError: a node on the way mixes several values or cannot take other classes.
    """
    producers, ranks = graph.producers, {name: len(shape) for name, shape in shapes.items()}
    # values in `constants` depend on nothing but the shapes of inputs: they are not data
    traced = behind(graph.nodes, graph.inputs, constants)
    path: list[tuple[Node, int]] = []
    choice: tuple[Node, list[int]] | None = None
    value = output
    while value in producers:
        node = producers[value]
        data = [i for i, n in enumerate(node.inputs) if n in traced and i not in node.op.static]
        factor = _factor(node, data, ranks)
        if factor is not None and (choice is None or node.op.name not in _CONVOLUTIONS):
            return LastLayer(output, node, data[0], *factor, tuple(path[::-1]))
        if factor is not None and choice is not None:  # it may choose among the classes, on axis 1
            (node, data), value = choice, choice[0].outputs[0]
        if factor is None and len(data) > 1 and _chooses_rows(node, shapes):
            choice, data = (node, data), data[:1]
        elif reason := _obstacle(node, data, value):
            raise InputError(
                f"the output '{output}' has no last layer that could get other classes: before it "
                f"is {node.label}, {reason}{_way_out(node, producers, traced, ranks)}"
            )
        path.append((node, data[0]))
        value = node.inputs[data[0]]
    raise InputError(
        f"the output '{output}' has no last layer: no matrix product or convolution is before it"
    )


def _chooses_rows(node: Node, shapes: Mapping[str, Shape]) -> bool:
    """Check whether a node chooses whole rows, like the last token's, of its first input."""
    shape, indices = (shapes.get(name) for name in (*node.inputs, "", "")[:2])
    if shape is None:
        return False
    if node.op.name == "Gather":
        return node.attributes.get("axis", 0) % len(shape) < len(shape) - 1
    depth = indices[-1] if node.op.name == "GatherND" and indices else None
    return isinstance(depth, int) and node.attributes.get("batch_dims", 0) + depth < len(shape)


def _factor(node: Node, data: list[int], ranks: Mapping[str, int]) -> tuple[int, Matrix] | None:
    """Return the position of the weight and the meaning of its axes; None if it is not a layer.

    Args:
      data: the positions of the inputs that are computed from the model's inputs.
      ranks: the ranks of values and tensors, as far as they are known.
    """
    if node.op.name not in _PRODUCTS or len(data) != 1 or _activation(node) in ENDINGS:
        return None
    for position, form in node.op.forms.items():
        name = node.inputs[position]
        if position not in data and name in ranks:
            matrix = form.axes(ranks[name], node.attributes, position)
            if matrix is not None and not matrix.grouped:
                return position, matrix
    return None


def _activation(node: Node) -> str:
    return node.attributes.get("activation", "")


def _obstacle(node: Node, data: list[int], value: str) -> str:
    """Explain, for an error, why the search for a layer ends at a node; "" if it does not."""
    if node.body is not None:
        return (
            "a function of the file: put its nodes in the place of the call with "
            "onnx.inliner.inline_local_functions before loading"
        )
    if node.op.like in PRODUCTS and node.op.like != node.op.name:
        return "which computes with integers: take the file from before quantization"
    if node.op.domain == "ai.onnx.ml":
        return "which is not a layer of a neural network"
    if node.graphs:
        return "which has subgraphs"
    if len(data) != 1:
        return "which is computed from several values" if data else "which is a constant"
    if value != node.outputs[0]:
        return "which has several results"
    if _activation(node) in ENDINGS:
        return f"with {_activation(node)} fused into it"
    return "whose weights give it no plain outputs" if node.op.forms else ""


def _way_out(
    node: Node, producers: Mapping[str, Node], traced: set[str], ranks: Mapping[str, int]
) -> str:
    """Return the part of an error that names layers before a node where the graph can be cut."""
    layers, queue, visited = list[Node](), [node], {node.index}
    while queue:  # the nearest layers, on all paths
        for name in queue.pop(0).reads:
            before = producers.get(name)
            if before is None or name not in traced or before.index in visited:
                continue
            visited.add(before.index)
            data = [i for i, n in enumerate(before.inputs) if n in traced]
            (queue if _factor(before, data, ranks) is None else layers).append(before)
    if not layers:
        return ""
    names = [f"'{layer.outputs[0]}' ({layer.op.name})" for layer in layers[:_LISTED]]
    more = ", ..." if len(layers) > _LISTED else ""
    return (
        f". Before it are {', '.join(names)}{more}: model.with_outputs(NAME) ends the graph at one "
        "of them, and the model that it gives can have another head"
    )
