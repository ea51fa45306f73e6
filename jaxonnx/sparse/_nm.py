"""N:M sparsity: at most N of every M consecutive weights are kept, along one axis or both.

The best transposable mask of an M x M block is a transport problem: maximise sum |w| s over
0 <= s <= 1 with all row and column sums N. With an entropy term it is solved for all blocks at once
by alternating projections (https://arxiv.org/abs/2505.23949), rounded, and improved by exchanges
until there is no better one.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import SparsityError
from jaxonnx.sparse import _search
from jaxonnx.sparse._pattern import SparsityPattern, ratio, register
from jaxonnx.sparse._templates import Axes, blocks, cell_axes


@dataclass(frozen=True)
class Pattern(SparsityPattern):
    """`n` of every `m` consecutive weights are kept, along one axis or (transposable) both."""

    n: int = 2
    m: int = 4
    transposable: bool = True

    def __str__(self) -> str:
        return self.name + (" transposable" if self.transposable else " one-axis")

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def density(self) -> float:
        return self.n / self.m

    @property
    def _has_templates(self) -> bool:
        return (self.n, self.m, self.transposable) == (2, 4, True)

    def misfit(self, shape: tuple[int, ...], axes: Axes) -> str:
        """Say why a weight of this shape cannot take the pattern; empty if it can."""
        for name, axis in zip(("output", "input"), axes, strict=True):
            if (self.transposable or name == "input") and (shape[axis] % self.m or not shape[axis]):
                return f"{name} axis of {shape[axis]} is not a multiple of {self.m}"
        return ""

    def search(self, w: jax.Array, axes: Axes) -> Any:
        if self._has_templates:
            return _search.search(w, axes)
        if self.transposable:
            return transposable(w, self.n, self.m, axes)
        return one_axis(w, self.n, self.m, axes[1])

    def expand(self, best: Any, axes: Axes) -> jax.Array:
        return _search.expand(best, axes) if self._has_templates else best

    def share(self, w: jax.Array, best: Any, axes: Axes) -> jax.Array:
        if self._has_templates:
            return ratio(best.kept.sum(), best.whole.sum())
        return super().share(w, best, axes)

    def groups(self, nonzero: np.ndarray, axes: Axes, along: int) -> tuple[np.ndarray, np.ndarray]:
        if nonzero.shape[along] % self.m:  # the free axis of a one-axis pattern
            return np.full(nonzero.shape, -1, np.int32), np.ones(nonzero.shape, bool)
        full = group_sums(nonzero, self.m, along) > self.n
        numbers = np.arange(full.size, dtype=np.int32).reshape(full.shape)
        return np.repeat(numbers, self.m, along), np.repeat(full, self.m, along)

    def holds(self, mask: jax.Array | np.ndarray, axes: Axes) -> bool:
        nonzero = np.asarray(mask) != 0
        required = axes if self.transposable else axes[1:]
        return all(int(group_sums(nonzero, self.m, a).max(initial=0)) <= self.n for a in required)

    def pack(self, w: np.ndarray, nonzero: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        if w.shape[axis] % self.m:
            raise SparsityError(
                f"axis {axis} of the weight must be a multiple of {self.m}, got {w.shape[axis]}"
            )
        w, nonzero = (_split_groups(np.moveaxis(x, axis, -1), self.m, -1) for x in (w, nonzero))
        if (most := int(nonzero.sum(-1).max(initial=0))) > self.n:
            raise SparsityError(
                f"a group along axis {axis} keeps {most} of {self.m}, not at most {self.n}"
            )
        # kept places first (a stable sort of ~kept), then as many of the others as are missing to
        # N; ascending order is what `damage` checks and what the hardware reads
        places = np.sort(np.argsort(~nonzero, axis=-1, kind="stable")[..., : self.n], axis=-1)
        return np.take_along_axis(w, places, -1), _to_bits(places, _width(self.m))

    def unpack(
        self, values: jax.Array, indices: jax.Array, shape: tuple[int, ...], axis: int
    ) -> jax.Array:
        places = _from_bits(jnp.asarray(indices), values.shape, _width(self.m))
        hit = places[..., None] == jnp.arange(self.m, dtype=jnp.uint8)  # [..., groups, n, m]
        values = jnp.asarray(values)[..., None]
        # at most one value hits a place. Select it: a sum would turn -0 into 0
        dense = jnp.zeros(hit.shape[:-2] + hit.shape[-1:], values.dtype)
        for k in range(self.n):
            dense = jnp.where(hit[..., k, :], values[..., k, :], dense)
        return jnp.moveaxis(dense.reshape(*dense.shape[:-2], -1), -1, axis)

    def damage(
        self, values: np.ndarray, indices: np.ndarray, shape: tuple[int, ...], axis: int
    ) -> str:
        n, m = self.n, self.m
        moved = (*shape[:axis], *shape[axis + 1 :], shape[axis] // m, n)
        words = -(-math.prod(moved) * _width(m) // 8)
        if values.shape != moved or shape[axis] % m:
            return f"values of shape {values.shape} do not fill {list(shape)}"
        if indices.dtype != np.uint8 or indices.shape != (words,):
            return f"{indices.size} bytes of indices, not {words}"
        places = np.asarray(_from_bits(jnp.asarray(indices), moved, _width(m))).astype(int)
        if (np.diff(places, axis=-1) <= 0).any() or (places >= m).any():
            return f"the indices of a group are not {n} different places of {m}"
        return ""


def _from_name(match, transposable: bool) -> Pattern | None:
    n, m = map(int, match.groups())
    return Pattern(n, m, transposable) if 0 < n < m <= 32 else None


register("N:M with 0 < N < M <= 32", r"(\d+):(\d+)", _from_name)


def _split_groups(x, m: int, axis: int):
    """Split `axis` into (groups, m)."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], -1, m, *x.shape[axis + 1 :])


