"""Pooling: maximum and sum over windows, and the first maximum over an axis."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.lowering.contract import contract


@dataclass(frozen=True)
class Taps:
    """T(index, x, y): y takes from each window of x the element number `index`."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]

    batch = (0, 1, 2)

    def padded(self, x, fill):
        return lax.pad(x, fill, [(0, 0, 0)] * 2 + [(*pair, 0) for pair in self.pads])

    def tap(self, padded, number: int):
        """Element `number` (row-major) of every window, a strided slice."""
        offsets = np.unravel_index(number, self.kernel)
        starts = [int(o) * d for o, d in zip(offsets, self.dilations, strict=True)]
        limits = [
            b + (n - 1) * s + 1 for b, n, s in zip(starts, self.out, self.strides, strict=True)
        ]
        return lax.slice(
            padded, (0, 0, *starts), (*padded.shape[:2], *limits), (1, 1, *self.strides)
        )

    @property
    def count(self):
        return int(np.prod(self.kernel))

    def _forward(self, index, x):
        padded = self.padded(x, np.zeros((), x.dtype))
        y = jnp.zeros(index.shape, x.dtype)
        for number in range(self.count):
            y = jnp.where(index == number, self.tap(padded, number), y)
        return y

    def plain(self, out, u, v):
        if out == 2:
            return self._forward(u, v)
        x = jax.ShapeDtypeStruct((*v.shape[:2], *self.size), v.dtype)
        return jax.linear_transpose(partial(self._forward, u), x)(v)[0]

    fast = plain


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _maximum(x, taps: Taps):
    padded = taps.padded(x, lowest(x.dtype))
    y = taps.tap(padded, 0)
    for number in range(1, taps.count):
        y = jnp.maximum(y, taps.tap(padded, number))
    return y


def winner(x, taps: Taps):
    """Each window's maximum and the number of the element that is its first maximum (or NaN)."""
    padded = taps.padded(x, lowest(x.dtype))
    y = taps.tap(padded, 0)
    index = jnp.zeros(y.shape, np.int8 if taps.count < 128 else np.int32)
    for number in range(1, taps.count):
        tap = taps.tap(padded, number)
        better = (tap > y) | (tap != tap)
        y = jnp.where(better, tap, y)
        index = jnp.where(better, index.dtype.type(number), index)
    return y, index


@_maximum.defjvp
def _(taps, primals, tangents):
    y, index = winner(*primals, taps)
    return y, contract(taps, 2, index, *tangents)


def max_pool(x, window):
    """Maximum of each window of x (N, C, *size); its gradient goes to the first maximum."""
    return _maximum(x, Taps(x.shape[2:], *window))


def first_winner(x, window):
    """The number, row-major in the window, of each window's first maximum (or NaN)."""
    return winner(x, Taps(x.shape[2:], *window))[1]


def lowest(dtype):
    if np.issubdtype(dtype, np.integer):
        return np.array(np.iinfo(dtype).min, dtype)
    return np.array(-np.inf, dtype)


def window_sum(x, window):
    """Sum of each window of x (N, C, *size), zeros in the padding."""
    return lax.reduce_window(
        x,
        np.zeros((), x.dtype),
        lax.add,
        (1, 1, *window.kernel),
        (1, 1, *window.strides),
        ((0, 0), (0, 0), *window.pads),
        window_dilation=(1, 1, *window.dilations),
    )


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_max(x, axis: int):
    """Maximum over an axis; the gradient goes to the first maximum, as in PyTorch."""
    return x.max(axis)


@first_max.defjvp
def _(axis, primals, tangents):
    (x,), (dx,) = primals, tangents
    index = jnp.argmax(x, axis, keepdims=True)
    chosen = lax.broadcasted_iota(index.dtype, x.shape, axis) == index
    return x.max(axis), jnp.where(chosen, dx, 0).sum(axis)
