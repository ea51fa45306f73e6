"""Load a file with an operator of com.acme, which an installed package brings."""

import sys

import numpy as np
import onnx.parser

import jaxonnx

TEXT = """<ir_version: 8, opset_import: ["": 17, "com.acme": 1]>
g (float[n, 2] x) => (float[n, 2] y) <float[2] s = {1, 2}>
{ y = com.acme.Swish <alpha = 2.0> (x, s) }"""

plain = onnx.parser.parse_model(TEXT.replace("com.acme.Swish <alpha = 2.0>", "Mul"))
jaxonnx.load(plain)
assert "acme_jaxonnx" not in sys.modules, "a file without its operators imports the package"
model = jaxonnx.load(onnx.parser.parse_model(TEXT))
x = np.array([[1, -1]], np.float32)
np.testing.assert_allclose(model(x), [1, 2] * x / (1 + np.exp(-2 * x)), rtol=1e-6)
assert [*model.params] == ["s"]
