"""Calibration on texts of several lengths: padding counts for nothing."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import Quantization

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(12, 16)).astype(np.float32)
TABLE[0] = 40 * RANDOM.normal(size=16)  # the token of padding
WEIGHTS = {
    "w1": RANDOM.normal(size=(16, 16)) / 4,
    "w2": RANDOM.normal(size=(16, 16)) / 4,
    "w3": RANDOM.normal(size=(16, 4)) / 4,
}
LENGTHS = 16, 2, 3, 5, 4, 7  # the first is as long as the matrices are wide
IDS = [RANDOM.integers(1, 12, n).tolist() for n in LENGTHS]
TESTS = RANDOM.integers(1, 12, (3, 6))
FORMS = {
    "batch and length": "k = MatMul(r, w2)",
    "one axis": """f = Reshape(r, flat)
                g = MatMul(f, w2)
                z = Shape(e)
                k = Reshape(g, z)""",
    "heads": """h = Reshape(r, heads)
                t = Transpose<perm = [0, 2, 1, 3]>(h)
                b = Transpose<perm = [0, 2, 1, 3]>(t)
                c = Reshape(b, whole)
                k = MatMul(c, w2)""",
}


def encoder(form):
    """The mean over tokens of what two matrices and a third one compute."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (int64[n, s] input_ids, int64[n, s] attention_mask) => (float[n, 4] y) {{
            e = Gather(table, input_ids)
            a = MatMul(e, w1)
            r = Tanh(a)
            {FORMS[form]}
            p = Relu(k)
            last = Constant<value_ints = [-1]>()
            f32 = Cast<to = 1>(attention_mask)
            m = Unsqueeze(f32, last)
            masked = Mul(p, m)
            one = Constant<value_ints = [1]>()
            total = ReduceSum<keepdims = 0>(masked, one)
            count = ReduceSum<keepdims = 1>(f32, one)
            mean = Div(total, count)
            y = MatMul(mean, w3)
        }}"""
    )
    tensors = {name: np.asarray(x, np.float32) for name, x in WEIGHTS.items()} | {
        "table": TABLE,
        "heads": np.array([0, 0, 2, 8]),
        "whole": np.array([0, 0, 16]),
        "flat": np.array([-1, 16]),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in tensors.items())
    return jaxonnx.load(proto, trainable=[*WEIGHTS])


PADDED = {"input_ids": IDS}
ALONE = [{"input_ids": np.array([x]), "attention_mask": np.ones((1, len(x)), int)} for x in IDS]


def quantize(form, data, scheme, method=None):
    return jaxonnx.quantize(encoder(form), data, scheme, method=method, check=False)


@pytest.mark.parametrize(
    ("form", "method"), [*((form, "gptq") for form in FORMS), ("batch and length", "awq")]
)
def test_methods_read_tokens_alone(form, method):
    four = Quantization(weights="int4", activations=None, block=8)
    models = [quantize(form, data, four, method) for data in (PADDED, ALONE)]
    outputs = [np.asarray(model(TESTS, np.ones_like(TESTS))) for model in models]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "calibration"),
    [
        *((form, "minmax") for form in FORMS),
        ("batch and length", "percentile"),
        ("batch and length", "mse"),
    ],
)
def test_ranges_are_those_of_tokens(form, calibration):
    scheme = Quantization(calibration=calibration)
    files = [quantize(form, data, scheme).to_onnx() for data in (PADDED, ALONE)]
    scales, expected = (
        {t.name: numpy_helper.to_array(t) for t in file.graph.initializer if "scale" in t.name}
        for file in files
    )
    assert {"e_scale", "r_scale"} <= scales.keys() == expected.keys()
    for name, scale in scales.items():
        np.testing.assert_allclose(scale, expected[name], rtol=1e-5, err_msg=name)


def test_the_range_of_a_table_is_that_of_the_tokens_in_the_data():
    file = quantize("batch and length", PADDED, Quantization(calibration="minmax")).to_onnx()
    scale = next(t for t in file.graph.initializer if t.name == "e_scale")
    used = TABLE[sorted({token for row in IDS for token in row})]
    np.testing.assert_allclose(
        numpy_helper.to_array(scale), (used.max() - used.min()) / 255, rtol=1e-5
    )


def test_padding_counts_for_nothing_in_errors():
    """The outputs of padding are as large as its embedding: `sensitivity` and `max_loss`."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (int64[n, s] input_ids, int64[n, s] attention_mask) => (float[n, s, 4] y) {
            e = Gather(table, input_ids)
            a = MatMul(e, w1)
            f32 = Cast<to = 1>(attention_mask)
            y = MatMul(a, w3)
        }"""
    )
    tensors = {n: WEIGHTS[n].astype(np.float32) for n in ("w1", "w3")} | {"table": TABLE}
    proto.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in tensors.items())
    model = jaxonnx.load(proto, trainable=["w1", "w3"])
    padded, alone = (
        jaxonnx.sensitivity(model, data, ("int4",), batches=len(IDS)).errors
        for data in (PADDED, ALONE)
    )
    for name, errors in alone.items():
        np.testing.assert_allclose(padded[name]["int4"], errors["int4"], rtol=1e-4, err_msg=name)
    tried = [
        jaxonnx.quantize(
            model, data, Quantization(weights="int4", activations=None), max_loss=1e-4, check=False
        ).sensitivity.trials
        for data in (PADDED, ALONE)
    ]
    assert [trial.loss for trial in tried[0]] == pytest.approx(
        [trial.loss for trial in tried[1]], rel=1e-3
    )
