"""Pooling over windows and over the whole image."""

import math
from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx import lowering
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX, canonical, divide
from jaxonnx.ops.elementwise import absolute
from jaxonnx.ops.windows import (
    Pooled,
    Unpooled,
    Window,
    counts,
    pad_pairs,
    per_axis,
    place_windows,
    spatial,
)
from jaxonnx.registry import Channels, Outputs, Static, op

IMAGES = "x (N, C, D1, *D)"


def _wide(x):
    """Widen half precision to float32, in which it is accumulated."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _axes(x, channels: int = 1):
    """Return the spatial axes."""
    return tuple(range(2, x.ndim)) if channels == 1 else tuple(range(1, x.ndim - 1))


@op("AveragePool", since=1, shapes=IMAGES, without=("ceil_mode", "count_include_pad", "dilations"))
@op("AveragePool", since=7, shapes=IMAGES)
def average_pool(x, *, count_include_pad=0, channels: Channels = 1, **window: Unpack[Pooled]):
    """Mean of each window; what ceil_mode adds beyond `pads` is never counted."""
    size = spatial(x.shape, channels)
    windows = place_windows(size, pooling=True, **window)
    is_automatic = window.get("auto_pad", "NOTSET") != "NOTSET"
    pads = sum(zip(*windows.pads, strict=True), ()) if is_automatic else window.get("pads")
    number = np.maximum(counts(windows, size, pads if count_include_pad else None), 1)
    number = number if channels == 1 else number[..., None]
    return divide(lowering.window_sum(_wide(x), windows, channels), number).astype(x.dtype)


@op("MaxPool", since=1, shapes=IMAGES, without=("ceil_mode", "dilations", "storage_order"))
@op("MaxPool", since=8, shapes=IMAGES)
def max_pool(
    x, *, storage_order=0, channels: Channels = 1, outputs: Outputs = 2, **window: Unpack[Pooled]
):
    """Maximum of each window, and its index in the flattened input.

    Ties go to the first element of the window, NaN counts as the greatest, both as in PyTorch.
    """
    windows = place_windows(spatial(x.shape, channels), pooling=True, **window)
    y = lowering.max_pool(x, windows, channels)
    if outputs < 2:
        return y
    return y, _indices(x if channels == 1 else jnp.moveaxis(x, -1, 1), windows, storage_order)


def _indices(x, windows: Window, column_major: int):
    """Return the index of each window's first maximum in the flattened input (N, C, *size)."""
    size = x.shape[2:]
    dtype = canonical(INDEX)
    steps = np.cumprod([1, *size[:-1]]) if column_major else np.cumprod([1, *size[:0:-1]])[::-1]
    tap = jnp.unravel_index(lowering.first_winner(x, windows), windows.kernel)
    index = lax.broadcasted_iota(dtype, (*x.shape[:2], *(1,) * len(size)), 0) * x.shape[1]
    index += lax.broadcasted_iota(dtype, index.shape, 1)
    index *= int(np.prod(size))
    for axis, number in enumerate(tap):
        start = np.arange(windows.out[axis]) * windows.strides[axis] - windows.pads[axis][0]
        start = start.reshape(-1, *(1,) * (len(size) - 1 - axis))
        at = number.astype(dtype) * windows.dilations[axis] + start.astype(dtype)
        index = index + at * int(steps[axis])
    return index


def _power(x, p):
    """Return |x| ** p, by multiplication if p is an integer."""
    if p == 2:
        return x * x
    return absolute(x) if p == 1 else absolute(x) ** (int(p) if p == int(p) else p)


def _root(total, p):
    """Return total ** (1 / p); its gradient at 0, infinite times zero, is set to 0."""
    if p == 1:
        return total
    positive = total > 0
    inner = jnp.where(positive, total, 1)
    root = jnp.sqrt(inner) if p == 2 else inner ** (1 / p)
    return jnp.where(positive, root, total)


@op("LpPool", since=1, shapes=IMAGES, without=("ceil_mode", "dilations"))
@op("LpPool", since=2, shapes=IMAGES)
def lp_pool(x, *, p: float = 2, **window: Unpack[Pooled]):
    """The p-norm of each window; the norm of an all-zero window has gradient 0."""
    windows = place_windows(x.shape[2:], pooling=True, **window)
    return _root(lowering.window_sum(_power(_wide(x), p), windows), p).astype(x.dtype)


@op("GlobalAveragePool", since=1, shapes=IMAGES)
def global_average_pool(x, *, channels: Channels = 1):
    total = _wide(x).sum(_axes(x, channels), keepdims=True)
    return divide(total, math.prod(spatial(x.shape, channels))).astype(x.dtype)


@op("GlobalMaxPool", since=1, shapes=IMAGES)
def global_max_pool(x):
    """The gradient goes to the first maximum."""
    flat = jnp.asarray(x).reshape(*x.shape[:2], math.prod(x.shape[2:]))
    return lowering.first_max(flat, 2).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))


@op("GlobalLpPool", since=1, shapes=IMAGES)
def global_lp_pool(x, *, p: float = 2):
    total = _power(_wide(x), p).sum(_axes(x), keepdims=True)
    return _root(total, p).astype(x.dtype)


@op("MaxUnpool", since=9, shapes="x (N, C, D1, *D), indices (N, C, D1, *D)")
def max_unpool(x, indices, output_shape: Static | None = None, **window: Unpack[Unpooled]):
    """Put each value at its index in the flattened output, zeros elsewhere.

    With `output_shape` the indices count in that shape, as onnxruntime and PyTorch have it.
    """
    rank = x.ndim - 2
    kernel = per_axis(window["kernel_shape"], rank, "kernel_shape")
    strides = per_axis(window.get("strides"), rank, "strides")
    pairs = pad_pairs(window.get("pads"), rank)
    if output_shape is None:
        axes = zip(x.shape[2:], kernel, strides, pairs, strict=True)
        shape = (*x.shape[:2], *((n - 1) * s + k - sum(pair) for n, k, s, pair in axes))
    else:
        shape = tuple(int(n) for n in output_shape)
        if len(shape) != x.ndim or shape[:2] != x.shape[:2]:
            raise NodeError(
                f"output_shape is {shape}, x has shape {x.shape}: they need one rank, "
                "and the first two must be equal"
            )
    check_size(shape, x.dtype)
    flat = jnp.zeros(math.prod(shape), x.dtype)
    return flat.at[indices.ravel()].set(x.ravel(), mode="drop").reshape(shape)
