"""The 90 transposable 2:4 templates, and the best one for every 4x4 block of a weight.

A template is a 4x4 0/1 matrix with exactly two ones in every row and every column. As a 16-bit code
its cells are read row by row, the first cell being the highest bit; descending code order is the
descending lexicographic order of the cells, so that "the first template on ties" and "the greatest
code on ties" are the same rule.
"""

from collections.abc import Sequence
from functools import cache, reduce
from itertools import combinations, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Axes = tuple[int, int]
"""The (output, input) axes of a weight."""


@cache
def _templates() -> np.ndarray:
    rows = [tuple(int(c in pair) for c in range(4)) for pair in combinations(range(4), 2)]
    valid = [
        sum(t, ()) for t in product(rows, repeat=4) if {*map(sum, zip(*t, strict=True))} == {2}
    ]
    matrix = np.array(sorted(valid, reverse=True), np.uint8)
    matrix.flags.writeable = False
    return matrix


def templates() -> np.ndarray:
    """Return the 90 templates as a read-only `uint8[90, 16]`, in descending lexicographic order.

    >>> templates()[0].reshape(4, 4)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 1],
           [0, 0, 1, 1]], dtype=uint8)
    """
    return _templates()


def blocks(w: jax.Array, axes: Axes, size: int = 4) -> jax.Array:
    """Split each of the two axes into (blocks, size); they must be multiples of `size`."""
    first, second = sorted(axis % w.ndim for axis in axes)
    s = w.shape
    return w.reshape(
        *s[:first], s[first] // size, size, *s[first + 1 : second], s[second] // size, size,
        *s[second + 1 :],
    )  # fmt: skip


def cell_axes(ndim: int, axes: Axes) -> tuple[int, int]:
    """Return the axes along which `blocks` puts the row and the column of a cell."""
    first, second = (axis % ndim for axis in axes)
    return (first + 1, second + 2) if first < second else (first + 2, second + 1)


def _cells(w: jax.Array, axes: Axes) -> list[jax.Array]:
    """Return the 16 cells of every block, in the order of a template's cells, as float32 |w|."""
    row, column = cell_axes(w.ndim, axes)
    view = blocks(w, axes)
    at: list[int | slice] = [slice(None)] * view.ndim

    def cell(r: int, c: int) -> jax.Array:
        at[row], at[column] = r, c
        # the absolute value after slicing, so that no |w| is written to memory
        return jnp.abs(view[tuple(at)].astype(jnp.float32))

    return [cell(r, c) for r in range(4) for c in range(4)]


def _units(cells: list[jax.Array]) -> list[jax.Array]:
    """Round the cells of a block down to integers, in units of 2^-28 of the largest one.

    Sums of these are exact. So a float32 cell within 2^-4 of the largest one keeps all its bits, a
    bfloat16 cell within 2^-20; ties are ties, and the order of a sum, which differs from device to
    device, does not matter. Blocks below 2^-99 are in units of 2^-127.
    """
    # Non-negative floats are ordered like their bits, and integers have a plain maximum. The
    # exponent field e of the block's maximum is biased by 127: frexp would give e - 126, so that
    # the scale 2^(28 - e + 126) has the field 28 + 126 + 127 - e = 281 - e.
    bits = reduce(jnp.maximum, (jax.lax.bitcast_convert_type(x, jnp.int32) for x in cells))
    exponent = jnp.maximum(bits >> 23, 27)
    scale = jax.lax.bitcast_convert_type((281 - exponent) << 23, jnp.float32)
    return [(x * scale).astype(jnp.int32) for x in cells]


class _PartialTemplate(NamedTuple):
    """A part of a template in every block: the sum of its cells and the code of its ones."""

    score: jax.Array
    code: jax.Array | int

    def __add__(self, other: "_PartialTemplate") -> "_PartialTemplate":  # type: ignore[override]
        # parts never share a cell: adding codes joins them, and the greatest sum of codes is the
        # sum of the greatest ones, which makes the tie rule separable
        return _PartialTemplate(self.score + other.score, self.code + other.code)


# The definition, an argmax over |w| @ templates.T (the reference of the tests), writes 90 scores to
# memory for 16 weights and reads them again. `best_codes` differs: it scores each half of a
# template once, shares it between the templates that contain it, and XLA fuses all of it into one
# loop. Two things keep the results equal, bit for bit. Scores are integers, so that a sum does not
# depend on its order. And ties need no index: codes descend as indices ascend, so that the first
# template on ties has the greatest code, and the greatest sum of codes of two parts is the sum of
# the greatest ones.


def _better(a: _PartialTemplate, b: _PartialTemplate) -> _PartialTemplate:
    """Return the candidate with the greater score, at equal scores that with the greater code."""
    if isinstance(a.code, int) and isinstance(b.code, int):
        # the tie is decided now, and costs the compiled search nothing
        high, low = (a, b) if a.code > b.code else (b, a)
        wins = high.score >= low.score
    else:
        high, low = a, b
        wins = (high.score > low.score) | ((high.score == low.score) & (high.code > low.code))
    return _PartialTemplate(
        jnp.where(wins, high.score, low.score), jnp.where(wins, high.code, low.code)
    )


