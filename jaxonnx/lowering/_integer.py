"""Products and convolutions of 8-bit integers, accumulated exactly in int32.

From JAX 0.12 on XLA:CPU multiplies int8 matrices in half the time of float32, but neither uint8 nor
a single row; before, every product of integers is a loop over scalars. So uint8 becomes int8 by a
change of the zero point, and zero points are subtracted from the product:

    (a - p) (b - q) = a b - p * columns(b) - q * rows(a) + K p q

The sums of the columns of b, which is the weight, are one more row of the product. Without fast
products of int8 those of float32 serve, over at most `EXACT` places at a time: its sums are then
integers up to 2^24, all of which float32 has.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jaxonnx._arrays import lower_fun
from jaxonnx.lowering._contract import named_primitive
from jaxonnx.lowering._stored_array import KernelFirst
from jaxonnx.lowering._taps import Taps

EXACT = 2**24 // 2**14
"""The number of products of two int8, each at most 2^14, whose sum is exact in float32."""

FAST_INT8 = jax.__version_info__ >= (0, 12)
"""Whether XLA:CPU has fast products of int8 (measured on 2026-11-25: YNNPACK of jaxlib 0.12)."""


def _is_byte(x: Any) -> bool:
    return x.dtype in (jnp.int8, jnp.uint8)


def _subtract_zero(x, zero):
    """Return x - zero in int32, or in float32 if x is a small floating point type."""
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    return x.astype(wide) - zero.astype(wide)


def _plain(a, b, a_zero, b_zero, *, zeros: tuple[bool, bool]):
    """Multiply by the definition.

    Args:
      a, b: the factors.
      a_zero, b_zero: their zero points.
      zeros: for each factor, whether a zero point was given; without one it is 0.
    """
    return jnp.matmul(_subtract_zero(a, a_zero), _subtract_zero(b, b_zero))


def _shift_to_int8(x, zero):
    """Convert uint8 with a zero point to int8 with a zero point, so that x - zero stays.

    Returns:
      int8, and the zero point as int32.
    """
    zero = zero.astype(jnp.int32)
    if x.dtype == jnp.int8:
        return x, zero
    # flipping the highest bit of an uint8 subtracts 128, read as int8
    return lax.bitcast_convert_type(x ^ jnp.uint8(128), jnp.int8), zero - 128


def product_int8(a, b):
    """Multiply int8 matrices exactly, (..., K) by (K, M), into int32."""
    if FAST_INT8:
        return jnp.matmul(a, b, preferred_element_type=jnp.int32)
    parts = range(0, a.shape[-1], EXACT)
    wide = a.astype(jnp.float32), b.astype(jnp.float32)
    sums = (wide[0][..., i : i + EXACT] @ wide[1][..., i : i + EXACT, :] for i in parts)
    return sum((y.astype(jnp.int32) for y in sums), jnp.zeros((), jnp.int32))


def _fast(a, b, a_zero, b_zero, *, zeros):
    """Multiply by a product of int8, and subtract the terms of the zero points from the result."""
    if not (_is_byte(a) and _is_byte(b)) or a.ndim < 2 or b.ndim != 2 or not b.shape[0]:
        return _plain(a, b, a_zero, b_zero, zeros=zeros)
    subtracted = zeros[0] or a.dtype == jnp.uint8, zeros[1] or b.dtype == jnp.uint8
    (a, a_zero), (b, b_zero) = _shift_to_int8(a, a_zero), _shift_to_int8(b, b_zero)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    count = rows.shape[0]
    # a row of ones gives the sums of the columns of b; and a single row is slow (see above)
    if subtracted[0] or count == 1:
        rows = jnp.concatenate([rows, jnp.ones((1, rows.shape[1]), jnp.int8)])
    every = product_int8(rows, b)
    y = every[:count].reshape(*a.shape[:-1], b.shape[1])
    if subtracted[0]:
        y = y - a_zero * every[count]
    if subtracted[1]:  # - q * rows(a) + K p q
        sums = a.sum(-1, keepdims=True, dtype=jnp.int32)
        y = y - (sums - a.shape[-1] * a_zero) * b_zero
    return y


integer_product_p = named_primitive("integer_product", _plain, "zeros")


def _lower(context, *operands, zeros):
    axes = context.module_context.axis_context
    split = getattr(axes, "num_devices", 1) > 1  # rows that devices share are not concatenated
    function = lower_fun(_plain if split else _fast, multiple_results=False)
    return function(context, *operands, zeros=zeros)


mlir.register_lowering(integer_product_p, _lower, platform="cpu")


def integer_product(a, b, a_zero=None, b_zero=None):
    """Return (a - a_zero) @ (b - b_zero) in int32, for 8-bit factors as in `numpy.matmul`.

    Zero points broadcast against a and b; None is 0.
    """
    has_zeros = a_zero is not None, b_zero is not None
    points = (
        jnp.zeros((), x.dtype) if zero is None else zero for x, zero in ((a, a_zero), (b, b_zero))
    )
    return integer_product_p.bind(*map(jnp.asarray, (a, b, *points)), zeros=has_zeros)


def integer_convolution(x, w, window: Any, groups: int, x_zero, w_zero, channels: int = 1):
    """Cross-correlate 8-bit images x (N, C, *size) with w (M, C / groups, *kernel), in int32.

    Padding counts as the zero point. `channels` is the axis of the channels: 1, or -1 for
    (N, *size, C). The weight may be a `KernelFirst`. Zero points are scalars, that of the weight
    may be a vector (M,).
    """
    x = jnp.moveaxis(x, channels, -1)
    taps = Taps(x.shape[1:-1], *window, lead=1)
    m, per_group = w.shape[:2]
    w = w.value if isinstance(w, KernelFirst) else w.transpose(*range(2, w.ndim), 1, 0)
    fill = jnp.zeros((), x.dtype) if x_zero is None else x_zero.reshape(())
    if groups == x.shape[-1] and m == groups:
        weight = w.reshape(-1, m).astype(jnp.int32)
        weight = weight if w_zero is None else weight - w_zero.astype(jnp.int32)
        start = jnp.zeros((x.shape[0], *taps.out, m), jnp.int32)
        add = lambda y, i, tap: y + _subtract_zero(tap, fill) * weight[i]  # noqa: E731
        return jnp.moveaxis(taps.fold((x,), (fill,), add, start), -1, channels)
    columns = taps.windows(x, fill)
    lead = columns.shape[:-2]
    if groups == 1:
        rows = columns.reshape(*lead, -1)
        y = integer_product(rows, w.reshape(-1, m), x_zero, w_zero)
        return jnp.moveaxis(y, -1, channels)
    columns = columns.reshape(*lead, -1, groups, per_group)
    columns = jnp.moveaxis(columns, -2, 0).reshape(groups, math.prod(lead), -1)
    weight = w.reshape(-1, groups, m // groups).swapaxes(0, 1)
    if w_zero is not None and w_zero.size > 1:
        w_zero = w_zero.reshape(groups, 1, -1)
    y = jnp.moveaxis(integer_product(columns, weight, x_zero, w_zero), 0, 1)
    return jnp.moveaxis(y.reshape(*lead, m), -1, channels)
