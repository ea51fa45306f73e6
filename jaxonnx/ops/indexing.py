"""Gathering and scattering by index, and selection by value."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._axes import table
from jaxonnx.errors import NodeError
from jaxonnx.lowering import ChangedRows
from jaxonnx.ops.common import axis_of, index_of
from jaxonnx.registry import Static, is_known, op, xp


@op("Gather", since=1, weights={"x": table("axis")}, accepts={"x": ChangedRows})
def gather(x, indices, *, axis=0):
    """Slices of `x` along `axis`: the shape of `indices` takes the place of that axis."""
    axis = axis_of(axis, x.ndim)
    size = x.shape[axis]
    indices = index_of(indices, size)
    if is_known(x, indices):
        return np.take(x, indices, axis)
    if isinstance(x, ChangedRows):
        if axis == 0 and x.by_row:
            rows = jnp.take(x.value, indices, 0)
            places = jnp.where(indices < 0, indices + size, indices)
            return rows + x.change_rows(places).astype(rows.dtype)
        x = x.to_array()
    if isinstance(x, np.ndarray):
        x = jnp.asarray(x)
    if is_known(indices) and indices.ndim == 0:
        return lax.index_in_dim(x, int(indices), axis, keepdims=False)
    if is_known(indices) and indices.ndim == 1 and indices.size:
        first, step = int(indices[0]), int(indices[1] - indices[0]) if indices.size > 1 else 1
        if step > 0 and (np.diff(indices) == step).all():
            return lax.slice_in_dim(x, first, int(indices[-1]) + 1, step, axis)
    return jnp.take(x, indices, axis)


def _mesh(indices, axis):
    """Return the index of every element of `indices`, with `indices` itself at `axis`."""
    mesh = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    mesh[axis] = indices
    return tuple(mesh)


def _check_rank(x, indices):
    if indices.ndim != x.ndim:
        raise NodeError(f"indices of rank {indices.ndim} do not fit data of rank {x.ndim}")


@op("GatherElements", since=11)
def gather_elements(x, indices, *, axis=0):
    """y[i, j] = x[indices[i, j], j] for axis 0, and so on; `indices` may be smaller than `x`."""
    axis = axis_of(axis, x.ndim)
    _check_rank(x, indices)
    indices = index_of(indices, x.shape[axis])
    if is_known(x, indices):
        return x[_mesh(indices, axis)]
    within = (slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))
    return jnp.take_along_axis(jnp.asarray(x)[tuple(within)], indices, axis)


def _tuples(indices, shape, batch=0):
    """Split the last axis of `indices`: one array of indices for each axis of `shape`."""
    count = indices.shape[-1]
    if count > len(shape) - batch:
        raise NodeError(f"index tuples of length {count} do not fit shape {tuple(shape)}")
    return tuple(index_of(indices[..., i], shape[batch + i]) for i in range(count))


@op("GatherND", since=11)
def gather_nd(x, indices, *, batch_dims=0):
    """The innermost axis of `indices` holds index tuples into `x` after its batch axes."""
    if not 0 <= batch_dims < min(x.ndim, indices.ndim):
        raise NodeError(
            f"batch_dims {batch_dims} must be below the ranks of {x.shape} and {indices.shape}"
        )
    if indices.shape[:batch_dims] != x.shape[:batch_dims]:
        raise NodeError(f"the first {batch_dims} axes of {x.shape} and {indices.shape} differ")
    tuples = _tuples(indices, x.shape, batch_dims)
    outer = indices.shape[:-1]
    batch = tuple(
        np.arange(n).reshape((n,) + (1,) * (len(outer) - 1 - i))
        for i, n in enumerate(outer[:batch_dims])
    )
    if is_known(x, indices):
        return x[batch + tuples]
    return jnp.asarray(x).at[batch + tuples].get(mode="fill")


Reduction = Literal["none", "add", "mul", "max", "min"]
_REDUCE = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(x, index, updates, reduction):
    """Return `x` with `updates` put at `index`, or combined with the values there.

    With reduction none and an index that occurs twice, which of the updates wins is not defined.
    """
    if is_known(x, index, updates):
        y = x.copy()
        if reduction == "none":
            y[index] = updates
        else:
            _REDUCE[reduction].at(y, index, updates)
        return y
    x = jnp.asarray(x)
    updates = jnp.asarray(updates)
    if updates.size == 0:
        return x
    if reduction == "mul":
        return _scatter_product(x, index, updates)
    method = "set" if reduction == "none" else reduction
    return getattr(x.at[index], method)(updates)


def _scatter_product(x, index, updates):
    """Multiply by updates that may share a place, with derivatives also where one is zero.

    XLA's own scatter-multiply has none for shared places. So the updates are sorted by place, each
    run of equal places is multiplied by a segmented scan, and the last of a run holds its product.
    """
    width = len(index)
    lead = np.broadcast_shapes(*(i.shape for i in index))
    strides = np.cumprod([1, *x.shape[:width][::-1]])[-2::-1]
    flat = x.reshape(-1, *x.shape[width:])
    wrapped = [jnp.where(i < 0, i + n, i) for i, n in zip(index, x.shape, strict=False)]
    outside = [(i < 0) | (i >= n) for i, n in zip(wrapped, x.shape, strict=False)]
    place = sum(i * int(s) for i, s in zip(wrapped, strides, strict=True))
    place = jnp.where(sum(outside) > 0, len(flat), place)
    place = jnp.broadcast_to(place, lead).reshape(-1)
    order = jnp.argsort(place)
    place, values = place[order], updates.reshape(-1, *x.shape[width:])[order]
    new = jnp.concatenate([jnp.ones(1, bool), place[1:] != place[:-1]])[: len(place)]
    first = new.reshape(-1, *(1,) * (values.ndim - 1))

    def combine(left, right):
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] * right[1])

    _, products = lax.associative_scan(combine, (first, values))
    last = jnp.roll(new, -1)
    # Distinct places outside of `x` for what is not written.
    target = jnp.where(last, place, len(flat) + jnp.arange(len(place)))
    flat = flat.at[target].multiply(products, mode="drop", unique_indices=True)
    return flat.reshape(x.shape)


@op("Scatter", since=9, without=("reduction",), shapes="indices (*I), updates (*I)")
@op("ScatterElements", since=11, without=("reduction",), shapes="indices (*I), updates (*I)")
@op("ScatterElements", since=16, shapes="indices (*I), updates (*I)")
def scatter_elements(x, indices, updates, *, axis=0, reduction: Reduction = "none"):
    """y[indices[i, j], j] = updates[i, j] for axis 0, and so on."""
    axis = axis_of(axis, x.ndim)
    _check_rank(x, indices)
    return _scatter(x, _mesh(index_of(indices, x.shape[axis]), axis), updates, reduction)


@op("ScatterND", since=11, without=("reduction",))
@op("ScatterND", since=16)
def scatter_nd(x, indices, updates, *, reduction: Reduction = "none"):
    """The innermost axis of `indices` holds index tuples; each names the place of one slice."""
    index = _tuples(indices, x.shape)
    shape = indices.shape[:-1] + x.shape[len(index) :]
    if updates.shape != shape:
        raise NodeError(f"updates must have shape {shape}, got {updates.shape}")
    return _scatter(x, index, updates, reduction)


@op("TensorScatter", since=24)
def tensor_scatter(
    past, update, write_indices=None, *, axis=-2, mode: Literal["linear", "circular"] = "linear"
):
    """Write `update` into a cache along `axis`, from `write_indices[b]` on for batch entry b."""
    axis = axis_of(axis, past.ndim)
    if axis == 0:
        raise NodeError("axis must not be the batch axis 0")
    size, length = past.shape[axis], update.shape[axis]
    start = np.zeros(past.shape[0], np.int64) if write_indices is None else write_indices
    place = start[:, None] + np.arange(length)
    if mode == "circular":
        place = place % size
    np_ = xp(past, update, start)
    index = np.arange(past.shape[0])[:, None], index_of(place, size)
    cache = np_.moveaxis(past, axis, 1)
    return np_.moveaxis(_scatter(cache, index, np_.moveaxis(update, axis, 1), "none"), 1, axis)


@op("Compress", since=9)
def compress(x, condition: Static, *, axis=None):
    """The slices along `axis` (of the flattened tensor if None) at which `condition` holds."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.ndim)
    chosen = np.flatnonzero(condition)
    return xp(x).take(x, index_of(chosen, x.shape[axis]), axis)


@op("NonZero", since=9, dynamic=True)
def non_zero(x):
    """The indices of the non-zero elements, one row per axis, in row-major order."""
    x = np.asarray(x)
    if x.ndim == 0:
        return np.zeros((0, int(x != 0)), np.int64)
    return np.stack(np.nonzero(x)).astype(np.int64)


@op("Unique", since=11, dynamic=True)
def unique(x, *, axis=None, sorted=1):
    """Distinct elements, or slices along `axis`: themselves, first places, inverse and counts."""
    x = np.asarray(x)
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.ndim)
    comparable = x.astype(str) if x.dtype == object else x
    along = None if x.ndim == 1 else axis
    _, first, inverse, counts = np.unique(comparable, True, True, True, axis=along)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return np.take(x, first, axis), *(a.astype(np.int64) for a in (first, inverse, counts))
