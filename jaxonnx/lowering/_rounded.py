"""Products of float32 arrays rounded to 16 bits, for the units that processors have for them.

XLA:CPU gives a product of two bfloat16 matrices to YNNPACK, whose kernels use the units, but only
where the left factor is contracted along its last axis. Any other product, above all the gradient
of a weight, is widened to float32; a transposition of the factor is folded into the product, and
the product widened again. Here the rows of the factor are transposed in two parts, which XLA does
not recognize as the transposition that they are.

A transposition of the result is folded into the product as well, but after XLA has chosen bfloat16
factors, so that the product fails when it runs ("Unsupported element type for DotThunk::Execute").
A barrier behind the product prevents that.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxonnx.lowering._compile import keep_apart, uses_onednn
from jaxonnx.lowering._contract import Form, Rule, on_platform, on_platforms
from jaxonnx.lowering._conv import Conv
from jaxonnx.lowering._taps import UNROLLED

UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of processors with units for bfloat16, as Linux names them on x86 and on ARM."""

LEAST_WORK = 2**20
"""The fewest multiplications of a product (of one matrix of a batch) that is faster in bfloat16."""

LEAST_SIDE = 32
"""The fewest rows, columns and terms of such a product: below, rounding costs more than gained."""


@cache
def has_units(dtype: Any) -> bool:
    """Check whether this processor has units for a 16-bit floating point type."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # another system than Linux
        return False
    return dtype == jnp.bfloat16 and not UNITS.isdisjoint(flags)


@dataclass(frozen=True)
class Dot:
    """T(a, b, y) = sum(dot_general(a, b) * y), of which only the product itself is computed.

    Attributes:
      contracted, mapped: the axes of a and b that are contracted, and those of batches.
      is_transposed: whether the product of two matrices is transposed afterwards, so that swapped
        factors save the transposition.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    mapped: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    is_transposed: bool = False
    batch: tuple[int, ...] = field(default=(), init=False)

    def plain(self, out, u, v):
        dims = self.contracted, self.mapped
        return lax.dot_general(u, v, dims, preferred_element_type=jnp.dtype(jnp.float32))

    def in_units(self, dtype, out, u, v):
        """Contract with both factors in `dtype` where the units are faster, else in float32."""
        if not self.pays(u, v):
            return keep_apart(self.plain(out, u.astype(jnp.float32), v.astype(jnp.float32)))
        if self.is_transposed:
            swapped = replace(self, contracted=self.contracted[::-1], is_transposed=False)
            return swapped.in_units(dtype, out, v, u).T
        u, v = u.astype(dtype), v.astype(dtype)
        if uses_onednn():
            dims = self.contracted, self.mapped
            y: Any = lax.dot_general(u, v, dims, preferred_element_type=dtype)
            return lax.optimization_barrier(y).astype(jnp.float32)
        lead, count = len(self.mapped[0]), len(self.contracted[0])
        first, head = (*range(lead, lead + count),), u.shape[:lead]
        if self.contracted != (first, first) or self.mapped != ((*range(lead),),) * 2:
            return lax.optimization_barrier(self.plain(out, u, v))
        ends = u.shape[lead + count :], v.shape[lead + count :]
        u, v = (x.reshape(*head, -1, math.prod(end)) for x, end in zip((u, v), ends, strict=True))
        by_rows = replace(self, contracted=((lead + 1,), (lead,)))
        y = by_rows.plain(out, _transpose_in_parts(u), v)
        return lax.optimization_barrier(y).reshape(*head, *ends[0], *ends[1])

    def pays(self, u, v) -> bool:
        """Check whether the units are faster than float32 for factors of these sizes."""
        factors = zip((u, v), self.contracted, self.mapped, strict=True)
        sizes = [
            math.prod(n for i, n in enumerate(x.shape) if i not in (*summed, *mapped))
            for x, summed, mapped in factors
        ]
        terms = math.prod(u.shape[i] for i in self.contracted[0])
        if not all(isinstance(n, int) for n in (*sizes, terms)):  # symbolic, of `jax.export`
            return False
        large = min(*sizes, terms) >= LEAST_SIDE and math.prod(sizes) * terms >= LEAST_WORK
        return large and terms % 2 == 0


