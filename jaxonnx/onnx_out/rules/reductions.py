"""Reductions, places of extremes, running sums and order."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._nodes import Tensor, ordered_dtype
from jaxonnx.onnx_out._rule_table import Refusal, composed, primitive
from jaxonnx.onnx_out._tensors import greatest_of, least_of

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
