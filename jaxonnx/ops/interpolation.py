"""Interpolation: Resize and Upsample, AffineGrid and GridSample.

Every axis is interpolated on its own. Where output position j reads (its coordinate in the input),
the pixels around it and their weights are NumPy arrays that follow from static shapes, so that an
axis is a few gathers forwards and one matrix product backwards.
"""

import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import axes_of, canonical
from jaxonnx.ops.pool import check_neighbours
from jaxonnx.registry import Static, op, xp


def _coordinates(mode, size, out, scale, length, start, end, dtype):
    """Return the coordinate in the input of each output position along an axis.

    Args:
      length: the resized length of the formulas, which may be fractional; None for scale * size.
      dtype: of the arithmetic, whose order is that of onnxruntime.
    """
    j = np.arange(out, dtype=dtype)
    out, size, scale, start, end = map(dtype, (out, size, scale, start, end))
    by_length = length is not None
    length = scale * size if length is None else dtype(length)
    match mode:
        case "half_pixel":
            return (j + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            offset = size / 2 * (1 - out / (scale * size))
            return (offset + (j.astype(np.float64) + 0.5) / scale - 0.5).astype(dtype)
        case "pytorch_half_pixel":
            return (j + 0.5) / scale - 0.5 if out > 1 else np.zeros_like(j)
        case "tf_half_pixel_for_nn":
            return (j + 0.5) / scale
        case "asymmetric":
            return j * size / length if by_length else j / scale
        case "align_corners":
            return np.zeros_like(j) if length == 1 else j * (size - 1) / (length - 1)
        case _:  # tf_crop_and_resize
            if length == 1:
                return np.full_like(j, 0.5 * (start + end) * (size - 1))
            return start * (size - 1) + j * (end - start) * (size - 1) / (length - 1)


_TIE = 1e-6
"""Within it coordinates are halfway between pixels, as in onnxruntime 1.32: float32 rounds them."""
_NEAREST = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5 - _TIE),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5 + _TIE),
    "floor": np.floor,
    "ceil": np.ceil,
}


UNROLLED = 16
"""The most pixels around a position for which each has an operation of its own."""

Mode = Literal["nearest", "linear", "bilinear", "cubic"]
Coordinates = Literal[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
    "asymmetric",
    "align_corners",
    "tf_crop_and_resize",
]


def _keys(a):
    """Return the cubic convolution kernel (Keys 1981, equation 4)."""

    def kernel(x):
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))

    return kernel


def _taps(x, size, kernel, radius, shrink, exclude_outside):
    """Return the pixels around coordinates, and their weights by an interpolation kernel.

    The edge pixel stands for all pixels beyond it, unless these are excluded.

    Args:
      x: the coordinates, float64[out].
      size: of the axis.
      kernel: a function of the distance.
      radius: the distance from which the kernel is 0.
      shrink: at most 1; the kernel is stretched by 1 / shrink, for antialiasing.
      exclude_outside: whether pixels beyond the edge have weight 0.

    Returns:
      Indices and weights, both (out, taps).
    """
    reach = int(np.ceil(radius / shrink))
    check_size([len(x), 2 * reach], np.float64, host=True)
    index = np.floor(x)[:, None] + np.arange(1 - reach, reach + 1)
    weight = kernel((index - x[:, None]) * shrink)
    if exclude_outside:
        weight = np.where((index < 0) | (index >= size), 0, weight)
    total = weight.sum(axis=1, keepdims=True)
    weight = weight / np.where(total == 0, 1, total)
    return np.clip(index, 0, size - 1).astype(np.int32), weight


