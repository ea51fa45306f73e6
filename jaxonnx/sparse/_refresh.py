"""New masks inside a compiled step: work that is done only when it is due, and copies nothing."""

import jax
import jax.numpy as jnp
import optax

from jaxonnx.sparse._layers import name_of
from jaxonnx.sparse._masks import from_bits, to_bits


def kept_share(w: jax.Array, mask: jax.Array) -> jax.Array:
    """The share of sum |w| under the mask; 1 of nothing."""
    size = jnp.abs(w.astype(jnp.float32))
    everything = jnp.sum(size)
    share = jnp.sum(jnp.where(mask, size, 0)) / jnp.where(everything > 0, everything, 1)
    return jnp.where(everything > 0, share, 1.0)


def when(condition, function, carry):
    """`function(0, carry)` if the condition holds, else `carry`, in place.

    A loop of one turn or none, because XLA copies whatever a conditional passes through.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, carry)


def renewed(true, total, old, pattern, where):
    """Masks as bits, the fraction of each that differs from `old`, and the fraction of |W| kept."""
    names = sorted(total)

    def find():
        return {n: pattern.search(total[n], where[n]) for n in names}

    # The conditional (on what is true here) parts the search from its expansion: within one
    # fusion XLA would search a block anew for each of its 16 cells.
    found = jax.lax.cond(
        true,
        find,
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(find)),
    )
    masks = {n: pattern.expand(found[n], where[n]) for n in names}
    bits = {n: to_bits(m) for n, m in masks.items()}
    flips = [
        jnp.sum(jnp.bitwise_count(bits[n] ^ old[n]), dtype=jnp.float32) / masks[n].size
        for n in names
    ]
    return bits, jnp.stack(flips), jnp.stack([kept_share(total[n], masks[n]) for n in names])


def zero_lost(inner, params, old, new):
    """A body for `when` that sets the moments of newly hidden weights to zero."""

    def lost(path, w):
        n = name_of(path)
        if n not in new:
            return jnp.zeros_like(w, bool)
        return from_bits(old[n] & ~new[n], w.shape)

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)  # of another group of multi_transform

    def cleared(moment, gone):
        if is_masked(moment) or moment.shape != gone.shape:
            return moment
        return jnp.where(gone, 0, moment).astype(moment.dtype)

    def zero(_, inner_state):
        gone = jax.tree_util.tree_map_with_path(lost, params)
        return optax.tree_utils.tree_map_params(
            inner, cleared, inner_state, gone, is_leaf=is_masked
        )

    return zero