def codes(w: jax.Array, axes: Axes = (-2, -1)) -> jax.Array:
    """Find the code of the best template for every block, fast; equal to the definition.

    Args:
      w: floating-point weight; both `axes` are multiples of 4, all other axes are batch axes.
      axes: the rows and columns of the blocks.

    Returns:
      `uint16`, shaped like `w` with the two axes divided by 4.
    """
    return best_codes(_cells(w, axes)).astype(jnp.uint16)


def best_codes(cells: list[jax.Array]) -> jax.Array:
    """Return the code of the best template as int32, from the cells of blocks as float32 |w|.

    The top half of a template (rows 0 and 1) has column sums of 0, 1 or 2, and the bottom half has
    the complementary ones. So a template is one of: one column pair on both halves (each side a
    permutation of its 2x2 cells) with full columns for the other two; full columns only; or
    permutations on both complementary column pairs of each half. With M_bc, N_bc the better
    permutation on columns b, c of the top and bottom half, and X_bc the better of "b full above, c
    full below" and the reverse, the candidates are M_bc + N_bc + X_rest for the six pairs,
    X_01 + X_23, X_02 + X_13, and max(M_01 + M_23, M_02 + M_13) + the same in N. That is 63
    additions and 28 selections a block instead of 90 sums of eight.
    """
    # a code with one bit for each cell; from here on codes are added as scores are
    scored = [_PartialTemplate(x, 1 << (15 - i)) for i, x in enumerate(_units(cells))]
    a = [scored[i : i + 4] for i in range(0, 16, 4)]
    pairs = list(combinations(range(4), 2))
    rest = dict(zip(pairs, reversed(pairs), strict=True))  # complements, as the pairs are sorted
    top = {(b, c): _better(a[0][b] + a[1][c], a[0][c] + a[1][b]) for b, c in pairs}
    bottom = {(b, c): _better(a[2][b] + a[3][c], a[2][c] + a[3][b]) for b, c in pairs}
    above = [a[0][c] + a[1][c] for c in range(4)]
    below = [a[2][c] + a[3][c] for c in range(4)]
    full = {(b, c): _better(above[b] + below[c], above[c] + below[b]) for b, c in pairs}
    # The column sums of the top half are, in some order, (2, 1, 1, 0), (2, 2, 0, 0) or (1, 1, 1,
    # 1): the candidates below, in this order. X_01 + X_23 chooses one of columns 0 and 1 and one of
    # 2 and 3 to be full above; together with X_02 + X_13 that is all six choices of two columns. So
    # it is for the ones of row 0 in M_01 + M_23 and M_02 + M_13.
    # best of the candidates, by a tree of pairwise selections
    candidates = [
        *(top[p] + bottom[p] + full[rest[p]] for p in pairs),
        _better(full[0, 1] + full[2, 3], full[0, 2] + full[1, 3]),
        _better(top[0, 1] + top[2, 3], top[0, 2] + top[1, 3])
        + _better(bottom[0, 1] + bottom[2, 3], bottom[0, 2] + bottom[1, 3]),
    ]
    while len(candidates) > 1:
        pairs = zip(candidates[::2], candidates[1::2], strict=False)
        candidates = [_better(a, b) for a, b in pairs] + candidates[len(candidates) & ~1 :]
    best = candidates[0]
    return jnp.asarray(best.code)


def search(w: jax.Array, axes: Axes = (-2, -1)) -> list[jax.Array]:
    """Find the best template of every block, and how much of |w| it keeps.

    Returns:
      `codes` (uint16, the two axes divided by 4), the float32 sums of |w| over the two axes, and
      the sums over the weights that the templates keep.
    """
    # a barrier, or XLA would search a block again for each of its 16 cells
    best = jax.lax.optimization_barrier(codes(w, axes))
    code = best.astype(jnp.int32)
    sizes = _cells(w, axes)
    ones = [jnp.where((code >> (15 - i)) & 1 == 1, x, 0) for i, x in enumerate(sizes)]
    pair = sorted(axis % w.ndim for axis in axes)
    return [best, *(_sum_blocks(reduce(jnp.add, parts), pair) for parts in (sizes, ones))]


def _sum_blocks(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Sum over two axes, the last one as a matrix product with ones.

    XLA on CPU fuses a plain sum with the operations that compute its summands, and compiles the
    fusion to a scalar loop; it does not fuse a matrix product.
    """
    x = jnp.moveaxis(x, axes, (-2, -1))
    return jnp.matmul(x, jnp.ones(x.shape[-1], x.dtype), precision="highest").sum(-1)


def expand(code: jax.Array, axes: Axes = (-2, -1)) -> jax.Array:
    """Expand `codes` to the boolean mask: each of the two axes four times as long."""
    row, column = cell_axes(code.ndim, axes)
    shape = [1] * (code.ndim + 2)
    r = jax.lax.broadcasted_iota(jnp.uint16, (*shape[:row], 4, *shape[row + 1 :]), row)
    c = jax.lax.broadcasted_iota(jnp.uint16, (*shape[:column], 4, *shape[column + 1 :]), column)
    wide = jnp.expand_dims(code, (row, column))
    mask = (wide >> (15 - 4 * r - c)) & 1  # cell 4 r + c of the template, the first in bit 15
    first, second = (axis % code.ndim for axis in axes)
    return mask.astype(bool).reshape(
        [4 * n if i in (first, second) else n for i, n in enumerate(code.shape)]
    )
