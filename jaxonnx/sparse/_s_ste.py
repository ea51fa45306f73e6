"""S-STE, training of weights that are soft-thresholded to N:M, as an optax transformation.

Hu, Zhu and Chen, "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training"
(https://arxiv.org/abs/2409.09099). With dense weights W and S(W) = sign(W) max(|W| - t, 0), where t
is the (M-N)-th smallest |W| of each group of M (of 2:4 the second smallest), the network computes
with beta S(W), and the gradient there is the one for W (straight through):

- beta = <W, S(W)> / <S(W), S(W)> of the initial weights, one number a tensor, which stays;
- W <- W + u, with u the update of the inner optimizer at W.

S is continuous, so that a weight does not jump when the mask changes. The paper also estimates the
gradient of weights with 2:4 gradients of activations, and rounds to FP8: here both are exact.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxonnx._require import check_arguments
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import Patterns, Select, goals, layers
from jaxonnx.sparse._nm import Pattern, soft_threshold
from jaxonnx.sparse._pattern import kept_share, to_bits
from jaxonnx.sparse._three_phase import ThreePhaseState, make_update, pick, replace


class SSteState(NamedTuple):
    """State of `s_ste`."""

    phases: ThreePhaseState
    """The state of a dynamic phase that never ends; its `pruned` holds the dense weights W."""
    scales: dict[str, jax.Array]
    """beta, by name."""


def s_ste(
    inner: optax.GradientTransformation,
    *,
    pattern: Patterns = "2:4",
    select: Select | None = None,
    exclude: Mapping[str, str] | None = None,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Train by soft-thresholding, S-STE (https://arxiv.org/abs/2409.09099), along one axis.

    The parameters are those that the network computes with, beta S(W), from the first step on; the
    state has W. The gradient of the first step is that of the initial weights.

    >>> params = {"w": jnp.array([[4.0, 1.0, -3.0, 2.0]])}
    >>> optimizer = s_ste(optax.sgd(1.0))
    >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    >>> state.scales["w"]  # of <W, S(W)> / <S(W), S(W)>, S(W) = [2, 0, -1, 0]
    Array(2.2, dtype=float32)

    Args:
      inner: any optax transformation that ends in the final update.
      pattern: N:M, along the input axis.
      select, exclude, axes: which weights become sparse: see `layers`.

    Raises:
      SparsityError: a pattern that is not N:M along one axis, or nothing to make sparse.
    """
    check_arguments(s_ste, locals())
    inner = optax.with_extra_args_support(inner)
    choice = {"pattern": pattern, "select": select, "exclude": exclude, "axes": axes}

    def thresholds(params):
        """Return the function S of each sparse weight, by name."""
        functions = {}
        for name, (goal, sides) in goals(layers(params, transposable=False, **choice)).items():
            if not isinstance(goal, Pattern) or goal.transposable:
                raise SparsityError(f"s_ste is for N:M along one axis, and {name} is to be {goal}")
            functions[name] = partial(soft_threshold, n=goal.n, m=goal.m, axis=sides[1])
        return functions

    def init(params):
        shrink = thresholds(params)
        dense = pick(params, shrink)
        small = {name: shrink[name](w) for name, w in dense.items()}
        masks = {name: x != 0 for name, x in small.items()}
        return SSteState(
            ThreePhaseState(
                count=jnp.zeros((), jnp.int32),
                phase=jnp.int32(2),
                inner=inner.init(params),
                pruned={name: jnp.array(w, copy=True) for name, w in dense.items()},
                masks={name: to_bits(mask) for name, mask in masks.items()},
                flips=jnp.zeros(len(shrink), jnp.float32),
                kept=jnp.stack([kept_share(w, masks[name]) for name, w in dense.items()]),
            ),
            {name: _scale(w, small[name]) for name, w in dense.items()},
        )

    def move(updates, state, params, extra_args):
        shrink, phases = thresholds(params), state.phases
        before = replace(params, phases.pruned)  # a weight decay of `inner` must see W, not S(W)
        updates, inner_state = inner.update(updates, phases.inner, before, **extra_args)
        dense = {n: (phases.pruned[n] + u).astype(phases.pruned[n].dtype)
                 for n, u in pick(updates, shrink).items()}  # fmt: skip
        used = {n: (state.scales[n] * shrink[n](w)).astype(w.dtype) for n, w in dense.items()}
        masks = {n: to_bits(x != 0) for n, x in used.items()}
        changed = [
            jnp.sum(jnp.bitwise_count(bits ^ phases.masks[n]), dtype=jnp.float32) / dense[n].size
            for n, bits in masks.items()
        ]
        shares = [kept_share(w, used[n] != 0) for n, w in dense.items()]
        count = jnp.asarray(optax.safe_increment(phases.count))
        phases = ThreePhaseState(
            count, phases.phase, inner_state, dense, masks, jnp.stack(changed), jnp.stack(shares)
        )
        shown = pick(params, shrink)
        # for a weight that becomes hidden this is -x, so that apply_updates gives exactly 0
        moved = {n: x - shown[n] for n, x in used.items()}
        return replace(updates, moved), SSteState(phases, state.scales)

    return optax.GradientTransformationExtraArgs(init, make_update("s_ste", move))


def _scale(w: jax.Array, small: jax.Array) -> jax.Array:
    """Return the beta for which beta * `small` is nearest to W (least squares); 1 if it is all 0.

    Args:
      w: the dense weight W.
      small: S(W).
    """
    w, small = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (w, small))
    square = jnp.vdot(small, small)
    return jnp.where(square > 0, jnp.vdot(w, small) / jnp.where(square > 0, square, 1), 1)
