"""Functions whose gradient computes them again instead of keeping their intermediate values.

This is `jax.checkpoint`, except that it works on CPU. Memory is saved only if the compiler neither
merges the second computation with the first nor starts it too early. An optimization barrier
prevents both, but XLA:CPU drops barriers. There the second computation starts behind a loop that
waits for the gradient, and ends after one round, which the compiler cannot know.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def remat(function: Callable[[Any, Any], Any], weights: Any, values: Any) -> Any:
    """Call `function(weights, values)`, and again for its gradient, which has no forward mode.

    The trees `weights` and `values` are kept; a compiler may still merge the computations from
    `weights` alone.
    """
    return function(weights, values)


def _forward(function, weights, values):
    return function(weights, values), (weights, values)


def _backward(function, saved, cotangents):
    weights, values = saved
    real = (x for x in jax.tree.leaves(cotangents) if x.size and x.dtype != jax.dtypes.float0)
    first = next(real, None)
    if first is not None:
        values = lax.platform_dependent(
            values,
            first.ravel()[0],
            **_AFTER,
            default=lambda values, signal: lax.optimization_barrier((values, signal))[0],
        )
    return jax.vjp(function, weights, values)[1](cotangents)


remat.defvjp(_forward, _backward)


def _loop(values, signal):
    """Return `values` behind a loop of one iteration that depends on `signal`, for XLA:CPU.

    The number of iterations is known to be 1 only at run time: `start` is always 0, computed from
    the signal.
    """
    start = lax.clamp(0, (signal != 0).astype(jnp.int32), 0)

    def once(carry):
        i, tree = carry
        return i + 1, jax.tree.map(lambda x: jnp.where(i > 0, jnp.zeros_like(x), x), tree)

    return lax.while_loop(lambda carry: carry[0] < 1, once, (start, values))[1]


_AFTER = {"cpu": _loop}
"""The function that makes values wait for a signal, by platform; elsewhere a barrier does."""
