"""Factors that are the same along axes of an array: taken out of sums, merged with each other.

The derivatives of normalizations multiply whole arrays by factors of channels, several times. In a
training step a product of small factors takes the place of products of the arrays; it rounds
otherwise, as compilers do.
"""

from typing import Any

import numpy as np

from jaxonnx._jaxpr import programs
from jaxonnx.onnx_out import _dims as dims
from jaxonnx.onnx_out._tensors import Tensor


def multiply(g: Any, x: Any, y: Any, out: Any) -> Any:
    """Return the product of two arrays, of which one may be thin."""
    full, factor = (x, y) if _whole(x, out) else (y, x)
    if not _whole(full, out):
        return g("Mul", x, y)
    if _whole(factor, out):
        z = Tensor(g("Mul", x, y), out.shape, out.dtype)
        z.times = x, y
        return z
    if full.scaled is not None and (both := _merge_factors(g, full.scaled[1], factor)) is not None:
        full, factor = full.scaled[0], both
    z = Tensor(g("Mul", full, factor), out.shape, out.dtype)
    z.scaled = full, factor
    return z


def add(g: Any, x: Any, y: Any, out: Any) -> Any:
    """Return the sum of two arrays; one pass scales an array and adds a number to each channel."""
    full, shift = (x, y) if _whole(x, out) else (y, x)
    if not _whole(full, out):
        return g("Add", x, y)
    if _whole(shift, out):
        z = Tensor(g("Add", x, y), out.shape, out.dtype)
        z.sum = x, y
        return z
    if _of_channels(shift, out):
        if _is_scaled(full, out):
            return _shift_channels(g, full, shift)
        for one, other in [full.sum, full.sum[::-1]] if full.sum else []:
            if _is_scaled(one, out):
                return g("Add", _shift_channels(g, one, shift), other)
    return g("Add", x, y)


def _of_channels(x: Any, out: Any) -> bool:
    """Tell whether there is a number for each channel of images (N, C, *size)."""
    if len(out.shape) < 3 or not dims.all_known([*x.shape, *out.shape[1:]]):
        return False
    return x.shape == (1, out.shape[1], *[1] * (len(out.shape) - 2))


def _is_scaled(x: Any, out: Any) -> bool:
    return x.scaled is not None and _of_channels(x.scaled[1], out)


def _shift_channels(g: Any, x: Any, shift: Any) -> Tensor:
    """Return BatchNormalization of an array that is scaled, by statistics that change nothing."""
    full, scale = x.scaled
    channels = x.shape[1]
    nothing = np.zeros(channels, x.dtype), np.ones(channels, x.dtype)
    vectors = (g.reshape(v, [channels]) for v in (scale, shift))
    y = g("BatchNormalization", full, *vectors, *nothing, epsilon=0.0)
    return Tensor(y, x.shape, x.dtype)


def _whole(x: Any, out: Any) -> bool:
    return isinstance(x, Tensor) and x.shape == out.shape


def _merge_factors(g: Any, a: Any, b: Any) -> Any:
    """Return the product of two factors, None where it is larger than both, or might overflow."""
    known = [x for x in (a, b) if isinstance(x, np.ndarray)]
    if len(known) == 2 or not all(_moderate(x) for x in known):
        return None
    if not dims.all_known((*a.shape, *b.shape)):
        return None
    shape = np.broadcast_shapes(a.shape, b.shape)
    if shape not in (a.shape, b.shape):
        return None
    return Tensor(g("Mul", a, b), shape, a.dtype)


def _moderate(x: np.ndarray) -> bool:
    return bool(((np.abs(x) > 1e-6) & (np.abs(x) < 1e6)).all())


def scales_by_bits(program: Any) -> bool:
    """Tell whether a program makes floating point numbers of bits.

    As `ldexp` does, whose factors are several because one would overflow.
    """
    for equation in getattr(program, "jaxpr", program).eqns:
        made = equation.primitive.name == "bitcast_convert_type"
        if made and equation.outvars[0].aval.dtype.kind == "f":
            return True
        if any(map(scales_by_bits, programs(equation.params))):
            return True
    return False


def reduce_sum(g: Any, x: Any, axes: list[int]) -> Tensor:
    """Return the sum of a tensor along axes, of which factors and signs are taken out."""
    if x.sum is not None and all(_is_scaled(y, x) and _taken_out(y, axes) for y in x.sum):
        parts = [reduce_sum(g, part, axes) for part in x.sum]
        return Tensor(g("Add", *parts), parts[0].shape, x.dtype)
    if x.negated is not None:
        total = reduce_sum(g, x.negated, axes)
        return Tensor(g("Neg", total), total.shape, total.dtype)
    factors = []
    if _taken_out(x, axes):
        x, factor = x.scaled
        factors.append(factor)
    if x.times is not None:
        operands = [*x.times]
        for i, operand in enumerate(operands):
            if _taken_out(operand, axes):
                operands[i], factor = operand.scaled
                factors.append(factor)
        if factors:
            x = Tensor(g("Mul", *operands), x.shape, x.dtype)
    left = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in left]
    total = Tensor(g.reduce("ReduceSum", x, axes), shape, x.dtype)
    for factor in factors:
        sizes = [factor.shape[i] for i in left] if factor.ndim == x.ndim else []
        total = Tensor(g("Mul", total, g.reshape(factor, sizes)), shape, x.dtype)
    return total


def _taken_out(x: Tensor, axes: list[int]) -> bool:
    """Tell whether a tensor has a factor that is one number along axes."""
    if x.scaled is None or not dims.all_known((factor := x.scaled[1]).shape):
        return False
    one = all(n == 1 for n in factor.shape)
    return one or (factor.ndim == x.ndim and all(factor.shape[axis] == 1 for axis in axes))
