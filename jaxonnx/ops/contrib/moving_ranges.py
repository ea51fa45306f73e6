"""Rounding that changes in the course of training, in a domain of our own.

`jaxonnx.quantization` puts these operators into a quantized graph for a run, and takes them out of
its result. The steps and the ranges are state, as running statistics are.
"""

from functools import cache

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxonnx.ops.common import divide, element_dtype
from jaxonnx.registry import Training, op, xp

DOMAIN = "jaxonnx"


@cache
def limits_of(dtype):
    """Return the least, the middle and the greatest number of a quantized type."""
    if "float" in dtype.name:
        info = ml_dtypes.finfo(dtype)
        return int(info.min), 0, int(info.max)
    info = ml_dtypes.iinfo(dtype)
    return info.min, (info.min + info.max + 1) // 2, info.max


def range_parameters(low, high, dtype, symmetric):
    """Return the scale and the zero point of a range [low, high] that contains 0.

    0 is represented exactly. If the range has no width, the scale is 1.

    Args:
      low, high: the ends, scalars or arrays.
      dtype: the quantized type.
      symmetric: whether the zero point is the middle of the type.

    Returns:
      The scale, in the dtype of `low`, and the zero point, in `dtype`.
    """
    np_ = xp(low, high)
    least, middle, most = limits_of(dtype)
    width = np_.maximum(-low, high) if symmetric else high - low
    scale = divide(width, low.dtype.type(most - middle if symmetric else most - least))
    scale = np_.where(width > 0, np_.maximum(scale, np.finfo(np.float32).tiny), 1)
    point = np_.rint(least - divide(low, scale))
    point = np_.full(np_.shape(low), middle) if symmetric else np_.clip(point, least, most)
    return scale.astype(low.dtype), point.astype(dtype)


@op("CountSteps", since=1, domain=DOMAIN, state=("count",))
def count_steps(count, *, training: Training):
    """The steps of training before this one, and with it."""
    # a float, since the state of a graph that is mapped over its examples is their mean
    return count, count + 1 if training else count


@op("MovingRange", since=1, domain=DOMAIN, state=("low", "high"))
def moving_range(
    x, low, high, count, *, to, decay, freeze=None, symmetric=0, positive=0, training: Training
):
    """(scale, low, high, zero point) of type `to` for a range that follows that of `x` in training.

    A step before the number `freeze` leaves the share `decay` of the range as it was, and rounds by
    the new one. The range of `positive` values, as behind a Relu, begins at 0.
    """
    if training:
        x = lax.stop_gradient(x)
        least = jnp.zeros_like(low) if positive else jnp.minimum(x.min(), 0)
        observed = least, jnp.maximum(x.max(), 0)
        moved = (
            old + (1 - decay) * (new - old) for old, new in zip((low, high), observed, strict=True)
        )
        moves = True if freeze is None else count < freeze
        low, high = (
            jnp.where(moves, new, old) for old, new in zip((low, high), moved, strict=True)
        )
    scale, point = range_parameters(low, high, element_dtype(to), symmetric)
    return scale, low, high, point


@op("BeginRounding", since=1, domain=DOMAIN, view="same axes")
def begin_rounding(x, rounded, count, *, start, positive=0, training: Training):
    """`x` in the steps of training before the number `start`; `rounded` from then on.

    If `positive`, as behind a Relu, `x` has no negative numbers either.
    """
    x = jnp.maximum(x, 0) if positive else x
    return jnp.where(count < start, x, rounded) if training else rounded


@op("RoundTo", since=1, domain=DOMAIN, view="same axes")
def round_to(x, levels):
    """`x` rounded to `levels`: scale, zero point, least and greatest integer; `x` if scale is 0."""
    scale, zero_point, least, most = levels
    factor = jnp.where(scale > 0, scale, 1)
    codes = jnp.clip(jnp.rint(divide(x, factor)) + zero_point, least, most)
    return jnp.where(scale > 0, (codes - zero_point) * factor, x)
