"""Windows read and written one tap (element of the window) at a time, as shifted slices.

Shifted slices are what XLA fuses into one vectorised loop. Reading taps and adding into taps are
each other's transposes; the transpose that JAX derives for a strided read is a dilated pad, which
is several times slower than gathering the contributions of each stride phase as done here.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Taps:
    """Geometry of windows (`jaxonnx.ops.windows.Window`); spatial axes start at axis `lead`."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]
    lead: int

    @property
    def count(self) -> int:
        return math.prod(self.kernel)

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Offset of each tap in its window, row-major."""
        steps = (range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True))
        return list(itertools.product(*steps))

    def _pad(self, x, fill, pairs):
        rest = x.ndim - self.lead - len(self.size)
        config = [(0, 0)] * self.lead + list(pairs) + [(0, 0)] * rest
        return lax.pad(x, jnp.asarray(fill, x.dtype), [(*pair, 0) for pair in config])

    def _slice(self, x, starts, lengths, strides):
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
        """Return for each tap its elements of x, one per window; `fill` in the padding."""
        padded = self._pad(x, fill, self.pads)
        return [self._slice(padded, o, self.out, self.strides) for o in self.offsets]

    def add(self, arrays, fills, term: Callable):
        """Apply the transpose of `read`.

        For each element of x that is the sum, over the taps and windows that read it, of
        term(tap, *arrays at that window). `arrays` have one entry per window; beyond them lie
        windows of `fills`. An element of x at stride phase p is only read by the taps at offsets
        congruent to p, so each phase is a sum of shifted contiguous slices, and the phases are
        interleaved in the end.
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
