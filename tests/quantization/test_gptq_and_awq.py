"""Weights rounded by the outputs of their layers (GPTQ), and inputs scaled before (AWQ)."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx import Quantization, demo
from tests.quantization.test_decoders import FOUR_BITS, GENAI, TEXTS, TOKENS, logits_of_onnxruntime
from tests.support.sessions import outputs_everywhere

RANDOM = np.random.default_rng(0)
METHODS = "gptq", "awq"


def network(text, **tensors):
    """A model of ONNX's text form, with float32 initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(x, np.float32), name) for name, x in tensors.items()
    )
    return jaxonnx.load(proto)


def matrix(*shape):
    return RANDOM.normal(size=shape) / np.sqrt(shape[0])


def rows(n, k):
    """Correlated inputs, a few of which are much larger than the others, as in transformers."""
    scales = np.exp(RANDOM.normal(size=k))
    scales[::16] *= 20
    return (RANDOM.normal(size=(n, k)) @ (matrix(k, k) + np.eye(k)) * scales).astype(np.float32)


def perceptron():
    """A normalization, products that share it, one that a Relu feeds, and one that is shared."""
    return network(
        """g (float[n, 64] x) => (float[n, 8] y) {
            h = LayerNormalization(x, scale, shift)
            a = MatMul(h, wa)
            b = Gemm<transB = 1>(h, wb, bias)
            r = Relu(b)
            s = Mul(a, r)
            y = MatMul(s, wc)
        }""",
        scale=np.exp(RANDOM.normal(size=64) * 1.5),
        shift=RANDOM.normal(size=64),
        wa=matrix(64, 48),
        wb=matrix(64, 48).T,
        bias=RANDOM.normal(size=48) * 0.1,
        wc=matrix(48, 8),
    )


SHARED = {
    "table": """g (int64[n] i) => (float[n, 40] y) {
        h = Gather(table, i)
        a = LayerNormalization(h, scale, shift)
        t = Transpose<perm = [1, 0]>(table)
        y = MatMul(a, t)
    }""",
    "twice": """g (int64[n] i) => (float[n, 64] y) {
        h = Gather(rows, i)
        a = LayerNormalization(h, scale, shift)
        b = MatMul(a, square)
        c = LayerNormalization(b, scale2, shift)
        y = MatMul(c, square)
    }""",
}


@pytest.mark.parametrize(("case", "limit"), {"table": 2, "twice": 1}.items())
def test_awq_scales_no_weight_that_another_node_reads(case, limit):
    """An output layer that is the embedding, and a matrix of two products, in 8 bits."""
    random, ratios = np.random.default_rng(0), []
    ids, scheme = np.arange(40), Quantization(weights="int8", activations=None)
    for _ in range(8):
        tensors = {
            "table": random.normal(size=(40, 64)),
            "rows": random.normal(size=(40, 64)),
            "square": random.normal(size=(64, 64)) / 8,
            "scale": np.exp(random.normal(size=64) * 2),
            "scale2": np.exp(random.normal(size=64) * 2),
            "shift": random.normal(size=64),
        }
        model = network(SHARED[case], **{n: x for n, x in tensors.items() if n in SHARED[case]})
        nearest, awq = (
            error(model, jaxonnx.quantize(model, ids, scheme, batch_size=40, method=m), ids)
            for m in (None, "awq")
        )
        ratios.append(awq / nearest)
    assert np.exp(np.log(ratios).mean()) < limit


def error(model, quantized, x):
    return np.square(np.asarray(model(x)) - np.asarray(quantized(x))).mean()


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_change_less_than_with_the_nearest_numbers(method, block):
    """On inputs that it did not see; and onnxruntime computes the same from the file."""
    model, x, held = perceptron(), rows(512, 64), rows(256, 64)
    scheme = Quantization(weights="int4", activations=None, block=block)
    nearest = jaxonnx.quantize(model, x, scheme, batch_size=64)
    better = jaxonnx.quantize(model, x, scheme, batch_size=64, method=method)
    assert error(model, better, held) < 0.75 * error(model, nearest, held)
    ours = np.asarray(better(held))
    default, *others = outputs_everywhere(better.to_onnx(), {"x": held})
    # by default its MatMulNBits rounds activations to int8
    assert np.square(default - ours).mean() < 1e-3 * np.square(ours).mean()
    for y in others:
        np.testing.assert_allclose(y, ours, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("method", "weights", "block"), [("gptq", "int8", None), ("awq", "int4", 16)]
)
def test_inputs_that_are_zero_in_the_data_keep_their_weights(method, weights, block):
    """Units that no example of the calibration activates, as rare experts and words do."""
    random = np.random.default_rng(0)
    first, second = random.normal(size=(64, 96)) / 8, random.normal(size=(96, 16)) / 10
    if method == "gptq":
        second[::5] *= 4  # their weights would be clipped to the range of the others
    off = first[:, ::5]
    x = random.normal(size=(512, 64))
    x -= (x @ off + 0.5) @ np.linalg.pinv(off)  # every fifth unit is -0.5
    model = network(
        """g (float[n, 64] x) => (float[n, 16] y) {
            h = MatMul(x, w1)
            r = Relu(h)
            y = MatMul(r, w2)
        }""",
        w1=first,
        w2=second,
    )
    scheme = Quantization(weights=weights, activations=None, block=block, where="w2")
    held = random.normal(size=(256, 64)).astype(np.float32)
    nearest, better = (
        jaxonnx.quantize(model, x.astype(np.float32), scheme, batch_size=64, method=m)
        for m in (None, method)
    )
    assert error(model, better, held) < 2 * error(model, nearest, held)


