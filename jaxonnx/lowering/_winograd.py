"""3x3 convolutions in steps of one with fewer multiplications: Winograd's F(2x2, 3x3).

A tile of 2x2 results takes 16 multiplications a channel instead of 36. The 4x4 image elements that
it reads and the kernel are transformed along both axes, multiplied place by place (which over the
channels is one matrix product for each of the 16 places), and transformed back; the transforms only
add and halve. Both gradients have the same structure. See https://arxiv.org/abs/1509.09308.

The transforms read with constant index tables, and XLA makes one loop of each: as sums of slices,
with a loop for each of the 16 places, they take six times as long to compile.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

Pairs = Sequence[tuple[int, int]]

IMAGE = ((0, 2, -1), (1, 2, 1), (2, 1, -1), (3, 1, -1))
"""The transform of an image tile along one axis: (a, b, f) for place = x[a] + f * x[b]."""
RESULT = ((0, 1, 0), (0, 1, 1), (0, 1, -1), (1, 0, 0))
"""The same for a tile of results; the transpose (`_results`) turns products into results."""
KERNEL = np.kron(*2 * [np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])])
"""The 16 places of a kernel from its 9 taps."""


def _delay(x, table):
    """Return the table in a form that XLA cannot read before x is computed.

    It is one of two equal tables, which an element of x chooses. XLA:CPU starts all work as early
    as it can, and would hold transforms, four times the size of an image and twice that of a
    kernel, in memory until they are needed.
    """
    return jnp.stack([table, table])[(x[0, 0, 0, 0] > 0).astype(int)]


def _tiles(x, pads: Pairs, counts: Sequence[int], rule, after=None):
    """Cut overlapping tiles out of images, and transform them along both axes.

    Args:
      x: images (N, H, W, C).
      pads: of H and W.
      counts: the tiles along H and W, which begin 2 apart.
      rule: `IMAGE` or `RESULT`.
      after: an array that is to be computed before the tiles; see `_delay`.

    Returns:
      (16, N * tiles, C).
    """
    side = 1 + max(a for a, _, _ in rule)
    need = [2 * (count - 1) + side for count in counts]
    ends = [n - pair[0] - size for n, pair, size in zip(need, pads, x.shape[1:3], strict=True)]
    config = [(pair[0], end, 0) for pair, end in zip(pads, ends, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    for axis, count in zip((1, 2), counts, strict=True):
        # each axis is gathered twice, once for all a and once for all b of the rule
        starts, before = 2 * np.arange(count), (slice(None),) * axis
        indices = np.stack([np.add.outer([row[i] for row in rule], starts).ravel() for i in (0, 1)])
        indices = indices if after is None else _delay(after, indices)
        a, b = (x.at[*before, i].get(mode="promise_in_bounds") for i in indices)
        f = np.repeat(np.array([row[2] for row in rule], x.dtype), count)
        x = a + np.expand_dims(f, tuple(range(1, 4 - axis))) * b
    x = x.reshape(x.shape[0], 4, counts[0], 4, counts[1], -1)
    return x.transpose(1, 3, 0, 2, 4, 5).reshape(16, -1, x.shape[-1])


def _results(places):
    """Return a tile of two results from its four places along axis 0."""
    p0, p1, p2, p3 = jnp.unstack(places)
    return p0 + p1 + p2, p1 - p2 + p3


def images(x, w, pads: Pairs, out: Sequence[int], flipped: bool = False):
    """Cross-correlate x (N, H, W, C) with w (3, 3, C, M): (N, *out, M).

    If `flipped`, w is (3, 3, M, C) and read from its end: with the gradient of a result as x, that
    gives the gradient of the image.
    """
    counts = [-(-n // 2) for n in out]
    # the weight too is transformed only when x is computed
    taps = _delay(x, (KERNEL[:, ::-1] if flipped else KERNEL).astype(w.dtype))
    places = (taps @ w.reshape(9, -1)).reshape(16, *w.shape[2:])
    contracted = (((2,), (2 if flipped else 1,)), ((0,), (0,)))
    y = lax.dot_general(_tiles(x, pads, counts, IMAGE), places, contracted)
    # back along both axes of the tiles, whose two results then stand side by side in the image
    y = y.reshape(4, 4, len(x), *counts, -1)
    y = jnp.stack([jnp.stack(_results(row), 3) for row in _results(y)], 2)
    y = y.reshape(len(x), 2 * counts[0], 2 * counts[1], -1)
    return y[:, : out[0], : out[1]]


def kernel(x, y, pads: Pairs):
    """Return the gradient of w (3, 3, C, M); x is the image, y the gradient of the result."""
    counts = [-(-n // 2) for n in y.shape[1:3]]
    v = _tiles(x, pads, counts, IMAGE, after=y)
    z = _tiles(y, ((0, 0), (0, 0)), counts, RESULT)
    # the sum over tiles and images is the contraction: the gradient needs no loop over them
    places = lax.dot_general(v, z, (((1,), (1,)), ((0,), (0,))))
    w = KERNEL.T.astype(x.dtype) @ places.reshape(16, -1)
    return w.reshape(3, 3, x.shape[-1], y.shape[-1])
