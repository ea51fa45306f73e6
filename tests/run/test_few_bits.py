"""Calls of files in int8 and float16: products of integers, and copies of weights made once."""

import jax
import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import jaxonnx
from jaxonnx._run import call_form
from jaxonnx.lowering import FAST_INT8
from tests.support.exact_products import avoid_saturation

X = np.random.default_rng(0).normal(size=(2, 80, 6, 5)).astype(np.float32)

fast = pytest.mark.skipif(not FAST_INT8, reason="XLA:CPU has no fast products of int8")


def node(kind, *names, **attributes):
    *inputs, output = names
    return helper.make_node(kind, inputs, [output], **attributes)


def model(nodes, tensors, x=X, opset=21):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(proto, x=X):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString(), options)
    return np.asarray(session.run(None, {"x": x})[0])


def assert_close(y, expected):
    assert np.abs(np.asarray(y) - np.asarray(expected)).max() <= 2e-6 * np.ptp(expected)


def quantized(bias_scale=1.0, axis=0):
    """A convolution and a matrix product, each between DequantizeLinear and QuantizeLinear."""
    random = np.random.default_rng(1)
    scales = {f"s{i}": np.float32(s) for i, s in enumerate((0.03, 0.6, 0.3))}
    zeros = {f"z{i}": np.uint8(z) for i, z in enumerate((120, 131, 90))}
    w_scale = random.uniform(0.01, 0.02, 96).astype(np.float32)
    m_scale = random.uniform(0.01, 0.02, 3).astype(np.float32)
    tensors = {
        **scales,
        **zeros,
        "w": random.integers(-127, 128, (96, 80, 3, 3), dtype=np.int8),
        "ws": w_scale,
        "wz": np.zeros(96, np.int8),
        "b": random.integers(-900, 900, 96, dtype=np.int32),
        "bs": w_scale * scales["s0"] * np.float32(bias_scale),
        "bz": np.zeros(96, np.int32),
        "m": random.integers(-127, 128, (5, 3), dtype=np.int8),
        "ms": m_scale,
        "mz": np.zeros(3, np.int8),
    }
    nodes = [
        node("QuantizeLinear", "x", "s0", "z0", "xq"),
        node("DequantizeLinear", "xq", "s0", "z0", "xd"),
        node("DequantizeLinear", "w", "ws", "wz", "wd", axis=axis),
        node("DequantizeLinear", "b", "bs", "bz", "bd", axis=0),
        node("Conv", "xd", "wd", "bd", "c", pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "c", "s1", "z1", "cq"),
        node("DequantizeLinear", "cq", "s1", "z1", "cd"),
        node("DequantizeLinear", "m", "ms", "mz", "md", axis=1),
        node("MatMul", "cd", "md", "p"),
        node("QuantizeLinear", "p", "s2", "z2", "pq"),
        node("DequantizeLinear", "pq", "s2", "z2", "y"),
    ]
    return model(nodes, tensors)


@fast
def test_products_between_quantized_tensors_are_those_of_integers():
    net = jaxonnx.load(quantized())
    np.testing.assert_array_equal(net(X), run(quantized()))
    assert len(net._call_form.changes.products) == 2
    used = {n.op.name for n in net._call_form.changes(net.program.graph).nodes}
    assert {"QLinearConv", "QLinearMatMul"} <= used
    assert used.isdisjoint({"Conv", "MatMul"})


@fast
def test_a_bias_in_other_units_stays_a_float():
    """An int32 bias that is not in units of the product cannot be added to it."""
    proto = quantized(bias_scale=3.0)
    net = jaxonnx.load(proto)
    assert len(net._call_form.changes.products) == 1  # the matrix product's
    reference = ReferenceEvaluator(proto).run(None, {"x": X})[0]
    assert np.abs(np.asarray(net(X)) - reference).max() <= 0.301  # a step of the last scale


def test_a_float_convolution_of_quantized_weights_has_one_copy_of_them():
    proto = quantized()
    del proto.graph.node[5:]
    proto.graph.node[4].output[0] = "y"
    net = jaxonnx.load(proto)
    kept = net._call_form
    assert kept.state["wd"].shape == (96, 80, 3, 3)  # kernel first, in the file's shape
    assert kept.state["wd"].dtype == np.float32
    assert_close(net(X), run(proto))

    changed = net.replace(state={**net.state, "w": net.state["w"] // 2})
    np.testing.assert_array_equal(
        kept.state["wd"].to_array(), net._call_form.state["wd"].to_array()
    )
    expected = changed.apply(changed.params, X)
    assert_close(changed(X), expected)
    assert np.abs(np.asarray(changed(X)) - np.asarray(net(X))).max() > 0.1


def test_copies_are_bounded(monkeypatch):
    proto = quantized()
    del proto.graph.node[5:]
    proto.graph.node[4].output[0] = "y"
    whole = np.asarray(jaxonnx.load(proto)(X))
    monkeypatch.setattr(call_form, "COPIES", 4 * 96 * 80 * 9 - 1)
    net = jaxonnx.load(proto)
    assert "wd" not in net._call_form.state
    assert_close(net(X), whole)


@pytest.mark.parametrize("block", [0, 2])
def test_weights_in_four_bits_or_blocks_stay_packed(block):
    dtype = np.int8 if block else ml_dtypes.int4
    w = np.random.default_rng(2).integers(-7, 8, (4, 5)).astype(dtype)
    scales = np.full((2, 5) if block else 5, 0.1, np.float32)
    options = {"block_size": block, "axis": 0} if block else {"axis": 1}
    nodes = [node("DequantizeLinear", "w", "s", "wd", **options), node("MatMul", "x", "wd", "y")]
    x = X.reshape(-1, 4)
    proto = model(nodes, {"w": w, "s": scales}, x)
    net = jaxonnx.load(proto)
    assert not net._call_form.changes.opened
    expected = x @ (w.astype(np.float32) * np.float32(0.1))
    assert_close(net(x), expected)


def test_products_in_half_precision_have_float32_copies_of_weights():
    random = np.random.default_rng(3)
    tensors = {
        "w": random.normal(size=(96, 80, 3, 3)).astype(np.float16),
        "b": random.normal(size=96).astype(np.float16),
        "m": random.normal(size=(5, 3)).astype(np.float16),
    }
    nodes = [
        node("Cast", "x", "h", to=TensorProto.FLOAT16),
        node("Conv", "h", "w", "b", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("MatMul", "r", "m", "p"),
        node("Cast", "p", "y", to=TensorProto.FLOAT),
    ]
    proto = model(nodes, tensors)
    net = jaxonnx.load(proto)
    kept = net._call_form.params
    assert {kept[name].dtype for name in ("w", "m")} == {np.dtype(np.float32)}
    assert net.params["w"].dtype == np.float16
    expected = run(proto)
    assert np.abs(np.asarray(net(X)) - expected).max() <= 2e-3 * np.ptp(expected)

    half = net.apply(net.params, X)
    assert np.abs(np.asarray(half) - expected).max() <= 2e-3 * np.ptp(expected)
    other = net.replace(params=jax.tree.map(lambda p: p * 0, net.params))
    assert not np.any(other(X))
