"""Mend the nodes that onnxruntime's `quantize_dynamic` writes for the Attention of ONNX.

It knows the Attention of com.microsoft alone, whose inputs are x and a weight, and writes
QAttention for that of ONNX (opset 23), too: Q and K are quantized, V stands in the place of the
bias, and the attributes stay those of ONNX. onnxruntime refuses that file.
"""

import warnings

from onnx import NodeProto, helper

from jaxonnx._io.protocol import File
from jaxonnx._text import list_some
from jaxonnx.errors import ModelError

_REQUIRED = "num_heads"
"""An attribute that every QAttention must have, and that the Attention of ONNX does not have."""
_SINCE = 23
"""The opset that introduced the Attention of ONNX."""


def restore_attention(file: File) -> File:
    """Replace misquantized QAttention nodes, with a warning, by DequantizeLinear and Attention.

    Raises:
      ModelError: a node had a cache, half of which the quantizer dropped.
    """
    proto = file.proto
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    nodes = [*proto.graph.node]
    restored = [node.output[0] for node in nodes if opset >= _SINCE and _is_misquantized(node)]
    if restored:
        del proto.graph.node[:]
        for node in nodes:
            proto.graph.node.extend(_restore(node) if _is_misquantized(node) else [node])
        warnings.warn(
            f"onnxruntime's quantizer replaced the Attention of '{list_some(restored, '')}' by a "
            "QAttention with invalid attributes, which onnxruntime refuses: it is loaded, and "
            "saved, as the original Attention of dequantized Q and K",
            stacklevel=3,
        )
    return file


def _is_misquantized(node: NodeProto) -> bool:
    """Check whether a node is a QAttention that was written for the Attention of ONNX."""
    valid = any(a.name == _REQUIRED for a in node.attribute)
    kind = (node.op_type, node.domain) == ("QAttention", "com.microsoft")
    return kind and not valid and len(node.input) >= 5 and bool(node.output)


def _restore(node: NodeProto) -> list[NodeProto]:
    """Return DequantizeLinear of Q and K and the Attention of ONNX in place of a QAttention.

    Raises:
      ModelError: the node has a cache.
    """
    q, k, v, q_scale, k_scale, *rest = node.input
    mask, q_zero, k_zero, past = (*rest, *("",) * 4)[:4]
    if past:
        raise ModelError(
            f"node '{node.output[0]}' (QAttention) is an Attention with a cache, half of which "
            "quantize_dynamic dropped: exclude the node when you quantize, or export it without one"
        )
    dequantized = [f"{node.output[0]}/{name}" for name in "qk"]
    parts = [(q, q_scale, q_zero), (k, k_scale, k_zero)]
    nodes = [
        helper.make_node("DequantizeLinear", inputs, [name])
        for inputs, name in zip(parts, dequantized, strict=True)
    ]
    attention = helper.make_node("Attention", [*dequantized, v, mask], node.output, node.name)
    attention.attribute.extend(node.attribute)
    return [*nodes, attention]
