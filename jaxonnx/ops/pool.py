"""Pooling, and the sliding windows over spatial axes that convolutions read as well.

Spatial axes are the axes from 2 on; `pads` is ONNX's [begin..., end...].
"""

import math
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx import _limits as limits
from jaxonnx import lowering
from jaxonnx._constraints import Default, NotNegative, Positive
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX, canonical, divide
from jaxonnx.ops.elementwise import absolute
from jaxonnx.registry import Channels, Outputs, Static, op

NEIGHBOURS = 1 << 10
"""The most pixels around a position: each is an operation of the program."""


class Window(NamedTuple):
    """The geometry of windows, with one entry per spatial axis; `out` is the number of windows.

    `pads` may be longer at the end than the node's own: with ceil_mode the last window is partial.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]


class Steps(TypedDict, total=False):
    """The attributes that all operators on windows have; each is a list with an entry per axis."""

    pads: NotNegative
    """ONNX's [begin..., end...]."""
    strides: Positive


class Taps(Steps, total=False):
    """The attributes of windows that may be dilated."""

    dilations: Positive


class WeightWindow(Taps, total=False):
    """The attributes of windows of a weight, whose shape `kernel_shape` may repeat."""

    kernel_shape: Any


AutoPad = Annotated[Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"], Default("NOTSET")]


class ConvAttributes(WeightWindow, total=False):
    """The window attributes of convolutions."""

    auto_pad: AutoPad


class UnpoolAttributes(Steps, total=False):
    """The window attributes of MaxUnpool, which has no automatic padding."""

    kernel_shape: Required[Positive]


class PoolAttributes(UnpoolAttributes, Taps, total=False):
    """The window attributes of pools."""

    auto_pad: AutoPad
    ceil_mode: Annotated[int, Default(0)]


def spatial(shape, channels: int = 1) -> tuple[int, ...]:
    """Return the sizes of the spatial axes of images whose channels are axis 1 or -1."""
    return tuple(shape[2:] if channels == 1 else shape[1:-1])


def per_axis(values, rank: int, name: str, default: int = 1) -> tuple[int, ...]:
    """Return a list attribute with one entry per axis, each `default` if it is absent."""
    values = (default,) * rank if values is None else tuple(int(v) for v in values)
    if len(values) != rank:
        raise NodeError(f"{name} has {len(values)} entries, the data needs {rank}")
    return values


def pad_pairs(pads, rank: int) -> tuple[tuple[int, int], ...]:
    flat = per_axis(pads, 2 * rank, "pads", 0)
    return tuple(zip(flat[:rank], flat[rank:], strict=True))


def split_padding(total: int, auto_pad: str) -> tuple[int, int]:
    """Split padding in two: SAME_UPPER puts the odd element at the end, others at the beginning."""
    begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
    return begin, total - begin


def kernel_of(w, kernel_shape=None) -> tuple[int, ...]:
    """Return the kernel of a convolution, which the attribute may repeat but not contradict."""
    if kernel_shape is not None and tuple(kernel_shape) != w.shape[2:]:
        raise NodeError(f"kernel_shape {kernel_shape} is not that of the weight, {w.shape[2:]}")
    if 0 in w.shape[2:]:
        raise NodeError(f"the kernel {w.shape[2:]} has no elements")
    return w.shape[2:]


def same_padding(size: int, reach: int, stride: int, auto_pad: str) -> tuple[int, int]:
    """Return the padding for ceil(size / stride) windows of `reach` elements."""
    return split_padding(max((-(-size // stride) - 1) * stride + reach - size, 0), auto_pad)


def place_windows(
    size,
    kernel=None,
    *,
    strides=None,
    pads=None,
    dilations=None,
    kernel_shape=None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    pooling: bool = False,
) -> Window:
    """Compute the geometry of windows over spatial axes from the attributes of a node.

    `kernel` is the shape of the weight; without one it is `kernel_shape`.

    With `ceil_mode` a last window may reach beyond the padding, but must start inside the
    padded input (as in PyTorch); it has no effect on an automatic padding. A window that is larger
    than a padded axis is an error, except in `pooling`: there its part of the axis counts if less
    than a stride is missing, and there are none if a stride is missing.
    """
    rank = len(size)
    kernel = per_axis(kernel_shape if kernel is None else kernel, rank, "kernel_shape")
    strides = per_axis(strides, rank, "strides")
    dilations = per_axis(dilations, rank, "dilations")
    pairs = pad_pairs(pads, rank)
    if auto_pad != "NOTSET" and any(map(any, pairs)):
        raise NodeError(f"pads {pairs} and auto_pad {auto_pad} exclude each other: keep one")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto_pad.startswith("SAME"):
        axes = zip(size, reach, strides, strict=True)
        pairs = tuple(same_padding(n, r, s, auto_pad) for n, r, s in axes)
    out, padding, steps = [], [], []
    for n, r, s, (begin, end) in zip(size, reach, strides, pairs, strict=True):
        room = n + begin + end - r
        # onnxruntime's division rounds towards zero, which lets too large windows of pooling in
        count = (-(-room // s) if pooling and room < 0 else room // s) + 1
        if ceil_mode and auto_pad == "NOTSET":
            count = -(-room // s) + 1
            count -= (count - 1) * s >= n + begin
        if count < (0 if pooling else 1):
            raise NodeError(f"a kernel that reaches over {r} elements does not fit an axis of {n}")
        step = s if count else 1  # the padding below then leaves no room for a window
        out.append(count)
        steps.append(step)
        padding.append((begin, max(end, (count - 1) * step + r - n - begin)))
    limits.check_size(kernel)
    limits.check_size([begin + n + end for n, (begin, end) in zip(size, padding, strict=True)])
    return Window(kernel, tuple(steps), dilations, tuple(padding), tuple(out))


def positions(w: Window) -> list[np.ndarray]:
    """Return for each axis the coordinates, int64[out, kernel], that the windows read.

    They are those of the input before padding, and negative or too large in the padding.
    """
    for o, k in zip(w.out, w.kernel, strict=True):
        limits.check_size([o, k], np.int64, host=True)
    return [
        np.arange(o)[:, None] * s - begin + np.arange(k) * d
        for k, s, d, (begin, _), o in zip(*w, strict=True)
    ]


def check_neighbours(along: int, rank: int) -> None:
    """Raise a NodeError if a position has too many pixels around it, each an operation."""
    if along**rank > NEIGHBOURS:
        raise NodeError(f"a position of {rank} axes has {along}^{rank} pixels around it")


def counts(w: Window, size, pads=None) -> np.ndarray:
    """Count the elements of the input, or of the input padded by `pads`, that each window holds."""
    limits.check_size(w.out, np.int64, host=True)
    total = np.ones((), np.int64)
    bounds = zip(size, pad_pairs(pads, len(size)), strict=True)
    for k, s, d, (pad, _), o, (n, (begin, end)) in zip(*w, bounds, strict=True):
        start = np.arange(o) * s - pad
        first = np.maximum(-((start + begin) // d), 0)
        last = np.minimum((n + end - 1 - start) // d, k - 1)
        total = total[..., None] * np.maximum(last - first + 1, 0)
    return total


IMAGES = "x (N, C, D1, *D)"


def _wide(x):
    """Widen half precision to float32, in which it is accumulated."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _axes(x, channels: int = 1):
    """Return the spatial axes."""
    return tuple(range(2, x.ndim)) if channels == 1 else tuple(range(1, x.ndim - 1))


@op("AveragePool", since=1, shapes=IMAGES, without=("ceil_mode", "count_include_pad", "dilations"))
@op("AveragePool", since=7, shapes=IMAGES)
def average_pool(
    x, *, count_include_pad=0, channels: Channels = 1, **window: Unpack[PoolAttributes]
):
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
    x,
    *,
    storage_order=0,
    channels: Channels = 1,
    outputs: Outputs = 2,
    **window: Unpack[PoolAttributes],
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
def lp_pool(x, *, p: float = 2, **window: Unpack[PoolAttributes]):
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
def max_unpool(x, indices, output_shape: Static | None = None, **window: Unpack[UnpoolAttributes]):
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
