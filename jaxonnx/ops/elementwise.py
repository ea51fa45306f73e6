"""Arithmetic element by element, with the broadcasting rules of every opset.

Where all operands are known, the same NumPy function is used instead of the JAX one, so that shape
arithmetic costs no compilation. Gradients at the points where there is more than one: `Abs` and
`Sign` have 0 at 0; `Max` and `Min` divide the gradient evenly between two equal operands, as JAX
and PyTorch do; `Clip` passes it on to the input where that equals a bound, as PyTorch does.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import NodeError
from jaxonnx.ops.common import axis_of, canonical, divide
from jaxonnx.registry import Starts, is_known, op, symbolic, xp

_UNARY = {
    1: ("Ceil", "Exp", "Floor", "Log", "Reciprocal", "Sqrt", "Tanh"),
    7: ("Acos", "Asin", "Atan", "Cos", "Sin", "Tan"),
    9: ("Acosh", "Asinh", "Atanh", "Cosh", "Sign", "Sinh"),
}
"""Operators by their first opset that numpy and jax.numpy have in lower case."""


def unary(name: str, since: int, function: str) -> None:
    """Register operator `name` as the function that numpy and jax.numpy both call `function`."""

    @op(name, since=since, pointwise=True)
    def apply(x):
        return getattr(xp(x), function)(x)


for _since, _names in _UNARY.items():
    for _name in _names:
        unary(_name, _since, _name.lower())
unary("Neg", 1, "negative")
unary("Round", 11, "rint")


@op("Abs", since=1, pointwise=True)
def absolute(x):
    # jnp.abs alone has the gradient 1 at 0
    return np.abs(x) if is_known(x) else jnp.where(x == 0, 0, jnp.abs(x))


def is_integer(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


@op("Erf", since=9, pointwise=True)
def erf(x):
    wide = x.astype(canonical(np.float64)) if is_integer(x) else x
    return jax.scipy.special.erf(wide).astype(x.dtype)


def align_axis(a, b, axis: int | None, broadcast: int):
    """Reshape `b` so that NumPy's broadcasting is that of opsets 1 to 6.

    There `b` matches a contiguous part of a's shape, from `axis` on or at its end, or has one
    element; and `broadcast` must be set unless the shapes are equal (specification of Add-1).
    Single dimensions of size 1 are stretched too, which files of that time rely on.
    """
    if a.shape == b.shape:
        return b
    if not broadcast:
        raise NodeError(
            f"shapes {a.shape} and {b.shape} differ; before opset 7 that needs broadcast=1"
        )
    if b.size == 1:
        return b.reshape(())
    start = a.ndim - b.ndim if axis is None else axis_of(axis, a.ndim)
    part = a.shape[max(start, 0) : start + b.ndim]
    if len(part) != b.ndim or any(n not in (1, m) for n, m in zip(b.shape, part, strict=True)):
        raise NodeError(f"shape {b.shape} is not part of shape {a.shape} from axis {start} on")
    return b.reshape(b.shape + (1,) * (a.ndim - start - b.ndim))


def binary(name: str, function: Callable[[Any, Any], Any], vectors: Starts = ()) -> None:
    """Register `function(a, b)` with NumPy's broadcasting from opset 7 on, `aligned` before."""

    @op(name, since=1, vectors=vectors)
    def limited_broadcast(a, b, *, axis=None, broadcast=0):
        return function(a, align_axis(a, b, axis, broadcast))

    @op(name, since=7, vectors=vectors, pointwise=True)
    def full(a, b):
        return function(a, b)


def div(a, b):
    """Return `a / b`, truncated towards zero for integers."""
    if symbolic(a) or symbolic(b):
        return a // b  # sizes are not negative
    if is_integer(a):
        # `a` less the remainder of C divides exactly, so nothing is rounded
        return (a - xp(a, b).fmod(a, b)) // b
    return divide(a, b)


@jax.custom_jvp
def _float_power(x, y):
    return jnp.power(x, y)


@functools.partial(_float_power.defjvp, symbolic_zeros=True)
def _float_power_jvp(primals, tangents):
    x, y = primals
    z = _float_power(x, y)
    slopes = (
        # for y = 0 the exponent y - 1 would make 0 * inf at x = 0
        lambda: y * _float_power(x, jnp.where(y == 0, 1, y - 1)),
        lambda: z * jnp.log(jnp.where(x == 0, 1, x)),
    )
    # log of a negative x must not meet the zero tangent of a constant exponent
    terms = (
        slope() * tangent
        for slope, tangent in zip(slopes, tangents, strict=True)
        if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    )
    return z, sum(terms, jnp.zeros_like(z))


