"""Normalization by statistics of the array itself, whose gradient reads it as seldom as it can.

With u = (x - mean) / sqrt(var + epsilon), u changes along v by P(v) / sqrt(var + epsilon), where

    P(v) = v - mean(v) - u * mean(u * v)

is its own transpose. The gradient of x thus takes two sums of the gradient dy, of dy and of u * dy,
which need not wait for each other; derived step by step it takes four. A scale that is constant
along the axes of the sums can be applied before P, and the gradients of scale and shift are then
the same two sums.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from jaxonnx._arrays import lower_fun
from jaxonnx.lowering._contract import is_split, named_primitive


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def standardize(x, scale, shift, axes: tuple[int, ...], epsilon: float):
    """Return (u * scale + shift, mean, var), where u is (x - mean) / sqrt(var + epsilon).

    Two passes: E[x^2] - mean^2 saves one and loses the variance of data far from zero.

    Args:
      x: floating point, of 32 bits or more.
      scale, shift: of x's dtype and rank, with 1 for each of `axes` (as mean and var, which is that
        of the population); or None, for u.
    """
    (unit, mean, var), _ = _standardize(x, axes, epsilon)
    return unit if scale is None else unit * scale + shift, mean, var


def _standardize(x, axes, epsilon):
    mean = x.mean(axes, keepdims=True)
    centred = x - mean
    var = jnp.square(centred).mean(axes)
    # The root is computed before the axes come back. Otherwise XLA moves their reshape one way in a
    # forward pass and another in its derivative, and computes the whole network twice.
    root = jnp.expand_dims(lax.rsqrt(var + epsilon), axes)
    return (centred * root, mean, jnp.expand_dims(var, axes)), root


@standardize.defjvp
def _(axes, epsilon, primals, tangents):
    (x, scale, shift), (moving, scale_moving, shift_moving) = primals, tangents
    (unit, mean, var), root = _standardize(x, axes, epsilon)
    v = moving * root
    mean_moving = moving.mean(axes, keepdims=True)
    var_moving = 2 * (unit * v).mean(axes, keepdims=True) / lax.square(root)
    y = unit
    if scale is not None:
        y, v = unit * scale + shift, moving * (root * scale)
    count = math.prod(x.shape[axis] for axis in axes)
    offset, slope = (-total / count for total in moments_p.bind(v, unit, axes=axes))
    if scale is not None:
        offset, slope = offset + shift_moving, slope + scale_moving
    (line,) = line_p.bind(offset, slope, unit, axes=axes)
    return (y, mean, var), (v + line, mean_moving, var_moving)


def _moments(x, u, axes):
    """Return the sums of x and of x * u over `axes`, kept."""
    return x.sum(axes, keepdims=True), (x * u).sum(axes, keepdims=True)


def _line(offset, slope, u, axes):
    """Return offset + slope * u, the transpose of `_moments` with respect to x."""
    return (offset + slope * u,)


moments_p = named_primitive("moments", _moments, "axes", several=True)
line_p = named_primitive("line", _line, "axes", several=True)


def _sum_together(x, u, axes):
    """Sum both in one loop, which XLA:CPU makes of a reduction of two arrays over the first axis.

    After that little is left. A sum of one array goes to YNNPACK, for which XLA first writes to
    memory what is summed.
    """
    if 0 not in axes:
        return _moments(x, u, axes)
    zeros = (jnp.zeros((), x.dtype),) * 2
    sums = lax.reduce((x, x * u), zeros, _add_both, (0,))
    others = tuple(axis for axis in axes if axis > 0)
    return tuple(y[None].sum(others, keepdims=True) for y in sums)


def _add_both(first: tuple, second: tuple) -> tuple:
    return first[0] + second[0], first[1] + second[1]


def _lower_on_cpu(context, x, u, *, axes):
    function = _moments if is_split(context) else _sum_together
    return lower_fun(partial(function, axes=axes), multiple_results=True)(context, x, u)


mlir.register_lowering(moments_p, _lower_on_cpu, platform="cpu")


def _moments_jvp(primals: Any, tangents: Any, *, axes):
    (x, u), (x_moving, u_moving) = primals, tangents
    first, second = moments_p.bind(ad.instantiate_zeros(x_moving), u, axes=axes)
    if not isinstance(u_moving, ad.Zero):
        second += (x * u_moving).sum(axes, keepdims=True)
    return moments_p.bind(x, u, axes=axes), [first, second]


def _line_jvp(primals: Any, tangents: Any, *, axes):
    (offset, slope, u), (*vectors_moving, u_moving) = primals, tangents
    (y,) = line_p.bind(*map(ad.instantiate_zeros, vectors_moving), u, axes=axes)
    if not isinstance(u_moving, ad.Zero):
        y += slope * u_moving
    return line_p.bind(offset, slope, u, axes=axes), [y]


def _transpose_moments(totals: Any, x, u, *, axes):
    return *line_p.bind(*map(ad.instantiate_zeros, totals), u, axes=axes), None


def _transpose_line(lines: Any, offset, slope, u, *, axes):
    totals = moments_p.bind(ad.instantiate_zeros(lines[0]), u, axes=axes)
    pairs = zip((offset, slope), totals, strict=True)
    return *(y if ad.is_undefined_primal(x) else None for x, y in pairs), None


ad.primitive_jvps |= {moments_p: _moments_jvp, line_p: _line_jvp}
ad.primitive_transposes |= {moments_p: _transpose_moments, line_p: _transpose_line}
