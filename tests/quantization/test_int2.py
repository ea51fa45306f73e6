"""int2 weights in onnxruntime's default session, which fuses their products to MatMulNBits."""

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx.quantization import list_layers
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
    monkeypatch.setattr("jaxonnx.quantization._sites.find_wrong_int2", lambda *_: [])
    with pytest.raises(jaxonnx.ModelError, match="the quantized file"):
        jaxonnx.quantize(proto, X, scheme(block))
    file = jaxonnx.quantize(proto, X, scheme(block), check=False).to_onnx()
    try:
        optimized, plain, _ = outputs_everywhere(file, {"x": X})
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        return
    assert np.abs(optimized - plain).max() > 0.3 * np.abs(plain).max()


@pytest.mark.parametrize(("kind", "outputs"), [("MatMul", 7), ("Transpose", 8)])
def test_a_bound_gives_them_the_next_type(kind, outputs):
    """A search with max_loss does not try int2 where onnxruntime computes it wrongly."""
    model = jaxonnx.load(product(kind, outputs))
    targets = np.asarray(model(X))
    error = {"metric": "mse", "max_loss": 0.05 * float(np.square(targets).mean())}
    bounded = jaxonnx.quantize(model, (X, targets), scheme(), validation=(X, targets), **error)
    file = bounded.to_onnx()
    stored = {t.name: t.data_type for t in file.graph.initializer}
    assert stored["w_quantized"] == onnx.TensorProto.INT8
    for output in outputs_everywhere(file, {"x": X}):
        np.testing.assert_allclose(output, bounded(X), atol=0.02 * np.abs(bounded(X)).max())


@pytest.mark.parametrize("weights", ["int2", "int4", "uint4"])
@pytest.mark.parametrize("kind", ["MatMul", "Gemm transB"])
def test_scales_are_negative_where_more_numbers_are_needed_above_zero(weights, kind):
    """Codes reach further below zero, and TensorRT gets positive scales."""
    proto = product(kind, 8)
    eye, lost = np.eye(INPUTS, dtype=np.float32), {}
    exact = np.asarray(jaxonnx.load(proto)(eye))
    for dialect, side in ("onnxruntime", -1), ("tensorrt", 1):
        settings = jaxonnx.Quantization(
            weights=weights, activations=None, block=16, dialect=dialect
        )
        model = jaxonnx.quantize(proto, X, settings)
        tensors = {t.name: t for t in model.to_onnx().graph.initializer}
        scales = numpy_helper.to_array(tensors["w_scale"])
        assert (np.sign(scales) == side).mean() > 0.7
        optimized, plain, _ = outputs_everywhere(model.to_onnx(), {"x": X})
        np.testing.assert_allclose(model(X), plain, atol=1e-5 * np.abs(plain).max())
        np.testing.assert_allclose(optimized, plain, atol=0.05 * np.abs(plain).max())
        lost[side] = np.square(np.asarray(model(eye)) - exact).mean()
        clipped = list_layers(model)[0].weight.clipped
        assert clipped is not None
        assert clipped < 0.1
    assert lost[-1] < lost[1] * (0.5 if weights == "int2" else 0.95)


def test_adapters_are_merged_at_scales_that_stay_negative():
    model = jaxonnx.load(jaxonnx.quantize(product("MatMul", 8), X, scheme(16)).to_onnx())
    eye = np.eye(INPUTS, dtype=np.float32)
    w = np.asarray(model(eye))
    adapted = jaxonnx.LoRA(rank=8, where="w_quantized").attach(model, jax.random.key(0))
    half = {"w_quantized.lora_A": w.T / 2, "w_quantized.lora_B": eye[:8, :8]}  # half of w more
    adapted = adapted.replace(params={**adapted.params, **half})
    with pytest.warns(UserWarning, match=r"rounded anew .* of w_quantized 0 \(0\)"):
        merged = adapted.merge_adapters(requantize=True)
    np.testing.assert_allclose(np.asarray(merged(eye)), 1.5 * w, rtol=1e-5)
