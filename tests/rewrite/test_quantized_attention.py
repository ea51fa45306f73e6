"""QAttention as onnxruntime's `quantize_dynamic` writes it for the Attention of ONNX."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import jaxonnx
from tests.support.exact_products import SATURATES

WIDTH, HEADS = 16, 4
ATTRIBUTES = {"q_num_heads": HEADS, "kv_num_heads": HEADS}


def write(path, inputs, **attributes):
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(4)]
    make = helper.make_node
    nodes = [make("MatMul", ["x", f"w{i}"], [name]) for i, name in enumerate("qkv")]
    nodes.append(make("Attention", ["q", "k", "v", *inputs], ["a"], **attributes))
    nodes.append(make("MatMul", ["a", "w3"], ["y"]))
    value = helper.make_tensor_value_info
    given = [value("x", TensorProto.FLOAT, ["b", "s", WIDTH])]
    given += [value(name, TensorProto.FLOAT, ["s", "s"]) for name in inputs]
    tensors = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "g", given, [value("y", TensorProto.FLOAT, None)], tensors)
    opset = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def as_meant(path, inputs, **attributes):
    """Return the file with the attention that the quantizer found, between what it quantized."""
    proto = onnx.load(path)
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "QAttention":
            nodes.append(node)
            continue
        for i in (0, 1):
            parts = [node.input[i + at] for at in (0, 3, 6)]
            nodes.append(helper.make_node("DequantizeLinear", parts, [f"plain{i}"]))
        names = ["plain0", "plain1", node.input[2], *inputs]
        nodes.append(helper.make_node("Attention", names, node.output, **attributes))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [((), {"is_causal": 1}), (("mask",), {"softcap": 2.0, "scale": 0.4})],
)
def test_attention_of_opset_23_behind_another_name(inputs, attributes, tmp_path):
    path, attributes = tmp_path / "net.onnx", ATTRIBUTES | attributes
    write(path, inputs, **attributes)
    quantize_dynamic(path, tmp_path / "q.onnx", reduce_range=SATURATES)
    with pytest.warns(UserWarning, match="replaced the Attention of 'a' .*onnxruntime refuses"):
        model = jaxonnx.load(tmp_path / "q.onnx")
    with pytest.raises(Exception, match="INVALID_GRAPH"):
        onnxruntime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    model.save(tmp_path / "saved.onnx")
    draw = np.random.default_rng(1)
    x = draw.standard_normal((2, 5, WIDTH)).astype(np.float32)
    feeds = {"x": x} | {n: draw.standard_normal((5, 5)).astype(np.float32) for n in inputs}
    meant = as_meant(tmp_path / "q.onnx", inputs, **attributes).SerializeToString()
    saved = (tmp_path / "saved.onnx").read_bytes()
    for file, bound in ((meant, 2e-5), (saved, 2e-5), (path.read_bytes(), 0.2)):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (expected,) = session.run(None, feeds)
        np.testing.assert_allclose(model(**feeds), expected, rtol=0, atol=bound)


def test_a_cache_that_the_quantizer_halved_is_an_error(tmp_path):
    write(tmp_path / "net.onnx", ("mask",), **ATTRIBUTES)
    quantize_dynamic(tmp_path / "net.onnx", tmp_path / "q.onnx")
    proto = onnx.load(tmp_path / "q.onnx")
    (node,) = (node for node in proto.graph.node if node.op_type == "QAttention")
    node.input[8] = "x"
    with pytest.raises(jaxonnx.ModelError, match=r"'a' .*half of which quantize_dynamic dropped"):
        jaxonnx.load(proto)
