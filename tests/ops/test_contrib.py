"""The operators of com.microsoft against onnxruntime."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

import jaxonnx
from jaxonnx.errors import ModelError, NodeError
from jaxonnx.ops.quantize import dequantize_linear, quantize_linear
from jaxonnx.registry import lookup, operators
from tests.ops.contrib_cases import DOMAIN, Fused, f, i8, i32, s, u8
from tests.ops.contrib_table import (
    CASES,
    GROUPED,
    IDS,
    KV,
    QKV,
    ROTARY,
    model_of,
    named,
    onnxruntime_result,
    places_of,
    run,
    traced,
    wanted,
)
from tests.support import central_differences

COMPILED = [case for case in CASES if not lookup(case.domain, case.op, 1).dynamic]


@pytest.mark.parametrize(
    ("case", "jit"),
    [
        pytest.param(case, jit, id=f"{named(case)}-{'jit' if jit else 'eager'}")
        for case in CASES
        for jit in [any(case is one for one in COMPILED)]
    ],
)
def test_same_as_onnxruntime(case, jit):
    """Compiled, or op by op where the result cannot be."""
    for y, e in zip(run(case, jit), wanted(case), strict=True):
        assert y.dtype == e.dtype
        assert y.shape == e.shape
        if e.dtype.kind in "iu":
            # the last unit of a quantized result hangs on the order of float32 operations
            np.testing.assert_allclose(np.asarray(y, int), np.asarray(e, int), atol=1)
        else:
            np.testing.assert_allclose(y, e, rtol=1e-4, atol=case.atol)


@pytest.mark.deep
@pytest.mark.parametrize("case", [c for c in COMPILED if places_of(c)], ids=named)
def test_vmap(case):
    """Each row of a batch of two different ones is a single result."""
    function, values = traced(case)
    rows = [values, [x[::-1] if x.ndim and x.dtype == jnp.float32 else x for x in values]]
    batch = jax.jit(jax.vmap(function))(*(jnp.stack(pair) for pair in zip(*rows, strict=True)))
    for row, one in enumerate(rows):
        for y, e in zip(batch, jax.jit(function)(*one), strict=True):
            assert y.dtype == e.dtype
            assert y.shape[1:] == e.shape
            tolerance = {"atol": 1} if e.dtype.kind in "iu" else {"rtol": 1e-4, "atol": case.atol}
            np.testing.assert_allclose(np.float64(y[row]), np.float64(e), **tolerance)


ROUNDED = ("QuantizeLinear", "DynamicQuantizeMatMul", "GemmFloat8", "Range", "DynamicQuantizeLSTM")
"""Operators whose result is of a type of its own, or known."""
SMOOTH = {
    case.op: case
    for case in COMPILED
    if case.op not in ROUNDED and all(x is None or x.dtype.itemsize > 1 for x in case.inputs)
}


@pytest.mark.deep
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name):
    case = SMOOTH[name]
    with jax.enable_x64(True):
        inputs = [
            x.astype(np.float64) if x is not None and x.dtype == np.float32 else x
            for x in case.inputs
        ]
        places = [i for i, x in enumerate(inputs) if x is not None and x.dtype == np.float64]

        def first(*values):
            full = list(inputs)
            for i, value in zip(places, values, strict=True):
                full[i] = value
            results = lookup(case.domain, case.op, 1)(*full, **case.attributes)
            return [results[0] if isinstance(results, tuple) else results]

        central_differences.check(first, [inputs[i] for i in places], 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["QLinearAdd", "QLinearMul"])
def test_every_unit_of_the_elementwise_ones(name):
    a, b = u8(64), u8(64)
    case = Fused(name, [a, s(0.1), np.uint8(9), b, s(0.2), np.uint8(70), s(0.5), np.uint8(50)])
    (expected,) = onnxruntime_result(case)
    assert np.mean(np.asarray(run(case)[0]) != expected) < 0.05


def test_packed_heads_are_those_of_the_separate_inputs():
    q, k, v = (x.reshape(2, 3, 2, 4) for x in QKV)
    attention = lookup(DOMAIN, "MultiHeadAttention", 1)
    expected = attention(*QKV, num_heads=2)[0]
    packed = attention(np.stack([q, k, v], 3), num_heads=2)[0]
    np.testing.assert_allclose(packed, expected, rtol=1e-6)
    half_packed = attention(QKV[0], np.stack([k, v], 3), num_heads=2)[0]
    np.testing.assert_allclose(half_packed, expected, rtol=1e-6)


@pytest.mark.deep
def test_gradient_goes_through_dynamic_quantization():
    # drawn here, where no other test draws: no row may sum to 0, which rounding would decide
    w = np.random.default_rng(0).integers(0, 256, (8, 3), np.uint8)
    product = lookup(DOMAIN, "DynamicQuantizeMatMul", 1)
    x = f(2, 8)
    gradient = jax.grad(lambda x: product(x, w, s(0.02), np.uint8(120)).sum())(x)
    plain = ((w.astype(np.float32) - 120) * 0.02).sum(axis=1)
    inner = (x > x.min()) & (x < x.max())  # the extremes also set the scale
    np.testing.assert_allclose(gradient[inner], np.tile(plain, (2, 1))[inner], rtol=1e-4)


def test_gradient_goes_through_quantized_layers():
    weight, x, past = i8(4, 24), f(2, 3, 4), f(2, 2, 2, 2, 4)
    scale, zero = s(0.02), np.int8(3)
    attention = lookup(DOMAIN, "QAttention", 1)
    plain = lookup(DOMAIN, "Attention", 1)

    def quantized(bias, past):
        q = quantize_linear(x, s(0.01), np.uint8(120))
        return attention(
            q, weight, bias, s(0.01), scale, None, np.uint8(120), zero, past, num_heads=2
        )[0].sum()

    def exact(bias, past):
        units = s(0.01), np.uint8(120)
        rounded = dequantize_linear(quantize_linear(x, *units), *units)
        w = (weight.astype(np.float32) - zero) * scale
        return plain(rounded, w, bias, past=past, num_heads=2)[0].sum()

    arguments = f(24), past
    found, wanted = (jax.jit(jax.grad(g, (0, 1)))(*arguments) for g in (quantized, exact))
    for y, e in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-5)
    case = next(c for c in CASES if named(c) == "MatMulBnb4-nf4")
    product = lookup(DOMAIN, case.op, 1)
    a, b, absmax = case.inputs
    columns = product(np.eye(32, dtype=np.float32), b, absmax, **case.attributes)
    slope = jax.grad(lambda a: product(a, b, absmax, **case.attributes).sum())(a)
    np.testing.assert_allclose(slope[0], columns.sum(1), rtol=1e-5)


def test_what_only_other_providers_have_is_refused():
    rotary, attention = (lookup(DOMAIN, name, 1) for name in ("RotaryEmbedding", "Attention"))
    with pytest.raises(NodeError, match="is_packed_batching"):
        rotary(f(2, 2, 3, 16), np.array([0]), *ROTARY, is_packed_batching=1)
    with pytest.raises(NodeError, match="do_rotary"):
        attention(f(2, 3, 4), f(4, 24), num_heads=2, do_rotary=1)


def test_an_input_omitted_before_required_ones():
    """As onnxruntime's optimizer writes the embeddings of a GPT-2."""
    proto = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (int32[2,3] ids) => (float[2,3,2] y)
    <float[4,2] words = {1,2,3,4,5,6,7,9}, float[3,2] places = {1,0,0,1,2,2},
     float[2] gamma = {1,2}, float[2] beta = {0,1}> {
      y, mask = com.microsoft.EmbedLayerNormalization(ids, , words, places, , gamma, beta)
    }""")
    model = jaxonnx.load(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    np.testing.assert_allclose(model(IDS), *session.run(None, {"ids": IDS}), rtol=1e-5)
    proto.graph.node[0].input[2] = ""
    with pytest.raises(ModelError, match=r"lacks input 2 \(word_embedding\)"):
        jaxonnx.load(proto)


def test_signatures_are_those_of_onnxruntime():
    """Its own schemas: as many inputs, the same attributes, and their defaults.

    Later releases may have more of them than the one that ours are of.
    """
    known = tuple(map(int, onnxruntime.__version__.split(".")[:2])) <= (1, 32)
    schemas = {(s.domain, s.name): s for s in get_all_operator_schema()}
    early = "jaxonnx.ops.contrib.fused"
    ours = [o for o in operators() if o.domain == DOMAIN or o.function.__module__ == early]
    ours = [o for o in ours if o.name != "SimplifiedLayerNormalization"]  # onnxruntime has it in ""
    assert len(ours) > 40
    for o in ours:
        schema = schemas[o.domain, o.name]
        attributes = {*schema.attributes}
        assert o.inputs is None or o.inputs <= len(schema.inputs), o.name
        assert o.attributes <= attributes, o.name
        if known:
            assert o.inputs in (None, len(schema.inputs)), o.name
            assert o.attributes == attributes, o.name
        for name in o.attributes:
            attribute, default = schema.attributes[name], o.defaults.get(name)
            if attribute.required:
                assert name in o.required, (o.name, name)
            elif attribute._default_value:
                wanted = onnx.AttributeProto.FromString(attribute._default_value)
                wanted = helper.get_attribute_value(wanted)
                wanted = wanted.decode() if isinstance(wanted, bytes) else wanted
                assert default == pytest.approx(wanted), (o.name, name)


def test_a_padded_chunk_of_queries_follows_a_cache():
    """Of each sample as many queries, and steps of the cache, as are specified."""
    chunk = [f(2, 3, 64), f(2, 3, 32), f(2, 3, 32), f(2, 2, 8, 16), f(2, 2, 8, 16), i32(5, 3)]
    chunk += [np.array(7, np.int32), *ROTARY, *[None] * 7, i32(2, 3)]
    case = Fused("GroupQueryAttention", chunk, GROUPED | {"do_rotary": 1}, KV)
    for y, e in zip(run(case, True), onnxruntime_result(case), strict=True):
        for sample, (count, length) in enumerate([(2, 6), (3, 4)]):
            part = (sample, slice(count)) if y.ndim == 3 else (sample, slice(None), slice(length))
            np.testing.assert_allclose(y[part], e[part], rtol=1e-4, atol=2e-6)


@pytest.mark.deep
def test_bias_dropout_drops_in_training_only():
    model = jaxonnx.load(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 22, "com.microsoft": 1]>
        g (float[n,8] x, float[n,8] residual, bool training) => (float[n,8] y)
        <float[8] b = {1,2,3,4,5,6,7,8}> {
            rate = Constant <value = float {0.5}> ()
            y = com.microsoft.BiasDropout (x, b, residual, rate, training)
        }""")
    )
    x, residual = f(100, 8), f(100, 8)
    shifted = x + np.arange(1, 9, dtype=np.float32)
    kept = model.apply(model.params, x, residual, np.array(False))
    np.testing.assert_allclose(kept, shifted + residual, rtol=1e-6)
    y, _ = model.apply_train(model.params, {}, jax.random.key(0), x, residual, np.array(True))
    dropped = np.isclose(y, residual, rtol=1e-6)
    np.testing.assert_allclose(y, np.where(dropped, 0, 2 * shifted) + residual, rtol=1e-5)
    assert 300 < dropped.sum() < 500  # of 800


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_sums_in_half_precision_are_normalized_before_they_are_rounded(op):
    random = np.random.default_rng(0)
    x, skip, bias = (3 * random.normal(size=(4, 64)) for _ in range(3))
    inputs = [x, skip, np.ones(64), bias[0]]
    if op == "SkipLayerNormalization":
        inputs.insert(3, np.zeros(64))
    outputs = ["y", "", "inverse", "total"]
    arrays = [a.astype(np.float16) for a in inputs]
    case = Fused(op, arrays, {"epsilon": 1e-5}, outputs)
    y, inverse, total = onnxruntime_result(case)
    results = jaxonnx.load(model_of(case)[0])(*arrays)
    np.testing.assert_array_equal(results[2], total)
    np.testing.assert_allclose(results[1], inverse, rtol=2e-6)
    np.testing.assert_array_equal(results[0], y)
