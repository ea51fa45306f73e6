"""Convolutions, and Col2Im, which is the transpose of reading windows."""

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx import lowering
from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx._weights import along, convolution, with_scales
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import divide
from jaxonnx.ops.pool import (
    ConvAttributes,
    Taps,
    WeightWindow,
    check_neighbours,
    kernel_of,
    pad_pairs,
    per_axis,
    place_windows,
    positions,
    spatial,
    split_padding,
)
from jaxonnx.registry import Channels, Static, is_known, op

WEIGHTED = "x (N, group*c, D1, *D), w (group*m, c, K1, *K)"
CONVOLUTION = f"{WEIGHTED}, b (group*m)"
INTEGER = f"{WEIGHTED}, x_zero_point #1, w_zero_point #1 | #group*m"
KERNELS = {"w": lowering.KernelFirst}


def _check_types(x, w):
    if jnp.issubdtype(x.dtype, jnp.floating) != jnp.issubdtype(w.dtype, jnp.floating):
        raise NodeError(f"W is {w.dtype}, and must have the type of X, {x.dtype}")


def _channels(b, rank: int, channels: int = 1):
    """Reshape a vector over the channels to broadcast to images of this rank."""
    return b.reshape(-1, *(1,) * (rank - 2)) if channels == 1 else b


@op(
    "Conv",
    since=1,
    weights={"w": convolution()},
    params=("b",),
    accepts=KERNELS,
    shapes=CONVOLUTION,
)
def conv(x, w, b=None, *, group=1, channels: Channels = 1, **window: Unpack[ConvAttributes]):
    """Cross-correlation of x (N, C, *D) with w (M, C / group, *kernel)."""
    _check_types(x, w)
    kernel = kernel_of(w, window.get("kernel_shape"))
    windows = place_windows(spatial(x.shape, channels), kernel, **window)
    y = lowering.convolution(x, w, windows, group, channels, wide=b is not None)
    return y if b is None else (y + _channels(b, y.ndim, channels)).astype(x.dtype)


@op(
    "ConvTranspose",
    since=1,
    weights={"w": convolution(transposed=True)},
    params=("b",),
    shapes="x (N, group*c, *D), w (group*c, m, *K), b (group*m)",
)
def conv_transpose(
    x,
    w,
    b=None,
    *,
    group=1,
    output_padding=None,
    output_shape=None,
    channels: Channels = 1,
    **window: Unpack[ConvAttributes],
):
    """The transpose of Conv as a map of images; x (N, C, *D), w (C, M / group, *kernel).

    Opset 1 contradicts itself about the side of the odd padding element; like onnxruntime this
    follows the wording of opset 11 for every opset.
    """
    _check_types(x, w)
    auto_pad = window.get("auto_pad", "NOTSET")
    images = spatial(x.shape, channels)
    rank = len(images)
    kernel = per_axis(kernel_of(w, window.get("kernel_shape")), rank, "kernel_shape")
    strides = per_axis(window.get("strides"), rank, "strides")
    dilations = per_axis(window.get("dilations"), rank, "dilations")
    extra = per_axis(output_padding, rank, "output_padding", 0)
    for e, s, d in zip(extra, strides, dilations, strict=True):
        if not 0 <= e < max(s, d):
            raise NodeError(f"output_padding {extra} must be less than the strides or dilations")
    pairs = pad_pairs(window.get("pads"), rank)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    span = [s * (n - 1) + r for s, n, r in zip(strides, images, reach, strict=True)]
    if output_shape is not None:
        if len(output_shape) not in (rank, rank + 2):
            raise NodeError(f"output_shape {list(output_shape)} is not that of {rank} axes")
        size = tuple(int(n) for n in output_shape[-rank:])
    elif auto_pad.startswith("SAME"):
        size = tuple(n * s for n, s in zip(images, strides, strict=True))
    else:
        axes = zip(span, extra, pairs, strict=True)
        size = tuple(n + e - sum(pair) for n, e, pair in axes)
    if output_shape is not None or auto_pad.startswith("SAME"):
        axes = zip(span, extra, size, strict=True)
        begins = [split_padding(max(n + e - o, 0), auto_pad)[0] for n, e, o in axes]
    else:
        begins = [begin for begin, _ in pairs]
    padding = tuple((b, n - b - o) for b, n, o in zip(begins, span, size, strict=True))
    check_size((x.shape[0], w.shape[1], *map(max, zip(span, size, strict=True))), x.dtype)
    y = lowering.transposed_convolution(
        x,
        w,
        size=size,
        strides=strides,
        dilations=dilations,
        pads=padding,
        groups=group,
        channels=channels,
        wide=b is not None,
    )
    return y if b is None else (y + _channels(b, y.ndim, channels)).astype(x.dtype)


