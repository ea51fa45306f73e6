"""Operators on quantized tensors (QLinearConv, QGemm, ...) as floating-point ones between Q and DQ.

A file of onnxruntime's `QuantFormat.QOperator` is opened for training, so that `unfold` finds
QuantizeLinear and DequantizeLinear, and closed when it is saved. A record says which nodes these
are; one that another rewrite has changed stays open.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from jaxonnx._display import list_some
from jaxonnx._io.protocol import File
from jaxonnx._io.protos import count_readers, opset_of, remove_values, sort_nodes
from jaxonnx.errors import ModelError, warn
from jaxonnx.registry import Op, lookup

_CONTRIB = "com.microsoft"
_CHANNELS_SINCE = 13


SAME_NUMBERS = (
    *("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "DepthToSpace"),
    *("Expand", "Gather", "GatherElements", "Slice", "Split", "Tile"),
    *("MaxPool", "ReduceMax", "ReduceMin", "Resize"),
)
"""Operators of ONNX that only move or select numbers, so that scale and zero point stay the same;
ONNX has them for integers, too, and a QOperator file has them between quantized operators."""


class ReplacedOperator(NamedTuple):
    """A node that `open_operators` replaced by an operator in floating point."""

    output: str
    """The result of the operator in floating point."""
    op: str
    """The quantized operator that it was."""
    domain: str
    """The domain of that."""


def has_quantized_operators(graph: GraphProto) -> bool:
    """Check whether a graph has operators on quantized tensors that `open_operators` knows."""
    return any(_find_operator(node.domain, node.op_type) is not None for node in graph.node)


def _find_operator(domain: str, name: str) -> Op | None:
    """Return an operator on quantized tensors, each followed by its scale and zero point."""
    op = lookup(domain, name, sys.maxsize)
    return None if op is None or op.result is None else op


def open_operators(
    proto: ModelProto, tensors: Mapping[str, Any]
) -> tuple[ModelProto, dict[str, np.ndarray], tuple[ReplacedOperator, ...]]:
    """Replace operators on quantized tensors by DequantizeLinear, operator, QuantizeLinear.

    Nodes whose attributes or inputs do not fit the layout (channels last, no zero points, computed
    scales) stay as they are.

    Args:
      proto: the file.
      tensors: the values of its named tensors.

    Returns:
      The new file, the scales of biases that it adds, and the nodes that were replaced.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    # QuantizeLinear has scales per channel since opset 13; that of com.microsoft always had them.
    domain = "" if opset_of(result) >= _CHANNELS_SINCE else _CONTRIB
    if all(entry.domain != domain for entry in result.opset_import):
        result.opset_import.add(domain=domain, version=1)
    opener = _Opener(result.graph, tensors, domain)
    for node in [*result.graph.node]:
        opener.open(node)
    sort_nodes(result.graph)
    return result, opener.added, tuple(opener.opened)


