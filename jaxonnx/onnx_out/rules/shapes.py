"""Primitives that move elements by their places alone."""

from math import prod
from typing import Any

import jax
import numpy as np
from jax.core import max_dim

from jaxonnx.onnx_out._nodes import FOLDED, Nodes, Tensor
from jaxonnx.onnx_out._rule_table import primitive
from jaxonnx.onnx_out._tensors import all_known, same_sizes


@primitive("reshape")
def reshape(g, x, *, out, dimensions=None):
    if dimensions is not None:
        x = g.transpose(x, dimensions)
    return g.reshape(x, out.shape)


@primitive("squeeze", "expand_dims")
def squeeze(g, x, *, out):
    return g.reshape(x, out.shape)


@primitive("transpose")
def transpose(g, x, *, permutation):
    return g.transpose(x, permutation)


@primitive("broadcast_in_dim")
def broadcast_in_dim(g, x, *, out, broadcast_dimensions):
    thin = getattr(x, "thin", None)
    if thin is not None and thin.ndim == x.ndim:  # broadcast from a tensor with as many axes
        x = thin
    sizes = [1] * len(out.shape)
    for axis, place in enumerate(broadcast_dimensions):
        sizes[place] = x.shape[axis]
    return expand(g, g.reshape(x, sizes), out.shape)


def expand(g: Nodes, x: Any, shape: Any) -> Any:
    """Broadcast x to a shape with as many axes; the result records x as `thin`.

    Elementwise rules read `thin` instead, so that most of these nodes are removed in the end.
    """
    if all_known(shape) and all_known(x.shape) and tuple(x.shape) == tuple(shape):
        return x
    if same_sizes(x.shape, shape):
        return x
    if isinstance(x, np.ndarray) and all_known(shape) and prod(shape) <= FOLDED:
        return np.broadcast_to(x, shape)
    return Tensor(g("Expand", x, g.sizes_of(shape)), shape, x.dtype, thin=x)


@primitive("concatenate")
def concatenate(g, *operands, dimension):
    return g("Concat", *operands, axis=dimension)


@primitive("stack")
def stack(g, *operands, axis, out):
    shape = [1 if i == axis else n for i, n in enumerate(out.shape)]
    return g("Concat", *(g.reshape(x, shape) for x in operands), axis=axis)


@primitive("tile")
def tile(g, x, *, reps):
    return g("Tile", x, g.sizes_of(reps))


@primitive("split")
def split(g, x, *, sizes, axis, out):
    return g.several("Split", len(out), x, g.sizes_of(sizes), axis=axis)


@primitive("unstack")
def unstack(g, x, *, axis, out):
    parts = g.several("Split", len(out), x, np.ones(len(out), np.int64), axis=axis)
    return [g.reshape(part, like.shape) for part, like in zip(parts, out, strict=True)]


@primitive("slice")
def slice_(g, x, *, start_indices, limit_indices, strides):
    return g.slice(x, start_indices, limit_indices, strides or (1,) * x.ndim)


@primitive("rev")
def rev(g, x, *, dimensions):
    return reverse(g, x, dimensions)


def reverse(g: Nodes, x: Any, axes: Any) -> Any:
    """Return x with the order of elements along these axes reversed."""
    axes = [axis for axis in axes if x.shape[axis] != 1]
    if not axes:
        return x
    end = np.full(len(axes), np.iinfo(np.int64).min + 1, np.int64)
    back = np.full(len(axes), -1, np.int64)
    turned = g("Slice", x, back, end, np.array(axes, np.int64), back)
    return Tensor(turned, x.shape, x.dtype)


@primitive("pad")
def pad(g, x, value, *, padding_config, out):
    # record a tensor that is zero around x: sums of such tensors may be a Concat (`join_disjoint`)
    y = g.cast_result(pad_tensor(g, x, value, padding_config), out)
    moved = [axis for axis, edges in enumerate(padding_config) if any(edges)]
    zero = isinstance(value, np.ndarray) and not value.any()
    if zero and len(moved) == 1 and all_known([x.shape[moved[0]], *padding_config[moved[0]]]):
        low, high, inner = padding_config[moved[0]]
        if min(low, high) >= 0 and not inner:
            y.pieces = moved[0], {low: x}
    return y


def join_disjoint(g: Nodes, x: Any, y: Any, out: Any) -> Any:
    """Write the sum of two zero-padded tensors whose parts do not overlap.

    The gradient of an array that is read in slices is such a sum. It becomes a Concat once the
    parts cover the axis.

    Returns:
      The sum; None if x and y are not such tensors.
    """
    first, second = getattr(x, "pieces", None), getattr(y, "pieces", None)
    if first is None or second is None or first[0] != second[0]:
        return None
    axis, pieces = first[0], dict(sorted((first[1] | second[1]).items()))
    ends = [start + piece.shape[axis] for start, piece in pieces.items()]
    starts = [*pieces, out.shape[axis]]
    overlap = any(end > start for end, start in zip(ends, starts[1:], strict=True))
    if overlap or len(pieces) < len(first[1]) + len(second[1]):
        return None
    if [0, *ends] == starts:
        return g("Concat", *pieces.values(), axis=axis)
    sum_ = Tensor(g("Add", x, y), out.shape, out.dtype)
    sum_.pieces = axis, pieces
    return sum_


