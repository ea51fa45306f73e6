"""Quantized layers of com.microsoft: convolution, Gemm, pooling, attention, embeddings, LSTM.

As in `jaxonnx.ops.contrib.quantized`, gradients go straight through; QLinearConv, which is exact in
integers, has none.
"""

from typing import Unpack

import jax.numpy as jnp
import numpy as np

from jaxonnx import lowering
from jaxonnx._weights import along, with_scales
from jaxonnx.errors import NodeError
from jaxonnx.lowering import KernelFirst, RoundedArray, product
from jaxonnx.ops.activation import leaky_relu, sigmoid, softmax
from jaxonnx.ops.common import axis_of, divide
from jaxonnx.ops.contrib.attention import refuse, self_attention
from jaxonnx.ops.contrib.fused import DOMAIN, layer_norm
from jaxonnx.ops.conv import QUANTIZED, qlinear_conv
from jaxonnx.ops.pool import ConvAttributes, PoolAttributes, average_pool
from jaxonnx.ops.quantize import dequantize_linear, dynamic_quantize_linear, quantize_linear
from jaxonnx.ops.reduction import reduce_mean
from jaxonnx.ops.rnn import (
    GatedAttributes,
    activations_of,
    lstm_step,
    scan_over,
    sum_of_biases,
)
from jaxonnx.registry import Omissible, op


def _requantize(function, x, x_scale, x_zero, y_scale, y_zero):
    """Dequantize, apply a function and quantize again."""
    y = function(dequantize_linear(x, x_scale, x_zero))
    zero = np.zeros((), x.dtype) if y_zero is None else y_zero
    return quantize_linear(y, y_scale, zero)


@op("QLinearLeakyRelu", since=1, domain=DOMAIN, accepts={"x": RoundedArray})
def qlinear_leaky_relu(x, x_scale, x_zero: Omissible, y_scale, y_zero=None, *, alpha=0.01):
    return _requantize(lambda x: leaky_relu(x, alpha=alpha), x, x_scale, x_zero, y_scale, y_zero)


@op("QLinearSigmoid", since=1, domain=DOMAIN, accepts={"x": RoundedArray})
def qlinear_sigmoid(x, x_scale, x_zero: Omissible, y_scale, y_zero=None):
    return _requantize(sigmoid, x, x_scale, x_zero, y_scale, y_zero)


@op("QLinearSoftmax", since=1, domain=DOMAIN, accepts={"x": RoundedArray})
def qlinear_softmax(x, x_scale, x_zero: Omissible, y_scale, y_zero, *, axis=-1, opset):
    """Softmax over `axis`; before opset 13 over the axes from `axis` on."""

    def over(x):
        if opset >= 13:
            return softmax(x, axis)
        rows = x.reshape(*x.shape[: axis_of(axis, x.ndim)], -1)
        return softmax(rows, -1).reshape(x.shape)

    return _requantize(over, x, x_scale, x_zero, y_scale, y_zero)


@op("QLinearReduceMean", since=1, domain=DOMAIN, accepts={"x": RoundedArray})
def qlinear_reduce_mean(x, x_scale, x_zero: Omissible, y_scale, y_zero=None, *, axes, keepdims):
    def mean(x):
        return reduce_mean(x, tuple(axes), bool(keepdims))

    return _requantize(mean, x, x_scale, x_zero, y_scale, y_zero)


@op(
    "QLinearAveragePool",
    since=1,
    domain=DOMAIN,
    like="AveragePool",
    quantized=with_scales("x"),
    result="y_scale",
    accepts={"x": RoundedArray},
    shapes="x (N, _, _, *D)",
    without=("dilations",),
)
def qlinear_average_pool(
    x,
    x_scale,
    x_zero_point: Omissible,
    y_scale,
    y_zero=None,
    *,
    channels_last=0,
    count_include_pad=0,
    **window: Unpack[PoolAttributes],
):
    def pool(x):
        channels = -1 if channels_last else 1
        return average_pool(x, count_include_pad=count_include_pad, channels=channels, **window)

    return _requantize(pool, x, x_scale, x_zero_point, y_scale, y_zero)


