"""Fused operators of com.microsoft that onnxruntime's optimizers write: products, Gelu, norms.

Meaning as in onnxruntime's ContribOperators.md; tests compare with onnxruntime.
"""

from typing import Annotated, Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import Default
from jaxonnx._weights import convolution, matrix, table
from jaxonnx.errors import NodeError
from jaxonnx.ops.activation import (
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    leaky_relu,
    relu,
    selu,
    sigmoid,
    softplus,
    softsign,
    swish,
    thresholded_relu,
)
from jaxonnx.ops.common import axis_of, widen
from jaxonnx.ops.conv import CONVOLUTION, conv
from jaxonnx.ops.linear import FACTORS, gemm, matmul
from jaxonnx.ops.pool import ConvAttributes
from jaxonnx.registry import Omissible, op


@op("Affine", since=1, pointwise=True)
def affine(x, *, alpha=1.0, beta=0.0):
    return alpha * x + beta


@op("Scale", since=1, pointwise=True)
def scale_by(x, *, scale=1.0):
    return scale * x


@op("ScaledTanh", since=1, pointwise=True)
def scaled_tanh(x, *, alpha, beta):
    return alpha * jnp.tanh(beta * x)


@op("ParametricSoftplus", since=1, pointwise=True)
def parametric_softplus(x, *, alpha, beta):
    return alpha * jax.nn.softplus(beta * x)


@op("ImageScaler", since=1)
def image_scaler(x, *, bias, scale=1.0):
    """scale * x + bias of its channel; x (N, C, H, W)."""
    return scale * x + np.asarray(bias, x.dtype).reshape(-1, 1, 1)


@op("Crop", since=1)
def crop(x, *, border, scale=None):
    """Cut (left, top, right, bottom) pixels off, or (height, width) out from left and top on."""
    left, top, right, bottom = border
    height, width = scale or (x.shape[2] - top - bottom, x.shape[3] - left - right)
    if min(height, width) < 0 or top + height > x.shape[2] or left + width > x.shape[3]:
        raise NodeError(f"images of {x.shape[2:]} pixels do not hold what is to be cropped")
    return x[:, :, top : top + height, left : left + width]


DOMAIN = "com.microsoft"

# name: (function, names of the parameters in the order of `activation_params`)
_ACTIVATIONS = {
    "Clip": (lambda x, *, min, max: jnp.clip(x, min, max), ("min", "max")),
    "Elu": (elu, ("alpha",)),
    "HardSigmoid": (hard_sigmoid, ("alpha", "beta")),
    "HardSwish": (hard_swish, ()),
    "LeakyRelu": (leaky_relu, ("alpha",)),
    "ParametricSoftplus": (parametric_softplus, ("alpha", "beta")),
    "Relu": (relu, ()),
    "ScaledTanh": (scaled_tanh, ("alpha", "beta")),
    "Selu": (selu, ("alpha", "gamma")),
    "Sigmoid": (sigmoid, ()),
    "Softplus": (softplus, ()),
    "Softsign": (softsign, ()),
    "Tanh": (jnp.tanh, ()),
    "ThresholdedRelu": (thresholded_relu, ("alpha",)),
}