def pad_tensor(g: Nodes, x: Any, value: Any, config: Any) -> Any:
    """Pad x as `lax.pad` does.

    Args:
      x: a tensor or array.
      value: the scalar that fills.
      config: (low, high, interior) for each axis; negative edges cut elements off.
    """
    shape = list(x.shape)
    # interior: give each element an axis of its own, pad that at its end, merge the axes again, and
    # cut off what was added after the last element
    for axis, (_, _, inner) in enumerate(config):
        if inner and (not all_known([shape[axis]]) or shape[axis] > 1):
            n = shape[axis]
            apart = g.reshape(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
            apart = _pad(
                g, apart, value, [(0, inner * (i == axis + 1)) for i in range(len(shape) + 1)]
            )
            x = g.reshape(apart, [*shape[:axis], n * (inner + 1), *shape[axis + 1 :]])
            ends = [*shape[:axis], n * (inner + 1) - inner, *shape[axis + 1 :]]
            x = g.slice(x, [0] * len(shape), ends, [1] * len(shape))
            shape = ends
    x = _pad(g, x, value, [(max_dim(low, 0), max_dim(high, 0)) for low, high, _ in config])
    shape = list(x.shape)
    starts = [max_dim(-low, 0) for low, _, _ in config]
    ends = [n - max_dim(-high, 0) for n, (_, high, _) in zip(shape, config, strict=True)]
    return g.slice(x, starts, ends, [1] * len(shape))


def _pad(g: Nodes, x: Any, value: Any, edges: Any) -> Any:
    """Append Pad with (low, high), not negative, for each axis, in a dtype that runtimes pad."""
    sizes = [low for low, _ in edges] + [high for _, high in edges]
    if all_known(sizes) and not any(sizes):
        return x
    shape = [n + low + high for n, (low, high) in zip(x.shape, edges, strict=True)]
    pads = g.sizes_of(sizes)
    dtype = {2: np.float32 if x.dtype.kind not in "iu" else np.int32, 1: np.int8}.get(
        x.dtype.itemsize, x.dtype
    )
    dtype = np.dtype(np.uint8 if x.dtype == bool else dtype)
    y = g("Pad", g.cast(x, dtype), pads, g.cast(value, dtype), mode="constant")
    return g.cast(Tensor(y, shape, dtype), x.dtype)


@primitive("iota")
def iota(g, *, out, dimension):
    wide = out.dtype if out.dtype in (np.int32, np.int64, np.float32) else np.dtype(np.int64)
    size = out.shape[dimension]
    if all_known([size]) and size <= FOLDED:
        line = np.arange(size, dtype=wide)
    else:
        count = (
            np.int64(size)
            if all_known([size])
            else g.reshape(Tensor(g.sizes_of([size]), (1,), np.int64), ())
        )
        line = Tensor(g("Range", np.int64(0), count, np.int64(1)), (size,), np.int64)
        line = g.cast(line, wide)
    sizes = [size if i == dimension else 1 for i in range(len(out.shape))]
    return expand(g, g.cast(g.reshape(line, sizes), out.dtype), out.shape)


@primitive("empty", "empty2")
def empty(g, *_, out):
    return expand(g, np.zeros([1] * len(out.shape), out.dtype), out.shape)


@primitive("dim_as_value")
def dim_as_value(g, *, dim, out):
    value = Tensor(g.sizes_of([dim]), (1,), np.int64)
    return g.cast(g.reshape(value, ()), out.dtype)


@primitive("dynamic_slice")
def dynamic_slice(g, x, *starts, slice_sizes, out):
    """Write a Gather for each axis if sizes are known, else one Slice.

    The result of a Slice with computed bounds has no known shape for runtimes.
    """
    if not x.shape:
        return x
    begin = _starts(g, x.shape, starts[: x.ndim], slice_sizes)
    if not all_known(slice_sizes):
        end = g("Add", begin, g.sizes_of(slice_sizes))
        return g("Slice", x, begin, end, np.arange(x.ndim, dtype=np.int64))
    for axis, (whole, size) in enumerate(zip(x.shape, slice_sizes, strict=True)):
        if not same_sizes([whole], [size]):
            first = g("Gather", begin, np.array([axis], np.int64), axis=0)
            x = g("Gather", x, g("Add", first, np.arange(size, dtype=np.int64)), axis=axis)
    return x


@primitive("dynamic_update_slice")
def dynamic_update_slice(g, x, update, *starts, out):
    """Write ScatterND, with the indices of all elements of `update` shifted by the start."""
    if not x.shape:
        return update
    begin = _starts(g, x.shape, starts, update.shape)
    if all_known(update.shape):
        places: Any = np.indices(update.shape, np.int64)
        places = np.moveaxis(places, 0, -1)
    else:
        like = jax.ShapeDtypeStruct((*update.shape, 1), np.int64)
        lines = (iota(g, out=like, dimension=axis) for axis in range(x.ndim))
        places = g("Concat", *lines, axis=x.ndim)
    return g("ScatterND", x, g("Add", places, begin), update)


def _starts(g: Nodes, shape: Any, starts: Any, sizes: Any) -> str:
    """Return the start of a slice, int64[rank], clipped so that the slice lies within the array."""
    parts = [g.reshape(g.cast(start, np.int64), (1,)) for start in starts]
    if all(isinstance(part, np.ndarray) for part in parts):
        begin = np.concatenate(parts)
    else:
        begin = g("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
    last = g.sizes_of([n - size for n, size in zip(shape, sizes, strict=True)])
    return g("Max", g("Min", begin, last), np.zeros(len(parts), np.int64))
