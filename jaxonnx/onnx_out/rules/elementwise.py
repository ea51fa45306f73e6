"""Element-wise primitives with an operator of the same meaning."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._io.protos import onnx_type
from jaxonnx.onnx_out import _simplify as simplify
from jaxonnx.onnx_out._nodes import WIDE, Nodes, Tensor, ordered_dtype
from jaxonnx.onnx_out._rule_table import Refusal, primitive
from jaxonnx.onnx_out.rules.shapes import join_disjoint

OPERATORS = {
    name: name.capitalize()
    for name in (
        *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf"),
        *("exp", "floor", "log", "max", "min", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh"),
    )
} | {"logistic": "Sigmoid"}
"""Primitives for which ONNX has an operator with the same operands."""

IDENTITIES = (
    *("copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "sharding_constraint"),
    *("device_put", "reshard", "pvary", "random_wrap", "random_unwrap", "random_clone"),
    "layout_constraint",
)
"""Primitives that return their operands unchanged."""

COMPARISONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater"}
COMPARISONS["ge"] = "GreaterOrEqual"


def elementwise(name: str, operator: str) -> None:
    """Register the rule of a primitive for which ONNX has an operator with the same operands."""

    @primitive(name, elementwise=True)
    def rule(g, *operands, out):
        return g.wide(operator, *thin(operands, out), dtype=out.dtype)


for _name, _operator in OPERATORS.items():
    elementwise(_name, _operator)


def thin(operands: Any, out: Any) -> list:
    """Return operands as they were before broadcasting, which the operator of ONNX repeats.

    At least one operand keeps the shape of the result; else the result would be smaller.
    """
    slim = [_unbroadcast(x) for x in operands]
    full = [i for i, x in enumerate(slim) if x is None]
    if not full and len(slim) > 1:
        full = [next((i for i, x in enumerate(operands) if isinstance(x, str)), 0)]
    if len(operands) == 1 or not any(operands[i].shape == out.shape for i in full):
        return list(operands)
    return [x if i in full else slim[i] for i, x in enumerate(operands)]


def _unbroadcast(x: Any) -> Any:
    """Return the source of a broadcast, or one element of a constant array; else None."""
    if isinstance(x, Tensor):
        return x.thin
    if x.size > 1 and (x == x.flat[0]).all():
        return x.reshape(-1)[:1].reshape((1,) * x.ndim)
    return x if x.size == 1 else None


@primitive("add", "add_any", elementwise=True)
def add(g, x, y, *, out):
    if (joined := join_disjoint(g, x, y, out)) is not None:
        return joined
    for operand, other in ((x, y), (y, x)):
        if simplify.number(other) == 0 and _fills(operand, out):
            return operand  # x + 0 is x, as XLA simplifies it too
    x, y = thin([x, y], out)
    if g.main.factors and out.dtype.name in ("float32", "float64"):
        return simplify.add(g, x, y, out)
    return g.wide("Add", x, y, dtype=out.dtype)


@primitive("mul", elementwise=True)
def mul(g, x, y, *, out):
    x, y = thin([x, y], out)
    if g.main.factors and out.dtype.name in ("float32", "float64"):
        return simplify.multiply(g, x, y, out)
    return g.wide("Mul", x, y, dtype=out.dtype)


@primitive("neg", elementwise=True)
def neg(g, x, *, out):
    y = g.cast_result(g.wide("Neg", x, dtype=out.dtype), out)
    y.negated = x if isinstance(x, Tensor) else None
    return y


@primitive(*IDENTITIES)
def identity(g, *operands):
    return operands


@primitive("convert_element_type", elementwise=True)
def convert_element_type(g, x, *, out):
    if out.dtype == bool and x.dtype != bool:
        return g("Not", g("Equal", *_comparable(g, [x, np.zeros((), x.dtype)])))
    thinner = getattr(x, "thin", None)
    y = g.cast(x, out.dtype)
    if thinner is not None and y is not x:
        y.thin = g.cast(thinner, out.dtype)
    return y


@primitive("reduce_precision")
def reduce_precision(g, x, *, exponent_bits, mantissa_bits):
    widths = {(5, 10): np.float16, (8, 7): jnp.bfloat16, (8, 23): np.float32, (11, 52): np.float64}
    if (exponent_bits, mantissa_bits) not in widths:
        raise Refusal(f"no type has {exponent_bits} bits of exponent, {mantissa_bits} of mantissa")
    return g.cast(g.cast(x, widths[exponent_bits, mantissa_bits]), x.dtype)


@primitive("round", elementwise=True)
def round_(g, x, *, rounding_method):
    if int(rounding_method):  # to the even one of two neighbours
        return g.wide("Round", x, dtype=x.dtype)
    return g.run(_away_from_zero, x)[0]


def _away_from_zero(x: Any) -> Any:
    # floor(|x| + 0.5) would round the greatest number below 0.5 to 1
    below = jnp.floor(jnp.abs(x))
    return jnp.sign(x) * jnp.where(jnp.abs(x) - below >= 0.5, below + 1, below)


@primitive("is_finite", elementwise=True)
def is_finite(g, x):
    if x.dtype.itemsize < 4:
        x = g.cast(x, np.float32)
    return g("Less", g("Abs", x), np.asarray(np.inf, x.dtype))


@primitive("square", elementwise=True)
def square(g, x, *, out):
    return g.wide("Mul", x, x, dtype=out.dtype)


@primitive("integer_pow", elementwise=True)
def integer_pow(g, x, *, y, out):
    if y == 1:
        return x
    if y == 2:
        return g.wide("Mul", x, x, dtype=out.dtype)
    if y == -1:
        return g.wide("Div", np.ones((), x.dtype), x, dtype=out.dtype)
    return g.wide("Pow", x, np.asarray(y, x.dtype), dtype=out.dtype)


@primitive("pow", elementwise=True)
def pow_(g, x, y, *, out):
    x, y = thin([x, y], out)
    if isinstance(y, np.ndarray) and y.size == 1 and x.dtype == y.dtype and _fills(x, out):
        if y.item() == 1:
            return x
        if y.item() in (2, -1):
            return integer_pow(g, x, y=int(y.item()), out=out)
    return g.wide("Pow", x, y, dtype=out.dtype)


def _fills(x: Any, out: Any) -> bool:
    """Check whether an operand is a tensor with the shape of the result."""
    return isinstance(x, Tensor) and x.shape == out.shape


@primitive("rsqrt", elementwise=True)
def rsqrt(g, x, *, out):
    x = g.cast(x, np.float32) if out.dtype.itemsize < 4 else x
    return g.cast(Tensor(g("Reciprocal", g("Sqrt", x)), out.shape, x.dtype), out.dtype)


@primitive("div", elementwise=True)
def div(g, x, y, *, out):
    return _divide(g, x, y, out, "Div", lambda x: jnp.full_like(x, -1))


@primitive("rem", elementwise=True)
def rem(g, x, y, *, out):
    return _divide(g, x, y, out, "Mod", lambda x: x, fmod=1)


def _divide(g: Nodes, x: Any, y: Any, out: Any, operator: str, by_zero: Any, **settings: int):
    """Write Div or Mod; integers divided by zero give what XLA gives; runtimes refuse them.

    Args:
      by_zero: a function of x that returns the result where y is 0.
      settings: attributes of the operator.
    """
    divisor = getattr(y, "thin", None) if isinstance(y, Tensor) else y
    if out.dtype.kind not in "iu" or (isinstance(divisor, np.ndarray) and divisor.all()):
        return g.wide(operator, *thin([x, y], out), dtype=out.dtype, **settings)
    zero, safe = g.run(lambda y: (y == 0, jnp.where(y == 0, 1, y)), y)
    result = Tensor(g.wide(operator, x, safe, dtype=out.dtype, **settings), out.shape, out.dtype)
    return g.run(lambda zero, x, y: jnp.where(zero, by_zero(x), y), zero, x, result)[0]


for _name, _operator in COMPARISONS.items():

    @primitive(_name, _name + "_to", elementwise=True)
    def compare(g, x, y, *, out, operator=_operator):
        y_of_x = g(operator, *_comparable(g, thin([x, y], out), order=operator != "Equal"))
        simplify.note(g, y_of_x, operator, x, y)
        return y_of_x


@primitive("ne", elementwise=True)
def ne(g, x, y, *, out):
    return g("Not", g("Equal", *_comparable(g, thin([x, y], out))))


def _comparable(g: Nodes, operands: Any, order: bool = False) -> list:
    """Cast operands to a dtype that runtimes can compare; for Equal alone bool is one."""
    dtype = operands[0].dtype
    if dtype.kind == "b" and not order:
        return list(operands)
    return [g.cast(x, ordered_dtype(dtype)) for x in operands]


for _name, _operator in {"and": "And", "or": "Or", "xor": "Xor"}.items():

    @primitive(_name, elementwise=True)
    def logical(g, x, y, *, out, operator=_operator):
        if out.dtype.kind != "b":
            return g("Bitwise" + operator, *thin([x, y], out))
        return g(operator, *thin([x, y], out))


@primitive("not", elementwise=True)
def not_(g, x, *, out):
    return g("Not" if out.dtype == bool else "BitwiseNot", x)


@primitive("select_n", elementwise=True)
def select_n(g, which, otherwise, chosen=None, *more, out):
    if chosen is None:
        return otherwise
    cases = otherwise, chosen, *more
    if more:  # more than two cases: the first one, or a selection among the others by index - 1
        rest = Tensor(g("Sub", which, np.ones((), which.dtype)), which.shape, which.dtype)
        first = Tensor(g("Equal", which, np.zeros((), which.dtype)), which.shape, bool)
        others = select_n(g, rest, *cases[1:], out=out)
        return _where(g, first, cases[0], Tensor(others, out.shape, out.dtype), out)
    if which.dtype != bool:
        which = Tensor(g("Cast", which, to=onnx_type(np.bool_)), which.shape, bool)
    if (y := simplify.clip_choice(g, which, chosen, otherwise, out)) is not None:
        return y
    return _where(g, which, chosen, otherwise, out)


def _where(g: Nodes, which: Any, x: Any, y: Any, out: Any) -> Any:
    """Write Where, in uint8 for bool and in a wide dtype for others that runtimes lack."""
    if which.shape == out.shape or which.ndim:
        which, x, y = thin([which, x, y], out)
    dtype = np.dtype(np.uint8) if out.dtype == bool else WIDE.get(out.dtype, out.dtype)
    chosen = g("Where", which, g.cast(x, dtype), g.cast(y, dtype))
    return g.cast(Tensor(chosen, out.shape, dtype), out.dtype)


@primitive("clamp", elementwise=True)
def clamp(g, low, x, high, *, out):
    upper = Tensor(g.wide("Max", x, low, dtype=out.dtype), out.shape, out.dtype)
    return g.wide("Min", upper, high, dtype=out.dtype)


def _shift(direction: str):
    """Return the rule of a logical shift, which gives 0 for amounts of the width and more."""

    def rule(g, x, amount, *, out):
        bits = 8 * out.dtype.itemsize
        unsigned = np.dtype(f"uint{max(32, bits)}")
        narrow = np.dtype(f"uint{bits}")
        x = g.cast(g.cast(x, narrow), unsigned)
        amount = g.cast(amount, unsigned)
        moved = Tensor(g("BitShift", x, amount, direction=direction), out.shape, unsigned)
        if not (isinstance(amount, np.ndarray) and (amount < bits).all()):
            inside = g("Less", g.cast(amount, np.int64), np.asarray(bits, np.int64))
            wide = g("Where", inside, g.cast(moved, np.int64), np.zeros((), np.int64))
            moved = g.cast(Tensor(wide, out.shape, np.int64), unsigned)
        return g.cast(g.cast(moved, narrow), out.dtype)

    return rule


primitive("shift_left")(_shift("LEFT"))
primitive("shift_right_logical")(_shift("RIGHT"))
