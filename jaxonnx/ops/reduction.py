"""Reductions, cumulative sums, arg-extrema, the k largest, Einstein sums.

A reduction is written as `f(x, axis, keepdims)`; where the axes come from (an attribute first, an
input from opset 18 on, ReduceSum already from 13 on) is settled once for all of them. The gradient
of ReduceMax and ReduceMin is divided evenly between equal extrema, that of ReduceL2 is 0 at a zero
vector and that of ReduceLogSumExp 0 at a vector of -inf.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import lowering
from jaxonnx._weights import einsum as summed
from jaxonnx.errors import NodeError
from jaxonnx.lowering import is_half
from jaxonnx.ops.common import INDEX, axes_of, axis_of, cast, divide
from jaxonnx.ops.elementwise import absolute, div, is_integer
from jaxonnx.registry import Static, is_known, op, symbolic, xp


def _xp(x):
    # NumPy accumulates float16 and bfloat16 in their own precision
    return np if is_known(x) and (x.dtype.kind in "biu" or symbolic(x)) else jnp


def _accumulator(x):
    """Return the type of a sum before it is rounded."""
    return np.dtype(np.float32) if is_half(x) else x.dtype


def reduce_sum(x, axis, keepdims):
    y = _xp(x).sum(x, axis=axis, keepdims=keepdims, dtype=_accumulator(x))
    return y.astype(x.dtype)


def reduce_prod(x, axis, keepdims):
    y = _xp(x).prod(x, axis=axis, keepdims=keepdims, dtype=_accumulator(x))
    return y.astype(x.dtype)


def reduce_mean(x, axis, keepdims):
    count = math.prod(x.shape[i] for i in axis)
    if is_integer(x):
        return div(reduce_sum(x, axis, keepdims), np.asarray(count).astype(x.dtype))
    total = jnp.sum(x, axis=axis, keepdims=keepdims, dtype=_accumulator(x))
    return divide(total, count).astype(x.dtype)


def _initial_of_empty(x, sign: int) -> dict[str, Any]:
    """Return the `initial` that an extremum needs if there are no elements."""
    if x.size:
        return {}
    if jnp.issubdtype(x.dtype, jnp.floating):
        return {"initial": sign * np.inf}
    if x.dtype == np.bool_:
        return {"initial": sign > 0}
    limits = jnp.iinfo(x.dtype)
    return {"initial": limits.max if sign > 0 else limits.min}


def reduce_max(x, axis, keepdims):
    return _xp(x).max(x, axis=axis, keepdims=keepdims, **_initial_of_empty(x, -1))


def reduce_min(x, axis, keepdims):
    return _xp(x).min(x, axis=axis, keepdims=keepdims, **_initial_of_empty(x, +1))


def reduce_l1(x, axis, keepdims):
    return reduce_sum(absolute(x), axis, keepdims)


def reduce_sum_square(x, axis, keepdims):
    wide = x.astype(_accumulator(x))
    return reduce_sum(wide * wide, axis, keepdims).astype(x.dtype)


def _float(x):
    return cast(x, np.float64) if is_integer(x) else x


def reduce_l2(x, axis, keepdims):
    squares = _float(reduce_sum_square(x.astype(_accumulator(x)), axis, keepdims))
    zero = squares == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares))).astype(x.dtype)


def reduce_log_sum(x, axis, keepdims):
    total = reduce_sum(x.astype(_accumulator(x)), axis, keepdims)
    return jnp.log(_float(total)).astype(x.dtype)


def reduce_log_sum_exp(x, axis, keepdims):
    # the specification computes in double and casts back; shifted by the maximum, half precision
    # needs no more than float32 and the rest no more than its own
    wide = _float(x)
    wide = wide.astype(jnp.promote_types(wide.dtype, jnp.float32))
    top = jax.lax.stop_gradient(reduce_max(wide, axis, True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.sum(jnp.exp(wide - top), axis=axis, keepdims=True)
    empty = total == 0
    result = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)) + top)
    return (result if keepdims else jnp.squeeze(result, axis)).astype(x.dtype)


def _reduction(name, function, axes_are_input):
    def reduce(data, axes, keepdims, noop):
        if axes is None or not len(axes):
            axes = () if noop else None
        return function(data, axes_of(axes, data.ndim), bool(keepdims))

    @op(name, since=1)
    def with_attribute(data, *, axes=None, keepdims=1):
        return reduce(data, axes, keepdims, noop=False)

    @op(name, since=axes_are_input, shapes="axes (n)")
    def with_input(data, axes: Static | None = None, *, keepdims=1, noop_with_empty_axes=0):
        return reduce(data, axes, keepdims, noop_with_empty_axes)


for _name, _function, _axes_are_input in (
    ("ReduceL1", reduce_l1, 18),
    ("ReduceL2", reduce_l2, 18),
    ("ReduceLogSum", reduce_log_sum, 18),
    ("ReduceLogSumExp", reduce_log_sum_exp, 18),
    ("ReduceMax", reduce_max, 18),
    ("ReduceMean", reduce_mean, 18),
    ("ReduceMin", reduce_min, 18),
    ("ReduceProd", reduce_prod, 18),
    ("ReduceSum", reduce_sum, 13),
    ("ReduceSumSquare", reduce_sum_square, 18),
):
    _reduction(_name, _function, _axes_are_input)


def _arg_extremum(name, function):
    @op(name, since=12)
    def select(data, *, axis=0, keepdims=1, select_last_index=0):
        search = getattr(xp(data), function)
        if select_last_index:
            flipped = search(xp(data).flip(data, axis), axis=axis, keepdims=bool(keepdims))
            return data.shape[axis] - 1 - flipped
        return search(data, axis=axis, keepdims=bool(keepdims))

    @op(name, since=1)
    def first(data, *, axis=0, keepdims=1):
        return select(data, axis=axis, keepdims=keepdims)


_arg_extremum("ArgMax", "argmax")
_arg_extremum("ArgMin", "argmin")


def _cumulative(name, since, function, identity):
    @op(name, since=since)
    def cumulate(x, axis: Static, *, exclusive=0, reverse=0):
        m, along = xp(x), axis_of(axis.item(), x.ndim)
        if reverse:
            x = m.flip(x, along)
        y = getattr(m, function)(x, axis=along, dtype=_accumulator(x)).astype(x.dtype)
        if exclusive:
            before, after = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
            before[along], after[along] = (1, 0), slice(x.shape[along])
            y = m.pad(y, before, constant_values=identity)[tuple(after)]
        return m.flip(y, along) if reverse else y


_cumulative("CumSum", 11, "cumsum", identity=0)
_cumulative("CumProd", 26, "cumprod", identity=1)


@op("Einsum", since=12, weights={"xs": summed("equation")})
def einsum(*xs, equation):
    if unexpected := re.search(r"[^A-Za-z,.>\s-]", equation):
        raise NodeError(f"the equation {equation!r} has {unexpected[0]!r}, which is not a letter")
    # what the sum of several factors has in between is not rounded
    first, *others = xs
    wide = np.float32 if len(others) > 1 and is_half(first) else None
    y = jnp.einsum(equation, *xs, preferred_element_type=wide)
    return lowering.keep_apart(y).astype(first.dtype)


@op("TopK", since=11)
def top_k(x, k: Static, *, axis=-1, largest=1, sorted=1):
    """Sorted even with `sorted=0`, where any order is right; of equal values the first is first.

    Zeros of either sign are equal, and NaN of either sign is above all numbers, as in NumPy's sort.
    """
    # order-reversing without overflow: not for integers, minus for floats
    keys = x if largest else ~x if is_integer(x) else -x
    if not is_integer(x):  # whose bits `lax.top_k` compares
        nan = jnp.nan if largest else -jnp.nan
        keys = jnp.where(keys == 0, 0, jnp.where(jnp.isnan(keys), nan, keys))
    _, indices = jax.lax.top_k(jnp.moveaxis(keys, axis, -1), k.item())
    indices = jnp.moveaxis(indices, -1, axis)
    return jnp.take_along_axis(jnp.asarray(x), indices, axis, mode="clip"), cast(indices, INDEX)


@op("TopK", since=10)
def top_k_10(x, k: Static, *, axis=-1):
    return top_k(x, k, axis=axis)


@op("TopK", since=1)
def top_k_1(x, *, k, axis=-1):
    return top_k(x, np.asarray(k), axis=axis)
