"""Operations that stay one primitive: division that XLA:CPU keeps exact, and normalization.

XLA rewrites x / c as x * (1 / c) where c is a constant, a scalar or broadcast, x / y / z as
x / (y * z), x / (y / z) as x * z / y, and x / sqrt(y) as x * rsqrt(y). Each saves time and rounds
once more, so that what is exact is not: 41 / 41 becomes 0.99999994, whose floor is 0 and not 1, and
1 / c overflows in float16 for c below 1.53e-5. Its rules look at the operations that give the two
operands, and none is about a selection by what XLA cannot know.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from jaxonnx._arrays import lower_fun
from jaxonnx.lowering._contract import named_primitive


def divide(x, y) -> jax.Array:
    """Return x / y, broadcast and rounded once, in the common floating-point type of both.

    This holds on CPU; on other platforms it is `jax.lax.div`, and so are its derivatives on all.
    """
    dtype = jnp.result_type(x, y)
    plain = isinstance(y, int | np.ndarray | np.generic) and _has_exact_inverse(y)
    x, y = jnp.broadcast_arrays(*(jnp.asarray(operand, dtype) for operand in (x, y)))
    return lax.div(x, y) if plain else divide_p.bind(x, y)


def _has_exact_inverse(y) -> bool:
    """Check for powers of two whose inverse every type has: x * (1 / y) is then x / y."""
    fraction, exponent = np.frexp(y)
    return bool(((abs(fraction) == 0.5) & (abs(exponent) < 14)).all())


divide_p = named_primitive("divide", lax.div)


def _divide_exactly(x, y):
    dtype = x.dtype
    if dtype.itemsize == 2:  # selections of halves are slow; in float32 the quotient is the same
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    # Always true, which XLA cannot know: zero stands behind a barrier. A barrier around y itself
    # would keep a broadcast divisor in memory. `zero == 0` alone would not do: XLA would move a
    # broadcast of x behind a selection by a scalar, and have a broadcast divisor again.
    zero = lax.optimization_barrier(np.zeros((), x.dtype))
    true = (x < zero) | (zero == 0)
    return lax.div(jnp.where(true, x, y), jnp.where(true, y, x)).astype(dtype)


mlir.register_lowering(divide_p, lower_fun(_divide_exactly, multiple_results=False), platform="cpu")


def _batch(operands, axes):
    x, y = (
        a[None] if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(operands, axes, strict=True)
    )
    return divide(x, y), 0


batching.primitive_batchers[divide_p] = _batch


def _wide_quotient(x, y):
    """Divide in float32 at least: in float16 the 1 / y of XLA may overflow."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.div(x.astype(wide), y.astype(wide)).astype(x.dtype)


ad.defjvp2(
    divide_p,
    lambda tangent, quotient, x, y: _wide_quotient(tangent, y),
    lambda tangent, quotient, x, y: -_wide_quotient(tangent, y) * quotient,
)


def normalize(x, scale, bias, mean, var, epsilon: float, channels: int):
    """Return (x - mean) / sqrt(var + epsilon) * scale + bias, all of one dtype.

    Args:
      channels: the axis of x (1 or -1) that the vectors after it run along.
    """
    return normalized_p.bind(x, scale, bias, mean, var, options=(epsilon, channels))


def _normalize(x, scale, bias, mean, var, options):
    epsilon, channels = options
    shape = (-1, *(1,) * (x.ndim - 2)) if channels == 1 else (-1,)
    scale, bias, mean, var = (v.reshape(shape) for v in (scale, bias, mean, var))
    return (x - mean) * (scale * lax.rsqrt(var + epsilon)) + bias


normalized_p = named_primitive("batch_normalization", _normalize, "options")


def _normalize_jvp(primals: Any, tangents: Any, *, options: Any):
    """Differentiate `_normalize` with respect to the operands that have a tangent."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of(*values):
        traced = dict(zip(moving, values, strict=True))
        return _normalize(*(traced.get(i, x) for i, x in enumerate(primals)), options=options)

    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[normalized_p] = _normalize_jvp
