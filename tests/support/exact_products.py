"""Files of int8 weights whose products onnxruntime computes exactly on every processor.

On x86 processors without VNNI, onnxruntime adds two products of uint8 and int8 in 16 bits, which
saturate. It does not so for uint8 and uint8, so that the same integers, 128 more, give the sums
that the specification asks for.
"""

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from jaxonnx._compare import saturates

WEIGHTS = {
    "ConvInteger": (1, 3),
    "DequantizeLinear": (0, 2),
    "MatMulInteger": (1, 3),
    "QGemm": (3, 5),
    "QLinearConv": (3, 5),
    "QLinearMatMul": (3, 5),
}
"""By operator: the inputs with a weight and its zero point."""


SATURATES = saturates()
"""Whether the products of onnxruntime saturate on this processor."""


def avoid_saturation(proto: ModelProto) -> ModelProto:
    """Return a file that computes the same, with weights in uint8 where int8 would saturate."""
    result = ModelProto()
    result.CopyFrom(proto)
    if not SATURATES:
        return result
    tensors = {tensor.name: tensor for tensor in result.graph.initializer}
    for node in result.graph.node:
        if node.op_type not in WEIGHTS:
            continue
        weight, zero = WEIGHTS[node.op_type]
        stored = tensors.get(node.input[weight])
        if stored is None or stored.data_type != TensorProto.INT8 or len(stored.dims) < 2:
            continue
        node.input.extend([""] * (zero + 1 - len(node.input)))
        for position in (weight, zero):
            name = f"{stored.name}/{position}/unsigned"
            old = tensors.get(node.input[position])
            value = np.zeros((), np.int8) if old is None else numpy_helper.to_array(old)
            if old is None and (scale := tensors.get(node.input[zero - 1])) is not None:
                value = np.zeros(scale.dims, np.int8)  # of as many numbers as there are scales
            value = (value.astype(np.int16) + 128).astype(np.uint8)
            node.input[position] = name
            if name not in tensors:
                result.graph.initializer.append(numpy_helper.from_array(value, name))
                tensors[name] = result.graph.initializer[-1]
    return result
