"""Standardisation to mean 0 and variance 1, the core of every normalization."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x, axes, epsilon):
    """((x - mean) * rsqrt(var + epsilon), mean, var) over `axes`, kept with length 1.

    `var` is the population variance. x must be float32 or wider.
    """
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + epsilon), mean, var


@standardize.defjvp
def _(axes, epsilon, primals, tangents):
    """The transpose of this tangent map reads x once: two sums, then one elementwise pass."""
    (x,), (dx,) = primals, tangents
    y, mean, var = standardize(x, axes, epsilon)
    scale = lax.rsqrt(var + epsilon)
    dmean = dx.mean(axes, keepdims=True)
    along = (y * dx).mean(axes, keepdims=True)
    return (y, mean, var), (scale * (dx - dmean - y * along), dmean, 2 * along / scale)