class _Opener:
    """Replaces quantized operators of a graph in place, one node after the other.

    Attributes:
      added: the scales of biases that the graph gets, by name.
      opened: the nodes that were replaced.
    """

    def __init__(self, graph: GraphProto, tensors: Mapping[str, Any], domain: str):
        self.graph, self.tensors, self.domain = graph, tensors, domain
        self.added: dict[str, np.ndarray] = {}
        self.opened: list[ReplacedOperator] = []
        self._parameters: dict[str, tuple[str, str]] = {}
        """The names of the scale and zero point of each quantized value."""
        self._real: dict[tuple[str, ...], str] = {}
        """The results of DequantizeLinear, by its inputs and axis."""

    def open(self, node: NodeProto) -> None:
        """Replace a node by DequantizeLinear, operator and QuantizeLinear, if it has a layout."""
        inputs, output = [*node.input], node.output[0] if node.output else ""
        quantized = _find_operator(node.domain, node.op_type)
        if node.op_type == "QuantizeLinear" and len(inputs) == 3:
            self._parameters[output] = (inputs[1], inputs[2])
        elif quantized is not None and self._fits(node, quantized):
            assert quantized.result is not None
            parameters = inputs[quantized.result], inputs[quantized.result + 1]
            operands = _operands(quantized, inputs)
            parts = [inputs[i : i + 3] for i in operands]
            axes = (self._axis(node, quantized, i) for i in operands)
            inputs_in_float = [*map(self._dequantize, parts, axes)]
            bias = quantized.bias
            if bias is not None and any(inputs[bias : bias + 1]):
                inputs_in_float.append(
                    self._dequantize_bias(inputs[bias], output, *(x[1] for x in parts))
                )
            self._replace(node, quantized.like, inputs_in_float, parameters)
        # ranges pass through views only where the producer before was replaced: nodes are in order
        elif node.op_type in SAME_NUMBERS and not node.domain and inputs[0] in self._parameters:
            parameters = self._parameters[inputs[0]]
            inputs_in_float = [self._dequantize([inputs[0], *parameters], None), *inputs[1:]]
            self._replace(node, node.op_type, inputs_in_float, parameters)

    def _fits(self, node: NodeProto, op: Op) -> bool:
        """Check that scales and zero points are stored, and that no attribute changes the meaning.

        The first operand must have one scale: ONNX has no product of data with scales per channel.
        A bias in as many scales needs a number for each.
        """
        inputs, result = [*node.input], op.result or 0
        operands = _operands(op, inputs)
        scales = [inputs[i + 1] for i in operands]
        needed = [*scales, *(n for i in (*operands, result - 1) for n in inputs[i + 1 : i + 3])]
        bias = inputs[op.bias : op.bias + 1] if op.bias is not None else []
        needed += filter(None, bias)
        attributes = {part.name: helper.get_attribute_value(part) for part in node.attribute}
        plain = not attributes.get("channels_last") and attributes.get("alpha", 1) == 1
        whole = len(inputs) > result + 1 and all(name in self.tensors for name in needed)
        if not (plain and whole) or np.size(self.tensors[scales[0]]) > 1:
            return False
        channels = np.shape(self.tensors[scales[-1]])
        return not any(bias) or channels in ((), (1,), np.shape(self.tensors[bias[0]])[-1:])

    def _axis(self, node: NodeProto, op: Op, operand: int) -> int | None:
        """Return the axis of an operand's scales per channel; None if it has one scale."""
        if np.size(self.tensors[node.input[operand + 1]]) == 1:
            return None
        attributes = {part.name: helper.get_attribute_value(part) for part in node.attribute}
        storage = op.storage(operand, self.tensors[node.input[operand]], attributes)
        return None if storage is None else storage.channels

    def _dequantize(self, inputs: list[str], axis: int | None) -> str:
        """Return the result of a DequantizeLinear of these inputs; add the node if needed."""
        key = *inputs, str(axis)
        if key not in self._real:
            self._real[key] = real = f"{inputs[0]}/real_{len(self._real)}"
            self._append("DequantizeLinear", inputs, real, axis)
        return self._real[key]

    def _dequantize_bias(self, name: str, output: str, x_scale: str, w_scale: str) -> str:
        """Add the scale of an int32 bias and its DequantizeLinear; return the result of that."""
        scale = np.float32(self.tensors[x_scale]).reshape(()) * np.float32(self.tensors[w_scale])
        scale = scale.reshape(()) if scale.size == 1 else scale
        real, stored = f"{output}/bias", f"{output}/bias_scale"
        self.added[stored] = np.asarray(scale)
        self.graph.initializer.add(name=stored, data_type=TensorProto.FLOAT, dims=scale.shape)
        axis = np.ndim(self.tensors[name]) - 1 if scale.ndim else None
        self._append("DequantizeLinear", [name, stored], real, axis)
        return real

    def _replace(
        self, node: NodeProto, op: str, inputs: list[str], result: tuple[str, str]
    ) -> None:
        """Make a node a floating-point `op` on `inputs`, with a QuantizeLinear behind it.

        The QuantizeLinear has the scale and zero point `result`, and the name of the node's result.
        A Split has several.
        """
        outputs = node.output if op == "Split" else node.output[:1]  # MaxPool has indices, too
        self.opened.append(ReplacedOperator(f"{outputs[0]}/real", node.op_type, node.domain))
        attributes = [part for part in node.attribute if part.name != "channels_last"]
        del node.attribute[:]
        node.attribute.extend(attributes)
        node.op_type, node.domain, node.input[:] = op, "", inputs
        for i, output in enumerate(outputs):
            self._parameters[output], node.output[i] = result, f"{output}/real"
            self._append("QuantizeLinear", [node.output[i], *result], output, None)

    def _append(self, op: str, inputs: list[str], output: str, axis: int | None) -> None:
        chosen: dict[str, Any] = {} if axis is None else {"axis": axis}
        chosen |= {"domain": self.domain, "name": f"{output}_{op}"}
        self.graph.node.append(helper.make_node(op, inputs, [output], **chosen))


