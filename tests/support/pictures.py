"""Networks of pictures."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import jaxonnx


def net(shape, classes=3, kind=TensorProto.FLOAT, metadata=None, softmax=False):
    """Scores are products of the flattened input with a weight, the same in each call."""
    size = int(np.prod([d if isinstance(d, int) else 1 for d in shape[1:]]))
    weight = np.random.default_rng(0).normal(size=(size, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["float"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["scores"]),
        helper.make_node("Softmax" if softmax else "Identity", ["scores"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape[0], classes])],
        [numpy_helper.from_array(weight, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    for key, value in (metadata or {}).items():
        proto.metadata_props.add(key=key, value=value)
    return jaxonnx.load(proto)
