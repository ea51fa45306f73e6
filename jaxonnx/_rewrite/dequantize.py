"""Weights that a file stores as integers: reported, and on request made floating-point tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.uses import uses
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import InputError

_DEQUANTIZE = "DequantizeLinear"
_INTEGER_PRODUCTS = (
    "ConvInteger",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QLinearConv",
    "QLinearMatMul",
)


def dequantized(proto: ModelProto, graph: Graph, tensors: dict[str, np.ndarray]) -> Graph:
    """Puts floating-point tensors in the place of each DequantizeLinear over constants.

    They have the names of its results. Changes `proto` and `tensors`; returns the graph bound anew.

    Raises:
      InputError: there is no such node.
    """
    nodes = [n for n in graph.nodes if n.op.name == _DEQUANTIZE and tensors.keys() >= {*n.reads}]
    names = tuple(node.outputs[0] for node in nodes)
    if not names:
        raise InputError(
            "dequantize=True: the file has no weights behind DequantizeLinear; print(model) shows "
            "what is trained"
        )
    values = run(replace(graph, nodes=tuple(nodes), outputs=names), {}, Context(tensors))
    tensors.update(zip(names, map(np.asarray, values), strict=True))
    for node in [node for node in proto.graph.node if node.output and node.output[0] in names]:
        proto.graph.node.remove(node)
    for name in names:
        kind = helper.np_dtype_to_tensor_dtype(tensors[name].dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=tensors[name].shape)
        proto.graph.initializer.append(tensor)
    bound = bind(proto, proto.graph, tensors.keys())
    _forget(proto, bound, {name for node in nodes for name in node.reads})
    return bind(proto, proto.graph, tensors.keys())


def _forget(proto: ModelProto, graph: Graph, names: set[str]) -> None:
    """Drops those of the tensors `names` that nothing reads any more."""
    names -= {*graph.outputs, *(value.name for value in proto.graph.input)}
    names -= {name for node in graph.nodes for name in node.reads}
    for tensor in [t for t in proto.graph.initializer if t.name in names]:
        proto.graph.initializer.remove(tensor)
    for node in [n for n in proto.graph.node if n.op_type == "Constant" and n.output[0] in names]:
        proto.graph.node.remove(node)


def notes(graph: Graph, tensors: Mapping[str, Any]) -> Iterator[str]:
    """What integers mean for training, in sentences."""
    weights = {
        use.name: None
        for use in uses(graph, tensors)
        if use.node.op.role(use.position) == "param" and tensors[use.name].dtype.kind in "iu"
    }
    if weights:
        yield (
            f"{len(weights)} weights are integers behind DequantizeLinear ({next(iter(weights))}, "
            "...) and are not trained; jaxonnx.load(path, dequantize=True) makes floating-point "
            "tensors of them, which save writes as such"
        )
    products = Counter(n.op.name for n in graph.nodes if n.op.name in _INTEGER_PRODUCTS)
    if products:
        listed = ", ".join(f"{name} {count}" for name, count in products.items())
        yield (
            f"operators that compute with integers ({listed}) have no gradient for their weights: "
            "train the file from before quantization"
        )