def _pick(x, index, axis):
    """Take pixels `index` along `axis`, without a gather where they repeat or step regularly."""
    size, out = x.shape[axis], len(index)
    if out == 0:
        return x[(slice(None),) * axis + (slice(0),)]
    first, step = int(index[0]), int(index[1] - index[0]) if out > 1 else 1
    if np.array_equal(index, np.arange(out) * size // out) and out % size == 0:
        return xp(x).repeat(x, out // size, axis=axis)
    if step > 0 and np.array_equal(index, first + step * np.arange(out)):
        return x[(slice(None),) * axis + (slice(first, int(index[-1]) + 1, step),)]
    return xp(x).take(x, index, axis=axis)


def _blend(x, index, weight, axis):
    """Sum weighted pixels along an axis by gathers, with a matrix product as derivative.

    A matrix product would give the values, too, but multiply infinite pixels by zeros: NaN for the
    whole line.
    """
    shape = [1] * x.ndim
    shape[axis] = len(index)
    weight = weight.astype(x.dtype)
    check_size((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype)

    @jax.custom_jvp
    def blend(x):
        if index.shape[1] > UNROLLED:
            gathered = jnp.take(x, index, axis=axis)
            return (gathered * weight.reshape(*index.shape, *shape[axis + 1 :])).sum(axis + 1)
        y = jnp.zeros((), x.dtype)
        for i, w in zip(index.T, weight.T, strict=True):
            y += w.reshape(shape) * jnp.take(x, i, axis=axis)
        return y

    @blend.defjvp
    def _(primals, tangents):
        pixels = jnp.arange(x.shape[axis])
        hits = jnp.where(pixels == index[..., None], weight[..., None], 0)
        matrix = hits.sum(axis=1)
        tangent = jnp.tensordot(tangents[0], matrix, (axis, 1), precision=lax.Precision.HIGHEST)
        return blend(primals[0]), jnp.moveaxis(tangent, -1, axis)

    return blend(x)


def _extents(lengths, scales, sizes, policy):
    """Return the scale and the output size of each axis, given either scales or sizes."""
    present = [v for v in (scales, sizes) if v is not None and v.size]
    if len(present) != 1:
        raise NodeError("exactly one of scales and sizes must be given")
    (extents,) = present
    if extents.shape != lengths.shape:
        raise NodeError(f"{extents.size} scales or sizes are given for {len(lengths)} axes")
    # an axis of none stays one
    smallest = np.finfo(extents.dtype).tiny if extents is scales else lengths != 0
    if not (np.isfinite(extents) & (extents >= smallest)).all():
        raise NodeError(f"scales and sizes must be positive: {extents.tolist()}")
    if extents is scales:
        # In the scales' own precision: 10 pixels at float32(0.7) are 7, as in onnxruntime.
        out = np.floor(lengths.astype(extents.dtype) * extents)
        return extents.astype(np.float64), _whole(out)
    ratios = extents / np.where(lengths != 0, lengths, 1)
    if policy == "stretch":
        if extents[lengths == 0].any():
            raise NodeError(f"axes of {lengths.tolist()} cannot have sizes {extents.tolist()}")
        return ratios, extents
    scale = ratios.min() if policy == "not_larger" else ratios.max()
    return np.full(lengths.shape, scale), _whole(np.floor(scale * lengths + 0.5))


def _whole(sizes):
    if not np.isfinite(sizes).all():
        raise NodeError(f"the sizes {sizes.tolist()} are not finite")
    return np.minimum(sizes, 2.0**62).astype(int)


def _resize(
    x,
    scales,
    sizes,
    *,
    mode,
    coordinates,
    nearest_mode=None,
    roi=None,
    axes=None,
    policy="stretch",
    antialias=0,
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
):
    """Resize `axes`; a `nearest_mode` of None is the rule before opset 11.

    As in onnxruntime and ONNX's shape inference, `roi` has no part in the output's size. Integers
    that are antialiased are rounded along each axis, of images the width first, as in onnxruntime,
    Pillow and PyTorch: what cubic interpolation adds beyond 0 and 255 along one axis is cut before
    the next.
    """
    axes = axes_of(axes, x.ndim)
    is_whole = sizes is not None and sizes.size > 0 and policy == "stretch"
    scales, sizes = _extents(np.array([x.shape[a] for a in axes]), scales, sizes, policy)
    after = dict(zip(axes, sizes, strict=True))
    # the largest image between the axes
    check_size([max(n, int(after.get(axis, 0))) for axis, n in enumerate(x.shape)], x.dtype)
    crop = coordinates == "tf_crop_and_resize"
    starts, ends = np.zeros(len(axes)), np.ones(len(axes))
    if crop:
        if roi is None or roi.size != 2 * len(axes):
            raise NodeError("tf_crop_and_resize needs a roi of a start and an end for each axis")
        starts, ends = roi.reshape(2, -1)
    dtype = x.dtype
    integer = not jnp.issubdtype(dtype, jnp.inexact)
    if mode != "nearest":
        x = x.astype(canonical(np.float64) if integer else jnp.promote_types(dtype, np.float32))
    rounds = integer and antialias and mode != "nearest"
    steps = [*zip(axes, scales, sizes, starts, ends, strict=True)]
    if rounds:
        steps.sort(reverse=True)  # the last axis first

    for axis, scale, out, start, end in steps:
        size = x.shape[axis]
        if scale == 1 and size == out and (start, end) == (0, 1):
            continue
        check_size([out], np.float64, host=True)
        # float32 rounds a coordinate to the next pixel where onnxruntime does
        kind, length = np.float32 if mode == "nearest" else np.float64, out if is_whole else None
        at = _coordinates(coordinates, size, out, scale, length, start, end, kind)
        at = at.astype(np.float64)
        if mode == "nearest":
            rule = nearest_mode or ("ceil" if scale < 1 else "floor")
            if rule not in _NEAREST:
                raise NodeError(f"nearest_mode is {rule!r}, not one of {', '.join(_NEAREST)}")
            x = _pick(x, np.clip(_NEAREST[rule](at), 0, size - 1).astype(np.int32), axis)
        else:
            if mode == "cubic":
                kernel, radius = _keys(cubic_coeff_a), 2
            else:
                kernel, radius = lambda t: np.maximum(1 - np.abs(t), 0), 1
            shrink = min(scale, 1.0) if antialias else 1.0
            x = _blend(x, *_taps(at, size, kernel, radius, shrink, exclude_outside), axis)
            if rounds:  # halves away from zero
                x = jnp.trunc(x + jnp.copysign(0.5, x))
                x = jnp.clip(x, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        outside = (at < 0) | (at > size - 1)
        if crop and outside.any():
            line = outside.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
            x = jnp.where(line, jnp.asarray(extrapolation_value, x.dtype), x)
    if mode != "nearest" and integer:
        info = jnp.iinfo(dtype)
        x = jnp.clip(jnp.round(x), info.min, info.max)
    return x.astype(dtype)


@op("Upsample", since=1)
def upsample_1(x, *, height_scale, width_scale, mode: Mode = "nearest"):
    scales = np.array([1, 1, height_scale, width_scale], np.float32)
    return _resize(x, scales, None, mode=mode, coordinates="asymmetric")


@op("Upsample", since=7)
def upsample_7(x, *, scales, mode: Mode = "nearest"):
    return _resize(x, np.array(scales, np.float32), None, mode=mode, coordinates="asymmetric")


@op("Upsample", since=9)
@op("Resize", since=10)
def resize_10(x, scales: Static, *, mode: Mode = "nearest"):
    """Pixel j reads at j / scale; "nearest" is the floor when enlarging, the ceiling otherwise."""
    return _resize(x, scales, None, mode=mode, coordinates="asymmetric")


@op("Resize", since=11)
def resize(
    x,
    roi: Static | None = None,
    scales: Static | None = None,
    sizes: Static | None = None,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode: Coordinates = "half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy: Literal["stretch", "not_larger", "not_smaller"] = "stretch",
    mode: Mode = "nearest",
    nearest_mode="round_prefer_floor",
):
    return _resize(
        x,
        scales,
        sizes,
        roi=roi,
        mode=mode,
        coordinates=coordinate_transformation_mode,
        nearest_mode=nearest_mode,
        axes=axes,
        policy=keep_aspect_ratio_policy,
        antialias=antialias,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        extrapolation_value=extrapolation_value,
    )


@op("AffineGrid", since=20, shapes="theta (N, r, r + 1), size (r + 2)")
def affine_grid(theta, size: Static, *, align_corners=0):
    """theta (N, r, r + 1) applied to r-dimensional positions in [-1, 1]; x comes first, then y.

    An axis of one pixel has its position at 0, also with `align_corners`.
    """
    spatial = [int(n) for n in size[2:]]
    if theta.shape[0] != size[0]:
        raise NodeError(f"theta of shape {theta.shape} does not fit {size[0]} images")

    check_size((*spatial, len(spatial) + 1), np.float64, host=True)

    def positions(n):
        centres = (2 * np.arange(n) + 1) / n - 1
        return centres * n / (n - 1) if align_corners and n > 1 else centres

    axes = np.meshgrid(*map(positions, spatial), indexing="ij")
    points = np.stack([*axes[::-1], np.ones(spatial)], axis=-1)
    wide = jnp.promote_types(theta.dtype, np.float32)
    grid = jnp.einsum("...k,nik->n...i", points.astype(wide), theta.astype(wide))
    return grid.astype(theta.dtype)


def _reflect(x, low, high):
    """Mirror x at the borders until it lies between them."""
    if low == high:
        return jnp.full_like(x, low)
    span = high - low
    return high - abs((x - low) % (2 * span) - span)


def _cubic_weights(t, a=-0.75):
    """Return the weights of cubic convolution (Keys 1981) at distances t + 1, t, 1 - t, 2 - t."""

    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _grid_sample(x, grid, mode, padding_mode, align_corners):
    """Sample x (N, C, *size) at positions (N, ..., rank) in [-1, 1]; see `grid_sample`."""
    batch, channels, *sizes = x.shape
    if grid.shape[-1] != len(sizes) or grid.ndim != x.ndim:
        raise NodeError(f"grid of shape {grid.shape} does not fit an input of shape {x.shape}")
    dtype = x.dtype
    wide = jnp.promote_types(dtype, np.float32)
    if not jnp.issubdtype(dtype, jnp.inexact):
        wide = canonical(np.float64)
    pixels = x.reshape(batch, channels, math.prod(sizes)).astype(
        wide if mode != "nearest" else dtype
    )
    points = grid.reshape(batch, math.prod(grid.shape[1:-1]), len(sizes)).astype(
        jnp.promote_types(grid.dtype, np.float32)
    )

    def taps(position, size):
        """Yield per tap the index along one axis, its weight and whether it lies inside."""
        low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
        at = (position + 1) / 2 * (high - low) + low
        if mode == "nearest":
            at = jnp.round(at)
        outside = (at < low) | (at > high)
        if mode != "cubic" and padding_mode == "border":
            at = jnp.where(outside, jnp.clip(at, 0, size - 1), at)
        elif mode != "cubic" and padding_mode == "reflection":
            at = jnp.where(outside, _reflect(at, low, high), at)
        start = jnp.floor(at)
        if mode == "nearest":
            weights, first = (None,), 0
        elif mode == "linear":
            weights, first = (1 - (at - start), at - start), 0
        else:
            weights, first = _cubic_weights(at - start), -1
        for offset, weight in enumerate(weights, first):
            index = start + offset
            inside = (index >= 0) & (index < size)
            if padding_mode == "reflection":
                index = _reflect(index, low, high)
            yield jnp.clip(index, 0, size - 1).astype(np.int32), weight, inside

    check_neighbours({"nearest": 1, "linear": 2, "cubic": 4}[mode], len(sizes))
    # The grid lists coordinates from the innermost axis outwards.
    axes = [list(taps(points[..., -1 - i], size)) for i, size in enumerate(sizes)]
    total = jnp.zeros((), pixels.dtype)
    for corner in itertools.product(*axes):
        index, factor, inside = np.zeros(1, np.int32), None, np.ones(1, bool)
        for size, (i, weight, within) in zip(sizes, corner, strict=True):
            index = index * size + i
            factor = weight if factor is None else factor * weight
            inside = inside & within
        values = jnp.take_along_axis(pixels, index[:, None], axis=2, mode="clip")
        if padding_mode == "zeros":
            values = jnp.where(inside[:, None], values, jnp.zeros((), values.dtype))
        total = values if factor is None else total + factor[:, None].astype(wide) * values
    return total.astype(dtype).reshape(batch, channels, *grid.shape[1:-1])


Padding = Literal["zeros", "border", "reflection"]


@op("GridSample", since=16)
def grid_sample_16(
    x,
    grid,
    *,
    align_corners=0,
    mode: Literal["bilinear", "bicubic", "nearest"] = "bilinear",
    padding_mode: Padding = "zeros",
):
    return _grid_sample(x, grid, mode.removeprefix("bi"), padding_mode, align_corners)


@op("GridSample", since=20)
def grid_sample(
    x,
    grid,
    *,
    align_corners=0,
    mode: Literal["linear", "cubic", "nearest"] = "linear",
    padding_mode: Padding = "zeros",
):
    """Sample x (N, C, D1..Dr) at grid (N, ..., r), whose coordinates lie in [-1, 1].

    In cubic mode each pixel is clamped or reflected, not the position, as in PyTorch and
    onnxruntime (ONNX's reference clamps the position).
    """
    return _grid_sample(x, grid, mode, padding_mode, align_corners)