def _or_none(zero_point):
    """Return a zero point, or None if it is known to be 0."""
    all_zero = zero_point is not None and is_known(zero_point) and not zero_point.any()
    return None if all_zero else zero_point


@op("ConvInteger", since=10, like="Conv", accepts=KERNELS, shapes=INTEGER)
def conv_integer(
    x,
    w,
    x_zero_point=None,
    w_zero_point=None,
    *,
    group=1,
    channels: Channels = 1,
    **window: Unpack[ConvAttributes],
):
    """Conv of 8-bit integers in int32; padding counts as the zero point."""
    kernel = kernel_of(w, window.get("kernel_shape"))
    windows = place_windows(spatial(x.shape, channels), kernel, **window)
    check_size((x.shape[0], w.shape[1] * group, *windows.out, *windows.kernel), x.dtype)
    x_zero_point, w_zero_point = _or_none(x_zero_point), _or_none(w_zero_point)
    if x_zero_point is not None:
        x_zero_point = x_zero_point.reshape(())
    if w_zero_point is not None:
        w_zero_point = w_zero_point.reshape(-1 if w_zero_point.size > 1 else ())
    return lowering.integer_convolution(x, w, windows, group, x_zero_point, w_zero_point, channels)


QUANTIZED = with_scales("x", "w", storage=along(lambda attributes: 0))


@op(
    "QLinearConv",
    since=10,
    like="Conv",
    quantized=QUANTIZED,
    result="y_scale",
    bias="b",
    accepts=KERNELS,
    shapes=f"{CONVOLUTION}, x_scale #1, x_zero_point #1, w_scale #1 | #group*m, "
    "w_zero_point #1 | #group*m, y_scale #1, y_zero_point #1",
)
def qlinear_conv(
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
    group=1,
    channels: Channels = 1,
    **window: Unpack[ConvAttributes],
):
    """ConvInteger plus an int32 bias, rescaled, rounded to even and saturated to y's type."""
    y = conv_integer(x, w, x_zero_point, w_zero_point, group=group, channels=channels, **window)
    y = y if b is None else y + _channels(b, y.ndim, channels)
    scale = divide(x_scale * w_scale, y_scale)
    scale = _channels(scale, x.ndim, channels) if scale.size > 1 else scale.reshape(())
    limits = np.iinfo(y_zero_point.dtype)
    rounded = jnp.round(y * scale) + y_zero_point.astype(np.float32).reshape(())
    return jnp.clip(rounded, limits.min, limits.max).astype(y_zero_point.dtype)


