"""N:M masks beyond the 90 templates: along one axis exactly, along both by optimal transport."""

import jax
import jax.numpy as jnp
import numpy as np


def group_sums(x: np.ndarray, m: int, axis: int) -> np.ndarray:
    """The sum over every `m` consecutive entries along `axis`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], -1, m, *x.shape[axis + 1 :]).sum(axis + 1)


def one_axis(w: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Keeps the `n` largest |w| of every `m` consecutive along `axis`; ties: the lower index."""
    axis %= w.ndim
    groups = jnp.abs(w).reshape(*w.shape[:axis], -1, m, *w.shape[axis + 1 :])
    order = jnp.argsort(groups, axis=axis + 1, stable=True, descending=True)
    rank = jnp.argsort(order, axis=axis + 1)
    return (rank < n).reshape(w.shape)
