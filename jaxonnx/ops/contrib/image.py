"""Operators of com.microsoft for images, most with their channels last: diffusion and vision.

Only the GPU providers of onnxruntime have most of them; tests compare with the formulas of
ContribOperators.md.
"""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp

from jaxonnx._weights import convolution
from jaxonnx.errors import NodeError
from jaxonnx.ops.activation import gelu
from jaxonnx.ops.common import widen
from jaxonnx.ops.contrib.fused import DOMAIN, activate
from jaxonnx.ops.conv import conv
from jaxonnx.ops.pool import ConvAttributes, PoolAttributes, max_pool
from jaxonnx.registry import op


@op("BiasAdd", since=1, domain=DOMAIN, params=("bias",))
def bias_add(x, bias, skip):
    return x + bias + skip


@op("BiasSplitGelu", since=1, domain=DOMAIN, params=("bias",))
def bias_split_gelu(x, bias):
    """The left half of x + bias times Gelu of the right half."""
    left, right = jnp.split(x + bias, 2, axis=-1)
    return left * gelu(right)


def _group_norm(x, gamma, beta, groups, epsilon, activation, channels_last):
    """Normalize each group of channels in float32, scale and shift each channel, round once."""
    wide = widen(x) if channels_last else jnp.moveaxis(widen(x), 1, -1)
    n, *size, channels = wide.shape
    if channels % groups:
        raise NodeError(f"{channels} channels do not divide into {groups} groups")
    parts = wide.reshape(n, *size, groups, channels // groups)
    axes = (*range(1, 1 + len(size)), parts.ndim - 1)
    centred = parts - parts.mean(axes, keepdims=True)
    unit = centred * jax.lax.rsqrt((centred**2).mean(axes, keepdims=True) + epsilon)
    y = unit.reshape(wide.shape) * gamma + beta
    y = (jax.nn.silu(y) if activation else y).astype(x.dtype)
    return y if channels_last else jnp.moveaxis(y, -1, 1)


@op("GroupNorm", since=1, domain=DOMAIN, params={"gamma": 1.0, "beta": 0.0})
def group_norm(x, gamma, beta, *, activation: Literal[0, 1], channels_last=1, epsilon=1e-5, groups):
    return _group_norm(x, gamma, beta, groups, epsilon, activation, channels_last)


@op("SkipGroupNorm", since=1, domain=DOMAIN, params={"gamma": 1.0, "beta": 0.0, "bias": 0.0})
def skip_group_norm(
    x,
    gamma,
    beta,
    skip,
    bias=None,
    *,
    activation: Literal[0, 1],
    channels_last=1,
    epsilon=1e-5,
    groups,
):
    """GroupNorm of x + skip + bias, and that sum; `skip` is an image or (N, C)."""

    def spread(v):
        inner = (1,) * (x.ndim - 2)
        lead, channels = v.shape[:-1], v.shape[-1:]
        return v.reshape(*lead, *inner, *channels) if channels_last else v.reshape(*v.shape, *inner)

    total = x + (spread(skip) if skip.ndim == 2 else skip)
    total = total if bias is None else total + spread(bias)
    y = _group_norm(total, gamma, beta, groups, epsilon, activation, channels_last)
    return y, total


LAST = "x (N, D1, *D, group*c), w (group*m, {}), b (group*m)"


@op(
    "NhwcConv",
    since=1,
    domain=DOMAIN,
    weights={"w": convolution(last=True)},
    params=("b",),
    shapes=LAST.format("K1, *K, c"),
)
def nhwc_conv(x, w, b=None, *, group=1, **window: Unpack[ConvAttributes]):
    """Conv of images (N, *D, C) with a weight (M, *kernel, C / group).

    The schema does not say the order of the weight: onnxruntime's FusionNhwcConv writes this one.
    """
    return conv(x, jnp.moveaxis(w, -1, 1), b, group=group, channels=-1, **window)


@op(
    "NhwcFusedConv",
    since=1,
    domain=DOMAIN,
    weights={"w": convolution()},
    params=("b",),
    shapes=LAST.format("c, K1, *K"),
)
def nhwc_fused_conv(
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
    """activation(Conv(x, w, b) + z) of images (N, *D, C); the weight is in the order of Conv."""
    y = conv(x, w, b, group=group, channels=-1, **window)
    return activate(y if z is None else y + z, activation, activation_params)


@op("NhwcMaxPool", since=1, domain=DOMAIN, shapes="x (N, D1, *D, C)")
def nhwc_max_pool(x, **window: Unpack[PoolAttributes]):
    """MaxPool of images (N, *D, C)."""
    return max_pool(x, channels=-1, outputs=1, **window)
