"""Three-phase transposable N:M training as an optax transformation.

The parameters are the masked weights W_u at all times. What the mask hides (W_p), the mask (one bit
per weight) and the counter live in the optimizer state, so the forward pass needs no hook and any
training loop that calls `update` and `apply_updates` trains sparse.

With u the inner optimizer's update for the dense gradient at W_u, and m the mask:

- phase 1 (dense): W <- W + u, m all ones;
- phase 2 (dynamic): W_u <- W_u + u * m, W_p <- W_p + u * (1 - m); at every refresh
  W = W_u + W_p, m = mask(W), W_u = W * m, W_p = W * (1 - m), or 0 with `reset`;
- phase 3 (fixed): W_u <- W_u + u * m.

One of W_u and W_p is zero at every weight. So the three are one rule, without a branch on the phase
(in phase 1 the mask is all ones, in phase 3 no refresh changes it): with v = W_p + u, W = W_u + v
and m' the mask after the step, W_u <- W_u + (v where m', -W_u elsewhere) and W_p <- W * (1 - m'),
where W is v unless the mask is new.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx._arrays import like, on_auto_axes, to_host
from jaxonnx._require import check_arguments
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import Goal, Patterns, Select, by_name, goals, layers, name_of
from jaxonnx.sparse._pattern import from_bits, kept_share, mask, parse, run_unfused, to_bits

_FOREVER = np.iinfo(np.int32).max
"""A step that the counter, which saturates, does not pass."""


class ThreePhaseState(NamedTuple):
    """State of `three_phase`. The dictionaries have an entry for each sparse weight, by name.

    Beyond the inner optimizer's state this is one copy of the sparse weights and one bit for each.
    """

    count: jax.Array
    """int32: number of steps done."""
    phase: jax.Array
    """int32: 1, 2 or 3, the phase of the next step."""
    inner: Any
    pruned: dict[str, jax.Array]
    """W_p where the mask is zero; where it is one, the last update."""
    masks: dict[str, jax.Array]
    """The masks as bits; `state_masks` expands them."""
    flips: jax.Array
    """float32[layers], by sorted name: fraction of the mask that the last refresh changed."""
    kept: jax.Array
    """float32[layers], by sorted name: fraction of sum |W| under the mask at the last refresh."""


def three_phase(
    inner: optax.GradientTransformation,
    *,
    dense: float,
    dynamic: float | None,
    fixed: float | None = None,
    steps_per_epoch: int | None = None,
    refresh: float | None = None,
    pattern: Patterns = "2:4",
    transposable: bool = True,
    select: Select | None = None,
    exclude: Mapping[str, str] | None = None,
    axes: Any = None,
    reset: bool = False,
    moments: Literal["keep", "zero"] = "keep",
    decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that it trains sparse weights. It must be the last member of a chain.

    Phase 1 equals `inner` bit for bit. From the last dense step on each sparse weight has the
    pattern after every step, and hidden weights are exactly 0 under any inner optimizer. The phases
    switch inside `update`, by the counter.

    >>> params = {"w": jnp.arange(16.0).reshape(4, 4)}
    >>> optimizer = three_phase(optax.sgd(0.1), dense=1, dynamic=1, refresh=1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": jnp.ones((4, 4))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> [int(n) for n in jnp.count_nonzero(params["w"], axis=0)]  # the next step is sparse
    [2, 2, 2, 2]

    Args:
      inner: any optax transformation that ends in the final update (step size and sign applied).
      dense, dynamic, fixed: lengths of the phases, in epochs with `steps_per_epoch`, else in
        steps. `dynamic=None` never ends. Training on after `fixed` stays in phase 3. With `dense=0`
        the mask is that of the initial weights, and is applied by the first step unless the weights
        were pruned before (`prune`).
      steps_per_epoch: the unit of the lengths.
      refresh: steps or epochs between mask refreshes in phase 2; one epoch by default.
      pattern, transposable, select, exclude, axes: which weights become sparse: see `layers`.
      reset: whether a refresh sets newly hidden weights to zero, as in the published procedure. By
        default it keeps them, so that they can come back, which is better on average (see
        benchmarks/sparse/accuracy.py).
      moments: whether the inner optimizer's moments of newly hidden weights stay or become zero
        (sums over rows, as in Adafactor, stay).
      decay: the factor of W_p that is added to the gradient, which pulls hidden weights to zero
        (SR-STE, https://arxiv.org/abs/2102.04010).

    Raises:
      SparsityError: an unknown pattern, a schedule without a sparse phase, lengths without a
        refresh interval, or nothing to make sparse (at `init`).
    """
    check_arguments(three_phase, locals())
    for name in pattern.values() if isinstance(pattern, Mapping) else [pattern]:
        parse(name, transposable)  # raises here, not at `init`
    # steps at which phases 2 and 3 begin, and the steps between refreshes
    lengths = {"dense": dense, "dynamic": dynamic, "fixed": fixed, "refresh": refresh}
    for name, length in lengths.items():
        if length is not None and length < 0:
            raise SparsityError(f"{name}={length} is negative")
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise SparsityError(f"steps_per_epoch={steps_per_epoch}: an epoch has at least one step")
    if dynamic == 0 and fixed == 0:
        raise SparsityError("dynamic=0 and fixed=0 leave no phase in which the weights are sparse")
    if dynamic != 0 and refresh is None and steps_per_epoch is None:
        raise SparsityError("pass refresh= (steps between mask refreshes) or steps_per_epoch=")
    unit = steps_per_epoch or 1
    every = round((1 if refresh is None else refresh) * unit)
    if every < 1:
        raise SparsityError(f"refresh={refresh} is less than a step")
    start = round(dense * unit)
    end = _FOREVER if dynamic is None else start + round(dynamic * unit)
    if start < end < start + every:
        raise SparsityError(
            f"the dynamic phase of {end - start} steps ends before the first refresh, after {every}"
        )
    inner = optax.with_extra_args_support(inner)

    plan = partial(
        _plan, pattern=pattern, transposable=transposable, select=select, exclude=exclude, axes=axes
    )

    def phase(count):
        return jnp.where(count < start, 1, jnp.where(count < end, 2, 3)).astype(jnp.int32)

    def init(params):
        leaves = by_name(params)
        where = plan(params)
        masks = {
            name: mask(leaves[name], goal.pattern, axes=goal.axes)
            if start == 0
            else jnp.ones_like(leaves[name])
            for name, goal in where.items()
        }
        count = jnp.zeros((), jnp.int32)
        return ThreePhaseState(
            count=count,
            phase=phase(count),
            inner=inner.init(params),
            pruned={
                # without a reset a mask from the start hides weights that may come back
                name: jnp.where((m != 0) | reset, 0, leaves[name]).astype(leaves[name].dtype)
                for name, m in masks.items()
            },
            masks={name: to_bits(m != 0) for name, m in masks.items()},
            flips=jnp.zeros(len(where), jnp.float32),
            kept=jnp.stack([kept_share(leaves[n], m != 0) for n, m in sorted(masks.items())]),
        )

    def move(updates, state, params, extra_args):
        where = plan(params)
        if decay:
            # gradients with `decay` * W_p added
            hidden = {
                n: jnp.where(from_bits(state.masks[n], x.shape), 0, x)
                for n, x in state.pruned.items()
            }
            updates = replace(
                updates, {n: g + decay * hidden[n] for n, g in pick(updates, hidden).items()}
            )
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        w, u = pick(params, where), pick(updates, where)
        # in the wider of the two dtypes: an update of -W in a narrower one would not give exactly 0
        u = {n: x.astype(jnp.promote_types(x.dtype, w[n].dtype)) for n, x in u.items()}
        count = jnp.asarray(optax.safe_increment(state.count))
        # `count` is the number of the next step. So the last dense step searches the first mask,
        # and the forward pass of the first sparse step computes with masked weights
        is_refresh = (count >= start) & (count <= end) & ((count - start) % every == 0)

        def expand_mask(masks, n):
            return from_bits(masks[n], w[n].shape)

        # v = W_p + u. A weight under a one of the mask has no W_p, and -0 stands for it: -0 + u is
        # u bit for bit, where 0 + u would turn an update of -0 into 0. v is the only array that a
        # step writes beyond those of `inner`: the update of W_u and the new W_p are parts of it
        v = {
            n: jnp.where(expand_mask(state.masks, n), -0.0, state.pruned[n]) + x
            for n, x in u.items()
        }
        v, masks, flips, shares = run_if(
            is_refresh,
            refresh_body(is_refresh, w, where, reset),
            (v, state.masks, state.flips, state.kept),
        )
        flips = jnp.where(count == start, 0, flips)  # the first mask: there was none before
        if moments == "zero":
            inner_state = run_if(
                is_refresh, zero_lost(inner, params, state.masks, masks), inner_state
            )
        # apply_updates adds these to W_u, which gives exactly W_u + u, W or 0
        u = {n: jnp.where(expand_mask(masks, n), x, -w[n]) for n, x in v.items()}
        pruned = {n: x.astype(w[n].dtype) for n, x in v.items()}
        return replace(updates, u), ThreePhaseState(
            count, phase(count), inner_state, pruned, masks, flips, shares
        )

    return optax.GradientTransformationExtraArgs(init, make_update("three_phase", move))


