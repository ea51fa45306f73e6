"""Trace functions to jaxprs; errors name the line of the user's program."""

import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import InconclusiveDimensionOperation

from jaxonnx._jaxpr import programs
from jaxonnx.errors import Error, InputError, UnsupportedError

UNTRACEABLE = (
    *(jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError),
    *(jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError),
)
"""The errors that JAX raises where Python control flow or NumPy needs the value of a tracer."""

SHOWN = 8
"""The most examples that a message lists."""


def trace(call: Callable, weights: Any, arguments: Any) -> tuple[Any, Any]:
    """Return the jaxpr of a function of weights and arguments, and the shapes of its results.

    Raises:
      InputError: the function does not take these arguments.
      UnsupportedError: it depends on values or symbolic sizes while it is traced, has side effects,
        or takes or gives complex numbers.
    """
    try:
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(weights, *arguments)
    except Error:
        raise
    except InconclusiveDimensionOperation as error:
        raise UnsupportedError(
            f"the function{_raise_location(error)} {explain_inconclusive(error)}"
        ) from error
    except NotImplementedError as error:
        raise UnsupportedError(
            f"JAX does not trace the function{_raise_location(error)}: {_first_paragraph(error)}"
        ) from error
    except UNTRACEABLE as error:
        raise UnsupportedError(
            f"the function{_raise_location(error)} depends on values while it is traced: "
            f"{_first_paragraph(error)}"
        ) from error
    except (TypeError, ValueError) as error:
        leaves = jax.tree.leaves(arguments)
        shapes = ", ".join(jax.typeof(leaf).str_short() for leaf in leaves[:SHOWN])
        shapes += ", ..." if len(leaves) > SHOWN else ""
        raise InputError(
            f"the function does not take the examples ({shapes}){_raise_location(error)}: "
            f"{_first_paragraph(error)}"
        ) from error
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        cause = _find_effect(closed)
        subject = describe_equation(closed, cause) if cause else "the function"
        raise UnsupportedError(
            f"{subject} has side effects ({effects}), which no ONNX model has; take callbacks, "
            "prints and references out of the function"
        )
    jaxpr: Any = closed.jaxpr
    for verb, variables in (("takes", jaxpr.invars), ("gives", jaxpr.outvars)):
        if any(jnp.issubdtype(variable.aval.dtype, jnp.complexfloating) for variable in variables):
            raise UnsupportedError(
                f"the function {verb} complex numbers, which runtimes do not; use their real and "
                "imaginary parts (lax.complex, jnp.real, jnp.imag)"
            )
    return closed, shapes


def explain_inconclusive(error: InconclusiveDimensionOperation) -> str:
    """Explain an operation that JAX cannot decide for all symbolic sizes, and name the remedy."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    constraints = ""
    if remainder := re.search(r"mod\((\d+), (\w+)\)", text):  # of padding with mode="wrap"
        k, size = remainder.groups()
        listed = [
            f"{size} >= {int(k) + 1}",
            f"mod({k}, {size}) == {k}",
            f"floordiv({k}, {size}) == 0",
        ]
        constraints = f", like constraints={listed}"
    multiples = ", multiples like '4*h'" * ("divide evenly" in text)
    return (
        f"depends on a symbolic size: {text}; give the example sizes that are numbers{multiples}, "
        f"or constraints to jax.export.symbolic_shape{constraints}"
    )


def _find_effect(program: Any) -> Any:
    """Return the innermost equation that has an effect, or None."""
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.effects:
            inner = (_find_effect(program) for program in programs(equation.params))
            return next(filter(None, inner), equation)
    return None


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of JAX, Flax, optax and this package: their lines are not the user's."""
    packages = (sys.modules.get(name) for name in ("jax", "jaxonnx", "flax", "optax"))
    return tuple(str(Path(p.__file__).parent) for p in packages if p and p.__file__)


def describe_equation(program: Any, equation: Any) -> str:
    """Return "JAX's primitive 'sin' in FILE:LINE", with a line of the user's program.

    The line is that of the equation, or else of the innermost call around it that has one: the
    equations of a function that JAX itself wraps in `jit` may only have lines of JAX.

    Args:
      program: the jaxpr that contains the equation at some depth; None if it is not known.
      equation: the equation.
    """
    around = (_find_enclosing(program, equation) or []) if program is not None else []
    line = next(filter(None, map(_line, (equation, *reversed(around)))), "")
    return f"JAX's primitive '{equation.primitive.name}'{line}"


def _find_enclosing(program: Any, sought: Any) -> list | None:
    """Return the equations that call the program with the sought one, outermost first.

    None if the program does not contain it.
    """
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation is sought:
            return []
        for inner in programs(equation.params):
            if (rest := _find_enclosing(inner, sought)) is not None:
                return [equation, *rest]
    return None


def _line(equation: Any) -> str:
    """Return the line of the user's program that an equation was traced at: see `_user_line`."""
    trace = equation.source_info.traceback
    frames = trace.frames if trace else ()
    return _user_line((frame.file_name, frame.line_num) for frame in frames)


def _raise_location(error: BaseException) -> str:
    """Return the line of the user's program that raised an error: see `_user_line`."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _user_line((frame.filename, frame.lineno) for frame in frames)


def _user_line(frames: Iterable[tuple[str, Any]]) -> str:
    """Return " in FILE:LINE" for the first frame outside of `_folders`, or "".

    Args:
      frames: (file, line), innermost first.
    """
    for file, number in frames:
        if not file.startswith(_folders()):
            return f" in {file}:{number}"
    return ""


def _first_paragraph(error: BaseException) -> str:
    """Return the first paragraph of an error's message, without the hints that JAX adds."""
    return str(error).strip().partition("\n\n")[0].rstrip(".")
