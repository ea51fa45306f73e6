"""Convolution, forward and both gradients.

It is `lax.conv_general_dilated` and its derivatives, except on platforms with a rule of their own.
The rule of CPU chooses by the shapes; `benchmarks/speed/lowerings.py` measures each case again.

3x3 convolutions in steps of one may take fewer multiplications, by Winograd's F(2x2, 3x3): a tile
of 2x2 results takes 16 multiplications a channel instead of 36. The 4x4 image elements that it
reads and the kernel are transformed along both axes, multiplied place by place (which over the
channels is one matrix product for each of the 16 places), and transformed back; the transforms only
add and halve. Both gradients have the same structure. See https://arxiv.org/abs/1509.09308.

The transforms read with constant index tables, and XLA makes one loop of each: as sums of slices,
with a loop for each of the 16 places, they take six times as long to compile.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.lowering._compile import keep_apart, uses_onednn
from jaxonnx.lowering._contract import Rule, contract, is_half, on_platforms
from jaxonnx.lowering._stored_array import KernelFirst
from jaxonnx.lowering._taps import UNROLLED, Taps

MERGED_CHANNELS = 32
"""Groups with fewer input channels are joined up to this many, as blocks of a larger weight."""

NARROW = 32
"""In the forward pass, windows of at most this many elements, with at most this many results, are
multiplied element by element, which reads the image in place."""

SLOW_WORK = 2**18
"""The fewest multiplications with which XLA:CPU's slow path is avoided: below, starting a product
costs more than it saves."""

FEW_WINDOWS = 16
"""The most windows an image for which gradients are computed by im2col, which uses all cores, if
the weight is stored kernel first. Gradients of weights whose windows do not overlap always are."""

LARGE_WEIGHT = 2**18
"""The fewest elements of a weight that costs more to transpose than that saves."""

MANY_CHANNELS = 24 if jax.__version_info__ >= (0, 12) else 20
"""The least half of the harmonic mean of input and output channels with which Winograd's form is
faster than XLA:CPU's own convolution, which became faster with JAX 0.12."""

MANY_CHANNELS_OF_WEIGHT = 20
"""The same for the gradient of the weight."""

MANY_TILES = 32
"""The fewest tiles of 2x2 in a batch that are worth a transform of the weight."""

TRANSFORMED = 2**25
"""The most bytes of transformed tiles with which Winograd's form is faster for images."""

SUMMED = 9
"""The taps of a depthwise kernel whose gradients are summed in one reading of the images."""

MANY_CHANNELS_BESIDE = 56
"""`MANY_CHANNELS` in a program that is compiled with oneDNN."""

WORK_OF_ONEDNN = 2**26
"""The fewest multiplications of a convolution that is worth a call of oneDNN."""

WORK_OF_TAP = 2**25
"""The fewest multiplications of a tap with which the gradient of a weight is a product for each."""

LARGE_TAP = 2**16
"""The fewest elements of a tap's matrix with which the gradient of a weight in 16 bits is a product
for each tap: below, reading the image once for each takes longer."""