@pytest.mark.parametrize("weights", ["int4", "int2"])
def test_awq_chooses_the_scales_of_blocks_by_outputs(weights):
    """No input is larger than others, so that errors that cancel each other are all that is won."""
    random = np.random.default_rng(0)
    x = random.normal(size=(768, 64)) @ (random.normal(size=(64, 64)) / 8 + np.eye(64))
    x, w = x.astype(np.float32), random.normal(size=(64, 48))
    model = network("g (float[n, 64] x) => (float[n, 48] y) { y = MatMul(x, w) }", w=w)
    scheme = Quantization(weights=weights, activations=None, block=16)
    nearest, better = (
        jaxonnx.quantize(model, x[:512], scheme, batch_size=64, method=m) for m in (None, "awq")
    )
    assert error(model, better, x[512:]) < 0.93 * error(model, nearest, x[512:])


def brain_surgeon(w, hessian, scale):
    """Optimal Brain Quantization in a fixed order (arXiv:2210.17323, equation 3), in float64.

    The inverse of the remaining Hessian is made anew after each column, without factorizations.
    """
    w, result = w.astype(np.float64), np.zeros(w.shape)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    for i in range(w.shape[1]):
        inverse = np.linalg.inv(damped[i:, i:])
        result[:, i] = np.clip(np.rint(w[:, i] / scale[:, i]), -8, 7) * scale[:, i]
        change = (w[:, i] - result[:, i]) / inverse[0, 0]
        w[:, i:] -= np.outer(change, inverse[0])
    return result


def test_columns_are_corrected_as_in_optimal_brain_quantization():
    w = matrix(24, 160).T.reshape(160, 24)  # more columns than are corrected at once
    model = network("g (float[n, 160] x) => (float[n, 24] y) { y = MatMul(x, w) }", w=w)
    x = rows(400, 160)
    scheme = Quantization(weights="int4", activations=None)
    proto = jaxonnx.quantize(model, x, scheme, batch_size=100, method="gptq").to_onnx()
    tensors = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    codes, scale = tensors["w_quantized"].astype(np.float64), tensors["w_scale"]
    order = np.argsort(-np.square(x).mean(0), kind="stable")
    hessian = (x.T.astype(np.float64) @ x / len(x))[np.ix_(order, order)]
    spread = np.broadcast_to(scale[:, None], (24, 160))
    expected = np.empty((24, 160))
    expected[:, order] = brain_surgeon(w.T[:, order], hessian, spread)
    same = np.rint(expected / spread) == codes.T
    assert same.mean() > 0.999  # a tie that float32 breaks otherwise changes what follows it


def test_layers_read_what_the_quantized_layers_before_them_compute():
    """The second of two equal layers corrects the error of the first one."""
    w1, w2 = matrix(32, 32), matrix(32, 32)
    text = "g (float[n, 32] x) => (float[n, 32] y) { h = MatMul(x, w1) \n y = MatMul(h, w2) }"
    model, x = network(text, w1=w1, w2=w2), rows(512, 32)
    scheme = Quantization(weights="int4", activations=None)
    both = jaxonnx.quantize(model, x, scheme, batch_size=128, method="gptq")
    first = np.asarray(both.params["w1"])
    alone = network("g (float[n, 32] h) => (float[n, 32] y) { y = MatMul(h, w2) }", w2=w2)
    second = jaxonnx.quantize(alone, x @ first, scheme, batch_size=128, method="gptq")
    np.testing.assert_allclose(both.params["w2"], second.params["w2"], rtol=1e-5, atol=1e-6)


