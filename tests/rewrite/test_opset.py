"""Files of older opsets in newer ones, in onnxruntime's default session before and after."""

import jax
import numpy as np
import onnx
import onnxruntime
import pytest

import jaxonnx

X = np.random.default_rng(0).normal(size=(1, 2, 6, 6)).astype(np.float32)


def resized(mode, sides):
    size = f"float[4] s = {{1, 1, {sides}}}"
    return f'(float[1, 2, 6, 6] x) => (y) <{size}> {{ y = Resize<mode = "{mode}">(x, s) }}'


FILES = {
    f"Resize 10, {mode}, {sides}": (10, resized(mode, sides))
    for mode in ("linear", "nearest")
    for sides in ("3, 2", "2.5, 2.5", "0.5, 0.5", "0.33333333, 0.4", "2.5, 0.33333333")
}
FILES |= {
    "Upsample 9": (
        9,
        """(float[1, 2, 6, 6] x) => (y) <float[4] s = {1, 1, 2, 3}> {
            y = Upsample<mode = "linear">(x, s) }""",
    ),
    "Upsample 7": (
        7,
        """(float[1, 2, 6, 6] x) => (y) {
            y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 3.0]>(x) }""",
    ),
    "Resize in a branch": (
        10,
        """(float[1, 2, 6, 6] x) => (y) <float[4] s = {1, 1, 2, 2}, bool c = {1}> {
            y = If(c) <then_branch = t () => (float[1, 2, 12, 12] p) {
                p = Resize<mode = "linear">(x, s) }, else_branch = e () =>
                (float[1, 2, 12, 12] q) { q = Resize<mode = "nearest">(x, s) }> }""",
    ),
    "Resize in a function": (
        10,
        """(float[1, 2, 6, 6] x) => (y) <float[4] s = {1, 1, 2, 2}> { y = loc.up(x, s) }
        <domain: "loc", opset_import: ["": 10]> up (a, s) => (b) {
            b = Resize<mode = "linear">(a, s) }""",
    ),
    "scales that a function takes": (
        10,
        """(float[1, 2, 6, 6] x) => (y) <float[4] s = {1, 1, 0.33333334, 2.5}> { y = loc.to(x, s) }
        <domain: "loc", opset_import: ["": 10]> to (a, s) => (b) {
            b = Resize<mode = "nearest">(a, s) }""",
    ),
    "Upsample in a function of an older opset": (
        13,
        """(float[1, 2, 6, 6] x) => (y) { y = loc.up(x) }
        <domain: "loc", opset_import: ["": 8]> up (a) => (b) {
            b = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(a) }""",
    ),
    "a tensor for a function of an older opset": (
        13,
        """(float[1, 2, 6, 6] x) => (y) <float[1] s = {2}> { y = loc.scale(x, s) }
        <domain: "loc", opset_import: ["": 12]> scale (a, s) => (b) {
            c = Mul(a, s)
            b = Softmax<axis = 1>(c) }""",
    ),
    "Hardmax": (11, "(float[1, 2, 6, 6] x) => (y) { y = Hardmax<axis = 2>(x) }"),
    "GroupNormalization 18": (
        18,
        """(float[1, 2, 6, 6] x) => (y) <float[2] s = {1, 2}, float[2] b = {3, 4},
        float[4, 2, 1, 1] w = {1, 2, -1, 3, 0, 1, 2, 2}> {
            c = Conv(x, w)
            y = GroupNormalization<num_groups = 2, epsilon = 0.01>(c, s, b) }""",
    ),
    "LayerNormalization before 17": (
        14,
        """(float[1, 2, 6, 6] x) => (y) <float[6] s = {1, 2, 3, 4, 5, 6}> {
            y = LayerNormalization<axis = -1>(x, s) }""",
    ),
    "Clip of float16": (10, "(float16[1, 2, 6, 6] x) => (y) { y = Clip<max = 0.5>(x) }"),
    "Pad of float16": (
        10,
        """(float16[1, 2, 6, 6] x) => (y) {
            y = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1], value = 0.5>(x) }""",
    ),
}

INLINED = {
    "Upsample in a function of an older opset": (
        8,
        """(float[1, 2, 6, 6] x) => (y) {
            y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(x) }""",
    ),
    "a tensor for a function of an older opset": (
        12,
        """(float[1, 2, 6, 6] x) => (y) <float[1] s = {2}> {
            c = Mul(x, s)
            y = Softmax<axis = 1>(c) }""",
    ),
}
"""What onnxruntime is asked where it takes a function's operators in the opset of the model."""


def file(opset, text):
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "loc": 1]> g {text}'
    )


def test_a_function_can_follow_a_file_that_was_converted():
    model = jaxonnx.load(file(7, "(float[1, 2, 6, 6] x) => (float[1, 2, 6, 6] y) { y = Relu(x) }"))
    with pytest.raises(jaxonnx.InputError, match=r"jaxonnx.convert\(model, opset=13\)"):
        model.then(jax.nn.softmax)
    newer = jaxonnx.convert(model, opset=13).then(jax.nn.softmax, outputs=["p"])
    np.testing.assert_allclose(newer(X), jax.nn.softmax(np.maximum(X, 0)), rtol=1e-5)


def run(proto, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    (y,) = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})
    return y


@pytest.mark.parametrize("name", FILES)
def test_a_newer_opset_computes_the_same(name):
    proto = file(*FILES[name])
    x = X.astype(np.float16) if "float16" in name else X
    expected = run(file(*INLINED[name]) if name in INLINED else proto, x)
    model = jaxonnx.load(proto)
    converted = jaxonnx.convert(model, opset=21)
    assert converted.params.keys() == model.params.keys()
    assert converted.proto.opset_import[0].version == 21
    for y in run(converted.to_onnx(), x), converted(x):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
