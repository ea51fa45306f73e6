"""Initialization graphs: the nodes that draw a tensor's first value."""

import math
import re
from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, NodeProto, helper

from jaxonnx._file.build import Writer, onnx_type
from jaxonnx.errors import TrainingError

KINDS = ("glorot", "he", "normal", "zeros", "ones")


def kinds(
    init: str | Mapping[str, str] | None, values: Mapping[str, np.ndarray], graph: GraphProto
) -> dict[str, str]:
    """The kind of initializer of each tensor that gets one.

    One kind is meant for weights: vectors become 0, or 1 where they scale a normalization. A
    mapping goes by names or regular expressions, the first that matches a name in full counts.

    Raises:
      TrainingError: an unknown kind, or an expression that matches no tensor.
    """
    chosen = init if isinstance(init, Mapping) else {} if init is None else {".*": init}
    for pattern, kind in chosen.items():
        if kind not in KINDS:
            raise TrainingError(f"init is {kind!r}; there are {', '.join(KINDS)}")
        if not any(name == pattern or re.fullmatch(pattern, name) for name in values):
            raise TrainingError(f"init={{{pattern!r}: ...}} matches none of {', '.join(values)}")
    result = {}
    for name, value in values.items():
        for pattern, kind in chosen.items():
            if name == pattern or re.fullmatch(pattern, name):
                vector = isinstance(init, str) and value.ndim < 2
                result[name] = _of_vector(name, graph) if vector else kind
                break
    return result


def draw(writer: Writer, kind: str, name: str, value: np.ndarray, graph: GraphProto) -> str:
    """Appends nodes that draw a tensor like `value`; returns their output.

    glorot: uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); he: normal with
    standard deviation sqrt(2 / fan_in) (He et al., 2015); normal: standard deviation 0.01.
    """
    if kind in ("zeros", "ones"):
        return fill(writer, name, np.full_like(value, kind == "ones"))
    fan_in, fan_out = _fans(name, value.shape, graph)
    if kind == "glorot":
        limit = math.sqrt(6 / max(fan_in + fan_out, 1))
        operator, settings = "RandomUniform", {"low": -limit, "high": limit}
    else:
        scale = math.sqrt(2 / max(fan_in, 1)) if kind == "he" else 0.01
        operator, settings = "RandomNormal", {"scale": scale}
    shape, dtype = list(value.shape), onnx_type(value.dtype)
    result = writer.node(operator, name=f"{name}.start", shape=shape, dtype=dtype, **settings)
    writer.output(result, value)
    return result


def fill(writer: Writer, name: str, value: np.ndarray) -> str:
    """Appends nodes for a tensor of one repeated number; returns their output."""
    number = helper.make_tensor("value", onnx_type(value.dtype), [1], value.reshape(-1)[:1])
    shape = writer.constant("shape", value.shape, np.int64)
    result = writer.node("ConstantOfShape", shape, name=f"{name}.start", value=number)
    writer.output(result, value)
    return result


def _of_vector(name: str, graph: GraphProto) -> str:
    scales = any(
        node.op_type.endswith("Normalization") and list(node.input[1:2]) == [name]
        for node in graph.node
    )
    return "ones" if scales else "zeros"


def _fans(name: str, shape: tuple[int, ...], graph: GraphProto) -> tuple[int, int]:
    """How many numbers go into one output of the layer, and how many outputs one input reaches."""
    if len(shape) < 2:
        return 1, 1
    node = next((node for node in graph.node if name in node.input), NodeProto())
    if node.op_type.startswith("Conv"):
        a, b = shape[:2]
        kernel = math.prod(shape[2:])
        return (a * kernel, b * kernel) if "Transpose" in node.op_type else (b * kernel, a * kernel)
    rows, columns = shape[-2:]
    outputs_first = node.op_type in ("Transpose", "RNN", "GRU", "LSTM") or any(
        attribute.name == "transB" and attribute.i for attribute in node.attribute
    )
    return (columns, rows) if outputs_first else (rows, columns)
