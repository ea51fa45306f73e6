"""Windows read and written one tap (element of the window) at a time, as shifted slices.

Shifted slices are what XLA fuses into one vectorised loop. Reading taps and adding into taps are
each other's transposes; the transpose that JAX derives for a strided read is a dilated pad, which
is several times slower than gathering the contributions of each stride phase as done here.

Compiling a slice takes as long as thousands of readings. A program has `UNROLLED` of them at most:
larger windows are read by a loop over pieces.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

UNROLLED = 32
"""The most taps, or phases of the strides, for which a program has a slice for each."""


@dataclass(frozen=True)
class Taps:
    """Geometry of windows (`jaxonnx.ops.pool.Window`); spatial axes start at axis `lead`."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]
    lead: int

    @property
    def count(self) -> int:
        """The number of taps."""
        return math.prod(self.kernel)

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Offset of each tap in its window, row-major."""
        steps = (range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True))
        return list(itertools.product(*steps))

    @property
    def is_unrolled(self) -> bool:
        """Whether a program has a slice for each tap."""
        return self.count <= UNROLLED

    def _pad(self, x, fill, pairs):
        """Pad the spatial axes of x by (low, high) pairs, which may be negative."""
        rest = x.ndim - self.lead - len(self.size)
        config = [(0, 0)] * self.lead + list(pairs) + [(0, 0)] * rest
        return lax.pad(x, jnp.asarray(fill, x.dtype), [(*pair, 0) for pair in config])

    def _slice(self, x, starts, lengths, strides):
        """Return slices of the spatial axes of x with these starts, lengths and strides."""
        limits = [b + (n - 1) * s + 1 for b, n, s in zip(starts, lengths, strides, strict=True)]
        end = x.shape[self.lead + len(self.size) :]
        head = x.shape[: self.lead]
        return lax.slice(
            x,
            (*(0 for _ in head), *starts, *(0 for _ in end)),
            (*head, *limits, *end),
            (*(1 for _ in head), *strides, *(1 for _ in end)),
        )

    def read(self, x, fill: Any = 0) -> list:
        """Return for each tap an array with its element of every window; `fill` in the padding."""
        padded = self._pad(x, fill, self.pads)
        return [self._slice(padded, o, self.out, self.strides) for o in self.offsets]

    @property
    def _blocks(self) -> list[int]:
        """For each axis, the number of slices from which `windows` assembles the windows.

        One if there is a single window; ceil(k / s) contiguous slices as long as a stride without
        dilation; else one for each tap.
        """
        axes = zip(self.kernel, self.strides, self.dilations, self.out, strict=True)
        return [1 if n == 1 else -(-k // s) if d == 1 else k for k, s, d, n in axes]

    @property
    def slices(self) -> int:
        """The number of slices that `windows` takes."""
        return self.count if self.is_unrolled else sum(self._blocks)

    def windows(self, x, fill: Any = 0):
        """Return x as (*lead, *out, taps, channels); `x` has one axis behind the spatial ones."""
        if self.is_unrolled:
            return jnp.stack(self.read(x, fill), -2)
        # one axis after the other becomes two: windows and taps
        x, rank, lead = self._pad(x, fill, self.pads), len(self.kernel), self.lead
        for a, blocks in enumerate(self._blocks):
            axis, n, k = lead + 2 * a, self.out[a], self.kernel[a]
            cut = partial(lax.slice_in_dim, axis=axis)
            step, apart = self.strides[a], self.dilations[a]
            if n == 1:  # one window: its taps themselves are contiguous, as a stride of k
                x = cut(x, 0, (k - 1) * apart + 1, apart)
                step, apart = k, 1
            if apart == 1:
                # cut the axis into pieces as long as a stride, (n, step); block i of a window is
                # the piece i places after its first one
                short = (n - 1 + blocks) * step - x.shape[axis]
                pads = [(0, short if i == axis else 0, 0) for i in range(x.ndim)]
                x = lax.pad(x, jnp.zeros((), x.dtype), pads)
                shape = (*x.shape[:axis], n, step, *x.shape[axis + 1 :])
                parts = [cut(x, i * step, (i + n) * step).reshape(shape) for i in range(blocks)]
                x = lax.slice_in_dim(jnp.concatenate(parts, axis + 1), 0, k, axis=axis + 1)
            else:
                ends = [(n - 1) * step + i * apart + 1 for i in range(k)]
                x = jnp.stack(
                    [cut(x, i * apart, end, step) for i, end in enumerate(ends)], axis + 1
                )
        pairs = range(lead, lead + 2 * rank)
        x = x.transpose(*range(lead), *pairs[::2], *pairs[1::2], x.ndim - 1)
        return x.reshape(*x.shape[: lead + rank], -1, x.shape[-1])

    def fold(self, arrays, fills, step: Callable, carry: Any, reverse: bool = False):
        """Fold over the taps: carry = step(carry, number, *elements of the arrays), in order.

        Args:
          arrays: images of one spatial size.
          fills: the value of each in the padding.
          step: a function of the carry, the number of the tap, and for each array its elements at
            this tap, one per window.
          carry: the first carry.
          reverse: whether to begin with the last tap.
        """

        def steps(taps, first, carry):
            numbered = [*enumerate(zip(*taps, strict=True))]
            for number, elements in reversed(numbered) if reverse else numbered:
                carry = step(carry, first + number, *elements)
            return carry

        def body(piece, number, starts, carry):
            parts = (lax.dynamic_slice(x, *piece._place(x.shape, starts)) for x in padded)
            return steps(map(piece.read, parts), number, carry)

        if self.is_unrolled:
            return steps(map(self.read, arrays, fills), 0, carry)
        padded = [self._pad(x, f, self.pads) for x, f in zip(arrays, fills, strict=True)]
        return self._loop(body, carry, reverse)

    def each(self, x, function: Callable):
        """Return `function(elements of x)` for each tap, stacked along a new first axis."""
        if self.is_unrolled:
            return jnp.stack([function(tap) for tap in self.read(x)])
        padded = self._pad(x, 0, self.pads)
        piece = self._piece((1,) * len(self.kernel))

        def at(starts):
            (tap,) = piece.read(lax.dynamic_slice(padded, *piece._place(x.shape, [*starts])))
            return function(tap)

        return lax.map(at, jnp.asarray(self.offsets))

    def add(self, arrays, fills, term: Callable):
        """Apply the transpose of `read`.

        For each element of x that is the sum, over the taps and windows that read it, of
        term(tap, *arrays at that window). `arrays` have one entry per window; beyond them lie
        windows of `fills`.
        """
        if math.prod(self.strides) > UNROLLED:
            # many stride phases: dilate the windows with fills instead, to strides of one
            steps = self.resize([1] * arrays[0].ndim, self.strides)
            spread = [[(0, 0, step - 1) for step in steps]] * len(arrays)
            fills = [jnp.asarray(f, x.dtype) for x, f in zip(arrays, fills, strict=True)]
            arrays = map(lax.pad, arrays, fills, spread)
            out = tuple((n - 1) * s + 1 for n, s in zip(self.out, self.strides, strict=True))
            return replace(self, strides=(1,) * len(out), out=out).add([*arrays], fills, term)
        if self.is_unrolled:
            return self._add(arrays, fills, term)

        def body(piece, number, starts, total):
            part = piece._add(arrays, fills, lambda tap, *values: term(number + tap, *values))
            starts, sizes = piece._place(total.shape, starts)
            return lax.dynamic_update_slice(
                total, lax.dynamic_slice(total, starts, sizes) + part, starts
            )

        like = jax.eval_shape(lambda *values: term(0, *values), *arrays)
        total = self._pad(jnp.zeros(self.resize(like.shape, self.size), like.dtype), 0, self.pads)
        total = self._loop(body, total)
        return self._pad(total, 0, [(-begin, -end) for begin, end in self.pads])

    def _loop(self, body: Callable, carry: Any, reverse: bool = False):
        """Fold over pieces of the windows: carry = body(piece, number, starts, carry), in order.

        A piece is a `Taps` with at most `UNROLLED` consecutive taps and without padding; all are
        the same. It reads the part of the padded images that begins at `starts`, and `number` is
        the number of its first tap.
        """
        # split the kernel along the first axis behind which at most UNROLLED taps are left
        axis = 0
        while (behind := math.prod(self.kernel[axis + 1 :])) > UNROLLED:
            axis += 1
        size = self.kernel[axis]
        width = max(n for n in range(1, min(UNROLLED // behind, size) + 1) if size % n == 0)
        kernel = (*(1 for _ in range(axis)), width, *self.kernel[axis + 1 :])
        piece = self._piece(kernel)
        offsets = jnp.asarray(self.offsets[:: piece.count])

        def step(i, carry):
            i = len(offsets) - 1 - i if reverse else i
            return body(piece, i * piece.count, [*offsets[i]], carry)

        return lax.fori_loop(0, len(offsets), step, carry)

    def _piece(self, kernel: tuple[int, ...]) -> "Taps":
        """Return windows with a smaller kernel, over images of just the elements that they read."""
        sizes = zip(self.out, self.strides, kernel, self.dilations, strict=True)
        size = tuple((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in sizes)
        return replace(self, size=size, kernel=kernel, pads=((0, 0),) * len(size))

    def resize(self, shape, middle):
        """Return a shape with other spatial sizes."""
        return (*shape[: self.lead], *middle, *shape[self.lead + len(middle) :])

    def _place(self, shape, starts):
        """Return the arguments of a dynamic slice for a piece's part of padded images.

        Args:
          shape: of the images.
          starts: of the part along the spatial axes.
        """
        zeros = [0] * len(shape)
        return [*self.resize(zeros, starts)], self.resize(shape, self.size)

    def _add(self, arrays, fills, term: Callable):
        """Add as `add` does, with a slice for each tap.

        An element of x at stride phase p is only read by the taps at offsets congruent to p, so
        each phase is a sum of shifted contiguous slices, and the phases are interleaved in the end.
        """
        rank = len(self.size)
        spatial = range(rank)
        blocks = [
            -(-(n + begin + max(end, 0)) // s)
            for n, (begin, end), s in zip(self.size, self.pads, self.strides, strict=True)
        ]
        far = [
            (k - 1) * d // s
            for k, d, s in zip(self.kernel, self.dilations, self.strides, strict=True)
        ]
        pairs = [(far[a], max(blocks[a] - self.out[a], 0)) for a in spatial]
        padded = [self._pad(x, fill, pairs) for x, fill in zip(arrays, fills, strict=True)]
        phases = []
        for phase in itertools.product(*map(range, self.strides)):
            total = None
            for tap, offset in enumerate(self.offsets):
                if any(offset[a] % self.strides[a] != phase[a] for a in spatial):
                    continue
                starts = [far[a] - offset[a] // self.strides[a] for a in spatial]
                part = term(tap, *(self._slice(x, starts, blocks, (1,) * rank) for x in padded))
                total = part if total is None else total + part
            phases.append(total)
        like = next(p for p in phases if p is not None)  # no tap reads a phase beyond the kernel
        phases = [jnp.zeros(like.shape, like.dtype) if p is None else p for p in phases]
        starts = (begin for begin, _ in self.pads)
        lengths = zip(self.size, starts, blocks, self.strides, strict=True)
        image = [(-begin, n + begin - b * s) for n, begin, b, s in lengths]
        return self._pad(self._interleave(phases), 0, image)

    def _interleave(self, phases):
        """Interleave the phases (row-major) along every spatial axis, the last axis first."""
        for axis in reversed(range(len(self.size))):
            at, step = self.lead + axis, self.strides[axis]
            if step == 1:
                continue
            grouped = [phases[i : i + step] for i in range(0, len(phases), step)]
            phases = [jnp.stack(group, at + 1) for group in grouped]
            merged = list(phases[0].shape)
            merged[at : at + 2] = [merged[at] * step]
            phases = [p.reshape(merged) for p in phases]
        return phases[0]
