"""Fuse the node groups that `quantize_dynamic` of onnxruntime writes for matrix products.

DynamicQuantizeLinear, MatMulInteger, Cast and two Mul with the scales give what
DynamicQuantizeMatMul gives, bit for bit, and so does MatMulIntegerToFloat, to which sessions of
onnxruntime fuse all but the first. As that operator, a product has a gradient, and its
matrix can be adapted. Only the bound graph changes: the file keeps its nodes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from onnx import TensorProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx.registry import lookup

_FUSED = lookup("com.microsoft", "DynamicQuantizeMatMul", 1)


class _Group(NamedTuple):
    """The nodes of a dynamically quantized matrix product."""

    last: Node
    """The node whose output is the product."""
    label: str
    """The label of the node that multiplies matrices."""
    parts: tuple[Node, ...]
    """The other nodes."""
    inputs: tuple[str, ...]
    """The inputs of a DynamicQuantizeMatMul that computes the same."""


def fuse_integer_products(graph: Graph, tensors: Collection[str]) -> Graph:
    """Replace dynamically quantized products with stored matrices by DynamicQuantizeMatMul.

    Other nodes of a group are dropped if nothing else reads them.

    Args:
      graph: the bound main graph.
      tensors: the names of its tensors.
    """
    if not any(node.op.name == "DynamicQuantizeLinear" for node in graph.nodes):
        return graph
    candidates = (_find_group(node, graph.producers, tensors) for node in graph.nodes)
    groups = {group.last.index: group for group in candidates if group is not None}
    nodes = []
    for node in graph.nodes:
        if (group := groups.get(node.index)) is not None:
            inputs = group.inputs
            while not inputs[-1]:  # omitted inputs at the end
                inputs = inputs[:-1]
            reads = tuple(dict.fromkeys(filter(None, inputs)))
            assert _FUSED is not None
            node = replace(
                node, label=group.label, op=_FUSED, inputs=inputs, attributes={}, reads=reads
            )
        nodes.append(node)
    parts = {node.index for group in groups.values() for node in group.parts}
    times = Counter([*graph.outputs, *(name for node in nodes for name in node.reads)])
    remaining = []
    for node in reversed(nodes):  # backwards: dropping a part can leave an earlier part unread
        if node.index in parts and not any(times[name] for name in node.outputs):
            times.subtract(node.reads)
        else:
            remaining.append(node)
    return replace(graph, nodes=(*reversed(remaining),))


def _find_group(
    last: Node, producers: Mapping[str, Node], tensors: Collection[str]
) -> _Group | None:
    """Return the group whose last node this is; None if it is not one."""

    def find_producer(name: str, kind: str) -> Node | None:
        node = producers.get(name)
        return node if node is not None and _is(node, kind) else None

    if _is(last, "MatMulIntegerToFloat", "com.microsoft"):
        a, b, a_scale, b_scale, zero, *others = (*last.inputs, "", "")[: len(last.inputs) + 2]
        quantize = find_producer(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or (a, a_scale, zero) != quantize.outputs:
            return None
        inputs = (quantize.inputs[0], b, b_scale, *others)
        return _Group(last, last.label, (quantize,), inputs)
    if not _is(last, "Mul"):
        return None
    for first, second in (last.inputs, last.inputs[::-1]):
        cast, scales = find_producer(first, "Cast"), find_producer(second, "Mul")
        product = cast and find_producer(cast.inputs[0], "MatMulInteger")
        if cast is None or scales is None or product is None:
            continue
        a, b, *zeros = product.inputs
        quantize = find_producer(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or cast.attributes["to"] != TensorProto.FLOAT:
            continue
        others = [name for name in scales.inputs if name != quantize.outputs[1]]
        # outputs of DynamicQuantizeLinear: y, y_scale, y_zero_point
        if (a, *zeros[:1]) == quantize.outputs[::2] and len(others) == 1:
            inputs = (quantize.inputs[0], b, others[0], *zeros[1:])
            return _Group(last, product.label, (quantize, product, cast, scales), inputs)
    return None


def _is(node: Node, name: str, domain: str = "") -> bool:
    return node.op.name == name and node.op.domain == domain and node.body is None
