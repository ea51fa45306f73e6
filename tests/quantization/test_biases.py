"""Biases of quantized products: which are int32 in the file, and with which scales."""

import numpy as np
import onnx
import optax
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from tests.support.sessions import outputs_everywhere
from tests.support.sweeps import sweep

random = np.random.default_rng(0)
X = random.normal(size=(20, 6)).astype(np.float32)
W = random.normal(size=(6, 5)).astype(np.float32)
V = random.normal(size=(5, 3)).astype(np.float32)
IMAGES = random.normal(size=(16, 4, 5, 5)).astype(np.float32)


def network(nodes, tensors, shapes, opset=21):
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    stored = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def gemm(bias, rows="n", **options):
    """A Gemm with Relu in front of a MatMul."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "c"], ["h"], **options),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    w = W.T.copy() if options.get("transB") else W
    x = [6, rows] if options.get("transA") else [rows, 6]
    return network(nodes, {"w": w, "c": bias, "v": V}, {"x": x, "y": [rows, 3]})


def transposed_convolution(group, per_group):
    """A ConvTranspose whose outputs differ in size, with Relu in front of a Conv."""
    outputs = group * per_group
    w = random.normal(size=(4, per_group, 3, 3)) * np.exp(random.normal(size=(1, per_group, 1, 1)))
    tensors = {
        "w": w.astype(np.float32),
        "b": 2 * random.normal(size=outputs).astype(np.float32),
        "v": random.normal(size=(2, outputs, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["h"], group=group, strides=[2, 2]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    return network(nodes, tensors, {"x": ["n", 4, 5, 5], "y": ["n", 2, None, None]})


def check(quantized, proto, x):
    """Compare a quantized model and its file with the network in floating point."""
    file = quantized.to_onnx()
    onnx.checker.check_model(file, full_check=True)
    floats = jaxonnx.load(proto)(x)
    theirs, *_ = outputs_everywhere(proto, {"x": x})
    np.testing.assert_allclose(floats, theirs, atol=1e-5 * np.abs(theirs).max())
    for y in (quantized(x), *outputs_everywhere(file, {"x": x})):
        assert np.abs(y - theirs).max() < 0.05 * np.abs(theirs).max()
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        *(((5,), "n"), ((1, 5), "n"), ((1,), "n"), ((), "n"), ((1, 1), "n")),
        *(((4, 1), 4), ((4, 5), 4), ((5, 5), 5), ((5, 1), 5)),
    ],
)
def test_a_bias_of_any_shape_is_added(shape, rows):
    """Vectors of outputs are stored in the units of products; other biases stay as they are."""
    bias = np.asarray(3 * random.normal(size=shape), np.float32)
    proto = gemm(bias, rows, transB=len(shape) % 2)
    x = X[: rows if rows != "n" else None]
    tensors = check(jaxonnx.quantize(proto, X, batch_size=len(x)), proto, x)
    vector = shape[-1:] == (5,) and bias.size == 5
    assert ("c_quantized" in tensors) == vector != ("c" in tensors)


@pytest.mark.parametrize(
    "options", [{"alpha": 0.5}, {"beta": -3.0}, {"alpha": 0.5, "beta": 2.0}, {"transA": 1}]
)
def test_a_bias_of_a_scaled_product_is_added(options):
    proto = gemm(random.normal(size=5).astype(np.float32), **options)
    if "transA" in options:  # the examples are columns
        quantized = jaxonnx.quantize(proto, X[:, :, None])
        check(quantized, proto, X.T.copy())
    else:
        check(jaxonnx.quantize(proto, X), proto, X)


def test_a_channel_of_weights_near_zero_keeps_its_bias():
    """At a scale of 1e-12 of the weights int32 ends at 1e-5; onnxruntime raises such scales too."""
    proto = gemm(random.normal(size=5).astype(np.float32))
    w = numpy_helper.to_array(proto.graph.initializer[0]).copy()
    w[:, 1] *= 1e-10
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    check(jaxonnx.quantize(proto, X), proto, X)


@pytest.mark.parametrize("scheme", ["int8", jaxonnx.Quantization(dialect="qnn")])
@pytest.mark.parametrize(("group", "per_group"), sweep([(2, 3), (2, 2), (4, 1), (1, 3)], 0))
def test_the_scales_of_a_group_repeat_for_the_bias(group, per_group, scheme):
    proto = transposed_convolution(group, per_group)
    tensors = check(jaxonnx.quantize(proto, IMAGES, scheme), proto, IMAGES)
    assert (
        tensors["b_quantized"].shape == tensors["b_quantized_scale"].shape == (group * per_group,)
    )


def test_a_transposed_convolution_in_groups_is_trained_and_saved():
    proto = transposed_convolution(2, 3)
    target = np.asarray(jaxonnx.load(proto)(IMAGES))
    settings = {"loss": "squared_error", "optimizer": optax.sgd(1e-5), "quantize": "int8"}
    trained = jaxonnx.train(proto, (IMAGES, target), batch_size=8, **settings).model
    check(trained, proto, IMAGES)


def test_a_model_that_cannot_be_saved_is_refused_before_training(monkeypatch):
    def refuse(*_, **__):
        raise jaxonnx.InputError("no file")

    monkeypatch.setattr("jaxonnx.quantization._view.fold", refuse)
    rows = []
    settings = {"loss": "squared_error", "quantize": "int8", "on_log": rows.append}
    with pytest.raises(jaxonnx.InputError, match="no file"):
        jaxonnx.train(gemm(V[:, 0]), (X, np.zeros((20, 3), np.float32)), **settings)
    quantized = jaxonnx.quantize(gemm(V[:, 0]), X, check=False)
    with pytest.raises(jaxonnx.InputError, match="no file"):
        jaxonnx.train(
            quantized, (X, np.zeros((20, 3), np.float32)), **(settings | {"quantize": None})
        )
    assert not rows


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1), (20, 1), (20, 5)])
def test_a_bias_of_an_operator_on_integers_comes_back(shape):
    """A run without steps returns the file; ONNX has no DequantizeLinear for some of them."""
    tensors = {
        **{"xs": np.float32(0.02), "xz": np.uint8(128), "wz": np.zeros(5, np.int8)},
        **{"ws": np.linspace(0.01, 0.03, 5, dtype=np.float32)},
        **{"ys": np.float32(0.05), "yz": np.uint8(128)},
        "w": random.integers(-60, 60, (6, 5)).astype(np.int8),
        "v8": random.integers(-60, 60, (5, 3)).astype(np.int8),
        "c": random.integers(-3000, 3000, shape).astype(np.int32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node(
            "QGemm",
            ["q", "xs", "xz", "w", "ws", "wz", "c", "ys", "yz"],
            ["h"],
            domain="com.microsoft",
        ),
        helper.make_node("DequantizeLinear", ["h", "ys", "yz"], ["r"]),
        helper.make_node("DequantizeLinear", ["v8", "xs"], ["v"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    proto = network(nodes, tensors, {"x": [20, 6], "y": [20, 3]})
    (before, *_) = outputs_everywhere(proto, {"x": X})
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.0), "quantize": "int8"}
    same = jaxonnx.train(proto, (X, before), batch_size=20, **settings).model
    for y in (same(X), *outputs_everywhere(same.to_onnx(), {"x": X})):
        np.testing.assert_allclose(y, before, atol=0.01 * np.abs(before).max())
