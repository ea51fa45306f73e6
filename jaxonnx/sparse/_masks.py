"""Masks of an N:M pattern for one weight, and their storage as one bit per weight."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxonnx.errors import SparsityError
from jaxonnx.sparse import _nm as nm
from jaxonnx.sparse._sharding import on_auto_axes
from jaxonnx.sparse._templates import Axes, codes, expand


@dataclass(frozen=True)
class Pattern:
    """`n` of every `m` consecutive weights are kept, along one axis or (transposable) both."""

    n: int = 2
    m: int = 4
    transposable: bool = True

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" + (" transposable" if self.transposable else " one-axis")

    def misfit(self, shape: tuple[int, ...], axes: Axes) -> str:
        """Why a weight of this shape cannot take the pattern; empty if it can."""
        for name, axis in zip(("output", "input"), axes, strict=True):
            if (self.transposable or name == "input") and (shape[axis] % self.m or not shape[axis]):
                return f"{name} axis of {shape[axis]} is not a multiple of {self.m}"
        return ""


def parse(pattern: str | Pattern, transposable: bool = True) -> Pattern:
    """`"2:4"` as a `Pattern`; `SparsityError` if it is not N:M with 0 < N < M <= 32."""
    if isinstance(pattern, Pattern):
        return pattern
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    n, m = map(int, found.groups()) if found else (0, 0)
    if not 0 < n < m <= 32:
        raise SparsityError(f"pattern {pattern!r} is not of the form N:M with 0 < N < M <= 32")
    return Pattern(n, m, transposable)


def default_axes(ndim: int) -> Axes:
    """(-2, -1) for a matrix, (0, 1) for a convolution kernel in ONNX layout (O, I, kH, kW)."""
    return (-2, -1) if ndim == 2 else (0, 1)


def mask(
    w: jax.Array | np.ndarray,
    pattern: str | Pattern = "2:4",
    *,
    transposable: bool = True,
    axes: Axes | None = None,
) -> jax.Array:
    """The 0/1 mask of the pattern that keeps the most of sum |w|, per block.

    2:4 transposable is exact; ties go to the template that comes first in `templates()`. Other
    transposable patterns are exact up to M = 8 but for ties and rounding, and within 0.1 % of the
    optimum beyond (`jaxonnx.sparse._nm`). A one-axis mask is exact, ties go to the lower index.

    >>> w = jnp.array([[4.0, 3, 2, 1], [3, 4, 1, 2], [1, 2, 3, 4], [2, 1, 4, 3]])
    >>> print(mask(w).astype(int))
    [[1 1 0 0]
     [1 1 0 0]
     [0 0 1 1]
     [0 0 1 1]]

    Args:
      w: floating-point weight. Blocks lie over the two `axes`; every other axis (kernel positions,
        leading batch axes) is a batch axis.
      pattern: "N:M" with 0 < N < M <= 32.
      transposable: N:M along both axes, so that the weight and its transpose are both N:M along
        their contraction; otherwise along the input axis only.
      axes: the (output, input) axes. By default (-2, -1) for rank 2 and (0, 1), the layout of ONNX
        and PyTorch convolutions, above. A Flax kernel (in, out) is `axes=(1, 0)`, its convolution
        (kH, kW, I, O) is `axes=(-1, -2)`; the order only matters for one-axis masks.

    Returns:
      `bool`, shaped like `w`.

    Raises:
      SparsityError: not floating point, axes that are not multiples of M, NaN or infinity. Under a
        trace the values are not looked at: a block with a NaN gets some valid template.
    """
    pattern = parse(pattern, transposable)
    axes = check(w, pattern, axes)
    if not isinstance(w, Tracer) and not np.isfinite(np.asarray(w, np.float32)).all():
        raise SparsityError("the weight has NaN or infinite entries: it has no best mask")

    def find(w):
        if (pattern.n, pattern.m, pattern.transposable) == (2, 4, True):
            # two programs: in one, XLA would search anew for every cell of the mask
            return _expand(_codes(w, axes), axes)
        return _search(w, pattern, axes)

    return on_auto_axes(find, lambda w: w, jnp.asarray(w))


def check(w, pattern: Pattern, axes: Axes | None) -> Axes:
    """The axes as non-negative numbers; raises `SparsityError` if the weight does not fit."""
    if w.ndim < 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise SparsityError(f"{w.dtype}{list(w.shape)} is not a floating-point matrix or kernel")
    axes = default_axes(w.ndim) if axes is None else axes
    if not all(-w.ndim <= a < w.ndim for a in axes) or len({a % w.ndim for a in axes}) != 2:
        raise SparsityError(f"axes {axes} do not name two axes of a weight of rank {w.ndim}")
    axes = (axes[0] % w.ndim, axes[1] % w.ndim)
    if misfit := pattern.misfit(w.shape, axes):
        raise SparsityError(f"a weight of shape {list(w.shape)} cannot be {pattern}: {misfit}")
    return axes


def search(w: jax.Array, pattern: Pattern, axes: Axes) -> jax.Array:
    """`mask` without its checks, for use under a trace."""
    if (pattern.n, pattern.m, pattern.transposable) == (2, 4, True):
        return expand(codes(w, axes), axes)
    if pattern.transposable:
        return nm.transposable(w, pattern.n, pattern.m, axes)
    return nm.one_axis(w, pattern.n, pattern.m, axes[1])


_codes = jax.jit(codes, static_argnums=1)
_expand = jax.jit(expand, static_argnums=1)
_search = jax.jit(search, static_argnums=(1, 2))


def to_bits(mask: jax.Array) -> jax.Array:
    """A mask as `uint8[ceil(size / 8)]`.

    Bit k of word j is element k * words + j of the flattened mask: consecutive weights then read
    consecutive words, which vectorises, and the packing does not depend on the pattern.
    """
    return on_auto_axes(_to_bits, None, mask)


def _to_bits(mask: jax.Array) -> jax.Array:
    words = -(-mask.size // 8)
    planes = jnp.pad(mask.reshape(-1), (0, 8 * words - mask.size)).reshape(8, words)
    place = jnp.arange(8, dtype=jnp.uint8)[:, None]
    return jnp.sum(planes.astype(jnp.uint8) << place, axis=0, dtype=jnp.uint8)


def from_bits(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The boolean mask of the given shape back from `to_bits`."""
    planes = (bits[None] >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1
    return planes.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(bool)


def is_pattern(mask: jax.Array | np.ndarray, pattern: Pattern, axes: Axes) -> bool:
    """Whether every group of the pattern keeps at most N, along the input axis or both."""
    kept = np.asarray(mask) != 0
    wanted = axes if pattern.transposable else axes[1:]
    return all(
        int(nm.group_sums(kept, pattern.m, axis).max(initial=0)) <= pattern.n for axis in wanted
    )