@op("QLinearWhere", since=1, domain=DOMAIN, accepts={"x": RoundedArray, "y": RoundedArray})
def qlinear_where(condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero):
    x, y = dequantize_linear(x, x_scale, x_zero), dequantize_linear(y, y_scale, y_zero)
    return quantize_linear(jnp.where(condition, x, y), z_scale, z_zero)


@op(
    "QLinearConv",
    since=1,
    domain=DOMAIN,
    like="Conv",
    quantized=QUANTIZED,
    result="y_scale",
    bias="b",
    accepts={"w": KernelFirst},
    shapes="w (group*m, c, K1, *K), x (N, group*c, D1, *D) | (N, D1, *D, group*c), b (group*m), "
    "x_scale #1, x_zero_point #1, w_scale #1 | #group*m, w_zero_point #1 | #group*m, "
    "y_scale #1, y_zero_point #1",
)
def qlinear_conv_contrib(
    x,
    x_scale,
    x_zero_point,
    w,
    w_scale,
    w_zero_point,
    y_scale,
    y_zero_point,
    b=None,
    *,
    channels_last=0,
    group=1,
    **window: Unpack[ConvAttributes],
):
    """QLinearConv, of images (N, *D, C) with `channels_last`; the weight is as in Conv."""
    return qlinear_conv(
        x,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        b,
        group=group,
        channels=-1 if channels_last else 1,
        **window,
    )


def _matrix(x, scale, zero):
    """Dequantize a matrix by one scale, or one a column."""
    return dequantize_linear(x, scale, zero, axis=-1)


@op(
    "QGemm",
    since=1,
    domain=DOMAIN,
    like="Gemm",
    quantized=with_scales(
        "a", "b", storage=along(lambda attributes: 0 if attributes.get("transB") else 1)
    ),
    result="y_scale",
    bias="c",
    accepts={"a": RoundedArray, "b": RoundedArray},
)
def qgemm(
    a,
    a_scale,
    a_zero_point,
    b,
    b_scale,
    b_zero_point,
    c=None,
    y_scale=None,
    y_zero_point=None,
    *,
    alpha=1.0,
    transA=0,
    transB=0,
):
    """alpha * A' B' + C, where C counts in a_scale * b_scale; in float32 without `y_zero_point`."""
    if y_zero_point is not None and y_scale is None:
        raise NodeError("y_zero_point needs a y_scale")
    a = dequantize_linear(a, a_scale, a_zero_point)
    b = dequantize_linear(b, b_scale, b_zero_point, axis=0 if transB else 1)
    y = alpha * lowering.keep_apart((a.T if transA else a) @ (b.T if transB else b))
    if c is not None:
        y = y + c.astype(y.dtype) * (alpha * a_scale * b_scale)
    if y_zero_point is not None:
        return quantize_linear(y, y_scale, y_zero_point)
    return y if y_scale is None else divide(y, y_scale)  # as onnxruntime has it


@op(
    "QAttention",
    since=1,
    domain=DOMAIN,
    quantized=with_scales("x", "weight"),
    params=("bias",),
    accepts={"x": RoundedArray, "weight": RoundedArray},
)
def qattention(
    x,
    weight,
    bias,
    x_scale,
    weight_scale,
    mask_index=None,
    x_zero_point=None,
    weight_zero_point=None,
    past=None,
    *,
    do_rotary=None,
    mask_filter_value=None,
    num_heads,
    past_present_share_buffer=None,
    scale=None,
    unidirectional=0,
):
    """Attention with a quantized projection to Q, K and V."""
    refuse(do_rotary=do_rotary, past_present_share_buffer=past_present_share_buffer)
    x = dequantize_linear(x, x_scale, x_zero_point)
    qkv = x @ _matrix(weight, weight_scale, weight_zero_point) + bias
    hidden = -10000.0 if mask_filter_value is None else mask_filter_value
    return self_attention(
        qkv, num_heads, None, mask_index, past, None, hidden, scale, unidirectional
    )


