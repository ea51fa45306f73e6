"""Weights that are stored as integers."""

import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx

QDQ = """
<ir_version: 9, opset_import: ["": 17]>
g (float[n,4] x) => (float[n,2] y)
<float xs = {0.05}, int8 xz = {3}, int8[4,3] wq = {1,2,3,4,5,6,7,8,-9,-10,-11,12},
 float[3] ws = {0.1,0.2,0.3}, int8[3] wz = {0,1,0}, int32[3] bq = {10,-20,30}, float bs = {0.01},
 float[2,3] v = {1,2,3,4,5,6}> {
  q = QuantizeLinear(x, xs, xz)
  d = DequantizeLinear(q, xs, xz)
  w = DequantizeLinear <axis = 1> (wq, ws, wz)
  b = DequantizeLinear(bq, bs)
  h = Gemm(d, w, b)
  t = Transpose(v)
  y = MatMul(h, t)
}
"""
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


def runs(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_integers_are_reported_and_made_floats_on_request(tmp_path):
    proto = onnx.parser.parse_model(QDQ)
    plain = jaxonnx.load(proto)
    assert {*plain.params} == {"v"}
    note, other = plain.warnings
    assert "1 weight in few bits (wq: int8, ...) is not trained; lora=" in note
    assert "2 tensors behind DequantizeLinear: jaxonnx.train(..., quantize=)" in other

    model = jaxonnx.load(proto, dequantize=True)
    assert {*model.params} == {"w", "b", "v"}
    wq = np.array([[1, 2, 3], [4, 5, 6], [7, 8, -9], [-10, -11, 12]])
    np.testing.assert_allclose(model.params["w"], (wq - [0, 1, 0]) * np.float32([0.1, 0.2, 0.3]))
    np.testing.assert_array_equal(model(X), plain(X))
    assert not model.warnings

    result = jaxonnx.train(
        model,
        (X, X[:, :2]),
        loss="squared_error",
        optimizer=optax.adam(0.05),
        epochs=10,
        batch_size=6,
    )
    assert result.history.losses[-1] < 0.8 * result.history.losses[0]
    assert result.changes["w"] > 0
    path = tmp_path / "floats.onnx"
    result.model.save(path)
    onnx.checker.check_model(path, full_check=True)
    saved = onnx.load(path)
    assert {t.name for t in saved.graph.initializer} == {"w", "b", "v", "xs", "xz"}
    np.testing.assert_allclose(runs(path, X), result.model(X), rtol=1e-4, atol=1e-4)


def test_nothing_to_dequantize():
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    with pytest.raises(jaxonnx.InputError, match="no weights behind DequantizeLinear"):
        jaxonnx.load(proto, dequantize=True)


def test_integer_products_are_reported():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (uint8[n,2] x) => (int32[n,2] y) <int8[2,2] w = {1,2,3,4}> { y = MatMulInteger(x, w) }
    """)
    assert "MatMulInteger 1" in " ".join(jaxonnx.load(proto).warnings)
