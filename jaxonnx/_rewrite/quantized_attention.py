"""Mending what onnxruntime's `quantize_dynamic` makes of the Attention of ONNX.

It knows the Attention of com.microsoft alone, whose inputs are x and a weight, and writes
QAttention for that of ONNX (opset 23), too: Q and K are quantized, V stands in the place of the
bias, and the attributes stay those of ONNX. onnxruntime refuses that file.
"""

from onnx import ModelProto, NodeProto, helper

from jaxonnx.errors import ModelError

_OWN = "num_heads"
"""An attribute that each QAttention must have, and the Attention of ONNX has not."""
_SINCE = 23


def restore_attention(proto: ModelProto) -> list[str]:
    """Replace such nodes by DequantizeLinear of Q and K and the Attention of ONNX, in place.

    Returns:
      The outputs of these nodes.

    Raises:
      ModelError: a node had a cache, half of which the quantizer dropped.
    """
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    nodes = [*proto.graph.node]
    found = [node.output[0] for node in nodes if opset >= _SINCE and _is_meant(node)]
    if found:
        del proto.graph.node[:]
        for node in nodes:
            proto.graph.node.extend(_restore(node) if _is_meant(node) else [node])
    return found


def _is_meant(node: NodeProto) -> bool:
    own = any(a.name == _OWN for a in node.attribute)
    kind = (node.op_type, node.domain) == ("QAttention", "com.microsoft")
    return kind and not own and len(node.input) >= 5 and bool(node.output)


def _restore(node: NodeProto) -> list[NodeProto]:
    q, k, v, q_scale, k_scale, *rest = node.input
    mask, q_zero, k_zero, past = (*rest, *("",) * 4)[:4]
    if past:
        raise ModelError(
            f"node '{node.output[0]}' (QAttention) is an Attention with a cache, half of which "
            "quantize_dynamic dropped: exclude the node when you quantize, or export it without one"
        )
    plain = [f"{node.output[0]}/{name}" for name in "qk"]
    parts = [(q, q_scale, q_zero), (k, k_scale, k_zero)]
    nodes = [
        helper.make_node("DequantizeLinear", inputs, [name])
        for inputs, name in zip(parts, plain, strict=True)
    ]
    attention = helper.make_node("Attention", [*plain, v, mask], node.output, node.name)
    attention.attribute.extend(node.attribute)
    return [*nodes, attention]
