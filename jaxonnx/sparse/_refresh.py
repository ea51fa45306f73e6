"""New masks inside a compiled step: computed only when they are due, without copies."""

import jax
import jax.numpy as jnp
import optax

from jaxonnx.sparse._layers import name_of
from jaxonnx.sparse._masks import from_bits, run_apart, to_bits


def run_if(condition, function, carry):
    """Return `function(0, carry)` if the condition holds, else `carry`, in place.

    This is a loop of one turn or none, because XLA copies whatever a conditional passes through.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, carry)


def renew_masks(true, total, old, where):
    """Find new masks as bits, the fraction of each that changed, and the fraction of |W| kept.

    `where` has the `Goal` of each weight.
    """

    def find():
        return {n: where[n].pattern.search(w, where[n].axes) for n, w in sorted(total.items())}

    found = run_apart(true, find)
    bits = {n: to_bits(where[n].pattern.expand(best, where[n].axes)) for n, best in found.items()}
    flips = [
        jnp.sum(jnp.bitwise_count(new ^ old[n]), dtype=jnp.float32) / total[n].size
        for n, new in bits.items()
    ]
    kept = [where[n].pattern.share(total[n], b, where[n].axes) for n, b in found.items()]
    return bits, jnp.stack(flips), jnp.stack(kept)


def refresh_body(is_refresh, w, where, reset):
    """Return a body for `when` that finds the masks of W = W_u + v and hides what they hide.

    Its carry is (v, masks, flips, kept). Where the new mask is 0, it leaves the new W_p in v.
    """

    def refresh(_, carry):
        v, old, _, _ = carry
        # what W_u has under a zero of its mask: nothing, unless this is the first step and the
        # weights were not pruned. W_p has it as well (with `reset`: it is dropped).
        stray = {n: jnp.where(from_bits(old[n], x.shape), 0, x) for n, x in w.items()}
        total = {n: (w[n] - stray[n] + x).astype(w[n].dtype) for n, x in v.items()}
        masks, flips, kept = renew_masks(is_refresh, total, old, where)
        hidden = {n: 0 if reset else x for n, x in total.items()}
        v = {
            n: jnp.where(from_bits(masks[n], x.shape), x - stray[n], hidden[n]).astype(x.dtype)
            for n, x in v.items()
        }
        return v, masks, flips, kept

    return refresh


def zero_lost(inner, params, old, new):
    """Return a body for `when` that sets the moments of newly hidden weights to zero."""

    def lost_elements(path, w):
        n = name_of(path)
        if n not in new:
            return jnp.zeros_like(w, bool)
        return from_bits(old[n] & ~new[n], w.shape)

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)  # of another group of multi_transform

    def clear_moment(moment, gone):
        if is_masked(moment) or moment.shape != gone.shape:
            return moment
        return jnp.where(gone, 0, moment).astype(moment.dtype)

    def zero(_, inner_state):
        gone = jax.tree_util.tree_map_with_path(lost_elements, params)
        return optax.tree_utils.tree_map_params(
            inner, clear_moment, inner_state, gone, is_leaf=is_masked
        )

    return zero
