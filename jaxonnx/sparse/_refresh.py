"""New masks inside a compiled step: computed only when they are due, without copies."""

import jax
import jax.numpy as jnp
import optax

from jaxonnx.sparse._layers import name_of
from jaxonnx.sparse._masks import from_bits, run_unfused, to_bits


def run_if(condition, function, carry):
    """Return `function(0, carry)` if `condition` holds, else `carry`, without a copy.

    It is a loop of one iteration or none: a `lax.cond` copies the arrays that it returns unchanged,
    and a loop updates its carry in place.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, carry)


def renew_masks(true, total, old, where):
    """Search new masks for the weights.

    Args:
      true: a traced true value; see `run_unfused`.
      total: the dense weights W = W_u + W_p by name.
      old: the masks that they have now, as bits (`to_bits`).
      where: the `Goal` of each weight by name.

    Returns:
      The new masks as bits by name; and, as float32[layers] by sorted name, the fraction of each
      mask that changed and the fraction of sum |W| that it keeps.
    """

    def find():
        return {n: where[n].pattern.search(w, where[n].axes) for n, w in sorted(total.items())}

    best = run_unfused(true, find)
    bits = {n: to_bits(where[n].pattern.expand(b, where[n].axes)) for n, b in best.items()}
    flips = [
        jnp.sum(jnp.bitwise_count(new ^ old[n]), dtype=jnp.float32) / total[n].size
        for n, new in bits.items()
    ]
    shares = [where[n].pattern.share(total[n], b, where[n].axes) for n, b in best.items()]
    return bits, jnp.stack(flips), jnp.stack(shares)


def refresh_body(is_refresh, w, where, reset):
    """Return a body for `run_if` that searches the masks of W = W_u + v and applies them.

    Its carry is (v, masks, flips, kept), with v = W_p + u as in `three_phase`. It returns in v the
    update of W_u where the new mask is 1, and the new W_p where it is 0.

    Args:
      is_refresh: whether masks are due; traced.
      w: the sparse weights W_u before the step, by name.
      where: their goals.
      reset: whether hidden weights become 0.
    """

    def refresh(_, carry):
        v, old, _, _ = carry
        # the nonzeros of W_u under a zero of its mask: none, unless this is the first step and the
        # weights were not pruned. They are in W_p as well, and must not be counted twice (with
        # `reset` they are dropped).
        stray = {n: jnp.where(from_bits(old[n], x.shape), 0, x) for n, x in w.items()}
        total = {n: (w[n] - stray[n] + x).astype(w[n].dtype) for n, x in v.items()}
        masks, flips, shares = renew_masks(is_refresh, total, old, where)
        hidden = {n: 0 if reset else x for n, x in total.items()}
        v = {
            n: jnp.where(from_bits(masks[n], x.shape), x - stray[n], hidden[n]).astype(x.dtype)
            for n, x in v.items()
        }
        return v, masks, flips, shares

    return refresh


def zero_lost(inner, params, old, new):
    """Return a body for `run_if` that zeroes the inner optimizer's moments of newly hidden weights.

    Args:
      inner: the inner optimizer; its state is the carry.
      params: the parameters.
      old, new: the masks of the sparse weights before and after the step, as bits.
    """

    def lost_elements(path, w):
        n = name_of(path)
        if n not in new:
            return jnp.zeros_like(w, bool)
        return from_bits(old[n] & ~new[n], w.shape)

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)  # of another group of multi_transform

    def clear_moment(moment, lost):
        if is_masked(moment) or moment.shape != lost.shape:  # a factored moment, as of Adafactor
            return moment
        return jnp.where(lost, 0, moment).astype(moment.dtype)

    def zero(_, inner_state):
        lost = jax.tree_util.tree_map_with_path(lost_elements, params)
        return optax.tree_utils.tree_map_params(
            inner, clear_moment, inner_state, lost, is_leaf=is_masked
        )

    return zero
