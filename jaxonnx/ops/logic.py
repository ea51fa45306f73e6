"""Comparisons, logic and bits. None of them has a gradient."""

from typing import Literal

from jaxonnx.ops.elementwise import binary, unary
from jaxonnx.registry import op, xp

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
    wanted = (x < 0) & bool(detect_negative) | (x > 0) & bool(detect_positive)
    return xp(x).isinf(x) & wanted
