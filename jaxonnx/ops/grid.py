"""Sampling at free positions: AffineGrid, GridSample."""

import itertools
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical
from jaxonnx.ops.windows import check_neighbours
from jaxonnx.registry import Static, op


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
