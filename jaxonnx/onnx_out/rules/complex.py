"""Operations on complex numbers, as pairs of real ones; Fourier transforms by DFT."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import PARTS, Pair, Refusal, complex_primitive, complex_rule
from jaxonnx.onnx_out.rules.shapes import reverse

PARTS.update(
    ("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "select_n", "copy", "copy_p", "name"),
    ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "rev", "pad", "tile"),
    ("concatenate", "stack", "split", "unstack", "slice", "dynamic_slice", "dynamic_update_slice"),
    ("gather", "scatter", "scatter-add", "scatter_add", "stop_gradient", "optimization_barrier"),
)


@complex_rule("real")
def real(z):
    return z.re


@complex_rule("imag")
def imag(z):
    return z.im


@complex_rule("complex")
def complex_(x, y):
    return Pair(x, y)


@complex_rule("conj")
def conj(z):
    return Pair(z.re, -z.im) if isinstance(z, Pair) else Pair(z, jnp.zeros_like(z))


@complex_rule("convert_element_type")
def convert_element_type(z, *, new_dtype):
    if not jnp.issubdtype(new_dtype, jnp.complexfloating):
        return z.re.astype(new_dtype)
    part = np.finfo(new_dtype).dtype
    if not isinstance(z, Pair):
        return Pair(z.astype(part), jnp.zeros(z.shape, part))
    return Pair(z.re.astype(part), z.im.astype(part))


@complex_rule("mul")
def mul(a, b):
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


@complex_rule("scatter-mul", "scatter_mul")
def scatter_mul(z, indices, factors, *, dimension_numbers, mode, unique_indices):
    if not unique_indices:
        raise Refusal("it multiplies complex numbers by several factors each; use unique_indices")

    def place(start, part):
        start = jnp.full(z.shape, start, z.re.dtype)
        return lax.scatter(start, indices, part, dimension_numbers, unique_indices=True, mode=mode)

    meant = place(0, jnp.ones_like(factors.re)) > 0
    product = mul(z, Pair(place(1, factors.re), place(0, factors.im)))
    return Pair(jnp.where(meant, product.re, z.re), jnp.where(meant, product.im, z.im))


@complex_rule("square")
def square(z):
    return mul(z, z)


@complex_rule("integer_pow")
def integer_pow(z, *, y):
    result = Pair(jnp.ones_like(z.re), jnp.zeros_like(z.re))
    for _ in range(abs(y)):
        result = mul(result, z)
    return result if y >= 0 else div(Pair(jnp.ones_like(z.re), jnp.zeros_like(z.re)), result)


@complex_rule("div")
def div(a, b):
    # scale b to a largest part of 1: |b|^2 itself could overflow
    size = jnp.maximum(jnp.abs(b.re), jnp.abs(b.im))
    re, im = b.re / size, b.im / size
    length = (re * re + im * im) * size
    return Pair((a.re * re + a.im * im) / length, (a.im * re - a.re * im) / length)


@complex_rule("abs")
def abs_(z):
    size = jnp.maximum(jnp.abs(z.re), jnp.abs(z.im))
    safe = jnp.where((size == 0) | jnp.isinf(size), 1, size)
    length = safe * jnp.sqrt(jnp.square(z.re / safe) + jnp.square(z.im / safe))
    return jnp.where((size == 0) | jnp.isinf(size), size, length)


@complex_rule("sign")
def sign(z):
    size = abs_(z)
    safe = jnp.where(size == 0, 1, size)
    return Pair(z.re / safe, z.im / safe)


@complex_rule("exp")
def exp(z):
    size = jnp.exp(z.re)
    return Pair(size * jnp.cos(z.im), size * jnp.sin(z.im))


@complex_rule("log")
def log(z):
    return Pair(jnp.log(abs_(z)), jnp.arctan2(z.im, z.re))


@complex_rule("sqrt")
def sqrt(z):
    size = abs_(z)
    re, im = jnp.sqrt((size + jnp.abs(z.re)) / 2), jnp.sqrt((size - jnp.abs(z.re)) / 2)
    re, im = jnp.where(z.re >= 0, re, im), jnp.where(z.re >= 0, im, re)
    return Pair(re, jnp.where(z.im < 0, -im, im))


@complex_rule("pow")
def pow_(a, b):
    b = b if isinstance(b, Pair) else Pair(b, jnp.zeros_like(b))
    zero = (a.re == 0) & (a.im == 0)
    z = exp(mul(log(Pair(jnp.where(zero, 1, a.re), a.im)), b))
    unit = ((b.re == 0) & (b.im == 0)).astype(z.re.dtype)
    return Pair(jnp.where(zero, unit, z.re), jnp.where(zero, 0, z.im))


@complex_rule("eq")
def eq(a, b):
    return (a.re == b.re) & (a.im == b.im)


@complex_rule("ne")
def ne(a, b):
    return (a.re != b.re) | (a.im != b.im)


@complex_rule("is_finite")
def is_finite(z):
    return jnp.isfinite(z.re) & jnp.isfinite(z.im)


@complex_rule("dot_general")
def dot_general(a, b, *, dimension_numbers):
    def dot(x, y):
        return lax.dot_general(x, y, dimension_numbers, precision="highest")

    return Pair(dot(a.re, b.re) - dot(a.im, b.im), dot(a.re, b.im) + dot(a.im, b.re))


@complex_primitive("fft")
def fft(g, operands, out, params):
    (x,) = operands
    kind, lengths = params["fft_type"].name, params["fft_lengths"]
    axes = [*range(len(x.shape) - len(lengths), len(x.shape))]
    # DFT takes the parts along a new last axis: 1 for real, 2 for complex
    shape, parts = list(x.shape), [x] if kind == "RFFT" else [x.re, x.im]
    parts = [g.reshape(part, [*shape, 1]) for part in parts]
    x = Tensor(g("Concat", *parts, axis=-1), [*shape, len(parts)], parts[0].dtype)
    backward = kind in ("IFFT", "IRFFT")
    # The last axis of a real transform is the half spectrum: an RFFT computes it first, by the
    # onesided DFT, and an IRFFT last, from the whole spectrum.
    others, last = axes[:-1], axes[-1]
    if kind == "RFFT":
        shape[last] = out.shape[last]
        x = _dft(g, x, last, [*shape, 2], onesided=1)
    elif kind == "FFT" or kind == "IFFT":
        others = axes
    for axis in others:
        x = _dft(g, x, axis, [*shape, 2], inverse=int(backward))
    if kind == "IRFFT":
        x = _dft(g, _hermitian(g, x, last, lengths[-1]), last, [*out.shape, 2], inverse=1)
        return _part(g, x, 0, out.shape)
    return Pair(_part(g, x, 0, out.shape), _part(g, x, 1, out.shape))


def _part(g: Nodes, x: Tensor, index: int, shape: Any) -> Tensor:
    return Tensor(g("Gather", x, np.int64(index), axis=-1), shape, x.dtype)


def _dft(g: Nodes, x: Tensor, axis: int, shape: Any, **settings: int) -> Tensor:
    """Append a DFT along an axis, which is an attribute before opset 20."""
    if g.opset >= 20:
        return Tensor(g("DFT", x, None, np.int64(axis), **settings), shape, x.dtype)
    return Tensor(g("DFT", x, axis=axis, **settings), shape, x.dtype)


def _hermitian(g: Nodes, x: Tensor, axis: int, length: int) -> Tensor:
    """Complete the half spectrum of real numbers: entry length - k is the conjugate of entry k.

    Args:
      x: the half spectrum, with the parts along the last axis.
      axis: the axis to complete.
      length: of the whole spectrum.
    """
    half = length // 2 + 1
    starts, ends = [0] * x.ndim, list(x.shape)
    starts[axis], ends[axis] = 1, length - half + 1
    if ends[axis] <= 1:
        return x
    rest = reverse(g, g.slice(x, starts, ends, [1] * x.ndim), [axis])
    shape = [length - half if i == axis else n for i, n in enumerate(x.shape)]
    conjugate = Tensor(g("Mul", rest, np.array([1, -1], x.dtype)), shape, x.dtype)
    whole = [length if i == axis else n for i, n in enumerate(x.shape)]
    return Tensor(g("Concat", x, conjugate, axis=axis), whole, x.dtype)
