"""Gathering, scattering and selecting; joining, splitting, slicing, padding and reversing."""

import math
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx._weights import table
from jaxonnx.errors import NodeError
from jaxonnx.lowering import ChangedRows
from jaxonnx.ops.common import FIXED_BATCH, INDEX, axes_of, axis_of, cast, index_of
from jaxonnx.registry import Outputs, Static, is_known, op, xp


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


@op("Concat", since=1)
def concat_1(*xs, axis=None):
    return concat(*xs, axis=1 if axis is None else axis)


@op("Concat", since=4, pointwise=True)
def concat(*xs, axis):
    axis = axis_of(axis, xs[0].ndim)
    dtype = xs[0].dtype
    if dtype in (ml_dtypes.int2, ml_dtypes.uint2) and xp(*xs) is jnp:
        # XLA on the CPU aborts the process when it concatenates 2-bit integers.
        return jnp.concatenate([x.astype(np.int8) for x in xs], axis).astype(dtype)
    return xp(*xs).concatenate(xs, axis)


def _split(x, axis, sizes):
    axis = axis_of(axis, x.ndim)
    sizes = [int(size) for size in sizes]
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise NodeError(
            f"sizes {sizes} do not add up to the {x.shape[axis]} of axis {axis}"
            f"{'' if axis else FIXED_BATCH}"
        )
    ends = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True))


