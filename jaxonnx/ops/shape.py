"""Shapes and views: operators that change how a tensor is laid out, but none of its values."""

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxonnx._constraints import NotNegative, Positive
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.lowering import LowRank, MergedRows, Packed, RoundedArray, reshape_rows
from jaxonnx.ops.common import FIXED_BATCH, axes_of, axis_of, sizes
from jaxonnx.registry import Static, op, xp


@op("Identity", since=1, view="same axes")
def identity(x):
    """The input itself, also when it is a sequence or an optional value."""
    return x


@op("Shape", since=1)
def shape(x, *, start=0, end=None):
    """The dimensions [start, end), always known; bounds are clamped as Python clamps slices."""
    return sizes(x.shape[start:end])


@op("Size", since=1)
def size(x):
    return sizes(x.size)


def _reshape(x, shape, allowzero=0):
    shape = np.asarray(shape).tolist()
    if allowzero and 0 in shape and -1 in shape:
        raise NodeError(f"with allowzero=1 the target {shape} must not hold both 0 and -1")
    copied = [] if allowzero else [i for i, d in enumerate(shape) if d == 0]
    if any(i >= x.ndim for i in copied):
        raise NodeError(f"a 0 in the target {shape} names no axis of the input's {tuple(x.shape)}")
    if shape.count(-1) > 1 or any(d < -1 for d in shape):
        raise NodeError(f"the target {shape} must hold at most one -1 and nothing below it")
    for i in copied:
        shape[i] = x.shape[i]
    if -1 in shape:
        # Without the copied axes, so that a batch of 0 leaves the rest determined.
        have = math.prod(n for i, n in enumerate(x.shape) if i not in copied)
        fixed = math.prod(d for i, d in enumerate(shape) if d != -1 and i not in copied)
        if fixed and have % fixed == 0:
            shape[shape.index(-1)] = have // fixed
    if math.prod(shape) != x.size:
        raise NodeError(
            f"cannot reshape {tuple(x.shape)} ({x.size} elements) to {shape}: the target is fixed "
            "in the file. If the sizes differ in the batch or sequence axis, the exporter froze "
            "that axis: feed the size it was exported with, or export with a dynamic axis; "
            "jaxonnx.load(path, batch='any') may open the batch"
        )
    return reshape_rows(x, shape)


@op("Reshape", since=1, view=True, accepts={"x": RoundedArray})
def reshape_1(x, *, shape=None):
    return _reshape(x, shape or ())


@op(
    "Reshape",
    since=5,
    view=True,
    shapes="shape (r)",
    accepts={"x": MergedRows | RoundedArray | LowRank},
)
def reshape(x, shape: Static, *, allowzero=0):
    """-1 is inferred; 0 keeps the input's dimension, or with `allowzero` is meant literally."""
    if isinstance(x, LowRank) and not jnp.issubdtype(x.dtype, jnp.floating):
        # an embedding in few bits that reads the codes of its output layer, row by row
        return x.map(lambda codes: _reshape(codes, shape, allowzero))
    x = x.to_array() if isinstance(x, LowRank) else x
    return _reshape(x, shape, allowzero)


@op("Flatten", since=1, view=True, accepts={"x": RoundedArray})
def flatten(x, *, axis=1):
    if axis != x.ndim:
        axis = axis_of(axis, x.ndim)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _squeeze(x, axes):
    if axes is None:
        return x.squeeze()
    axes = axes_of(axes, x.ndim)
    if any(x.shape[axis] != 1 for axis in axes):
        hint = FIXED_BATCH if 0 in axes and x.shape[0] != 1 else ""
        raise NodeError(f"axes {list(axes)} of shape {tuple(x.shape)} are not all of size 1{hint}")
    return x.squeeze(axes)


@op("Squeeze", since=1, view=True, accepts={"x": RoundedArray})
def squeeze_1(x, *, axes=None):
    return _squeeze(x, axes)


@op("Squeeze", since=13, view=True, accepts={"x": RoundedArray})
def squeeze(x, axes: Static | None = None):
    return _squeeze(x, axes)


def _unsqueeze(x, axes):
    return xp(x).expand_dims(x, axes_of(axes, x.ndim + np.size(axes)))


@op("Unsqueeze", since=1, view=True, accepts={"x": RoundedArray})
def unsqueeze_1(x, *, axes):
    return _unsqueeze(x, axes)


@op("Unsqueeze", since=13, view=True, accepts={"x": RoundedArray})
def unsqueeze(x, axes: Static):
    """Axes of size 1 at the positions `axes` of the result."""
    return _unsqueeze(x, axes)


@op("Transpose", since=1, view=True, accepts={"x": LowRank | Packed | RoundedArray})
def transpose(x, *, perm=None):
    if perm is not None and sorted(perm) != list(range(x.ndim)):
        raise NodeError(f"perm {perm} is not a permutation of the {x.ndim} axes")
    return x.transpose(perm)


@op("Expand", since=8)
def expand(x, shape: Static):
    """Broadcast in both directions: a 1 in either shape gives way to the other's size."""
    target = jnp.broadcast_shapes(x.shape, tuple(shape.tolist()))
    check_size(target, x.dtype)
    return xp(x).broadcast_to(x, target)


@op("Tile", since=1)
def tile_1(x, tiles: Static | NotNegative, axis: Static):
    repeats = [1] * x.ndim
    repeats[axis_of(int(axis.item()), x.ndim)] = int(tiles.item())
    return _tile(x, repeats)


@op("Tile", since=6, shapes="x (*D), repeats (rank D)")
def tile(x, repeats: Static | NotNegative):
    return _tile(x, repeats.tolist())


def _tile(x, repeats):
    check_size([n * r for n, r in zip(x.shape, repeats, strict=True)], x.dtype)
    return xp(x).tile(x, repeats)


@op("DepthToSpace", since=1, shapes="x (N, blocksize*blocksize*C, H, W)")
def depth_to_space(x, *, blocksize: Positive, mode: Literal["DCR", "CRD"] = "DCR"):
    """(N, C, H, W) -> (N, C / b^2, H b, W b); blocks are the outer (DCR) or inner part of C."""
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        blocks = x.reshape(n, b, b, c // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // b**2, h * b, w * b)


@op("SpaceToDepth", since=1, shapes="x (N, C, blocksize*H, blocksize*W)")
def space_to_depth(x, *, blocksize: Positive, mode: Literal["DCR", "CRD"] = "DCR"):
    """(N, C, H, W) -> (N, C b^2, H / b, W / b): the inverse of DepthToSpace."""
    n, c, h, w = x.shape
    b = blocksize
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    blocks = x.reshape(n, c, h // b, b, w // b, b).transpose(order)
    return blocks.reshape(n, c * b**2, h // b, w // b)
