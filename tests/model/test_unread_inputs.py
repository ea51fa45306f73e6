"""Inputs that no node reads, like `token_type_ids` of exported encoders, stay with their file."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import jaxonnx

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype(np.float32)
DATA = {"x": X, "unread": X}


def network(weight="a = MatMul(x, w1)"):
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x, float[n, 8] unread) => (float[n, 4] y) {{
            {weight}
            r = Relu(a)
            y = MatMul(r, w2)
        }}"""
    )
    tensors = {"w1": RANDOM.normal(size=(8, 8)), "w2": RANDOM.normal(size=(8, 4))}
    if "mask" in weight:
        tensors["mask"] = RANDOM.random((8, 8)) < 0.5
    proto.graph.initializer.extend(
        numpy_helper.from_array(x.astype(np.float32), name) for name, x in tensors.items()
    )
    return proto


CHANGES = {
    "quantize": lambda: jaxonnx.quantize(network(), DATA),
    "awq": lambda: jaxonnx.quantize(network(), DATA, "int4", method="awq"),
    "train quantized": lambda: (
        jaxonnx.train(network(), (DATA, np.arange(16) % 4), quantize="int8").model
    ),
    "head": lambda: jaxonnx.train(network(), (DATA, np.arange(16) % 3), head=3).model,
    "masks": lambda: jaxonnx.convert(
        network("m = Mul(w1, mask) a = MatMul(x, m)"), fold_masks=True
    ),
    "batch": lambda: jaxonnx.load(network()).with_any_batch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_nothing_reads_stay(change):
    model = CHANGES[change]()
    assert [value.name for value in model.inputs] == ["x", "unread"]
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    (y,) = session.run(None, DATA)
    np.testing.assert_allclose(y, model(X, X), rtol=1e-2, atol=1e-2)
