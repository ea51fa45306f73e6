"""N:M masks beyond the 90 templates: along one axis exactly, along both by optimal transport.

The best transposable mask of an M x M block is a transport problem: maximise sum |w| s over
0 <= s <= 1 with all row and column sums N. With an entropy term it is solved for all blocks at once
by alternating projections (https://arxiv.org/abs/2505.23949), rounded, and improved by exchanges.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .templates import Axes, blocks, cell_axes

_ITERATIONS = 100
_COLDEST = 15.0  # inverse temperature of the last iteration, times the block's mean |w|
_SWEEPS = 2


def group_sums(x: np.ndarray, m: int, axis: int) -> np.ndarray:
    """The sum over every `m` consecutive entries along `axis`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], -1, m, *x.shape[axis + 1 :]).sum(axis + 1)


def one_axis(w: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Keeps the `n` largest |w| of every `m` consecutive along `axis`; ties: the lower index."""
    axis %= w.ndim
    groups = jnp.abs(w).reshape(*w.shape[:axis], -1, m, *w.shape[axis + 1 :])
    lower = jax.lax.broadcasted_iota(jnp.int32, groups.shape, axis + 1)
    return (_rank(groups, lower, axis + 1) < n).reshape(w.shape)


def transposable(w: jax.Array, n: int, m: int, axes: Axes) -> jax.Array:
    """A boolean mask with exactly `n` ones in every row and column of every m x m block.

    Within 0.1 % of the greatest sum |w| on average; a NaN counts as 0. Deterministic.
    """
    view = blocks(w, axes, m)
    cells = cell_axes(w.ndim, axes)
    size = jnp.nan_to_num(jnp.moveaxis(jnp.abs(view), cells, (-2, -1)).astype(jnp.float32))
    flat = size.reshape(-1, m, m)
    flat = flat / jnp.maximum(flat.mean((1, 2), keepdims=True), np.finfo(np.float32).tiny)
    mask = _exchange(_repair(_round(_transport(flat, n), n), flat, n), flat)
    return jnp.moveaxis(mask.reshape(size.shape), (-2, -1), cells).reshape(w.shape)


def _transport(w: jax.Array, n: int) -> jax.Array:
    """log s of the entropic plan of blocks [b, m, m], by Dykstra's projections while it cools."""
    log_n = np.log(n).astype(np.float32)

    def step(k, carry):
        log_s, dual = carry
        # the potentials grow with the inverse temperature, and so stay where they were in w
        log_s, dual = (x * (k + 1) / jnp.maximum(k, 1) for x in (log_s, dual))
        log_s += log_n - jax.nn.logsumexp(log_s, axis=2, keepdims=True)
        log_s += log_n - jax.nn.logsumexp(log_s, axis=1, keepdims=True)
        capped = jnp.minimum(log_s + dual, 0)
        return capped, log_s + dual - capped

    start = (w * (_COLDEST / _ITERATIONS), jnp.zeros_like(w))
    return jax.lax.fori_loop(0, _ITERATIONS, step, start)[0]


def _rank(x: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """How many entries along `axis` come before each: greater ones, or equal and less in `first`.

    All pairs are compared: for the few entries of a block that is far quicker than XLA's sort.
    """
    mine, mine_first = jnp.expand_dims(x, axis), jnp.expand_dims(first, axis)
    other, other_first = jnp.expand_dims(x, axis + 1), jnp.expand_dims(first, axis + 1)
    before = (other > mine) | ((other == mine) & (other_first < mine_first))
    return jnp.sum(before, axis=axis, dtype=jnp.int32)


def _round(log_s: jax.Array, n: int) -> jax.Array:
    """The entries that are among the `n` greatest of both their row and their column."""
    index = jnp.arange(log_s.shape[1])
    # at equal entries diagonals come first: a constant block is then complete at once
    diagonal = jnp.broadcast_to((index - index[:, None]) % len(index), log_s.shape)
    return (_rank(log_s, diagonal, 1) < n) & (_rank(log_s, diagonal, 2) < n)


def _repair(mask: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """Fills rows and columns up to `n`, one entry a step, at the least loss.

    With row i and column j short, either (i, j) is free and is set, or some set (r, c) with (i, c)
    and (r, j) free gives way to those two; when no short pair is free there always is one, since
    every column that is free in row i is then full.
    """
    b, m, _ = mask.shape
    block = jnp.arange(b)

    def short(mask):
        return mask.sum(2) < n, mask.sum(1) < n

    def step(mask):
        rows, columns = short(mask)
        pairs = rows[:, :, None] & columns[:, None, :]
        preferred = jnp.where(pairs, jnp.where(mask, 0, 1 + w), -1).reshape(b, -1)
        i, j = jnp.divmod(jnp.argmax(preferred, axis=1), m)
        needed, free = pairs.any((1, 2)), ~mask[block, i, j]
        row, column = mask[block, i], mask[block, :, j]
        movable = mask & ~row[:, None, :] & ~column[:, :, None]
        gain = w[block, i][:, None, :] + w[block, :, j][:, :, None] - w
        r, c = jnp.divmod(jnp.argmax(jnp.where(movable, gain, -jnp.inf).reshape(b, -1), axis=1), m)
        add, move = needed & free, needed & ~free
        mask = mask.at[block, i, j].set(jnp.where(add, True, mask[block, i, j]))
        mask = mask.at[block, i, c].set(mask[block, i, c] | move)
        mask = mask.at[block, r, j].set(mask[block, r, j] | move)
        return mask.at[block, r, c].set(mask[block, r, c] & ~move)

    return jax.lax.while_loop(lambda mask: short(mask)[0].any(), step, mask)


def _exchange(mask: jax.Array, w: jax.Array) -> jax.Array:
    """Deals the columns that only one of two rows has anew among the two, best first.

    Every pair of rows meets once a sweep, half of the rows with the other half at a time.
    """
    m = mask.shape[1]
    meetings, columns = jnp.asarray(_round_robin(m)), jnp.arange(m)

    def meet(k, mask):
        a, b = meetings[k % len(meetings)]
        one, other = mask[:, a], mask[:, b]
        differ = one != other
        gain = jnp.where(differ, w[:, a] - w[:, b], -jnp.inf)
        # at equal gain the columns that it has already come first: nothing moves for nothing
        rank = _rank(gain, jnp.where(one, columns, columns + m), 2)
        gets = differ & (rank < (one & differ).sum(2, keepdims=True))
        both = one & other
        return mask.at[:, a].set(both | gets).at[:, b].set(both | (differ & ~gets))

    return jax.lax.fori_loop(0, _SWEEPS * len(meetings), meet, mask)


def _round_robin(m: int) -> np.ndarray:
    """Pairings int[rounds, 2, m // 2] in which every two of m rows meet once."""
    players = list(range(m + m % 2))
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], players[: half - 1 : -1], strict=True)
        rounds.append([p for p in pairs if max(p) < m])
        players = [players[0], players[-1], *players[1:-1]]
    return np.array(rounds).transpose(0, 2, 1)