def group_sums(x: np.ndarray, m: int, axis: int) -> np.ndarray:
    """Return the sum over every `m` consecutive entries along `axis`."""
    return _split_groups(x, m, axis).sum(axis % x.ndim + 1)


def one_axis(w: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Return the mask of the `n` largest |w| of every `m` consecutive weights along `axis`.

    At ties the lower index is kept.
    """
    axis %= w.ndim
    grouped = _split_groups(jnp.abs(w), m, axis)
    lower = jax.lax.broadcasted_iota(jnp.int32, grouped.shape, axis + 1)
    return (rank(grouped, lower, axis + 1) < n).reshape(w.shape)


def soft_threshold(w: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Soft-threshold every `m` consecutive weights at their (m-n)-th smallest |w|.

    Each |w| becomes max(|w| - threshold, 0), so that at most `n` of them remain nonzero.
    """
    grouped = _split_groups(w, m, axis)
    axis = axis % w.ndim + 1
    least = jax.lax.index_in_dim(jnp.sort(jnp.abs(grouped), axis), m - n - 1, axis)
    return (jnp.sign(grouped) * jnp.maximum(jnp.abs(grouped) - least, 0)).reshape(w.shape)


def _width(m: int) -> int:
    """Return the number of bits of an index below `m`."""
    return (m - 1).bit_length()


def _to_bits(places: np.ndarray, width: int) -> np.ndarray:
    """Pack indices into `uint8`, `width` bits each, low bits first, without gaps."""
    bits = (places.reshape(-1, 1) >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def _from_bits(words: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """Unpack the indices of `_to_bits` into `uint8` of `shape`."""
    count = math.prod(shape)
    bits = jnp.unpackbits(words, count=count * width, bitorder="little").reshape(count, width)
    return jnp.sum(bits << jnp.arange(width, dtype=jnp.uint8), axis=1, dtype=jnp.uint8).reshape(
        shape
    )


_ITERATIONS = 60
_COLDEST = 15.0  # inverse temperature of the last iteration, times the block's mean |w|
_LONGEST = 8  # rows in a cycle
_MAX_CYCLES = 64  # improvements of a block; the loop ends before, where none is left
_UNITS = 1 << 24  # the integer that stands for a block's largest |w|; a cycle sums up to 8 of them
_NEVER = -(1 << 27)  # no walk with such a step gains; eight of it fit an int32


def transposable(w: jax.Array, n: int, m: int, axes: Axes) -> jax.Array:
    """Find a boolean mask with exactly `n` ones in every row and column of every m x m block.

    It has the greatest sum |w| for m up to 8 (to 2^-24 of the block's largest), and is within 0.1 %
    of it beyond; a NaN counts as 0. Deterministic.
    """
    view = blocks(w, axes, m)
    cells = cell_axes(w.ndim, axes)
    size = jnp.nan_to_num(jnp.moveaxis(jnp.abs(view), cells, (-2, -1)).astype(jnp.float32))
    flat = size.reshape(-1, m, m)
    flat = flat / jnp.maximum(flat.mean((1, 2), keepdims=True), np.finfo(np.float32).tiny)
    mask = _improve(_repair(_round_transport(_transport(flat, n), n), flat, n), flat)
    return jnp.moveaxis(mask.reshape(size.shape), (-2, -1), cells).reshape(w.shape)


def _transport(w: jax.Array, n: int) -> jax.Array:
    """Solve the transport problem with an entropy term for blocks [b, m, m], by annealing.

    Each iteration is a step of Dykstra's projections onto the three constraints; the temperature
    falls from one iteration to the next.

    Returns:
      log s, float32[b, m, m].
    """
    log_n = np.log(n).astype(np.float32)

    def step(k, carry):
        log_s, dual = carry
        # log s is an inverse temperature times (w + potentials). The k-th iteration has k times the
        # first one's, so that scaling both keeps the potentials that were found so far
        log_s, dual = (x * (k + 1) / jnp.maximum(k, 1) for x in (log_s, dual))
        # project onto row sums n, column sums n, and s <= 1. Only the last is not a subspace, and
        # needs Dykstra's correction (`dual`)
        log_s += log_n - jax.nn.logsumexp(log_s, axis=2, keepdims=True)
        log_s += log_n - jax.nn.logsumexp(log_s, axis=1, keepdims=True)
        capped = jnp.minimum(log_s + dual, 0)
        return capped, log_s + dual - capped

    start = (w * (_COLDEST / _ITERATIONS), jnp.zeros_like(w))
    return jax.lax.fori_loop(0, _ITERATIONS, step, start)[0]


def rank(x: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """Return the rank of each entry along `axis` in descending order; the greatest has rank 0.

    All pairs are compared: for the few entries of a block that is far quicker than XLA's sort.

    Args:
      x: the entries.
      first: the tie-break: of equal entries that with the lower `first` comes first.
      axis: non-negative.

    Returns:
      int32, shaped like `x`.
    """
    entry, entry_first = jnp.expand_dims(x, axis), jnp.expand_dims(first, axis)
    other, other_first = jnp.expand_dims(x, axis + 1), jnp.expand_dims(first, axis + 1)
    before = (other > entry) | ((other == entry) & (other_first < entry_first))
    return jnp.sum(before, axis=axis, dtype=jnp.int32)


def _round_transport(log_s: jax.Array, n: int) -> jax.Array:
    """Choose the entries that are among the `n` greatest of both their row and their column."""
    index = jnp.arange(log_s.shape[1])
    # ties are broken by the diagonal of an entry: a constant block is then complete at once
    diagonal = jnp.broadcast_to((index - index[:, None]) % len(index), log_s.shape)
    return (rank(log_s, diagonal, 1) < n) & (rank(log_s, diagonal, 2) < n)


def _repair(mask: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """Fill rows and columns up to `n`, one entry a step, at the least loss.

    With row i and column j short, either (i, j) is free and is set, or some set (r, c) with (i, c)
    and (r, j) free gives way to those two; such an (r, c) always exists when no short pair is free,
    since every column that is free in row i is then full.
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


def _improve(mask: jax.Array, w: jax.Array) -> jax.Array:
    """Improve masks [b, m, m] by cyclic exchanges, until none of at most `_LONGEST` rows gains.

    In an exchange along a cycle of rows, each row passes one of its columns on to the next row, so
    that all row and column sums stay. A mask that no cycle improves is optimal: these are the
    negative cycles of a minimum-cost flow. Walks of k steps with the greatest gain are the k-th
    max-plus power of the gains between two rows. The shortest cycle that gains meets no row twice,
    since otherwise a part of it would gain. Gains are integers, so that rounding cannot make the
    loop run forever.
    """
    b, m, _ = mask.shape
    block, same = jnp.arange(b), jnp.eye(m, dtype=bool)
    top = jnp.maximum(w.max((1, 2), keepdims=True), np.finfo(np.float32).tiny)
    units = (w / top * _UNITS).astype(jnp.int32)

    def turn(carry):
        mask, _, count = carry
        # gain[b, p, q]: the best column that row p can hand on to row q
        free = mask[:, :, None] & ~mask[:, None]
        gain = jnp.where(free, units[:, None] - units[:, :, None], _NEVER).max(3)
        walks = [jnp.where(same, 0, gain)]  # of one step, two steps, ...
        while len(walks) < min(m, _LONGEST):
            walks.append((walks[-1][..., None] + walks[0][:, None]).max(2))
        tours = jnp.stack([jnp.diagonal(walk, axis1=1, axis2=2) for walk in walks])
        steps = jnp.argmax((tours > 0).any(2), axis=0)  # of the shortest, minus 1; 0 if none gains
        start = jnp.argmax(tours[steps, block], axis=1)
        # follow the cycle backwards from its end (which is `start` again), and move a column at
        # each of its steps; a block whose cycle is shorter stays at `start`, where row == to
        turned, row = mask, start
        for i in reversed(range(len(walks))):
            to, row = row, start
            if i:
                before = jnp.argmax(walks[i - 1][block, start] + walks[0][block, :, to], axis=1)
                row = jnp.where(i <= steps, before, start)
            free = mask[block, row] & ~mask[block, to]
            gain = jnp.where(free, units[block, to] - units[block, row], _NEVER)
            column, moves = jnp.argmax(gain, axis=1), row != to
            turned = turned.at[block, row, column].set(turned[block, row, column] & ~moves)
            turned = turned.at[block, to, column].set(turned[block, to, column] | moves)
        return turned, steps.any(), count + 1

    return jax.lax.while_loop(lambda c: c[1] & (c[2] < _MAX_CYCLES), turn, (mask, True, 0))[0]
