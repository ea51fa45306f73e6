"""Pooling: maximum and sum over windows, and the first maximum over an axis.

Max pooling is a maximum of shifted slices, and its gradient is gathered from the windows that an
element won: on CPU 3 to 30 times faster than the derivative of reduce_window; small sums likewise.
The maximum of a large window is taken one axis after the other, which keeps the program small.

A TPU has an instruction for reduce_window, and another for its derivative: shifted slices are
padding there, of which a step of LeNet reads and writes half as much again.
"""

from dataclasses import dataclass, field
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxonnx._arrays import lower_fun
from jaxonnx.lowering._contract import Rule, contract, named_primitive, on_platforms
from jaxonnx.lowering._taps import Taps

UNROLLED = 16
"""The most elements of a window that is unrolled."""


@dataclass(frozen=True)
class Choice:
    """T(index, x, y): y takes from each window of x the element with the number `index`.

    It is the derivative of max pooling, where `index` is the number of each window's maximum.
    """

    taps: Taps
    batch: tuple[int, ...] = field(default=(0, 1, 2), init=False)

    def plain(self, out, u, v):
        if out == 2:
            chosen = lambda y, number, tap: jnp.where(u == number, tap, y)  # noqa: E731
            return self.taps.fold((v,), (0,), chosen, jnp.zeros(u.shape, v.dtype))
        won = lambda number, index, y: jnp.where(index == number, y, 0)  # noqa: E731
        return self.taps.add((u, v), (-1, 0), won)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _maximum(x, taps: Taps):
    return maximum_p.bind(x, taps=taps)


def _plain_maximum(x, taps: Taps):
    low = lowest(x.dtype)
    if taps.is_unrolled:
        return reduce(jnp.maximum, taps.read(x, low))
    start = jnp.full(taps.resize(x.shape, taps.out), low)
    return taps.fold((x,), (low,), lambda y, _, tap: jnp.maximum(y, tap), start)


def _winner(x, y, taps: Taps):
    """Return the number of the first element of each window that is its maximum, or NaN.

    Args:
      x: images.
      y: the maxima of the windows.
      taps: the windows.

    Returns:
      int8 or int32, shaped like y.
    """
    # `inside` is padded with False: padding cannot win, even if it equals the maximum
    outer = (1,) * (x.ndim - taps.lead - len(taps.size))
    inside = jnp.ones((*(1,) * taps.lead, *taps.size, *outer), bool)

    def first(index, number, tap, real):
        won = ((tap == y) | (tap != tap)) & real
        return jnp.where(won, jnp.asarray(number, index.dtype), index)

    index = jnp.zeros(y.shape, np.int8 if taps.count < 128 else np.int32)
    return taps.fold((x, inside), (lowest(x.dtype), False), first, index, reverse=True)


def _reduce_max(x, taps: Taps):
    """Return the maxima by `lax.reduce_window`, whose derivative goes to the first of equals.

    Where the maximum is NaN, the derivative goes to any element of the window.
    """
    return lax.reduce_window(x, lowest(x.dtype), lax.max, *_window_arguments(taps, x.ndim))


def _has_instruction(taps: Taps) -> bool:
    """Check whether `_reduce_max` takes these windows and can be differentiated."""
    return max(taps.dilations) == 1 and min(map(min, taps.pads)) >= 0


def _window_arguments(taps: Taps, rank: int) -> tuple:
    """Return the arguments of `lax.reduce_window` after the function, for arrays of a rank."""
    ones, none = (1,) * rank, ((0, 0),) * rank
    kernel, strides = taps.resize(ones, taps.kernel), taps.resize(ones, taps.strides)
    return kernel, strides, taps.resize(none, taps.pads), ones, taps.resize(ones, taps.dilations)


maximum_p = named_primitive("window_maximum", _plain_maximum, "taps")
winner_p = named_primitive("window_winner", _winner, "taps")
_maximum_on_tpu = lower_fun(
    lambda x, taps: _reduce_max(x, taps) if _has_instruction(taps) else _plain_maximum(x, taps),
    multiple_results=False,
)
mlir.register_lowering(maximum_p, _maximum_on_tpu, platform="tpu")


@_maximum.defjvp
def _(taps, primals, tangents):
    # the same maximum as without a derivative, so that XLA merges the two if a graph has both
    (x,), (dx,) = primals, tangents
    y = _maximum(x, taps)

    # two equal tangents: taken from the winner of each window, or by the derivative of the
    # instruction
    def take_winners(x, y, dx):
        return contract(Choice(taps), 2, winner_p.bind(x, y, taps=taps), dx)

    def derive_instruction(x, y, dx):
        return jax.jvp(partial(_reduce_max, taps=taps), (x,), (dx,))[1]

    on_tpu = derive_instruction if _has_instruction(taps) else take_winners
    fixed = map(lax.stop_gradient, (x, y))
    return y, lax.platform_dependent(*fixed, dx, tpu=on_tpu, default=take_winners)


