"""Operators of com.microsoft that ONNX took over later, or that are close to ONNX's own.

Meaning as in onnxruntime's ContribOperators.md; tests compare with onnxruntime where its CPU
provider has them, else with NumPy and PyTorch.
"""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import lowering
from jaxonnx._weights import matrix
from jaxonnx.errors import NodeError
from jaxonnx.ops.activation import gelu, relu, softmax
from jaxonnx.ops.cast import convert
from jaxonnx.ops.common import axis_of, element_dtype, widen
from jaxonnx.ops.contrib.fused import BATCHED, DOMAIN, Product, activate, fused_matmul
from jaxonnx.ops.generators import range_
from jaxonnx.ops.linear import FACTORS, affine
from jaxonnx.ops.normalization import dropout
from jaxonnx.ops.selection import PadMode, gather_nd, pad, trilu, unique
from jaxonnx.registry import Key, Static, Training, op, xp


@op("TransposeMatMul", since=1, domain=DOMAIN, weights=FACTORS)
def transpose_matmul(a, b, *, alpha=1.0, transA=0, transB=0):
    return fused_matmul(a, b, alpha=alpha, transA=transA, transB=transB)


@op("FusedMatMulActivation", since=1, domain=DOMAIN, weights=BATCHED)
def fused_matmul_activation(
    a,
    b,
    *,
    activation,
    activation_alpha=None,
    activation_axis=None,
    activation_beta=None,
    activation_gamma=None,
    **product: Unpack[Product],
):
    y = fused_matmul(a, b, **product)
    if activation == "Softmax":
        return softmax(y, -1 if activation_axis is None else activation_axis)
    return activate(y, activation, (activation_alpha, activation_beta, activation_gamma))


@op("GemmFastGelu", since=1, domain=DOMAIN, weights={"w": matrix()}, params=("bias",))
def gemm_fast_gelu(x, w, bias=None):
    return gelu(affine(x, w, bias), approximate="tanh")


@op("GemmFloat8", since=1, domain=DOMAIN, weights=FACTORS, params=("c",))
def gemm_float8(
    a,
    b,
    c=None,
    scale_a=None,
    scale_b=None,
    scale_y=None,
    *,
    activation: Literal["NONE", "RELU", "GELU"] = "NONE",
    alpha=1.0,
    beta=0.0,
    dtype=1,
    transA=0,
    transB=0,
):
    """activation(alpha * A' B' + beta * C), accumulated in float32; scales are factors."""
    a, b = widen(a), widen(b)
    y = alpha * lowering.keep_apart((a.T if transA else a) @ (b.T if transB else b))
    for scale in (scale_a, scale_b):
        y = y if scale is None else y * scale
    y = y if c is None or beta == 0 else y + beta * widen(c)
    y = relu(y) if activation == "RELU" else gelu(y) if activation == "GELU" else y
    return convert(y if scale_y is None else y * scale_y, element_dtype(dtype))


@op("Inverse", since=1, domain=DOMAIN)
def inverse(x):
    """Inverses of the innermost matrices; half precision is computed in float32."""
    return jnp.linalg.inv(widen(x)).astype(x.dtype)


@op("CDist", since=1, domain=DOMAIN)
def cdist(a, b, *, metric: Literal["sqeuclidean", "euclidean"] = "sqeuclidean"):
    """Distances of each row of `a` to each row of `b`; at distance 0 the gradient is 0."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * (a @ b.T)
    positive = squares > 0
    if metric == "sqeuclidean":
        return jnp.where(positive, squares, 0)
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


@op("ExpandDims", since=1, domain=DOMAIN, view=True)
def expand_dims(x, axis: Static):
    return xp(x).expand_dims(x, axis_of(int(axis.item()), x.ndim + 1))


@op("Trilu", since=1, domain=DOMAIN)
def trilu_contrib(x, k=None, *, upper=1):
    return trilu(x, k, upper=upper)


@op("Pad", since=1, domain=DOMAIN)
def pad_contrib(x, pads: Static, value=None, *, mode: PadMode = "constant"):
    return pad(x, pads, value, mode=mode)


@op("Range", since=1, domain=DOMAIN)
def range_contrib(start: Static, limit: Static, delta: Static | None = None):
    return range_(start, limit, np.ones((), start.dtype) if delta is None else delta)


@op("GatherND", since=1, domain=DOMAIN)
def gather_nd_contrib(x, indices):
    return gather_nd(x, indices)


@op("Unique", since=1, domain=DOMAIN, dynamic=True)
def unique_contrib(x):
    """Distinct elements in the order of their first places, the inverse, and counts."""
    y, _, places, counts = unique(x, sorted=0)
    return y, places, counts


@op("Rfft", since=1, domain=DOMAIN)
def rfft(x, *, normalized=0, onesided=1, signal_ndim=1):
    """The Fourier transform of real signals along the last axis, as pairs of real and imaginary."""
    _one_dimension(normalized, onesided, signal_ndim)
    y = jnp.fft.rfft(widen(x))
    return jnp.stack([y.real, y.imag], axis=-1).astype(x.dtype)


@op("Irfft", since=1, domain=DOMAIN)
def irfft(x, *, normalized=0, onesided=1, signal_ndim):
    """The inverse of Rfft: pairs (..., n / 2 + 1, 2) to signals of n samples."""
    _one_dimension(normalized, onesided, signal_ndim)
    wide = widen(x)
    return jnp.fft.irfft(jax.lax.complex(wide[..., 0], wide[..., 1])).astype(x.dtype)


def _one_dimension(normalized, onesided, signal_ndim):
    if (normalized, onesided, signal_ndim) != (0, 1, 1):
        raise NodeError(
            f"onnxruntime has normalized=0, onesided=1 and signal_ndim=1, not {normalized}, "
            f"{onesided} and {signal_ndim}"
        )


def _complex_product(a, b, sign):
    (a_re, a_im), (b_re, b_im) = ((x[..., 0], x[..., 1]) for x in (a, b))
    re, im = a_re * b_re - sign * a_im * b_im, a_im * b_re + sign * a_re * b_im
    return jnp.stack([re, im], axis=-1)


@op("ComplexMul", since=1, domain=DOMAIN)
def complex_mul(a, b):
    """a * b of complex numbers, as pairs in the last axis."""
    return _complex_product(a, b, 1)


@op("ComplexMulConj", since=1, domain=DOMAIN)
def complex_mul_conj(a, b):
    """a * conj(b) of complex numbers, as pairs in the last axis."""
    return _complex_product(a, b, -1)


@op("BiasSoftmax", since=1, domain=DOMAIN)
def bias_softmax(data, bias, *, axis=1, is_inner_broadcast):
    """softmax(data + bias) over the axes from `axis` on."""
    x = data + bias
    start = axis_of(axis, x.ndim)
    return softmax(x.reshape(*x.shape[:start], -1), -1).reshape(x.shape)


@op("BiasDropout", since=1, domain=DOMAIN, params=("bias",))
def bias_dropout(
    data,
    bias,
    residual=None,
    ratio=None,
    training_mode=None,
    *,
    seed=None,
    key: Key,
    training: Training,
):
    y, mask = dropout(data + bias, ratio, training_mode, seed=seed, key=key, training=training)
    return y if residual is None else y + residual, mask