def _equal(x, axis, parts):
    axis = axis_of(axis, x.ndim)
    length = x.shape[axis]
    if length % parts:
        raise NodeError(
            f"{length} elements of axis {axis} do not split into {parts} equal parts"
            f"{'' if axis else FIXED_BATCH}"
        )
    return [length // parts] * parts


@op("Split", since=1)
def split_1(x, sizes: Static | None = None, *, axis=None, split=None, outputs: Outputs):
    """The sizes come from the second input or the attribute `split`, else the parts are equal."""
    return split_2(x, axis=axis or 0, split=split if sizes is None else sizes, outputs=outputs)


@op("Split", since=2)
def split_2(x, *, axis=0, split=None, outputs: Outputs):
    return _split(x, axis, _equal(x, axis, outputs) if split is None else split)


@op("Split", since=13)
def split(
    x, sizes: Static | None = None, *, axis=0, num_outputs: Positive | None = None, outputs: Outputs
):
    """Parts of these sizes, or `num_outputs` of equal size, the last of which may be smaller."""
    if sizes is None and num_outputs is not None:
        length = x.shape[axis_of(axis, x.ndim)]
        chunk = math.ceil(length / num_outputs)
        listed = min(num_outputs, outputs)  # those that the node does not list are not made
        parts = np.clip(length - chunk * np.arange(listed), 0, chunk).tolist()
        return _split(x, axis, parts + [length - sum(parts)] * (listed < num_outputs))
    return _split(x, axis, _equal(x, axis, outputs) if sizes is None else sizes)


def _slice(x, starts, ends, axes=None, steps=None):
    axes = range(np.size(starts)) if axes is None else axes
    steps = [1] * np.size(starts) if steps is None else steps
    window = [slice(None)] * x.ndim
    bounds = (np.asarray(v).tolist() for v in (starts, ends))
    for start, end, axis, step in zip(*bounds, axes, steps, strict=True):
        axis = axis_of(int(axis), x.ndim)
        window[axis] = _window(start, end, int(step), x.shape[axis])
    return x[tuple(window)]


def _window(start, end, step, size):
    """Clamp as specified, which for a backward slice from far left differs from Python."""
    if step == 0:
        raise NodeError("a step of 0 selects nothing")
    if isinstance(end, int) and not isinstance(size, int) and end >= np.iinfo(np.int32).max:
        end = size
    if isinstance(size, int):  # a step beyond the end takes one element, whatever its length
        step = max(-max(size, 1), min(step, max(size, 1)))
    start += size if start < 0 else 0
    end += size if end < 0 else 0
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if size else slice(0, 0)


@op("Slice", since=1, shapes="starts (n), ends (n), axes (n)")
def slice_1(x, *, starts, ends, axes=None):
    return _slice(x, starts, ends, axes)


@op("Slice", since=10, shapes="starts (n), ends (n), axes (n), steps (n)")
def slice_10(
    x, starts: Static, ends: Static, axes: Static | None = None, steps: Static | None = None
):
    """Bounds count from the end when negative and are clamped; negative steps run backwards."""
    return _slice(x, starts, ends, axes, steps)


PadMode = Literal["constant", "reflect", "edge", "wrap"]


def _pad(x, pads, mode, value=None, axes=None):
    axes = axes_of(axes, x.ndim)
    if len(pads) != 2 * len(axes):
        raise NodeError(f"pads {list(pads)} must hold two numbers for each of the axes {axes}")
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(axes):
        widths[axis] = int(pads[k]), int(pads[k + len(axes)])
    if any(low + high + n < 0 for (low, high), n in zip(widths, x.shape, strict=True)):
        raise NodeError(f"pads {list(pads)} remove more than there is of shape {tuple(x.shape)}")
    check_size([low + n + high for (low, high), n in zip(widths, x.shape, strict=True)], x.dtype)
    # A negative pad removes elements, before the rest is padded from what remains.
    slices = []
    for axis, ((low, high), n) in enumerate(zip(widths, x.shape, strict=True)):
        begin, end = max(0, -low), max(0, -high)
        widths[axis] = max(0, low), max(0, high)
        if (begin or end) and begin + end > n:  # of the padding, too
            if mode != "constant":
                raise NodeError(f"pads {list(pads)} leave nothing of axis {axis} of {x.shape}")
            begin, end, widths[axis] = n, 0, (low + n + high, 0)
        slices.append(slice(begin, n - end))
    x = x[tuple(slices)]
    if mode in ("reflect", "wrap"):
        for axis, (low, high) in enumerate(widths):
            n = x.shape[axis]
            if isinstance(n, int) and 0 < n <= max(low, high):
                # several turns, of which NumPy and JAX take one after the other
                x = xp(x).take(x, _mirror_indices(low, n, high, mode), axis)
                widths[axis] = (0, 0)
    if mode != "constant":
        return xp(x).pad(x, widths, mode)
    if value is None:
        value = np.array("" if x.dtype == object else 0, x.dtype)
    return xp(x, value).pad(x, widths, constant_values=value.reshape(()))


def _mirror_indices(low, n, high, mode):
    """Return the place of each element of a padded axis of `n` in that axis."""
    check_size([low + n + high], INDEX, host=True)
    place = np.arange(-low, n + high)
    if mode == "wrap":
        return place % n
    period = max(2 * n - 2, 1)
    place %= period
    return np.where(place < n, place, period - place)


@op("Pad", since=1)
def pad_1(x, *, paddings, mode: PadMode = "constant", value=0.0):
    return _pad(x, paddings, mode, np.array(value, x.dtype))


@op("Pad", since=2)
def pad_2(x, *, pads, mode: PadMode = "constant", value=0.0):
    return _pad(x, pads, mode, np.array(value, x.dtype))


@op("Pad", since=11)
def pad(x, pads: Static, value=None, axes: Static | None = None, *, mode: PadMode = "constant"):
    """`pads` are all begins, then all ends, of `axes`; the modes are those of `numpy.pad`."""
    return _pad(x, pads, mode, value, axes)


@op("CenterCropPad", since=18)
def center_crop_pad(x, shape: Static, *, axes=None):
    """Crop or zero-pad `axes` to `shape` around the centre; an odd rest goes to the end."""
    axes = axes_of(axes, x.ndim)
    if len(shape) != len(axes):
        raise NodeError(f"{len(shape)} sizes are given for {len(axes)} axes")
    rest = [int(target) - x.shape[axis] for target, axis in zip(shape, axes, strict=True)]
    begins = [math.trunc(r / 2) for r in rest]
    ends = [r - b for r, b in zip(rest, begins, strict=True)]
    return _pad(x, begins + ends, "constant", axes=axes)


@op("Trilu", since=14)
def trilu(x, k=None, *, upper=1):
    """Keep the elements on and above (or below) the k-th diagonal of the innermost matrices."""
    np_ = xp(x, k)
    offset = np_.arange(x.shape[-1]) - np_.arange(x.shape[-2])[:, None]
    k = 0 if k is None else k.reshape(())
    return np_.where(offset >= k if upper else offset <= k, x, np_.zeros((), x.dtype))


@op("ReverseSequence", since=10)
def reverse_sequence(x, lengths, *, batch_axis=1, time_axis=0):
    """Reverse the first `lengths[b]` steps of each sequence b and keep the rest in place."""
    if {batch_axis, time_axis} != {0, 1}:
        raise NodeError(f"batch_axis {batch_axis} and time_axis {time_axis} must be 0 and 1")
    batch = x.shape[batch_axis]
    if lengths.shape != (batch,):
        raise NodeError(f"sequence lengths of shape {lengths.shape} do not fit {batch} sequences")
    np_ = xp(x, lengths)
    steps = x.shape[time_axis]
    if isinstance(lengths, np.ndarray) and ((lengths < 0) | (lengths > steps)).any():
        raise NodeError(f"sequence lengths {lengths.tolist()} must lie in [0, {steps}]")
    length = np_.expand_dims(lengths, time_axis)
    t = np_.expand_dims(np_.arange(steps), batch_axis)
    order = np_.where(t < length, length - 1 - t, t)
    return np_.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), time_axis)


@op("OneHot", since=9, shapes="values (2)")
def one_hot(indices, depth: Static | Positive, values, *, axis=-1):
    """`values` is [off, on]; an index outside [-depth, depth) gives a row of off values."""
    np_ = xp(indices, values)
    count = int(depth.item())
    axis = axis_of(axis, indices.ndim + 1)
    check_size((*indices.shape, count), values.dtype)
    check_size((count,), INDEX)
    indices = np_.expand_dims(cast(indices, INDEX), axis)
    indices = np_.where(indices < 0, indices + count, indices)
    classes = np_.arange(count).reshape((count,) + (1,) * (indices.ndim - 1 - axis))
    return np_.where(indices == classes, values[1], values[0])