def close_operators(graph: GraphProto, opened: Iterable[ReplacedOperator]) -> None:
    """Undo `open_operators` in place: fuse DequantizeLinear, operator and QuantizeLinear again.

    A node whose neighbours are other operators now stays in floating point.

    Args:
      graph: the graph; weights and biases are stored as integers behind DequantizeLinear.
      opened: the nodes that `open_operators` replaced.
    """
    producers = {name: node for node in graph.node for name in node.output}
    readers = {name: node for node in graph.node for name in node.input}
    used, fused = set(), set()
    for output, op, domain in opened:
        node, quantized = producers.get(output), _find_operator(domain, op)
        like = op if quantized is None else quantized.like
        if node is None or node.op_type != like:
            continue
        after = [readers.get(name) for name in node.output[: None if op == "Split" else 1]]
        # a view has one quantized input; its others (shapes, axes) are plain tensors
        count = 1 if quantized is None else len(node.input)
        before = [producers.get(name) for name in node.input[:count]]
        pairs = [
            *((x, "DequantizeLinear") for x in before),
            *((x, "QuantizeLinear") for x in after),
        ]
        if any(x is None or x.op_type != kind for x, kind in pairs):
            continue  # another rewrite has changed the neighbours
        quantizers = [x for x in after if x is not None]
        used.update(x.output[0] for x in before if x is not None)
        parts = [[*x.input] for x in before if x is not None]
        if quantized is None:
            node.input[0] = parts[0][0]
        else:
            node.input[:] = _arrange_inputs(quantized, parts, [*quantizers[0].input[1:3]])
        node.op_type, node.domain = op, domain
        for i, x in enumerate(quantizers):
            node.output[i], x.output[0] = x.output[0], node.output[i]
            fused.add(x.output[0])
    remove_values(graph, fused)
    # remove the producers that nothing reads any more, and the tensors that only they read
    times = count_readers(graph)
    removed = [x for x in graph.node if x.output and x.output[0] in used and not times[x.output[0]]]
    candidates = {name for node in removed for name in node.input}
    remove_values(graph, [node.output[0] for node in removed])
    stored = {tensor.name for tensor in graph.initializer}
    remove_values(graph, candidates & stored - count_readers(graph).keys())


def _arrange_inputs(op: Op, parts: list[list[str]], result_parameters: list[str]) -> list[str]:
    """Return the inputs of a quantized operator in its order.

    Args:
      parts: tensor, scale and zero point of each operand; of the bias, if there is one, last.
      result_parameters: scale and zero point of the result.
    """
    bias = [parts.pop()[0]] if op.bias is not None and len(parts) > 2 else []
    whole = [name for part in parts for name in part]
    if op.result == 0:
        return [*result_parameters, *whole]
    if op.bias is not None and op.result is not None and op.bias < op.result:
        return [*whole, *(bias or [""]), *result_parameters]
    return [*whole, *result_parameters, *bias]


def _operands(op: Op, inputs: list[str]) -> tuple[int, ...]:
    """Return the positions of the operands; a variadic operator has any number of them."""
    return (*op.quantized,) if op.inputs else (*range(op.last, len(inputs), 3),)


_REQUIRED = "num_heads"
"""An attribute that every QAttention must have, and that the Attention of ONNX does not have."""
_SINCE = 23
"""The opset that introduced the Attention of ONNX."""


def restore_attention(file: File) -> File:
    """Replace misquantized QAttention nodes, with a warning, by DequantizeLinear and Attention.

    onnxruntime's `quantize_dynamic` knows the Attention of com.microsoft alone, whose inputs are x
    and a weight, and writes QAttention for that of ONNX (opset 23), too: Q and K are quantized, V
    stands in the place of the bias, and the attributes stay those of ONNX. onnxruntime refuses that
    file.

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
            if not _is_misquantized(node):
                proto.graph.node.append(node)
                continue
            q, k, v, q_scale, k_scale, *rest = node.input
            mask, q_zero, k_zero, past = (*rest, *("",) * 4)[:4]
            if past:
                raise ModelError(
                    f"node '{node.output[0]}' (QAttention) is an Attention with a cache, half of "
                    "which quantize_dynamic dropped: exclude the node when you quantize, or export "
                    "it without one"
                )
            dequantized = [f"{node.output[0]}/{name}" for name in "qk"]
            for inputs, name in zip(
                ((q, q_scale, q_zero), (k, k_scale, k_zero)), dequantized, strict=True
            ):
                proto.graph.node.append(helper.make_node("DequantizeLinear", inputs, [name]))
            attention = helper.make_node(
                "Attention", [*dequantized, v, mask], node.output, node.name
            )
            attention.attribute.extend(node.attribute)
            proto.graph.node.append(attention)
        warn(
            f"onnxruntime's quantizer replaced the Attention of '{list_some(restored, '')}' by a "
            "QAttention with invalid attributes, which onnxruntime refuses: it is loaded, and "
            "saved, as the original Attention of dequantized Q and K",
        )
    return file


def _is_misquantized(node: NodeProto) -> bool:
    """Check whether a node is a QAttention that was written for the Attention of ONNX."""
    valid = any(a.name == _REQUIRED for a in node.attribute)
    kind = (node.op_type, node.domain) == ("QAttention", "com.microsoft")
    return kind and not valid and len(node.input) >= 5 and bool(node.output)