def power(x, y):
    """Return `x ** y` in the dtype of `x`; an integer base is truncated back.

    The gradient in `x` at 0 is that of the mathematics (0 for y = 0 and y > 1, 1 for y = 1, inf for
    0 < y < 1), in every order; the gradient in `y` at x = 0 is 0.
    """
    m = xp(x, y)
    if is_integer(x) and is_integer(y):
        magnitude = m.power(x, abs(y).astype(x.dtype))
        unit = m.ones((), x.dtype)
        return m.where(y < 0, div(unit, magnitude), magnitude)
    wide = canonical(np.float64 if is_integer(x) else jnp.promote_types(x.dtype, y.dtype))
    function = np.power if m is np else _float_power
    return function(x.astype(wide), y.astype(wide)).astype(x.dtype)


binary("Add", lambda a, b: xp(a, b).add(a, b), vectors={"a": 0.0, "b": 0.0})
binary("Sub", lambda a, b: xp(a, b).subtract(a, b), vectors={"a": 0.0})
binary("Mul", lambda a, b: xp(a, b).multiply(a, b), vectors={"a": 1.0, "b": 1.0})
binary("Div", div)
binary("Pow", power)


@op("Mod", since=10, pointwise=True)
def mod(a, b, *, fmod: Literal[0, 1] = 0):
    if fmod:
        return xp(a, b).fmod(a, b)
    y = xp(a, b).mod(a, b)
    if xp(a, b) is np or not jnp.issubdtype(y.dtype, jnp.floating):
        return y
    # A zero has the sign of the divisor, in jnp.mod that of the dividend. Subtracting what is +0
    # with the derivative of -y leaves the sign as it is and gives the zero the derivative of y.
    zero = jnp.copysign(jnp.zeros_like(y), jax.lax.stop_gradient(b))
    return jnp.where(y == 0, zero - (jax.lax.stop_gradient(y) - y), y)


@op("Max", since=1, pointwise=True)
def max_(*xs):
    return functools.reduce(xp(*xs).maximum, xs)


@op("Min", since=1, pointwise=True)
def min_(*xs):
    return functools.reduce(xp(*xs).minimum, xs)


@op("Sum", since=1, pointwise=True)
def sum_(*xs):
    return functools.reduce(xp(*xs).add, xs)


@op("Mean", since=1, pointwise=True)
def mean(*xs):
    return divide(functools.reduce(jnp.add, map(jnp.asarray, xs)), xs[0].dtype.type(len(xs)))


@op("Where", since=9, pointwise=True)
def where(condition, x, y):
    return xp(condition, x, y).where(condition, x, y)


@op("Clip", since=11, pointwise=True)
def clip(x, min=None, max=None):
    # comparisons instead of minimum and maximum: the gradient at a bound is 1 and not 1/2
    m = xp(x, min, max)
    if min is not None:
        x = m.where(x < min, min, x)
    if max is not None:
        x = m.where(x > max, max, x)
    return x


_FLOAT_MAX = float(np.finfo(np.float32).max)


def _clip_to(x, min, max):
    # a bound beyond the range of float16 becomes an infinity
    with np.errstate(over="ignore"):
        bounds = [None if b is None else np.asarray(b).astype(x.dtype) for b in (min, max)]
    return clip(x, *bounds)


@op("Clip", since=1, pointwise=True)
def clip_1(x, *, min=None, max=None):
    return _clip_to(x, min, max)


@op("Clip", since=6, pointwise=True)
def clip_6(x, *, min=-_FLOAT_MAX, max=_FLOAT_MAX):
    return _clip_to(x, min, max)


# operator -> name of the function in numpy and in jax.numpy; broadcast attribute before opset 7
_LEGACY = {
    "And": "logical_and",
    "Equal": "equal",
    "Greater": "greater",
    "Less": "less",
    "Or": "logical_or",
    "Xor": "logical_xor",
}

# operator -> first opset, name of the function
_BROADCASTING = {
    "BitwiseAnd": (18, "bitwise_and"),
    "BitwiseOr": (18, "bitwise_or"),
    "BitwiseXor": (18, "bitwise_xor"),
    "GreaterOrEqual": (12, "greater_equal"),
    "LessOrEqual": (12, "less_equal"),
}


def _pairwise(function: str):
    return lambda a, b: getattr(xp(a, b), function)(a, b)


for _name, _function in _LEGACY.items():
    binary(_name, _pairwise(_function))

for _name, (_since, _function) in _BROADCASTING.items():
    op(_name, since=_since)(_pairwise(_function))

unary("BitwiseNot", 18, "bitwise_not")
unary("IsNaN", 9, "isnan")
unary("Not", 1, "logical_not")


@op("BitShift", since=11)
def bit_shift(x, y, *, direction: Literal["LEFT", "RIGHT"]):
    # NumPy and XLA both shift arithmetically if signed, and both define shifts beyond the width
    return getattr(xp(x, y), f"{direction.lower()}_shift")(x, y)


@op("IsInf", since=10)
def is_inf(x, *, detect_negative=1, detect_positive=1):
    detected = (x < 0) & bool(detect_negative) | (x > 0) & bool(detect_positive)
    return xp(x).isinf(x) & detected
