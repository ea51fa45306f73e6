"""The jaxpr of a function, or the reason why there is none, with the line of the program."""

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
"""What JAX raises where a program depends on values in a way that is not in its jaxpr."""

SHOWN = 8
"""Examples that a message shows."""


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
            f"the function{_raise_location(error)} depends on a symbolic size: {_first(error)}; "
            "give the example sizes that are numbers, or constraints to jax.export.symbolic_shape"
        ) from error
    except UNTRACEABLE as error:
        raise UnsupportedError(
            f"the function{_raise_location(error)} depends on values while it is traced: "
            f"{_first(error)}"
        ) from error
    except (TypeError, ValueError) as error:
        leaves = jax.tree.leaves(arguments)
        shapes = ", ".join(jax.typeof(leaf).str_short() for leaf in leaves[:SHOWN])
        shapes += ", ..." if len(leaves) > SHOWN else ""
        raise InputError(
            f"the function does not take the examples ({shapes}){_raise_location(error)}: "
            f"{_first(error)}"
        ) from error
    _check_pure(closed)
    _check_real(closed)
    return closed, shapes


def _check_pure(closed: Any) -> None:
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        cause = _effect(closed)
        what = describe_equation(closed, cause) if cause else "the function"
        raise UnsupportedError(
            f"{what} has side effects ({effects}), which no ONNX model has; take callbacks, prints "
            "and references out of the function"
        )


def _effect(program: Any) -> Any:
    """Return the innermost equation that has an effect."""
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.effects:
            inner = (_effect(program) for program in programs(equation.params))
            return next(filter(None, inner), equation)
    return None


def _check_real(closed: Any) -> None:
    jaxpr = closed.jaxpr
    for what, variables in (("takes", jaxpr.invars), ("gives", jaxpr.outvars)):
        if any(jnp.issubdtype(variable.aval.dtype, jnp.complexfloating) for variable in variables):
            raise UnsupportedError(
                f"the function {what} complex numbers, which runtimes do not; use their real and "
                "imaginary parts (lax.complex, jnp.real, jnp.imag)"
            )


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of packages whose lines are not the user's."""
    packages = (sys.modules.get(name) for name in ("jax", "jaxonnx", "flax", "optax"))
    return tuple(str(Path(p.__file__).parent) for p in packages if p and p.__file__)


def describe_equation(program: Any, equation: Any) -> str:
    """Return "JAX's primitive 'sin' in FILE:LINE", the line being one of the user's program.

    It is that of the innermost equation that has one: what a function traces under `jit` knows its
    own lines only, which may all be JAX's.
    """
    around = (_find_enclosing(program, equation) or []) if program is not None else []
    line = next(filter(None, map(_line, (equation, *reversed(around)))), "")
    return f"JAX's primitive '{equation.primitive.name}'{line}"


def _find_enclosing(program: Any, sought: Any) -> list | None:
    """Return the equations whose programs have an equation in them, outermost first."""
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation is sought:
            return []
        for inner in programs(equation.params):
            if (rest := _find_enclosing(inner, sought)) is not None:
                return [equation, *rest]
    return None


def _line(equation: Any) -> str:
    trace = equation.source_info.traceback
    frames = trace.frames if trace else ()
    return _users((frame.file_name, frame.line_num) for frame in frames)


def _raise_location(error: BaseException) -> str:
    """Return where the user's program raised an error."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _users((frame.filename, frame.lineno) for frame in frames)


def _users(frames: Iterable[tuple[str, Any]]) -> str:
    """Return the first place that is not within a package; frames are innermost first."""
    for file, number in frames:
        if not file.startswith(_folders()):
            return f" in {file}:{number}"
    return ""


def _first(error: BaseException) -> str:
    """Return what an error says in its first lines, without JAX's hints."""
    return str(error).strip().partition("\n\n")[0].rstrip(".")
