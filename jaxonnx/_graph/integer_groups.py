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
    """A product whose last node gives the result."""

    last: Node
    label: str
    """Of the node that multiplies."""
    parts: tuple[Node, ...]
    """The other nodes."""
    inputs: tuple[str, ...]
    """Of DynamicQuantizeMatMul."""


def fuse_integer_products(graph: Graph, tensors: Collection[str]) -> Graph:
    """Return a graph in which such groups of a tensor's matrix are DynamicQuantizeMatMul.

    Nodes of a group that nothing else reads are left out.

    Args:
      graph: the bound main graph.
      tensors: the names of its tensors.
    """
    if not any(node.op.name == "DynamicQuantizeLinear" for node in graph.nodes):
        return graph
    makers = {name: node for node in graph.nodes for name in node.outputs}
    found = (_find_group(node, makers, tensors) for node in graph.nodes)
    groups = {group.last.index: group for group in found if group is not None}
    nodes = [_fuse(groups[n.index]) if n.index in groups else n for n in graph.nodes]
    parts = {node.index for group in groups.values() for node in group.parts}
    read = Counter([*graph.outputs, *(name for node in nodes for name in node.reads)])
    kept = []
    for node in reversed(nodes):  # a part may be read by a later part that is left out itself
        if node.index in parts and not any(read[name] for name in node.outputs):
            read.subtract(node.reads)
        else:
            kept.append(node)
    return replace(graph, nodes=(*reversed(kept),))


def _find_group(last: Node, makers: Mapping[str, Node], tensors: Collection[str]) -> _Group | None:
    """Return the group that ends in a node, if it ends one."""

    def find_maker(name: str, kind: str) -> Node | None:
        node = makers.get(name)
        return node if node is not None and _is(node, kind) else None

    if _is(last, "MatMulIntegerToFloat", "com.microsoft"):
        a, b, a_scale, b_scale, zero, *others = (*last.inputs, "", "")[: len(last.inputs) + 2]
        quantize = find_maker(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or (a, a_scale, zero) != quantize.outputs:
            return None
        inputs = (quantize.inputs[0], b, b_scale, *others)
        return _Group(last, last.label, (quantize,), inputs)
    if not _is(last, "Mul"):
        return None
    for first, second in (last.inputs, last.inputs[::-1]):
        cast, scales = find_maker(first, "Cast"), find_maker(second, "Mul")
        product = cast and find_maker(cast.inputs[0], "MatMulInteger")
        if cast is None or scales is None or product is None:
            continue
        a, b, *zeros = product.inputs
        quantize = find_maker(a, "DynamicQuantizeLinear")
        if quantize is None or b not in tensors or cast.attributes["to"] != TensorProto.FLOAT:
            continue
        others = [name for name in scales.inputs if name != quantize.outputs[1]]
        if (a, *zeros[:1]) == quantize.outputs[::2] and len(others) == 1:
            inputs = (quantize.inputs[0], b, others[0], *zeros[1:])
            return _Group(last, product.label, (quantize, product, cast, scales), inputs)
    return None


def _is(node: Node, name: str, domain: str = "") -> bool:
    return node.op.name == name and node.op.domain == domain and node.body is None


def _fuse(group: _Group) -> Node:
    assert _FUSED is not None
    inputs = group.inputs
    while not inputs[-1]:
        inputs = inputs[:-1]
    return replace(
        group.last,
        label=group.label,
        op=_FUSED,
        inputs=inputs,
        attributes={},
        reads=tuple(dict.fromkeys(filter(None, inputs))),
    )