def activate(x, name, parameters):
    """Apply a fused activation by name; an empty name is none."""
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise NodeError(f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    function, names = _ACTIVATIONS[name]
    values = [p for p in parameters or () if p is not None]
    return function(x, **dict(zip(names, values, strict=False)))


BATCHED = {
    "a": matrix(first=True, transpose="transA", batch="transBatchA"),
    "b": matrix(transpose="transB", batch="transBatchB"),
}
"""The factors of a FusedMatMul."""


class Product(TypedDict, total=False):
    """The attributes of a FusedMatMul."""

    alpha: Annotated[Any, Default(1.0)]
    transA: Annotated[Any, Default(0)]
    transB: Annotated[Any, Default(0)]
    transBatchA: Annotated[Any, Default(0)]
    transBatchB: Annotated[Any, Default(0)]


@op("FusedMatMul", since=1, domain=DOMAIN, weights=BATCHED)
def fused_matmul(a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """alpha * A' B'; `transBatch` moves the first axis behind the batch axes."""

    def transpose(x, batch, matrix):
        if x.ndim < 2:
            return x
        x = jnp.moveaxis(x, 0, -2) if batch else x
        return x.swapaxes(-1, -2) if matrix else x

    y = matmul(transpose(a, transBatchA, transA), transpose(b, transBatchB, transB))
    return y if alpha == 1 else alpha * y


@op("FusedGemm", since=1, domain=DOMAIN, weights=FACTORS, params=("c",))
def fused_gemm(
    a,
    b,
    c=None,
    *,
    activation="",
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    alpha=1.0,
    beta=1.0,
    transA=0,
    transB=0,
):
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activate(y, activation, (activation_alpha, activation_beta, activation_gamma))


@op(
    "FusedConv",
    since=1,
    domain=DOMAIN,
    weights={"w": convolution()},
    params=("b",),
    shapes=CONVOLUTION,
)
def fused_conv(
    x,
    w,
    b=None,
    z=None,
    *,
    activation="",
    activation_params=None,
    group=1,
    **window: Unpack[ConvAttributes],
):
    """activation(Conv(x, w, b) + z)."""
    y = conv(x, w, b, group=group, **window)
    return activate(y if z is None else y + z, activation, activation_params)


@op("Gelu", since=1, domain=DOMAIN)
def gelu_1(x):
    return gelu(x)


@op("BiasGelu", since=1, domain=DOMAIN, params=("b",))
def bias_gelu(a, b):
    return gelu(a + b)


@op("FastGelu", since=1, domain=DOMAIN, params=("bias",))
def fast_gelu(x, bias=None):
    return gelu(x if bias is None else x + bias, approximate="tanh")


@op("QuickGelu", since=1, domain=DOMAIN)
def quick_gelu(x, *, alpha=1.7020000219345093):
    return swish(x, alpha=alpha)


def layer_norm(x, gamma, beta, epsilon):
    """Return (x - mean) / deviation * gamma + beta over the last axis, mean and 1 / deviation.

    The deviation is sqrt(var + epsilon).
    """
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    mean = wide.mean(axis=-1, keepdims=True)
    centred = wide - mean
    inverse = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    y = centred * inverse * gamma
    return (y if beta is None else y + beta).astype(x.dtype), mean, inverse


def rms_norm(x, gamma, epsilon, axes=(-1,)):
    """Return x / sqrt(mean(x^2) + epsilon) * gamma over the last axes, and 1 / root mean square."""
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    inverse = jax.lax.rsqrt((wide**2).mean(axis=axes, keepdims=True) + epsilon)
    return (wide * inverse * gamma).astype(x.dtype), inverse


def _sum_wide(x, skip, bias):
    """Add in float32, or in float64 where x is: onnxruntime normalizes the sum before rounding."""
    total = widen(x) + widen(skip)
    return total if bias is None else total + bias


@op(
    "SkipLayerNormalization",
    since=1,
    domain=DOMAIN,
    params={"gamma": 1.0, "beta": 0.0, "bias": 0.0},
)
def skip_layer_normalization(x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    total = _sum_wide(x, skip, bias)
    y, mean, inverse = layer_norm(total, gamma, beta, epsilon)
    return y.astype(x.dtype), mean, inverse, total.astype(x.dtype)


@op("SkipSimplifiedLayerNormalization", since=1, domain=DOMAIN, params={"gamma": 1.0, "bias": 0.0})
def skip_simplified_layer_normalization(x, skip, gamma, bias=None, *, epsilon=1e-12):
    total = _sum_wide(x, skip, bias)
    y, inverse = rms_norm(total, gamma, epsilon)
    return y.astype(x.dtype), None, inverse, total.astype(x.dtype)


# onnxruntime keeps this operator in the default domain, though ONNX does not know it.
@op("SimplifiedLayerNormalization", since=1, params={"scale": 1.0})
@op("SimplifiedLayerNormalization", since=1, domain=DOMAIN, params={"scale": 1.0})
def simplified_layer_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Root mean square normalization over the axes from `axis` on, at least in float32."""
    return rms_norm(x, scale, epsilon, tuple(range(axis_of(axis, x.ndim), x.ndim)))


@op(
    "EmbedLayerNormalization",
    since=1,
    domain=DOMAIN,
    weights={
        "word_embedding": table(),
        "position_embedding": table(),
        "segment_embedding": table(),
    },
    params={"gamma": 1.0, "beta": 0.0},
)
def embed_layer_normalization(
    input_ids,
    segment_ids: Omissible,
    word_embedding,
    position_embedding,
    segment_embedding: Omissible,
    gamma,
    beta,
    mask=None,
    position_ids=None,
    *,
    epsilon=1e-12,
    mask_index_type=0,
):
    """Normalized sum of word, position and segment embeddings; the number of ones in each mask."""
    batch, steps = input_ids.shape
    positions = np.arange(steps) if position_ids is None else position_ids
    total = widen(word_embedding)[input_ids] + widen(position_embedding)[positions]
    if segment_embedding is not None:
        # as in onnxruntime, tokens without segments are of the first
        total = total + widen(segment_embedding)[0 if segment_ids is None else segment_ids]
    counts = jnp.zeros(batch, np.int32) if mask is None else (mask == 1).sum(axis=1, dtype=np.int32)
    y, dtype = layer_norm(total, gamma, beta, epsilon)[0], word_embedding.dtype
    return y.astype(dtype), counts, total.astype(dtype)