@op(
    "CausalConvWithState",
    since=27,
    weights={"weight": convolution(depthwise=True)},
    params=("bias",),
    shapes="x (N, C, L), weight (C*m, 1, k), bias (C*m), past_state (N, C, _)",
)
def causal_conv_with_state(
    x,
    weight,
    bias=None,
    past_state=None,
    *,
    activation: Literal["none", "silu", "swish"] = "none",
):
    """Depthwise convolution over current and past positions; x (N, C, L), weight (C, 1, k).

    The second output holds the last k - 1 positions of past_state followed by x.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NodeError(f"input is {x.dtype}, it must have a type of floating point")
    past = weight.shape[2] - 1
    if past_state is None:
        past_state = jnp.zeros((*x.shape[:2], past), x.dtype)
    padded = jnp.concatenate([past_state, x], 2)
    y = conv(padded, weight, bias, group=x.shape[1])
    if activation != "none":
        y = jax.nn.silu(y.astype(jnp.promote_types(y.dtype, jnp.float32))).astype(y.dtype)
    return y, padded[:, :, padded.shape[2] - past :]


@op("DeformConv", since=19, weights={"w": convolution()}, params=("b",), shapes=CONVOLUTION)
def deform_conv(
    x, w, offset, b=None, mask=None, *, group=1, offset_group=1, **window: Unpack[WeightWindow]
):
    """Conv whose taps are moved by `offset` and weighted by `mask`, any number of spatial axes.

    x (N, C, *D), offset (N, offset_group * prod(kernel) * rank, *out), mask the same without
    rank. Values between pixels are interpolated linearly, pixels outside are zero.
    """
    _check_types(x, w)
    n, c = x.shape[:2]
    size, kernel = x.shape[2:], kernel_of(w, window.get("kernel_shape"))
    rank, taps = len(kernel), int(np.prod(kernel))
    windows = place_windows(size, kernel, **window)
    if offset.shape != (n, offset_group * taps * rank, *windows.out):
        raise NodeError(f"offset {offset.shape} does not fit {windows.out} windows of {kernel}")
    offset = jnp.asarray(offset).reshape(n, offset_group, *kernel, rank, *windows.out)
    check_neighbours(2, rank)
    # flat index and weight of the pixels around each position, and whether they lie in the image:
    # every axis doubles their number
    corners = [(jnp.zeros((), jnp.int32), jnp.ones((), x.dtype), jnp.array(True))]
    for axis, at in enumerate(positions(windows)):
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = kernel[axis], windows.out[axis]
        base = jnp.asarray(at.T.reshape(shape), x.dtype)
        place = offset[(slice(None),) * (2 + rank) + (axis,)] + base
        low = lax.stop_gradient(jnp.floor(place))
        part = place - low
        both = (low, 1 - part), (low + 1, part)
        inside = [(p, v, (p >= 0) & (p < size[axis])) for p, v in both]
        corners = [
            (
                index * size[axis] + jnp.clip(p, 0, size[axis] - 1).astype(jnp.int32),
                weight * v,
                within & here,
            )
            for index, weight, within in corners
            for p, v, here in inside
        ]
    pixels = jnp.asarray(x).reshape(n, offset_group, c // offset_group, -1)

    def flat(value):
        return value.reshape(n, offset_group, 1, -1)

    sampled: Any = sum(
        jnp.where(flat(within), jnp.take_along_axis(pixels, flat(index), 3), 0) * flat(weight)
        for index, weight, within in corners
    )
    if mask is not None:
        sampled = sampled * mask.reshape(n, offset_group, 1, -1)
    sampled = sampled.reshape(n, group, c // group * taps, -1)
    y = jnp.einsum("gmk,ngkl->ngml", w.reshape(group, -1, c // group * taps), sampled)
    y = y.reshape(n, -1, *windows.out)
    return y if b is None else y + _channels(b, y.ndim)


@op("Col2Im", since=18)
def col2im(x, image_shape: Static, block_shape: Static | Positive, **window: Unpack[Taps]):
    """Sum blocks back into an image: x (N, C * prod(block), L) -> (N, C, *image)."""
    size = tuple(int(n) for n in image_shape)
    windows = place_windows(size, block_shape, **window)
    taps, blocks = int(np.prod(windows.kernel)), int(np.prod(windows.out))
    if x.ndim != 3 or x.shape[1] % taps or x.shape[2] != blocks:
        raise NodeError(f"input {x.shape} does not hold {blocks} blocks of {windows.kernel}")
    channels = x.shape[1] // taps
    x = jnp.asarray(x).reshape(x.shape[0], channels, *windows.kernel, *windows.out)
    check_size((*x.shape[:2], *size), x.dtype)
    image = jnp.zeros((*x.shape[:2], *size), x.dtype)
    index = []
    for axis, at in enumerate(positions(windows)):
        shape = [1] * (2 * len(size))
        shape[axis], shape[len(size) + axis] = at.shape[::-1]
        # an index beyond the end is dropped, a negative one would wrap
        index.append(np.where(at < 0, size[axis], at).T.reshape(shape))
    return image.at[(slice(None), slice(None), *index)].add(x, mode="drop")
