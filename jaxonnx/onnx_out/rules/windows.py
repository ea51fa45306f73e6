"""Reductions over axes and over windows, order, and JAX's own convolutions."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._nodes import Nodes, Tensor, ordered_dtype
from jaxonnx.onnx_out._rule_table import Refusal, composed, primitive
from jaxonnx.onnx_out._tensors import greatest_of, least_of
from jaxonnx.onnx_out.rules.shapes import pad_tensor, reverse

OPERATORS = {
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
    "reduce_sum": "ReduceSum",
}

for _name, _operator in OPERATORS.items():

    @primitive(_name)
    def reduce_(g, x, *, axes, out, operator=_operator):
        if not axes:
            return x
        # a sum of uint64 wraps to the same bits in int64, which runtimes can sum
        wraps = x.dtype == np.uint64 and operator == "ReduceSum"
        dtype = np.dtype(np.int64) if wraps else ordered_dtype(x.dtype)
        return g.cast(g.reduce_tensor(operator, g.cast(x, dtype), axes), out.dtype)


for _name, _operator in {"reduce_and": "ReduceMin", "reduce_or": "ReduceMax"}.items():

    @primitive(_name)
    def reduce_logical(g, x, *, axes, out, operator=_operator):
        if x.dtype != bool:
            raise Refusal("it supports bool, not integers")
        if not axes:
            return x
        y = Tensor(g.reduce(operator, g.cast(x, np.int32), axes), out.shape, np.int32)
        return g.cast(y, bool)


@composed("reduce_xor")
def reduce_xor(x, *, axes):
    if x.dtype == bool:
        return jnp.sum(x.astype(jnp.int32), axes) % 2 == 1
    rows = jnp.moveaxis(x, axes, range(len(axes)))
    rows = rows.reshape(-1, *rows.shape[len(axes) :])
    while (half := len(rows) // 2) > 0:
        rows = jnp.concatenate([rows[:half] ^ rows[half : 2 * half], rows[2 * half :]])
    return jnp.sum(rows, 0, dtype=x.dtype)  # of one row, or of none


for _name, _operator in {"argmax": "ArgMax", "argmin": "ArgMin"}.items():

    @primitive(_name)
    def place(g, x, *, axes, index_dtype, out, operator=_operator):
        y = g(operator, g.cast(x, ordered_dtype(x.dtype)), axis=int(axes[0]), keepdims=0)
        return g.cast(Tensor(y, out.shape, np.int64), index_dtype)


@primitive("cumsum")
def cumsum(g, x, *, axis, reverse, out):
    return g.wide("CumSum", x, np.int64(axis), reverse=int(reverse), dtype=out.dtype)


def _register_running(name, combine, start):
    """Register a cumulative reduction, in log2(n) steps: combine with the values 1, 2, 4... before.

    Args:
      name: of the primitive.
      combine: the function of two arrays.
      start: a function of the dtype that returns the neutral element.
    """

    @composed(name)
    def rule(x, *, axis, reverse):
        n, step = x.shape[axis], 1
        fill = jnp.asarray(start(x.dtype), x.dtype)
        while step < n:
            edges = [(0, 0, 0)] * x.ndim
            edges[axis] = (-step, step, 0) if reverse else (step, -step, 0)
            x = combine(x, lax.pad(x, fill, edges))
            step *= 2
        return x


_register_running("cummax", lax.max, least_of)
_register_running("cummin", lax.min, greatest_of)
_register_running("cumprod", lax.mul, lambda dtype: 1)
_register_running("cumlogsumexp", jnp.logaddexp, least_of)


@primitive("sort")
def sort(g, *operands, dimension, num_keys, out):
    """Sort by each key in turn, the last one first.

    TopK is stable (equal elements keep their order), so that the first key decides.
    """
    operands = list(operands)
    for key in reversed(range(num_keys)):
        x = operands[key]
        size = g.sizes_of([x.shape[dimension]])
        wide = g.cast(x, ordered_dtype(x.dtype))
        _, order = g.several("TopK", 2, wide, size, axis=dimension, largest=0, sorted=1)
        operands = [
            Tensor(g("GatherElements", y, order, axis=dimension), y.shape, y.dtype)
            for y in operands
        ]
    return operands


@primitive("top_k")
def top_k(g, x, *, k, out, axis=-1):
    wide = g.cast(x, ordered_dtype(x.dtype))
    values, places = g.several("TopK", 2, wide, g.sizes_of([k]), axis=axis)
    values, places = Tensor(values, out[0].shape, wide.dtype), Tensor(places, (), np.int64)
    return g.cast(values, out[0].dtype), g.cast(places, out[1].dtype)


@composed("approx_top_k")
def approx_top_k(x, *, k, reduction_dimension, is_max_k):
    """Return the exact greatest or least, which satisfies any recall target."""
    x = jnp.moveaxis(x if is_max_k else -x, reduction_dimension, -1)
    values, places = (jnp.moveaxis(y, -1, reduction_dimension) for y in lax.top_k(x, k))
    return values if is_max_k else -values, places


@primitive("conv_general_dilated")
def conv_general_dilated(
    g, x, w, *, out, dimension_numbers, window_strides, padding, lhs_dilation, rhs_dilation,
    feature_group_count, batch_group_count,
):  # fmt: skip
    if out.dtype.kind in "iub":
        raise Refusal("ONNX has convolutions of floating point numbers only")
    dtype = np.dtype(np.float32) if out.dtype.itemsize < 4 and x.dtype != np.float16 else out.dtype
    x, w = g.cast(x, dtype), g.cast(w, dtype)
    x = g.transpose(x, dimension_numbers.lhs_spec)
    w = g.transpose(w, dimension_numbers.rhs_spec)
    groups = feature_group_count
    # batch groups (the kernel gradient of a grouped convolution) become feature groups: the groups
    # of examples are moved into the channels
    if batch_group_count > 1:
        groups = batch_group_count
        n, c, *space = x.shape
        x = g.reshape(x, [groups, n // groups, c, *space])
        x = g.transpose(x, [1, 0, *range(2, len(space) + 3)])
        x = g.reshape(x, [n // groups, groups * c, *space])
    flat = x.ndim == 2
    if flat:  # without a spatial axis; Conv needs one
        x, w = g.reshape(x, [*x.shape, 1]), g.reshape(w, [*w.shape, 1])
        window_strides = lhs_dilation = rhs_dilation = (1,)
        padding = ((0, 0),)
    spec = dimension_numbers.out_spec
    shape = [out.shape[i] for i in spec] + [1] * flat
    dilated, cut, more = any(s > 1 for s in lhs_dilation), [], []
    if dilated:
        # dilated images are the gradient of a strided convolution: ConvTranspose, whose padding
        # cuts `reach` minus that of the dilated images. What a high edge pads beyond `reach` is
        # its output_padding, which must be less than the stride
        reach = [(k - 1) * d for k, d in zip(w.shape[2:], rhs_dilation, strict=True)]
        cut = [(r - low, r - high) for r, (low, high) in zip(reach, padding, strict=True)]
        more = [max(-high, 0) for _, high in cut]
    if (
        dilated
        and all(s == 1 for s in window_strides)
        and all(low >= 0 for low, _ in cut)
        and all(m < s for m, s in zip(more, lhs_dilation, strict=True))
    ):
        # it takes kernels (C, M / groups, *space), and applies them mirrored
        m, c, *kernel = w.shape
        w = g.reshape(w, [groups, m // groups, c, *kernel])
        w = g.transpose(w, [0, 2, 1, *range(3, 3 + len(kernel))])
        w = g.reshape(w, [groups * c, m // groups, *kernel])
        w = reverse(g, w, range(2, w.ndim))
        y = g(
            "ConvTranspose", x, w, strides=lhs_dilation,
            pads=[low for low, _ in cut] + [max(high, 0) for _, high in cut], output_padding=more,
            dilations=rhs_dilation, group=groups, kernel_shape=kernel,
        )  # fmt: skip
    else:
        if dilated:
            config = [(0, 0, 0)] * 2 + [(0, 0, s - 1) for s in lhs_dilation]
            x = pad_tensor(g, x, np.zeros((), x.dtype), config)
        if any(low < 0 or high < 0 for low, high in padding):
            config = [(0, 0, 0)] * 2 + [(min(low, 0), min(high, 0), 0) for low, high in padding]
            x = pad_tensor(g, x, np.zeros((), x.dtype), config)
        pads = [max(low, 0) for low, _ in padding] + [max(high, 0) for _, high in padding]
        y = g(
            "Conv", x, w, strides=window_strides, pads=pads, dilations=rhs_dilation, group=groups,
            kernel_shape=w.shape[2:],
        )  # fmt: skip
    y = Tensor(y, shape, dtype)
    y = g.reshape(y, shape[:2]) if flat else y
    return g.cast(g.transpose(y, np.argsort(spec)), out.dtype)


NEUTRAL = {
    "reduce_window_max": ("Max", least_of),
    "reduce_window_min": ("Min", greatest_of),
    "reduce_window_sum": ("Add", lambda dtype: np.zeros((), dtype)),
}

for _name, (_operator, _neutral) in NEUTRAL.items():

    @primitive(_name)
    def reduce_window(
        g, x, *, out, window_dimensions, window_strides, padding, base_dilation,
        window_dilation, operator=_operator, neutral=_neutral,
    ):  # fmt: skip
        edges = [(low, high, b - 1) for (low, high), b in zip(padding, base_dilation, strict=True)]
        if operator == "Max" and x.dtype == np.float32:
            y = _max_pool(g, x, window_dimensions, window_strides, edges, window_dilation, out)
            if y is not None:
                return y
        x = pad_tensor(g, x, neutral(x.dtype), edges)
        # a window is a box, so that its reduction is one along each axis, one after the other
        for axis, size in enumerate(window_dimensions):
            x = _reduce_axis(
                g, x, axis, size, window_strides[axis], window_dilation[axis], operator
            )
        return x


def _reduce_axis(g: Nodes, x: Any, axis: int, size: int, stride: int, dilation: int, operator: str):
    """Reduce windows along one axis, by an operator on `size` strided slices."""
    if size == 1 and stride == 1:
        return x
    count = (x.shape[axis] - (size - 1) * dilation - 1) // stride + 1
    shape = [count if i == axis else n for i, n in enumerate(x.shape)]
    result = None
    for tap in range(size):
        starts, ends, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
        starts[axis], steps[axis] = tap * dilation, stride
        ends[axis] = tap * dilation + (count - 1) * stride + 1
        part = g.slice(x, starts, ends, steps)
        if result is not None:
            part = Tensor(g.wide(operator, result, part, dtype=x.dtype), shape, x.dtype)
        result = part
    return result


def _max_pool(g: Nodes, x, sizes, strides, edges, dilations, out) -> Any:
    """Write a windowed maximum as MaxPool, whose windows lie along up to three last axes.

    Args:
      x: the operand.
      sizes, strides, edges, dilations: for each axis of x; an edge is (low, high, interior).
      out: the shape and dtype of the result.

    Returns:
      The result; None if MaxPool cannot express the windows.
    """
    space = [i for i in range(x.ndim) if (sizes[i], strides[i], edges[i]) != (1, 1, (0, 0, 0))]
    fits = all(
        inner == 0 and 0 <= low < sizes[i] and 0 <= high < sizes[i]
        for i, (low, high, inner) in ((i, edges[i]) for i in space)
    )
    others = [i for i in range(x.ndim) if i not in space]
    if not fits or not 1 <= len(space) <= 3 or len(others) > 2:
        return None
    order = [*others, *space]
    missing = 2 - len(others)
    y = g.transpose(x, order)
    y = g.reshape(y, [1] * missing + list(y.shape))
    y = g(
        "MaxPool", y, kernel_shape=[sizes[i] for i in space],
        strides=[strides[i] for i in space], dilations=[dilations[i] for i in space],
        pads=[edges[i][0] for i in space] + [edges[i][1] for i in space],
    )  # fmt: skip
    shape = [out.shape[i] for i in order]
    y = g.reshape(Tensor(y, [1] * missing + shape, x.dtype), shape)
    return g.transpose(y, np.argsort(order))


@composed("select_and_scatter_add")
def select_and_scatter_add(
    source, operand, *, select_prim, window_dimensions, window_strides, padding
):
    """Add each number of `source` to the first greatest (or least) element of its window.

    This is the gradient of a windowed maximum. A tap is a position within the window; the elements
    of all windows at one tap are a strided slice.
    """
    least = select_prim.name == "ge"
    fill = (least_of if least else greatest_of)(np.dtype(operand.dtype))
    edges = [(low, high, 0) for low, high in padding]
    x = lax.pad(operand, jnp.asarray(fill), edges)
    zero = jnp.zeros((), source.dtype)
    better = jnp.greater if least else jnp.less
    taps = list(product(*map(range, window_dimensions)))

    def read(tap):
        ends = [
            t + (n - 1) * s + 1 for t, n, s in zip(tap, source.shape, window_strides, strict=True)
        ]
        return lax.slice(x, tap, ends, window_strides)

    best, winner = read(taps[0]), jnp.zeros(source.shape, jnp.int32)
    for i, tap in enumerate(taps[1:], 1):
        value = read(tap)
        ahead = better(value, best)
        best, winner = jnp.where(ahead, value, best), jnp.where(ahead, i, winner)
    # scatter: dilate the numbers whose window chose this tap, and pad them to the operand's shape
    total = None
    for i, tap in enumerate(taps):
        part = jnp.where(winner == i, source, zero)
        config = [
            (t - low, low + n - t - (m - 1) * s - 1, s - 1)
            for t, (low, _), n, m, s in zip(
                tap, padding, operand.shape, source.shape, window_strides, strict=True
            )
        ]
        part = lax.pad(part, zero, config)
        total = part if total is None else total + part
    return total


@composed("select_and_gather_add")
def select_and_gather_add(
    tangents, operand, *, select_prim, window_dimensions, window_strides, padding, base_dilation,
    window_dilation,
):  # fmt: skip
    """Return the tangent of the first greatest (or least) element of each window."""
    least = select_prim.name == "ge"
    fill = (least_of if least else greatest_of)(np.dtype(operand.dtype))
    edges = [(low, high, b - 1) for (low, high), b in zip(padding, base_dilation, strict=True)]
    x = lax.pad(operand, jnp.asarray(fill), edges)
    slopes = lax.pad(tangents, jnp.zeros((), tangents.dtype), edges)
    better = jnp.greater if least else jnp.less
    best: Any = None
    result: Any = None
    for tap in product(*map(range, window_dimensions)):
        starts = [t * d for t, d in zip(tap, window_dilation, strict=True)]
        ends = [
            n - (w - 1 - t) * d
            for n, w, t, d in zip(x.shape, window_dimensions, tap, window_dilation, strict=True)
        ]
        value, slope = (lax.slice(a, starts, ends, window_strides) for a in (x, slopes))
        if best is None:
            best, result = value, slope
        else:
            ahead = better(value, best)
            best, result = jnp.where(ahead, value, best), jnp.where(ahead, slope, result)
    return result