@op(
    "QEmbedLayerNormalization",
    since=1,
    domain=DOMAIN,
    accepts=dict.fromkeys(("word", "position", "segment", "gamma", "beta"), RoundedArray),
)
def qembed_layer_normalization(
    input_ids,
    segment_ids: Omissible,
    word,
    position,
    segment: Omissible,
    gamma,
    beta,
    mask: Omissible,
    word_scale,
    position_scale,
    segment_scale: Omissible,
    gamma_scale,
    beta_scale,
    word_zero_point,
    position_zero_point,
    segment_zero_point: Omissible,
    gamma_zero_point,
    beta_zero_point,
    *,
    epsilon=1e-12,
):
    """EmbedLayerNormalization with quantized tables, scale and shift."""
    batch, steps = input_ids.shape
    total = dequantize_linear(word, word_scale, word_zero_point)[input_ids]
    total = total + dequantize_linear(position, position_scale, position_zero_point)[:steps]
    if segment_ids is not None:
        table = dequantize_linear(segment, segment_scale, segment_zero_point)
        total = total + table[segment_ids]
    counts = jnp.zeros(batch, np.int32) if mask is None else (mask == 1).sum(axis=1, dtype=np.int32)
    gamma = dequantize_linear(gamma, gamma_scale, gamma_zero_point)
    beta = dequantize_linear(beta, beta_scale, beta_zero_point)
    return layer_norm(total, gamma, beta, epsilon)[0], counts


def _fake_quantize(x):
    """Quantize x to 8 bits by its own range, and dequantize it."""
    return dequantize_linear(*dynamic_quantize_linear(x))


@op(
    "DynamicQuantizeLSTM",
    since=1,
    domain=DOMAIN,
    quantized=with_scales("w", "r"),
    params={"b": 0.0, "p": 0.0},
    accepts={"w": RoundedArray, "r": RoundedArray},
    shapes="r (directions, hidden_size, 4*hidden_size), w (directions, _, 4*hidden_size), "
    "b (directions, 8*hidden_size), r_scale (directions, *_), w_scale (directions, *_)",
    without=("output_sequence",),
)
def dynamic_quantize_lstm(
    x,
    w,
    r,
    b: Omissible,
    sequence_lens: Omissible,
    initial_h: Omissible,
    initial_c: Omissible,
    p: Omissible,
    w_scale,
    w_zero_point,
    r_scale,
    r_zero_point,
    *,
    input_forget=0,
    **attributes: Unpack[GatedAttributes],
):
    """LSTM whose weights are quantized, and whose inputs and hidden states are as it goes.

    W (directions, features, 4 hidden) and R (directions, hidden, 4 hidden) lie transposed.
    """
    functions = activations_of(["Sigmoid", "Tanh", "Tanh"], r, **attributes)
    w, r = (
        jnp.stack([_matrix(x[d], scale[d], zero[d]) for d in range(x.shape[0])])
        for x, scale, zero in ((w, w_scale, w_zero_point), (r, r_scale, r_zero_point))
    )

    def cell(d):
        f, g, h = functions[d]
        step = lstm_step(f, g, h, input_forget)

        def quantized_gates(gates, extra, h, c):
            recurrent, peepholes = extra
            return step(gates + product(_fake_quantize(h), recurrent), peepholes, h, c)

        return quantized_gates, 0, w.mT[d], None, (r[d], None if p is None else p[d])

    bias, initial = sum_of_biases(b), (initial_h, initial_c)
    x = _fake_quantize(x)
    return scan_over(cell, x, r.shape[1], bias, sequence_lens, initial, **attributes)
