"""A schedule of optax, or any JAX function of a count, as ONNX nodes.

A schedule is an opaque Python function, but a scalar one: tracing it gives a jaxpr of a few dozen
primitives that ONNX has as operators. So constant, step, polynomial, exponential, cosine and
warm-up schedules, joined or not, and those that users write need no case of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._file.build import Writer, onnx_type
from jaxonnx._jaxpr import interpret
from jaxonnx.errors import UnsupportedError

_OPERATORS = {
    "abs": "Abs",
    "add": "Add",
    "add_any": "Add",
    "and": "And",
    "broadcast_in_dim": "Identity",
    "ceil": "Ceil",
    "copy": "Identity",
    "cos": "Cos",
    "div": "Div",
    "eq": "Equal",
    "exp": "Exp",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "log": "Log",
    "logistic": "Sigmoid",
    "lt": "Less",
    "max": "Max",
    "min": "Min",
    "mul": "Mul",
    "neg": "Neg",
    "not": "Not",
    "or": "Or",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "reshape": "Identity",
    "squeeze": "Identity",
    "stop_gradient": "Identity",
    "sub": "Sub",
    "tanh": "Tanh",
}
"""Primitives with an operator of the same operands."""


def append(
    writer: Writer, schedule: Callable[[jax.Array], Any], count: str, dtype: np.dtype
) -> str:
    """Append nodes that compute schedule(count); return their output's name.

    Args:
      writer: receives nodes and the initializers that they need.
      schedule: a function of an int32 scalar that returns a scalar.
      count: the name of an int64 scalar.
      dtype: float32 or float64, the type of the result and of the arithmetic.

    Raises:
      UnsupportedError: naming the JAX primitive that has no operator.
    """
    with jax.enable_x64(dtype == np.float64):
        closed = jax.make_jaxpr(schedule)(jax.ShapeDtypeStruct((), jnp.int32))
    argument = writer.node("Cast", count, name="schedule", to=onnx_type(np.int32))
    (value,) = interpret(
        closed,
        partial(_equation, writer),
        [argument],
        constant=lambda value, aval: writer.constant("schedule", value, aval.dtype),
    )
    return writer.node("Cast", value, name="learning_rate", to=onnx_type(dtype))


def _equation(writer: Writer, equation: Any, inputs: list[str]) -> list[str]:
    if any(atom.aval.shape for atom in (*equation.invars, *equation.outvars)):
        raise UnsupportedError(
            f"the schedule computes with arrays ({equation.primitive.name}); only schedules of "
            "scalars become part of the file: give one of those or a number"
        )
    return [_primitive(partial(writer.node, name="schedule"), writer, equation, inputs)]


def _primitive(node: Callable[..., str], writer: Writer, equation: Any, inputs: list[str]) -> str:
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    if name in _OPERATORS:
        return node(_OPERATORS[name], *inputs)
    if name == "convert_element_type":
        return node("Cast", *inputs, to=onnx_type(dtype))
    if name == "integer_pow":
        return node("Pow", *inputs, writer.constant("schedule", equation.params["y"], dtype))
    if name == "square":
        return node("Mul", *inputs, *inputs)
    if name == "ne":
        return node("Not", node("Equal", *inputs))
    if name == "rem":
        return node("Mod", *inputs, fmod=1)
    if name == "clamp":
        low, value, high = inputs
        return node("Min", node("Max", value, low), high)
    if name == "select_n" and equation.invars[0].aval.dtype == bool:
        condition, otherwise, chosen = inputs
        return node("Where", condition, chosen, otherwise)
    raise UnsupportedError(
        f"the schedule uses JAX's '{name}', for which jaxonnx writes no ONNX operator; "
        "give a schedule of elementary functions or a number"
    )