def _transpose_in_parts(x):
    """Transpose the last two axes of x (..., rows, columns) in two parts, for an even row count."""
    *lead, rows, columns = x.shape
    axes = len(lead)
    x = x.reshape(*lead, 2, rows // 2, columns)
    return x.transpose(*range(axes), axes + 2, axes, axes + 1).reshape(*lead, columns, rows)


@dataclass(frozen=True)
class RoundedForm:
    """A form whose arguments, in float32, are rounded to `dtype`."""

    form: Form
    dtype: Any

    @property
    def batch(self):
        return self.form.batch

    def _with(self, contract, out, u, v):
        return contract(out, u.astype(self.dtype), v.astype(self.dtype)).astype(jnp.float32)

    def plain(self, out, u, v):
        return self._with(self.form.plain, out, u, v)

    def on_cpu(self, out, u, v, mapped: bool = False, split: bool = False):
        """Contract in the units of the processor where they are faster, else in float32.

        Without units both factors are rounded, so that the processor of an accelerator's machine
        shows what training on the accelerator would do.
        """
        contract, form = on_platform("cpu", self.form, mapped, split), self.form

        def round_factors():
            return lax.optimization_barrier(self._with(contract, out, u, v))

        if not has_units(self.dtype):
            return round_factors()
        # XLA splits only products in its own forms over several devices
        if isinstance(form, Dot) and form.pays(u, v):
            return round_factors() if split else form.in_units(self.dtype, out, u, v)
        if isinstance(form, Conv) and not mapped and not split and not form.is_pointwise:
            y = form.round_by_onednn(out, u.astype(self.dtype), v.astype(self.dtype))
            if y is not None:
                return lax.optimization_barrier(y).astype(jnp.float32)
        if isinstance(form, Conv) and not mapped and _is_product(form, out, u, v):
            return round_factors() if split else _convolve(form, self.dtype, out, u, v)
        return keep_apart(contract(out, u, v))


def _is_product(form: Conv, out: int, u, v) -> bool:
    """Check whether a convolution is faster as a product in units than in float32.

    With stride one, Winograd's form saves more multiplications in float32.
    """
    if form.is_pointwise:
        return True
    strided = form.groups == 1 and out != 0 and all(n > 1 for n in form.strides)
    return strided and u.shape[-1] >= LEAST_SIDE and form.taps.slices <= UNROLLED


def _convolve(form: Conv, dtype, out: int, u, v):
    """Contract a convolution as a product of matrices of all windows (im2col)."""
    last = 1 + len(form.kernel)  # the axis of channels
    places = (*range(last),)

    def rows(x):
        return form.taps.read(x)[0]

    def columns(x):
        if form.is_pointwise:
            return rows(x)
        windows = form.taps.windows(x.astype(dtype))
        return windows.reshape(*windows.shape[:-2], -1)

    if out == 1:
        w = Dot((places, places)).in_units(dtype, 2, columns(u), v)
        w = w.reshape(*form.kernel, -1, w.shape[-1])
        return w if form.turned else w.transpose(last, last - 1, *range(last - 1))
    w = form.rows(u if out == 0 else v)
    if out == 2:
        return Dot(((last,), (0,))).in_units(dtype, 2, columns(u), w)
    x = jax.ShapeDtypeStruct((v.shape[0], *form.size, w.shape[0]), v.dtype)
    y = Dot(((last,), (1,))).in_units(dtype, 2, v, w)
    return jax.linear_transpose(rows, x)(y)[0]


_RULE = Rule(
    RoundedForm.on_cpu,
    partial(RoundedForm.on_cpu, mapped=True),
    partial(RoundedForm.on_cpu, split=True),
)
on_platforms(RoundedForm, {"cpu": _RULE})