@dataclass(frozen=True)
class Conv:
    """T(x, w, y) of a convolution: x (N, *size, C), w (M, C / groups, *kernel), y (N, *out, M).

    If `turned`, w is stored kernel first, (*kernel, C / groups, M).
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]
    groups: int
    turned: bool = False
    wide: int | None = None
    """The argument in float32, where the others are in half precision."""
    batch: tuple[int, ...] = field(default=(0, 2), init=False)

    @property
    def taps(self) -> Taps:
        return Taps(self.size, self.kernel, self.strides, self.dilations, self.pads, self.out, 1)

    @property
    def is_pointwise(self) -> bool:
        """Whether it is one product of matrices: a kernel of one element, one group, no padding."""
        return math.prod(self.kernel) == self.groups == 1 and not any(map(any, self.pads))

    def _weight(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape of w for these numbers of channels."""
        inputs //= self.groups
        return (*self.kernel, inputs, outputs) if self.turned else (outputs, inputs, *self.kernel)

    def _channels(self, w) -> tuple[int, int]:
        """Return (outputs, inputs of a group) of a weight."""
        return w.shape[:-3:-1] if self.turned else w.shape[:2]

    def rows(self, w):
        """Return w as a matrix (taps * C / groups, M)."""
        if not self.turned:
            w = w.transpose(*range(2, w.ndim), 1, 0)
        return w.reshape(-1, w.shape[-1])

    def _dtype(self, out, u, v):
        """Return the dtype of a contraction."""
        least = min(u.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
        return jnp.promote_types(least, jnp.float32) if out == self.wide else least

    def dense(self, x, w, dtype=None):
        """Convolve by `lax.conv_general_dilated`, into `dtype`."""
        rank = len(self.kernel)
        image = (0, rank + 1, *range(1, rank + 1))
        weight = (rank + 1, rank, *range(rank)) if self.turned else (*range(rank + 2),)
        y = lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.pads,
            rhs_dilation=self.dilations,
            dimension_numbers=lax.ConvDimensionNumbers(image, weight, image),
            feature_group_count=self.groups,
            preferred_element_type=dtype,
        )
        return keep_apart(y)

    def plain(self, out, u, v):
        dtype = self._dtype(out, u, v)
        if out == self.wide == 2:
            common = jnp.promote_types(u.dtype, v.dtype)
            return self.dense(u.astype(common), v.astype(common), dtype)
        return self._contract_derived(self.dense, out, u.astype(dtype), v.astype(dtype))

    def _contract_derived(self, forward, out, u, v):
        """Contract by `forward(x, w)`, or by its transpose as JAX derives it."""
        if out == 2:
            return forward(u, v)
        if out == 0:
            inputs = self._channels(u)[1] * self.groups
            x = jax.ShapeDtypeStruct((v.shape[0], *self.size, inputs), v.dtype)
            return jax.linear_transpose(lambda x: forward(x, u), x)(v)[0]
        w = jax.ShapeDtypeStruct(self._weight(v.shape[-1], u.shape[-1]), u.dtype)
        return jax.linear_transpose(lambda w: forward(u, w), w)(v)[0]

    def fast(self, out, u, v):
        return self._in_float32(self._fast, out, u, v)

    def split(self, out, u, v):
        """Contract as `fast`, but for the weight's gradient in a form that XLA splits well.

        Devices that share a batch add up the results of the product over it: with Winograd's form
        these are 16 places for each pair of channels, instead of the weight's 9 taps.
        """
        return self._in_float32(partial(self._fast, split=True), out, u, v)

    def map_weights(self, out, u, v):
        """Contract in a form that is fast under a vmap over weights.

        A product of matrices becomes one product of batches of matrices. A plain convolution would
        become a grouped one, at which XLA:CPU is slow.
        """
        if self.groups > 1 or self.taps.slices > UNROLLED:
            return self.fast(out, u, v)
        return self._in_float32(partial(self._contract_derived, self._im2col), out, u, v)

    def _in_float32(self, function, out, u, v):
        """Contract in float32 at least: XLA:CPU accumulates half precision in half precision."""
        if not u.size or not v.size:
            return self.plain(out, u, v)
        wide = jnp.promote_types(u.dtype, jnp.float32)
        y: Any = function(out, u.astype(wide), v.astype(wide))
        return y.astype(self._dtype(out, u, v))

    def _fast(self, out, u, v, split=False):
        """Contract by the formulation that is fastest on CPU for these sizes."""
        batch, inputs, outputs, work = self._sizes(out, u, v)
        count = math.prod(self.kernel)
        takes = u.dtype == jnp.float32 and self._suits_onednn(out)
        if self.groups > 1:
            suits = out == 2 or (out == 0 and math.prod(self.strides) == 1)
            if takes and suits and _reaches(work, SLOW_WORK):
                return self._by_onednn(out, u, v)
            if self.groups == inputs and outputs == inputs:
                return self._depthwise(out, u, v, split)
            return self._contract_derived(self._join_groups, out, u, v)
        if self.is_pointwise and out == 1:
            return self._sum_by_taps(u, v)
        if self.is_pointwise:
            return self._contract_derived(self._pointwise, out, u, v)
        added = split and out == 1
        if not added and self._few_multiplications(out, batch, inputs, outputs, takes):
            return self._winograd(out, u, v)
        if takes and out != 1 and _reaches(work, WORK_OF_ONEDNN):
            return self._by_onednn(out, u, v)
        by_taps = takes and out == 1 and not added and self.taps.is_unrolled
        if by_taps and _reaches(work // count, WORK_OF_TAP):
            return self._sum_by_taps(u, v)
        parted = out == 1 and all(k <= s for k, s in zip(self.kernel, self.strides, strict=True))
        few = self.turned and out != 2 and (parted or math.prod(self.out) <= FEW_WINDOWS)
        if (few or self._slow(out)) and _reaches(work, SLOW_WORK):
            if self.taps.slices <= UNROLLED:
                return self._contract_derived(self._im2col, out, u, v)
            return self.plain(out, u, v) if out == 1 else self._convolve_padded(out, u, v)
        if out == 2 and inputs * count <= NARROW and outputs <= NARROW:
            return self._narrow(u, v)
        return self.plain(out, u, v)

    def _sizes(self, out, u, v):
        """Return (batch, inputs, outputs, multiplications) of a contraction."""
        inputs = self._channels(u)[1] * self.groups if out == 0 else u.shape[-1]
        outputs = v.shape[-1] if out == 1 else self._channels((u, None, v)[out])[0]
        batch, count = (v, u, u)[out].shape[0], math.prod((*self.kernel, *self.out))
        return batch, inputs, outputs, batch * inputs * outputs * count // self.groups

    def _suits_onednn(self, out) -> bool:
        return uses_onednn() and len(self.kernel) <= 2 and not self._slow(out)

    def round_by_onednn(self, out, u, v):
        """Contract factors of 16 bits into 16 bits by oneDNN; None where float32 is faster.

        oneDNN accumulates in float32. The gradient of a weight is a product for each tap where its
        matrix is large, else a convolution as JAX derives it.
        """
        work = self._sizes(out, u, v)[-1]
        if self.groups > 1 or not self._suits_onednn(out) or not _reaches(work, WORK_OF_ONEDNN):
            return None
        if out != 1:
            return self._by_onednn(out, u, v)
        if u.shape[-1] * v.shape[-1] >= LARGE_TAP and self.taps.is_unrolled:
            return self._sum_by_taps(u, v)
        return self._contract_derived(self.dense, out, u, v)

    def _slow(self, out):
        """Check whether XLA:CPU would leave its fast path.

        It does if the image that it reads is smaller than the kernel; with large weights it is then
        40 times slower. The gradient of the weight is not affected.
        """
        image = (self.out, self.kernel, self.size)[out]
        return any(n < k for n, k in zip(image, self.kernel, strict=True))

    def _by_onednn(self, out, u, v):
        """Contract to images by convolutions that oneDNN takes, if there are such.

        The gradient of the images is a convolution of the other gradient with the kernel flipped;
        with strides of one group, one for each phase, by the taps of the kernel that meet it.
        """
        if out == 2:
            return self._over_three_axes(u, v)
        strides = self.strides
        if math.prod(strides) > (1 if math.prod(self.dilations) > 1 else UNROLLED):
            return self.plain(out, u, v)
        rank = len(self.kernel)
        size = tuple(-(-n // s) for n, s in zip(self.size, strides, strict=True))
        places = range(rank) if self.turned else range(2, 2 + rank)
        phases: list[Any] = []
        for phase in itertools.product(*map(range, strides)):
            starts, pads, kernel = [], [], []
            axes = zip(phase, self.kernel, strides, self.dilations, self.pads, strict=True)
            for (at, k, s, d, (begin, _)), n, count in zip(axes, size, self.out, strict=True):
                first, shift = (at + begin) % s, (at + begin) // s
                taps = max(0, -(-(k - first) // s))
                starts.append(first)
                kernel.append(taps)
                pads.append(((taps - 1) * d - shift, n + shift - count))
            if not all(kernel):
                phases.append(jnp.zeros((v.shape[0], *size, self._channels(u)[1]), v.dtype))
                continue
            at = [slice(None)] * u.ndim
            for axis, start, step in zip(places, starts, strides, strict=True):
                at[axis] = slice(start, None, step)
            # a barrier, or XLA moves the flip into the convolution, which oneDNN does not take
            w = lax.optimization_barrier(self._turn_around(u[tuple(at)], places))
            cut = [(0, 0, 0), *((min(b, 0), min(e, 0), 0) for b, e in pads), (0, 0, 0)]
            form = replace(
                self,
                size=tuple(n + b + e for n, (b, e, _) in zip(self.out, cut[1:-1], strict=True)),
                kernel=(*kernel,),
                strides=(1,) * rank,
                pads=tuple((max(b, 0), max(e, 0)) for b, e in pads),
                out=size,
            )
            phases.append(form._over_three_axes(lax.pad(v, jnp.zeros((), v.dtype), cut), w))
        if len(phases) == 1:
            return phases[0]
        x = jnp.stack(phases).reshape(*strides, *phases[0].shape)
        pairs = (axis for i in range(rank) for axis in (rank + 1 + i, i))
        x = x.transpose(rank, *pairs, x.ndim - 1)
        whole = (n * s for n, s in zip(size, strides, strict=True))
        x = x.reshape(x.shape[0], *whole, x.shape[-1])
        return x[(slice(None), *map(slice, self.size))]

    def _turn_around(self, w, places):
        """Flip the kernel of a weight along its axes `places`, and swap its channels."""
        w, groups = jnp.flip(w, [*places]), self.groups
        if self.turned:
            *head, inputs, outputs = w.shape
            w = w.reshape(*head, inputs, groups, outputs // groups).swapaxes(-1, -3)
            return w.reshape(*head, outputs // groups, groups * inputs)
        outputs, inputs, *end = w.shape
        w = w.reshape(groups, outputs // groups, inputs, *end).swapaxes(1, 2)
        return w.reshape(groups * inputs, outputs // groups, *end)

    def _over_three_axes(self, x, w):
        """Convolve images, with one more axis where there are two: those are left to YNNPACK."""
        if len(self.kernel) != 2:
            return self.dense(x, w)
        form = replace(
            self,
            size=(1, *self.size),
            kernel=(1, *self.kernel),
            strides=(1, *self.strides),
            dilations=(1, *self.dilations),
            pads=((0, 0), *self.pads),
            out=(1, *self.out),
        )
        return form.dense(x[:, None], w[None] if self.turned else w[:, :, None])[:, 0]

    def _sum_by_taps(self, x, y):
        """Contract to the weight as one product for each tap.

        Its factors are matrices: XLA would transpose arrays of which it contracts several axes.
        """
        y = y.reshape(-1, y.shape[-1])
        w = jnp.stack([tap.reshape(-1, tap.shape[-1]).T @ y for tap in self.taps.read(x)])
        w = w.reshape(*self.kernel, *w.shape[1:])
        rank = len(self.kernel)
        return w if self.turned else w.transpose(rank + 1, rank, *range(rank))

    def _pointwise(self, x, w):
        """Convolve with a kernel of one element: one matrix product."""
        (tap,) = self.taps.read(x)
        return tap @ (self.rows(w) if self.turned else w.reshape(w.shape[:2]).T)

    def _im2col(self, x, w):
        """Convolve as one matrix product of all windows (im2col)."""
        columns = self.taps.windows(x)
        if self.turned or w.size < LARGE_WEIGHT:
            return columns.reshape(*columns.shape[:-2], -1) @ self.rows(w)
        columns = columns.swapaxes(-1, -2)
        return columns.reshape(*columns.shape[:-2], -1) @ w.reshape(w.shape[0], -1).T

    def _convolve_padded(self, out, u, v):
        """Convolve images that are padded beforehand, so that none is smaller than the kernel.

        The gradient of the image (out = 0) is a convolution of the dilated, padded gradient with
        the kernel flipped and its channels swapped.
        """
        x, w = (u, v) if out == 2 else (v, u)
        pads, form = [(*pair, 0) for pair in self.pads], self
        if out == 0:
            strict = partial(zip, strict=True)
            begins = (begin for begin, _ in self.pads)
            axes = strict(self.size, self.kernel, self.strides, self.dilations, begins, self.out)
            pads = [
                ((k - 1) * d - begin, n + begin - (count - 1) * s - 1, s - 1)
                for n, k, s, d, begin, count in axes
            ]
            spatial = range(len(self.kernel)) if self.turned else range(2, w.ndim)
            w = self._turn_around(w, spatial)
            form = replace(self, strides=(1,) * len(self.kernel), out=self.size)
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        x = lax.optimization_barrier(x)  # XLA would move the pads into the convolution again
        return replace(form, size=x.shape[1:-1], pads=((0, 0),) * len(pads)).dense(x, w)

    def _narrow(self, x, w):
        """Convolve as a sum over taps and channels of elementwise products, fused into one loop."""
        rows = self.rows(w).reshape(-1, *self._channels(w)[::-1])
        return sum(
            tap[..., c, None] * row
            for tap, matrix in zip(self.taps.read(x), rows, strict=True)
            for c, row in enumerate(matrix)
        )

    def _few_multiplications(self, out, batch, inputs, outputs, beside: bool) -> bool:
        """Check whether Winograd's form applies and is faster, `beside` oneDNN or YNNPACK."""
        if (self.kernel, self.strides, self.dilations) != ((3, 3), (1, 1), (1, 1)):
            return False
        tiles = batch * math.prod(-(-n // 2) for n in (self.size if out == 0 else self.out))
        can_transpose = self.turned or 9 * inputs * outputs < LARGE_WEIGHT
        bound = MANY_CHANNELS_BESIDE if beside else MANY_CHANNELS
        bound = MANY_CHANNELS_OF_WEIGHT if out == 1 else bound
        many = inputs * outputs >= bound * (inputs + outputs)
        small = out == 1 or not _reaches(4 * 16 * tiles * (inputs + outputs), TRANSFORMED)
        return can_transpose and many and small and _reaches(tiles, MANY_TILES)

    def _winograd(self, out, u, v):
        if out != 2:  # otherwise XLA computes what v is for each of the tiles that read it
            v = lax.optimization_barrier(v)
        if out == 1:
            w = kernel(u, v, self.pads)
            return w if self.turned else w.transpose(3, 2, 0, 1)
        w = u if out == 0 else v
        w = w if self.turned else w.transpose(2, 3, 1, 0)
        if out == 2:
            return images(u, w, self.pads, self.out)
        pads = [(2 - begin, 2 - end) for begin, end in self.pads]
        return images(v, w, pads, self.size, flipped=True)

    def _join_groups(self, x, w):
        """Convolve with several groups joined to one, whose weight has zeros between the groups.

        XLA:CPU computes the weight's gradient of a grouped convolution in slow loops; that of a
        dense one is faster, even if a part of it is not needed.
        """
        if self.turned:
            w = w.transpose(w.ndim - 1, w.ndim - 2, *range(w.ndim - 2))
        groups, per_group = self.groups, w.shape[1]
        joined = next(
            j
            for j in range(1, groups + 1)
            if groups % j == 0 and (j * per_group >= MERGED_CHANNELS or j == groups)
        )
        parts, rows = groups // joined, w.shape[0] // groups
        # block-diagonal by a product with the identity: a masked sum crashes XLA:CPU's library
        # fusion
        blocks = w.reshape(parts, joined, rows, -1)
        blocks = jnp.einsum("pjrc,jk->pjrkc", blocks, jnp.eye(joined, dtype=w.dtype))
        blocks = blocks.reshape(parts, joined * rows, joined * per_group, *self.kernel)
        single = replace(self, groups=1, turned=False)
        pieces = [
            contract(single, 2, piece, block)
            for piece, block in zip(jnp.split(x, parts, -1), blocks, strict=True)
        ]
        return jnp.concatenate(pieces, -1)

    def _depthwise(self, out, u, v, split=False):
        """Convolve each channel with its own kernel, by multiplying and adding shifted images."""
        taps = self.taps
        if out != 2:
            v = lax.optimization_barrier(v)  # otherwise XLA computes what v is for each tap
        if out == 1:
            sums = self._sum_depthwise(u, v, split)
            return (sums if self.turned else sums.T).reshape(self._weight(self.groups, self.groups))
        w = self.rows(jnp.asarray(u if out == 0 else v))
        if out == 0:
            return taps.add((v,), (0,), lambda tap, y: y * w[tap])
        start = jnp.zeros(taps.resize(u.shape, taps.out), u.dtype)
        return taps.fold((u,), (0,), lambda y, i, tap: y + tap * w[i], start)

    def _sum_depthwise(self, x, y, split):
        """Sum the products of images and the gradient of a depthwise result, for each tap.

        Several taps are one reduction, which reads both arrays once; over the images first, so that
        its loop runs along contiguous elements. Alone, a product and a sum over all places take
        YNNPACK 3 to 12 times as long. Over several devices XLA does not split such a reduction, and
        would gather the batch.
        """
        places = tuple(range(y.ndim - 2))
        if split or not self.taps.is_unrolled:
            return self.taps.each(x, lambda tap: (tap * y).sum(0).sum(places))
        products, sums = [tap * y for tap in self.taps.read(x)], []
        for begin in range(0, len(products), SUMMED):
            several = products[begin : begin + SUMMED]
            zeros = (jnp.zeros((), y.dtype),) * len(several)
            sums += lax.reduce(tuple(several), zeros, _add_each, (0,))
        return jnp.stack([total.sum(places) for total in sums])


on_platforms(Conv, {"cpu": Rule(Conv.fast, Conv.map_weights, Conv.split)})


def _add_each(first: tuple, second: tuple) -> tuple:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _reaches(size, bound: int) -> bool:
    """Check whether a size is at least `bound`; a symbolic size of `jax.export` never is."""
    return isinstance(size, int) and size >= bound


def convolution(x, w, window, groups: int, channels: int = 1, wide: bool = False):
    """Cross-correlate images with kernels.

    Args:
      x: (N, C, *size), or (N, *size, C) with `channels` -1.
      w: (M, C / groups, *kernel), or a `KernelFirst`.
      window: the geometry (`ops.windows.Window`).
      groups: the number of feature groups.
      channels: the axis of the channels of x and of the result, 1 or -1.
      wide: whether half precision gives float32, which the caller rounds.
    """
    turned = isinstance(w, KernelFirst)
    x = jnp.moveaxis(x, channels, -1)
    slot = 2 if wide and is_half(x) else None
    form = Conv(x.shape[1:-1], *window, groups=groups, turned=turned, wide=slot)
    y = contract(form, 2, x, w.value if turned else w)
    return jnp.moveaxis(y, -1, channels)


def transposed_convolution(
    x, w, *, size, strides, dilations, pads, groups: int, channels: int = 1, wide: bool = False
):
    """Apply the transpose of `convolution` as a map of images, x (N, M, *out) -> (N, C, *size)."""
    x = jnp.moveaxis(x, channels, -1)
    slot = 0 if wide and is_half(x) else None
    out = x.shape[1:-1]
    form = Conv(size, w.shape[2:], strides, dilations, pads, out, groups, wide=slot)
    return jnp.moveaxis(contract(form, 0, w, x), -1, channels)


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
