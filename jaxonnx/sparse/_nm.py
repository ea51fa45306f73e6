"""N:M sparsity: at most N of every M consecutive weights are kept, along one axis or both."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import SparsityError
from jaxonnx.sparse import _search
from jaxonnx.sparse._pattern import SparsityPattern, ratio, register
from jaxonnx.sparse._templates import Axes
from jaxonnx.sparse._transport import rank, transposable


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
