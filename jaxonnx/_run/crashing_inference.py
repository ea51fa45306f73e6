"""Operators whose shape inference in ONNX crashes the process (out-of-bounds reads)."""

from onnx import AttributeProto, ModelProto, NodeProto, helper

from jaxonnx._io.protos import all_nodes

_HIDDEN = "hidden"
"""A domain that ONNX's shape inference does not know, so that it skips the nodes in it."""

_NEVER = {"Einsum", "EyeLike", "GatherND", "LabelEncoder", "RegexFullMatch", "TreeEnsemble"}
"""Operators whose inference reads a type that an input may lack, or axes before the first: indices
of GatherND may have sizes below zero, which inference itself computes. That of Einsum has no end
for an equation with digits."""


def rename_crashing_nodes(proto: ModelProto) -> None:
    """Move nodes that would crash inference to an unknown domain, in place.

    Inference then finds no shapes of their results.
    """
    bodies = (proto.graph, *proto.functions)
    nodes = [n for body in bodies for n in all_nodes(body) if not _is_safe(n)]
    for node in nodes:
        node.domain = _HIDDEN
    for imports in (proto, *proto.functions) if nodes else ():
        imports.opset_import.append(helper.make_opsetid(_HIDDEN, 1))


def _is_safe(node: NodeProto) -> bool:
    """Check that inference of a node reads only outputs that it has and an axis of 32 bits."""
    if node.op_type in _NEVER:
        return False
    if node.op_type == "Split":
        count = _number(node, "num_outputs", len(node.output))
        return count == len(node.output)
    if node.op_type == "LayerNormalization":
        axis = _number(node, "axis", -1)
        return axis is not None and -(2**31) <= axis < 2**31
    return True


def _number(node: NodeProto, name: str, default: int) -> int | None:
    """Return an integer attribute; None if it has another type or refers to one of a function."""
    for attribute in node.attribute:
        if attribute.name == name:
            literal = attribute.type == AttributeProto.INT and not attribute.ref_attr_name
            return attribute.i if literal else None
    return default