def fixed_mask(inner: optax.GradientTransformation, **options: Any) -> optax.GradientTransformation:
    """Train under the mask of the initial weights: `three_phase` with phase 3 only.

    With the weights of a trained model this is one-shot pruning and fine-tuning (as in ASP), with
    fresh ones a static mask. Start from `prune(params)`, or the first forward pass is dense.
    """
    return three_phase(inner, dense=0, dynamic=0, **options)


def sr_ste(
    inner: optax.GradientTransformation, *, decay: float = 2e-4, refresh: int = 1, **options: Any
) -> optax.GradientTransformation:
    """Train by sparse-refined straight-through estimation (https://arxiv.org/abs/2102.04010).

    From the first step on the mask follows the dense weights; hidden weights are kept and decay.
    """
    return three_phase(
        inner, dense=0, dynamic=None, refresh=refresh, reset=False, decay=decay, **options
    )


def _plan(params, pattern: Patterns, **options) -> dict[str, Goal]:
    """Return the pattern and the axes of each weight that becomes sparse, by name."""
    return goals(layers(params, pattern, **options))


def make_update(
    method: str, move: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Return the `update` function of an optax transformation that needs the parameters.

    Args:
      method: the name of the transformation in errors.
      move: a function of updates, state, parameters and a dict of extra arguments that returns the
        new updates and the new state; they get the shardings of the parameters and the state.
    """

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise SparsityError(f"{method} needs the parameters: update(grads, state, params)")
        return on_auto_axes(
            move, lambda _, g, state, w, *rest: like((w, state)), updates, state, params, extra_args
        )

    return update


def pick(tree, names: Iterable[str]) -> dict[str, Any]:
    """Return the leaves of a pytree with these names, sorted by name."""
    leaves = by_name(tree)
    return {name: leaves[name] for name in sorted(names)}


def replace(tree, new):
    """Return a pytree in which the arrays of `new` replace the leaves of the same names."""
    return jax.tree_util.tree_map_with_path(lambda path, x: new.get(name_of(path), x), tree)


def prune(
    params: Any,
    pattern: Patterns = "2:4",
    *,
    transposable: bool = True,
    select: Select | None = None,
    exclude: Mapping[str, str] | None = None,
    axes: Any = None,
) -> Any:
    """Apply its mask to every weight of `params` that `layers` selects (one-shot pruning)."""
    where = _plan(
        params, pattern, transposable=transposable, select=select, exclude=exclude, axes=axes
    )
    masks = {
        name: mask(w, where[name].pattern, axes=where[name].axes)
        for name, w in pick(params, where).items()
    }
    leaves = by_name(params)
    return replace(params, {n: jnp.where(m, leaves[n], 0) for n, m in masks.items()})


# New masks inside a compiled step: computed only when they are due, without copies.


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


# What the optimizer state says about the sparsity.


def find_state(opt_state: Any) -> ThreePhaseState:
    """Return the `ThreePhaseState` in an optimizer state; `SparsityError` unless there is one."""

    def is_state(x):
        return isinstance(x, ThreePhaseState)

    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(states) != 1:
        raise SparsityError(f"the optimizer state has {len(states)} three-phase states, not one")
    return states[0]


def state_masks(opt_state: Any) -> dict[str, jax.Array]:
    """Return the current boolean masks by name."""
    state = find_state(opt_state)
    return {n: from_bits(bits, state.pruned[n].shape) for n, bits in state.masks.items()}


def metrics(opt_state: Any) -> dict[str, Any]:
    """Summarise the sparsity of an optimizer state in plain numbers.

    `phase` (of the next step), `sparsity` (fraction of weights hidden), `flip_rate` and `kept` (of
    sum |W|, at the last refresh) over all sparse weights, `flips` and `kept_by_layer` by name.

    >>> import jax, optax
    >>> from jaxonnx import sparse
    >>> optimizer = sparse.fixed_mask(optax.sgd(0.1))
    >>> metrics(optimizer.init({"w": jax.numpy.ones((4, 4))}))["sparsity"]
    0.5
    """
    state = find_state(opt_state)
    names = sorted(state.masks)
    sizes = np.array([state.pruned[n].size for n in names])
    ones = np.array([np.bitwise_count(to_host(state.masks[n])).sum() for n in names])
    flips, shares = np.asarray(state.flips, float), np.asarray(state.kept, float)
    return {
        "phase": int(state.phase),
        "sparsity": 1 - float(ones.sum() / sizes.sum()),
        "flip_rate": float(flips @ sizes / sizes.sum()),
        "kept": float(shares @ sizes / sizes.sum()),
        "flips": dict(zip(names, flips.tolist(), strict=True)),
        "kept_by_layer": dict(zip(names, shares.tolist(), strict=True)),
    }
