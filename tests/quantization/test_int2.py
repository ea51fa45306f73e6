"""int2 weights in onnxruntime's default session, which fuses their products to MatMulNBits."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from tests.support.sessions import outputs_everywhere

INPUTS = 64
random = np.random.default_rng(0)
X = random.normal(size=(4, INPUTS)).astype(np.float32)


def product(kind, outputs):
    """A MatMul, a Gemm, a Gemm with transB or a MatMul behind a Transpose."""
    w = random.normal(1.5, size=(INPUTS, outputs)).astype(np.float32)
    transposed = kind in ("Gemm transB", "Transpose")
    nodes = {
        "MatMul": [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "Gemm": [helper.make_node("Gemm", ["x", "w"], ["y"])],
        "Gemm transB": [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
        "Transpose": [
            helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "t"], ["y"]),
        ],
    }[kind]
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", INPUTS), ("y", outputs))
    )
    stored = numpy_helper.from_array(w.T.copy() if transposed else w, "w")
    graph = helper.make_graph(nodes, "g", [x], [y], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)


def scheme(block=None, **options):
    return jaxonnx.Quantization(weights="int2", activations=None, block=block, **options)


@pytest.mark.parametrize(
    ("kind", "outputs", "block"),
    [
        *(("MatMul", 8, None), ("MatMul", 12, 16), ("Gemm", 4, None), ("Gemm transB", 7, None)),
        *(("Gemm transB", 10, 16), ("Transpose", 8, 16), ("Transpose", 7, 16)),
    ],
)
def test_a_default_session_computes_what_the_file_says(kind, outputs, block):
    model = jaxonnx.quantize(product(kind, outputs), X, scheme(block))
    optimized, plain, reloaded = outputs_everywhere(model.to_onnx(), {"x": X})
    np.testing.assert_allclose(model(X), plain, atol=1e-5 * np.abs(plain).max())
    np.testing.assert_allclose(reloaded, plain, atol=1e-5 * np.abs(plain).max())
    # MatMulNBits rounds the activations to int8
    np.testing.assert_allclose(optimized, plain, atol=0.05 * np.abs(plain).max())


@pytest.mark.parametrize(
    ("kind", "outputs", "block"),
    [("MatMul", 7, None), ("MatMul", 6, 16), ("Gemm", 1, None), ("Transpose", 8, None)],
)
def test_products_that_it_computes_wrongly_are_refused(kind, outputs, block, monkeypatch):
    proto = product(kind, outputs)
    with pytest.raises(jaxonnx.InputError, match="'w' in int2 wrongly or refuses"):
        jaxonnx.quantize(proto, X, scheme(block))
    monkeypatch.setattr("jaxonnx.quantization._sites._check_int2", lambda *_: None)
    file = jaxonnx.quantize(proto, X, scheme(block)).to_onnx()
    try:
        optimized, plain, _ = outputs_everywhere(file, {"x": X})
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        return
    assert np.abs(optimized - plain).max() > 0.3 * np.abs(plain).max()