REPEATED = {
    "products": "a = MatMul(x, w) \n b = LayerNormalization(a, scale) \n y = MatMul(b, w)",
    "views": "a = Gemm<transB = 1>(x, w) \n b = LayerNormalization(a, scale) \n"
    "t = Transpose<perm = [1, 0]>(w) \n y = MatMul(b, t)",
    "convolutions": "i = Unsqueeze(x, axes) \n a = Conv(i, w) \n s = Squeeze(a, axes) \n"
    "b = LayerNormalization(s, scale) \n c = Unsqueeze(b, axes) \n z = Conv(c, w) \n"
    "y = Squeeze(z, axes)",
    "other rows": "a = MatMul(x, w) \n m = ReduceMean<keepdims = 1>(a, first) \n"
    "b = LayerNormalization(m, scale) \n c = MatMul(b, w) \n y = Add(a, c)",
    "transposed, too": "a = MatMul(x, w) \n b = LayerNormalization(a, scale) \n c = MatMul(b, w) \n"
    "t = Transpose<perm = [1, 0]>(w) \n y = MatMul(c, t)",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", REPEATED)
def test_a_weight_of_several_products_is_rounded_by_the_inputs_of_all(case, method):
    """As a weight that reads them concatenated; those of the second product are much larger."""
    random = np.random.default_rng(0)
    w, scale = random.normal(size=(32, 32)) / 6, np.exp(random.normal(size=32)) * 8
    stored = {"views": w.T, "convolutions": w.T[..., None]}.get(case, w)
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 32] x) => (float[n, 32] y) '
        f"<int64[1] axes = {{2}}, int64[1] first = {{0}}> {{ {REPEATED[case]} }}"
    )
    for name, value in {"w": stored, "scale": scale}.items():
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    model, x = jaxonnx.load(proto), rows(384, 32)
    inputs = [x, np.asarray(model.with_outputs("b")(x))]
    if case == "other rows":  # one for each batch
        inputs[1] = np.concatenate(
            [model.with_outputs("b")(part) for part in x.reshape(3, 128, 32)]
        )
    settings = Quantization(weights="int4", activations=None)
    alone = network("g (float[n, 32] x) => (float[n, 32] y) { y = MatMul(x, w) }", w=w)
    results = []
    for net, data in ((model, x), (alone, np.concatenate(inputs))):
        proto = jaxonnx.quantize(net, data, settings, batch_size=128, method=method).to_onnx()
        results.append({t.name: numpy_helper.to_array(t) for t in proto.graph.initializer})
    np.testing.assert_allclose(*(tensors["w_scale"] for tensors in results), rtol=1e-5)
    codes = [tensors["w_quantized"].astype(int).reshape(32, 32) for tensors in results]
    codes[0] = codes[0].T if case in ("views", "convolutions") else codes[0]
    assert (codes[0] == codes[1]).mean() > 0.998


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ("y = Conv<strides = [2, 2]>(x, w)", (24, 16, 1, 1)),
        ("t = Transpose<perm = [1, 0]>(w) \n f = GlobalAveragePool(x) \n z = Flatten(f) \n"
         "y = MatMul(z, t)", (24, 16)),
        ("f = GlobalAveragePool(x) \n z = Flatten(f) \n y = Gemm<transB = 1>(z, w)", (24, 16)),
        ("f = GlobalAveragePool(x) \n z = Flatten(f) \n t = Transpose(z) \n y = MatMul(w, t)",
         (24, 16)),
    ],
)  # fmt: skip
def test_forms_of_products(nodes, shape):
    """Pointwise convolutions, matrices on the left and those behind a Transpose."""
    model = network(f"g (float[n, 16, 4, 4] x) => (float y) {{ {nodes} }}", w=matrix(*shape))
    mixed = rows(16 * 192, 16).reshape(192, 4, 4, 16).transpose(0, 3, 1, 2)
    x, held = mixed[:128], mixed[128:]
    scheme = Quantization(weights="int4", activations=None)
    nearest = jaxonnx.quantize(model, x, scheme, batch_size=32)
    better = jaxonnx.quantize(model, x, scheme, batch_size=32, method="gptq")
    assert error(model, better, held) < 0.75 * error(model, nearest, held)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_that_say_nothing_leave_the_nearest_numbers(method):
    """Zeros, one constant row (a singular Hessian), and a column that is always zero."""
    model = perceptron()
    scheme = Quantization(weights="int8", activations=None)
    for x in (np.zeros((4, 64), np.float32), np.ones((1, 64), np.float32)):
        quantized = jaxonnx.quantize(model, x, scheme, method=method)
        assert np.isfinite(np.asarray(quantized(x))).all()
        assert error(model, quantized, x) <= 1e-3 * np.square(np.asarray(model(x))).mean()
    plain = network("g (float[n, 8] x) => (float[n, 4] y) { y = MatMul(x, w) }", w=matrix(8, 4))
    x = rows(64, 8)
    x[:, 3] = 0
    first, second = (
        jaxonnx.quantize(plain, data, scheme, batch_size=16, method="gptq").to_onnx()
        for data in (x, np.zeros_like(x))
    )
    one, two = (
        next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "w_quantized")
        for proto in (first, second)
    )
    assert np.abs(one[3].astype(int) - two[3]).max() <= 1  # other scales, and no correction


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_no_row_reaches_is_rounded_to_the_nearest(method):
    wa, wb = matrix(32, 8), matrix(32, 8)
    model = network(
        """g (float[n, 32] x, float[n, 32] z) => (float[n, 8] y) {
            a = MatMul(x, wa) \n r = Relu(z) \n b = MatMul(r, wb) \n y = Add(a, b)
        }""",
        wa=wa,
        wb=wb,
    )
    data = rows(128, 32), -np.abs(rows(128, 32))
    scheme = Quantization(weights="int4", activations=None, block=16)
    quantized = jaxonnx.quantize(model, data, scheme, batch_size=32, method=method)
    eye = np.eye(32, dtype=np.float32)
    change = np.abs(np.asarray(quantized(0 * eye, eye)) - wb).reshape(2, 16, 8)
    step = np.abs(wb).reshape(2, 16, 8).max(1, keepdims=True) / 7
    assert (change <= step * 0.5001).all()
    exact = np.asarray(model(*data))
    assert np.square(np.asarray(quantized(*data)) - exact).mean() < 0.01 * exact.var()


