"""Normalization by known statistics, which readers of a jaxpr see as one primitive."""

from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from jaxonnx.lowering._contract import named_primitive


def normalize(x, scale, bias, mean, var, epsilon: float, channels: int):
    """Return (x - mean) / sqrt(var + epsilon) * scale + bias, all of one dtype.

    Args:
      channels: the axis of x (1 or -1) that the vectors after it run along.
    """
    return normalized_p.bind(x, scale, bias, mean, var, options=(epsilon, channels))


def _plain(x, scale, bias, mean, var, options):
    epsilon, channels = options
    shape = (-1, *(1,) * (x.ndim - 2)) if channels == 1 else (-1,)
    scale, bias, mean, var = (v.reshape(shape) for v in (scale, bias, mean, var))
    return (x - mean) * (scale * lax.rsqrt(var + epsilon)) + bias


normalized_p = named_primitive("batch_normalization", _plain, "options")


def _jvp(primals: Any, tangents: Any, *, options: Any):
    """Differentiate `_plain` with respect to the operands that have a tangent."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of(*values):
        traced = dict(zip(moving, values, strict=True))
        return _plain(*(traced.get(i, x) for i, x in enumerate(primals)), options=options)

    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[normalized_p] = _jvp
