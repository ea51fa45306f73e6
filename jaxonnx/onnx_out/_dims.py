"""Sizes of axes that are known at run time only: JAX's symbolic dimensions as nodes."""

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxonnx.onnx_out._rule_table import Refusal

_OPERATORS = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}
_FUNCTIONS = {"mod": "Mod", "max": "Max", "min": "Min"}


def all_known(shape: Sequence) -> bool:
    """Check whether all sizes are numbers, and none is symbolic."""
    return all(isinstance(size, (int, np.integer)) for size in shape)


def same(sizes: Sequence, others: Sequence) -> bool:
    """Check whether sizes are equal for all values of symbolic dimensions.

    Types are compared first: a symbolic size and a number raise where JAX cannot decide.
    """
    return all(type(a) is type(b) and a == b for a, b in zip(sizes, others, strict=True))


def declare(g: Any, name: str, shape: Sequence) -> None:
    """Record on `g.sizes` from which axis of an input each symbolic variable can be read.

    Args:
      g: the nodes of the main graph.
      name: the input.
      shape: its shape.
    """
    for axis, size in enumerate(shape):
        if not all_known([size]):
            # an axis of 2*batch also gives batch: divide by 2
            times, _, variable = str(size).rpartition("*")
            if variable.isidentifier() and (not times or times.isdecimal()):
                g.sizes.setdefault(variable, (name, axis, int(times or 1)))


def sizes(g: Any, shape: Sequence) -> Any:
    """Return sizes as an int64 vector: an array, or the name of a tensor if some are symbolic."""
    if all_known(shape):
        return np.array(shape, np.int64)
    parts = [np.array([n], np.int64) if all_known([n]) else size(g, str(n)) for n in shape]
    return g("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]


def size(g: Any, expression: str) -> str:
    """Return the name of an int64[1] tensor with a symbolic size, written at its first use.

    Args:
      g: the nodes of the main graph.
      expression: the size as JAX prints it, like "2*batch + 1".

    Raises:
      Refusal: it depends on a variable that no axis of an input gives.
    """
    source = g.sizes.get(expression)
    if isinstance(source, str):
        return source
    if source is not None:
        name, axis, times = source
        value = g("Gather", g("Shape", name), np.array([axis], np.int64), axis=0)
        if times > 1:
            value = g("Div", value, np.array([times], np.int64))
    else:
        value = _evaluate(g, ast.parse(expression.replace("^", "**"), mode="eval").body)
    g.sizes[expression] = value
    return value


def _evaluate(g: Any, tree: ast.AST) -> Any:
    """Write the nodes of a parsed expression of sizes; return an int64[1] tensor or array."""
    match tree:
        case ast.Constant(value):
            return np.array([value], np.int64)
        case ast.UnaryOp(ast.USub(), operand):
            return g("Neg", _evaluate(g, operand))
        case ast.BinOp(left, ast.Pow(), ast.Constant(power)):
            return g("Pow", _evaluate(g, left), np.array([power], np.int64))
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            name = _OPERATORS[type(operator)]
            return g(name, _evaluate(g, left), _evaluate(g, right))
        case ast.Call(ast.Name("floordiv"), [over, under]):  # ONNX's Div rounds towards zero
            a, b = _evaluate(g, over), _evaluate(g, under)
            return g("Div", g("Sub", a, g("Mod", a, b)), b)
        case ast.Call(ast.Name(function), operands) if function in _FUNCTIONS:
            return g(_FUNCTIONS[function], *(_evaluate(g, operand) for operand in operands))
        case ast.Name(variable) if variable in g.sizes:
            return size(g, variable)
    raise Refusal(f"the size {ast.unparse(tree)} is not that of an input's axis")
