"""A recurrence over the steps of a sequence, whose gradient multiplies once for all steps.

Reverse mode of a `lax.scan` adds to the gradient of a weight in every step: a small product, and
the whole of the gradient read and written. Here the weights' share of a derivative is computed for
all steps at once, outside of the loop, to which only the part remains that really depends on the
step before. JAX derives the rest, and this rule as well: forward mode and all orders work.

Half precision is multiplied as it is, and gives gates in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxonnx.lowering._product import is_half, product, rows

Step = Callable[..., tuple]

GROUPS = 2
"""Groups of hidden units in each step on CPU. XLA:CPU computes side by side what does not depend on
each other, which uses two cores better than a product that they share."""

LARGE = 2**18
"""The fewest elements of a recurrent weight that is split into groups: below, starting a second
product costs more than it saves."""

VAST = 2**20
"""The most elements of such a weight: a larger product is better shared by the cores."""

FEW = 4
"""The fewest examples of a batch with which groups are faster."""


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def elementwise(function: Callable, *values):
    """Apply an elementwise function to arrays of one shape.

    Its derivative keeps one residual for each array, the partial derivative. Within a scan,
    automatic differentiation would write all factors of the partial derivatives to memory in every
    step, and read them again for the gradient.
    """
    return function(*values)


@elementwise.defjvp
def _(function, values, tangents):
    def part(i):
        varied = lambda x: function(*values[:i], x, *values[i + 1 :])  # noqa: E731
        return jax.jvp(varied, (values[i],), (jnp.ones_like(values[i]),))[1] * tangents[i]

    return function(*values), sum(map(part, range(1, len(values))), part(0))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def recur(
    step: Step, reverse: bool, lone: int, x, w, r, bias, extra, valid, states
) -> tuple[Any, Any]:
    """Return the first state after every step, and all states after the last.

    A step is `states = step(gates, extra, *states)`. The gates are first the sums of `x @ w.T` and
    `states[0] @ r.T`, then what the input, then what the state has alone, all with the bias added.

    Args:
      step: a function that closes over no array.
      reverse: whether to begin with the last element of the sequence.
      lone: the number of gates that the state has alone, the last rows of r.
      x: (steps, batch, features).
      w: (gates - lone, features).
      r: (at most gates, hidden), or None for a step that multiplies the state itself.
      bias: (gates,) or None.
      extra: a pytree of further arrays for every step, or None.
      valid: bool (steps, batch, 1), the states stay where it is false; or None.
      states: before the first step, a tuple of (batch, hidden).
    """
    return _scan(step, reverse, lone, None, x, w, r, bias, extra, valid, states)


@partial(recur.defjvp, symbolic_zeros=True)
def _(step, reverse, lone, primals, tangents):
    x, w, r, bias, extra, valid, states = primals
    dx, dw, dr, dbias, dextra, _, dstates = tangents
    dextra, dstates = jax.tree.map(_array, (dextra, dstates), is_leaf=_is_zero)
    kind = jnp.float32 if is_half(x) else x.dtype
    gates = jnp.zeros((*x.shape[:2], len(w) + lone), kind)

    def scan(gates, extra, states):
        return _scan(step, reverse, lone, gates, x, w, r, bias, extra, valid, states)

    # The reference, a scan differentiated step by step, accumulates dw += x_t.T @ dgates_t in every
    # step. Here the loop is linearized in the gates only; the tangents of x, w, r and bias enter
    # through the gates of all steps at once, and transposing those products gives dw as one product
    # over (steps * batch). `before` is the state that each step multiplied by r.
    (hidden, last), linear = jax.linearize(scan, gates, extra, states)
    ends = [hidden, states[0][None]]
    before = jnp.concatenate(ends)[1:] if reverse else jnp.concatenate(ends[::-1])[: len(x)]
    before = lax.platform_dependent(before, tpu=_steps_outside, default=lambda h: h)
    if not _is_zero(dx):
        gates += _apart(_by_rows(dx, w), len(w), gates.shape[-1])
    if not _is_zero(dw):
        gates += _apart(_at_once(x, transpose_weight(dw)), len(w), gates.shape[-1])
    if not (dr is None or _is_zero(dr)):
        gates += _apart(_at_once(before, transpose_weight(dr)), len(r) - lone, gates.shape[-1])
    if not (dbias is None or _is_zero(dbias)):
        gates += dbias
    return (hidden, last), linear(gates, dextra, dstates)


def _scan(step: Step, reverse: bool, lone: int, added, x, w, r, bias, extra, valid, states):
    """Run `recur`, with an array through which tangents can enter the gates.

    If `added` (steps, batch, gates) is not None, its tangents are added to those of the gates; its
    values are not used.

    Accelerators multiply the input of all steps at once; a CPU does it step by step, since it would
    have to fetch the product from memory again.
    """
    width = states[0].shape[-1]
    w_t, r_t = (None if a is None else transpose_weight(a) for a in (w, r))
    of_input, of_state = (None, None) if bias is None else jnp.split(bias, [len(w)])

    def gates(from_x, h):
        return from_x if r is None else _add_gates(from_x, state_product(h, r, r_t), lone, of_state)

    def scan(gates_of, from_x, count=1):
        """Scan with the gates `gates_of(given, h)` of each group of hidden units."""
        split = partial(_groups, width=width, count=count)

        def body(groups, inputs):
            from_x, valid, added = inputs
            gates = gates_of(from_x, _join_groups([group[0] for group in groups]))
            if added is not None:
                gates = map(_with_tangent, gates, split(added))
            new = [
                _next(step, *group, valid)
                for group in zip(gates, split(extra), groups, strict=True)
            ]
            return new, _join_groups([group[0] for group in new])

        last, hidden = lax.scan(body, split(states), (from_x, valid, added), reverse=reverse)
        return jax.tree.map(lambda *groups: _join_groups(groups), *last), hidden

    def at_once(x):
        return scan(lambda x, h: [gates(x, h)], _at_once(x, w_t, of_input))

    def step_by_step(x):
        few = isinstance(x.shape[1], int) and x.shape[1] < FEW
        whole = few or lone or width % GROUPS
        if r is not None and len(r) == len(w) and LARGE <= r.size <= VAST and not whole:
            split = partial(_groups, width=width, count=GROUPS, axis=0)
            both = map(transpose_weight, split(jnp.concatenate([w, r], 1)))
            weights = [*zip(split(r), both, split(bias), strict=True)]
            return scan(lambda x, h: [_both_products(x, h, *group) for group in weights], x, GROUPS)
        return scan(lambda x, h: [gates(_affine(x, w_t, of_input), h)], x)

    last, hidden = lax.platform_dependent(x, cpu=step_by_step, default=at_once)
    return hidden, last


def _next(step: Step, gates, extra, states, valid) -> tuple:
    """Return the states after a step; where `valid` is false they stay as they were."""
    new = step(gates, extra, *states)
    new = tuple(n.astype(s.dtype) for n, s in zip(new, states, strict=True))
    if valid is None:
        return new
    return tuple(jnp.where(valid, n, s) for n, s in zip(new, states, strict=True))


def _groups(tree: Any, width: int, count: int, axis: int = -1) -> list:
    """Split the arrays of a tree into `count` groups of hidden units.

    Args:
      tree: a pytree of arrays.
      width: the number of hidden units. The axis has a multiple of this length: the units of one
        gate after those of the other.
      count: the number of groups, a divisor of `width`.
      axis: the axis of the units.

    Returns:
      A tree for each group.
    """

    def share(i, x):
        at = axis % x.ndim
        shape = *x.shape[:at], x.shape[at] // width, count, width // count, *x.shape[at + 1 :]
        share = lax.index_in_dim(x.reshape(shape), i, at + 1, keepdims=False)
        return share.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])

    if count == 1:
        return [tree]
    return [jax.tree.map(partial(share, i), tree) for i in range(count)]


def _add_gates(from_x, product, lone: int, bias):
    """Add the shares of the input and the state in the gates.

    Args:
      from_x: of the input; its last gates, beyond those of the state, are the input's alone.
      product: of the state; its last `lone` gates are the state's alone.
      lone: see `recur`.
      bias: of the state's own gates, or None.

    Returns:
      The common gates, then the input's own, then the state's own.
    """
    shared = product.shape[-1] - lone
    if shared == from_x.shape[-1] and not lone:
        return from_x + product
    both, alone = from_x[..., :shared] + product[..., :shared], product[..., shared:]
    alone = alone if bias is None else alone + bias
    return jnp.concatenate([both, from_x[..., shared:], alone], -1)


def _apart(gates, first: int, size: int):
    """Insert zeros after the first `first` of `size` gates, where a tangent has no share."""
    gap = jnp.zeros((*gates.shape[:-1], size - gates.shape[-1]), gates.dtype)
    return jnp.concatenate([gates[..., :first], gap, gates[..., first:]], -1) if gap.size else gates


def _join_groups(groups):
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, -1)


def transpose_weight(w):
    """Return `w.T`, on CPU in several parts if its rows divide.

    XLA merges a plain transposition into the product whose result it transposes, here a gradient
    (gates, features). On CPU that product takes up to twice as long as the one (features, gates).
    On TPU it is the better one: in parts, the factors would be copied.
    """
    return lax.platform_dependent(w, cpu=_in_parts, default=jnp.transpose)


def _in_parts(w):
    rows, columns = w.shape
    parts = next(n for n in (4, 3, 2, 1) if rows % n == 0)
    return w.reshape(parts, rows // parts, columns).transpose(2, 0, 1).reshape(columns, rows)


def _steps_outside(h):
    """Return h (steps, batch, hidden) with a layout, on TPU, in which each step is contiguous.

    For the product over steps and batch XLA:TPU would choose a layout with the batch outermost, and
    every step of the loop would copy what it writes.
    """
    return lax.optimization_barrier(h.reshape(-1, h.shape[-1])).reshape(h.shape)


def _affine(x, w_t, bias=None):
    return product(x, w_t) if bias is None else product(x, w_t) + bias


def _at_once(x, w_t, bias=None):
    """Project all steps, in one matrix product."""
    gates = rows(x, w_t)
    return gates if bias is None else gates + bias


@jax.custom_jvp
def state_product(h, r, r_t):
    """Return `h @ r.T`, given both r and its transpose.

    The forward pass multiplies by r_t and the gradient by r, so that neither transposes. Gradients
    of the weight go to r_t.
    """
    return product(h, r_t)


@partial(state_product.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (h, r, r_t), (dh, _, dr_t) = primals, tangents
    tangent = 0 if _is_zero(dh) else _by_rows(dh, r)
    return product(h, r_t), tangent if _is_zero(dr_t) else tangent + product(h, dr_t)


def _both_products(x, h, r, w_and_r_t, bias):
    """Return `x @ w.T + h @ r.T + bias` by one product of the concatenated factors.

    Args:
      w_and_r_t: the transpose of w and r side by side.
    """
    gates = _joint(x, h, r, w_and_r_t)
    return gates if bias is None else gates + bias


@jax.custom_jvp
def _joint(x, h, r, w_and_r_t):
    return product(jnp.concatenate([x, h], -1), w_and_r_t)


@partial(_joint.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (x, h, r, both), (dx, dh, _, dboth) = primals, tangents
    joined = jnp.concatenate([x, h], -1)
    terms = [] if _is_zero(dh) else [_by_rows(dh, r)]
    if not _is_zero(dx):
        terms.append(product(dx, both[: x.shape[-1]]))
    if not _is_zero(dboth):
        terms.append(product(joined, dboth))
    return product(joined, both), sum(terms[1:], terms[0])


def _by_rows(x, w):
    """Return `x @ w.T`; beyond half precision without transposing w, by contracting last axes."""
    if is_half(x):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return product(rows, w.T).reshape(*x.shape[:-1], w.shape[0])
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_jvp
def _with_tangent(gates, added):
    """Return the gates; their tangent is that of the gates plus that of `added`."""
    return gates


_with_tangent.defjvp(lambda primals, tangents: (primals[0], tangents[0] + tangents[1]))


def _is_zero(x) -> bool:
    return isinstance(x, SymbolicZero)


def _array(x):
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x