def _taps(x, window, channels: int) -> Taps:
    """Return the windows over images whose channels are axis 1 or -1."""
    return Taps(x.shape[2:] if channels == 1 else x.shape[1:-1], *window, lead=1 + (channels == 1))


def max_pool(x, window, channels: int = 1):
    """Return the maximum of each window; its gradient goes to the first one.

    Args:
      x: (N, C, *size), or (N, *size, C) with `channels` -1.
      window: the geometry (`ops.windows.Window`).
      channels: the axis of the channels, 1 or -1.
    """
    taps = _taps(x, window, channels)
    if taps.count <= UNROLLED:
        return _maximum(x, taps)
    # a large window: along one axis after the other, the last axis first. The first maximum of the
    # window in row-major order is then the one that the gradient goes to
    for axis in reversed(range(len(taps.size))):
        windows = _along(taps, axis)
        x = _maximum(x, windows) if windows.is_unrolled else _long_maximum(x, windows, axis)
    return x


def _long_maximum(x, taps: Taps, axis: int):
    """Return the maximum of long windows along one axis; disjoint ones by a reshape."""
    size, step, count = taps.kernel[axis], taps.strides[axis], taps.out[axis]
    disjoint = count == 1 or step == size
    if not disjoint or taps.dilations[axis] != 1 or any(taps.pads[axis]):
        return _maximum(x, taps)
    at = taps.lead + axis
    x = lax.slice_in_dim(x, 0, count * size, axis=at)
    return first_max(x.reshape(*x.shape[:at], count, size, *x.shape[at + 1 :]), at + 1)


def _along(taps: Taps, axis: int) -> Taps:
    """Return the windows along one axis of images whose later axes are pooled already."""

    def only(values, other):
        return tuple(v if i == axis else other for i, v in enumerate(values))

    size, out = taps.size[: axis + 1] + taps.out[axis + 1 :], taps.size[:axis] + taps.out[axis:]
    kernel, strides = only(taps.kernel, 1), only(taps.strides, 1)
    dilations, pads = only(taps.dilations, 1), only(taps.pads, (0, 0))
    return Taps(size, kernel, strides, dilations, pads, out, taps.lead)


def first_winner(x, window):
    """Return the row-major number, within its window, of each window's first maximum or NaN."""
    taps = _taps(x, window, 1)
    return _winner(x, _plain_maximum(x, taps), taps)


def lowest(dtype):
    """Return the neutral element of a maximum."""
    if np.issubdtype(dtype, np.integer):
        return np.array(np.iinfo(dtype).min, dtype)
    return np.array(-np.inf, dtype)


@dataclass(frozen=True)
class Sum:
    """T(one, x, y): y is the sum of the windows of x, times the scalar `one`.

    The scalar, which is 1, makes the linear map a trilinear form, as `contract` takes it.
    """

    taps: Taps
    batch: tuple[int, ...] = field(default=(1, 2), init=False)

    def _forward(self, x):
        zero = np.zeros((), x.dtype)
        return lax.reduce_window(x, zero, lax.add, *_window_arguments(self.taps, x.ndim))

    def plain(self, out, u, v):
        if out == 0:
            return (self._forward(u) * v).sum()
        if out == 2:
            return u * self._forward(v)
        lead, size = self.taps.lead, self.taps.size
        shape = (*v.shape[:lead], *size, *v.shape[lead + len(size) :])
        x = jax.ShapeDtypeStruct(shape, v.dtype)
        return u * jax.linear_transpose(self._forward, x)(v)[0]

    def fast(self, out, u, v):
        if self.taps.count > UNROLLED or out == 0:
            return self.plain(out, u, v)
        if out == 2:
            return u * sum(self.taps.read(v))
        return u * self.taps.add((v,), (0,), lambda _, y: y)


on_platforms(Sum, {"cpu": Rule(Sum.fast, mapped=Sum.fast)})


def window_sum(x, window, channels: int = 1):
    """Return the sum of each window of x (N, C, *size), with zeros in the padding."""
    return contract(Sum(_taps(x, window, channels)), 2, np.ones((), x.dtype), x)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_max(x, axis: int):
    """Return the maximum over an axis; its gradient goes to the first one, as in PyTorch."""
    return x.max(axis)


@first_max.defjvp
def _(axis, primals, tangents):
    (x,), (dx,) = primals, tangents
    index = jnp.argmax(x, axis, keepdims=True)
    chosen = lax.broadcasted_iota(index.dtype, x.shape, axis) == index
    return x.max(axis), jnp.where(chosen, dx, 0).sum(axis)
