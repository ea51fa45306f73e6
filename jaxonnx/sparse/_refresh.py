"""New masks inside a compiled step: computed only when they are due, without copies."""

import jax
import jax.numpy as jnp
import optax

from jaxonnx.sparse._layers import name_of
from jaxonnx.sparse._masks import from_bits, to_bits


def kept_share(w: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the share of sum |w| under the mask; 1 if the sum is 0."""
    size = jnp.abs(w.astype(jnp.float32))
    everything = jnp.sum(size)
    share = jnp.sum(jnp.where(mask, size, 0)) / jnp.where(everything > 0, everything, 1)
    return jnp.where(everything > 0, share, 1.0)


def when(condition, function, carry):
    """Return `function(0, carry)` if the condition holds, else `carry`, in place.

    This is a loop of one turn or none, because XLA copies whatever a conditional passes through.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, carry)


def renewed(true, total, old, pattern, where):
    """Find new masks as bits, the fraction of each that changed, and the fraction of |W| kept."""
    names = sorted(total)

    def find():
        return {n: pattern.search(total[n], where[n]) for n in names}

    # A conditional, though the condition holds whenever this runs, keeps the search and its
    # expansion apart: fused, XLA would search a block anew for each of its 16 cells.
    best = jax.lax.cond(
        true,
        find,
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(find)),
    )
    masks = {n: pattern.expand(best[n], where[n]) for n in names}
    bits = {n: to_bits(m) for n, m in masks.items()}
    flips = [
        jnp.sum(jnp.bitwise_count(bits[n] ^ old[n]), dtype=jnp.float32) / masks[n].size
        for n in names
    ]
    return bits, jnp.stack(flips), jnp.stack([kept_share(total[n], masks[n]) for n in names])


def refreshed(is_refresh, w, pattern, where, reset):
    """Return a body for `when` that finds the masks of W = W_u + v and hides what they hide.

    Its carry is (v, masks, flips, kept). Where the new mask is 0, it leaves the new W_p in v.
    """

    def refresh(_, carry):
        v, old, _, _ = carry
        # what W_u has under a zero of its mask: nothing, unless this is the first step and the
        # weights were not pruned. W_p has it as well (with `reset`: it is dropped).
        stray = {n: jnp.where(from_bits(old[n], x.shape), 0, x) for n, x in w.items()}
        total = {n: (w[n] - stray[n] + x).astype(w[n].dtype) for n, x in v.items()}
        masks, flips, kept = renewed(is_refresh, total, old, pattern, where)
        hidden = {n: 0 if reset else x for n, x in total.items()}
        v = {
            n: jnp.where(from_bits(masks[n], x.shape), x - stray[n], hidden[n]).astype(x.dtype)
            for n, x in v.items()
        }
        return v, masks, flips, kept

    return refresh


def zero_lost(inner, params, old, new):
    """Return a body for `when` that sets the moments of newly hidden weights to zero."""

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
