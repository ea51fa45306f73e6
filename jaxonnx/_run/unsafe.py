"""Operators at which ONNX's shape inference reads outside of its vectors and ends the process."""

from onnx import AttributeProto, ModelProto, NodeProto, helper

from jaxonnx._file.protos import all_nodes

_HIDDEN = "jaxonnx.hidden"
"""The domain of nodes that inference is not to know."""


def hide(proto: ModelProto) -> None:
    """Rename, in place, the nodes that inference could not read, and all whose type is GatherND.

    What they give then has no shape. Of GatherND the indices may have sizes below zero, which
    inference itself computes.
    """
    bodies = (proto.graph, *proto.functions)
    nodes = [n for body in bodies for n in all_nodes(body) if not _is_safe(n)]
    for node in nodes:
        node.domain = _HIDDEN
    for imports in (proto, *proto.functions) if nodes else ():
        imports.opset_import.append(helper.make_opsetid(_HIDDEN, 1))


def _is_safe(node: NodeProto) -> bool:
    if node.op_type == "GatherND":
        return False
    if node.op_type == "Split":
        count = _number(node, "num_outputs", len(node.output))
        return count == len(node.output)
    if node.op_type == "LayerNormalization":
        axis = _number(node, "axis", -1)
        return axis is not None and -(2**31) <= axis < 2**31
    return True


def _number(node: NodeProto, name: str, default: int) -> int | None:
    """Return an attribute, None for one that is not a number, or that a caller gives."""
    for attribute in node.attribute:
        if attribute.name == name:
            plain = attribute.type == AttributeProto.INT and not attribute.ref_attr_name
            return attribute.i if plain else None
    return default
