"""Joining, splitting, slicing, padding, masking and reversing tensors."""

import math
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX, axes_of, axis_of, cast
from jaxonnx.registry import Outputs, Static, op, xp


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
        raise NodeError(f"sizes {sizes} do not add up to the {x.shape[axis]} of axis {axis}")
    ends = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True))


def _equal(x, axis, parts):
    length = x.shape[axis_of(axis, x.ndim)]
    if length % parts:
        raise NodeError(f"{length} elements of axis {axis} do not split into {parts} equal parts")
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