@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_do_not_divide_the_inputs_are_refused(method):
    scheme = Quantization(weights="int4", activations=None, block=48)
    with pytest.raises(jaxonnx.InputError, match="64 inputs, which blocks of 48 do not divide"):
        jaxonnx.quantize(perceptron(), rows(8, 64), scheme, method=method)


def test_inputs_that_are_not_finite_are_refused():
    x = rows(8, 64)
    x[3, 5] = np.inf
    scheme = Quantization(weights="int8", activations=None)
    with pytest.raises(jaxonnx.InputError, match="is not finite for some example"):
        jaxonnx.quantize(perceptron(), x, scheme, method="gptq")


def test_a_network_of_fixed_batch_size_says_what_to_do():
    proto = perceptron().to_onnx()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    model = jaxonnx.load(proto).with_batch_axis()
    with pytest.raises(jaxonnx.InputError, match="takes batches itself"):
        jaxonnx.quantize(model, rows(8, 64)[:, None], "int8", method="awq")


@pytest.mark.parametrize(
    ("method", "weights"),
    [("gptq", "int4"), ("awq", "int4"), pytest.param("gptq", "int2", marks=pytest.mark.deep)],
)
def test_decoders_with_texts(method, weights, tmp_path):
    """onnxruntime runs the saved folder with default settings, and gives our logits."""
    model, scheme = jaxonnx.load(GENAI), dataclasses.replace(FOUR_BITS, weights=weights)
    quantized = jaxonnx.quantize(model, TEXTS, scheme, batch_size=4, method=method)
    quantized.save(f"{tmp_path}/")
    saved = jaxonnx.load(tmp_path)
    logits = np.asarray(saved.without_cache()(TOKENS, np.ones_like(TOKENS)))
    theirs = logits_of_onnxruntime(saved.to_onnx(), TOKENS)
    assert np.square(theirs - logits).mean() < 1e-3 * logits.var()
    types = {helper.tensor_dtype_to_np_dtype(t.data_type).name
             for t in saved.proto.graph.initializer}  # fmt: skip
    assert weights in types


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_fills_up_the_last_batch_does_not_count(method):
    """Forty examples in batches of 32 are quantized as in batches of eight."""
    images, scheme = demo.digits()[0][0][:40], Quantization(weights="int4")
    one, two = (
        jaxonnx.quantize(demo.mlp(), images, scheme, batch_size=size, method=method, check=False)
        for size in (32, 8)
    )
    expected = {t.name: numpy_helper.to_array(t) for t in two.to_onnx().graph.initializer}
    for tensor in one.to_onnx().graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), expected[tensor.name])
    errors = [
        jaxonnx.sensitivity(demo.mlp(), images, ("int4",), batch_size=size, batches=5).errors
        for size in (32, 8)
    ]
    assert errors[0]["body_weight"] == pytest.approx(errors[1]["body_weight"], rel=1e-5)
