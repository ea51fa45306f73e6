"""An interpreter of jaxprs on values of any kind.

Values may be arrays, names of ONNX tensors, or facts about an array. A rule says what an equation
makes of them. Only this module knows how a jaxpr holds other programs, which equations only run one
of them, and how the operands of loops are laid out, for every release of JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr

Program = Any
"""A jaxpr, closed or not; JAX 0.11 made the two types one."""

Rule = Callable[[JaxprEqn, list], Sequence[Any]]

_CALLS = {
    *("call", "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "custom_vmap_call", "jit", "pjit", "remat", "remat2"),
}
"""Primitives that do nothing but run a program on their operands."""


def inner_program(equation: JaxprEqn) -> Program | None:
    """Return the program that an equation does nothing but run, None for all other equations.

    A primitive of jaxonnx has an attribute `plain`: a function of its operands and parameters that
    computes the same with primitives of JAX.
    """
    primitive, params = equation.primitive, equation.params
    if (plain := getattr(primitive, "plain", None)) is not None:
        return jax.make_jaxpr(partial(plain, **params))(*map(_like, equation.invars))
    if primitive.name == "call_hi_primitive":  # one that knows itself in terms of others
        return jax.make_jaxpr(params["_prim"].expand)(*map(_like, equation.invars))
    return next(iter(programs(params)), None) if primitive.name in _CALLS else None


def bind_equation(equation: JaxprEqn, inputs: Sequence[Any]) -> list:
    """Return the results of an equation on arrays, its own derivative kept."""
    primitive = equation.primitive
    bound = primitive.get_bind_params(equation.params)  # with functions apart before JAX 0.11
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = primitive.bind(*functions, *inputs, **params)
    return [*results] if primitive.multiple_results else [results]


def source(program: Program) -> str:
    """Return "NAME at FILE:LINE" of the function that a program was traced from."""
    return getattr(program, "jaxpr", program).debug_info.func_src_info or ""


def interpret(
    program: Program,
    rule: Rule,
    arguments: Sequence[Any],
    *,
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
    enter: Callable[[JaxprEqn], Program | None] = inner_program,
) -> list:
    """Evaluate a program.

    Args:
      program: a jaxpr, as `jax.make_jaxpr` or a parameter of an equation has it.
      rule: `rule(equation, inputs)` gives the values of the equation's results, one for each.
      arguments: the values of the program's inputs.
      constant: `constant(value, aval)` gives the value for a literal or a captured array.
      enter: gives the program to evaluate in place of an equation, or None to apply the rule.
    """
    # As `jax.core.eval_jaxpr`, but with values of any kind, and calls entered instead of bound: a
    # rule sees only primitives that compute something.
    jaxpr = getattr(program, "jaxpr", program)
    consts = getattr(program, "consts", ())
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = constant(value, variable.aval)

    def read(atom):
        return constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if (inner := enter(equation)) is not None:
            results = interpret(inner, rule, inputs, constant=constant, enter=enter)
        else:
            results = rule(equation, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def live(program: Program) -> Program:
    """Return a closed program without the equations that its results do not need."""
    jaxpr = getattr(program, "jaxpr", program)
    left, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return program.replace(jaxpr=left) if hasattr(program, "jaxpr") else left


def programs(params: Mapping[str, Any]) -> list[Program]:
    """Return the programs among the parameters of an equation."""
    leaves = jax.tree.leaves([*params.values()], is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]


def retrace_params(params: Mapping[str, Any], run: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of an equation, each program in them traced from `run(program, *args)`.

    `run` gives a list, as `interpret` does.
    """

    def other(value):
        if type(value) is tuple:
            return tuple(map(other, value))
        if not is_program(value):
            return value
        jaxpr = getattr(value, "jaxpr", None)
        traced = jax.make_jaxpr(partial(run, value))(*map(_like, (jaxpr or value).invars))
        return traced if jaxpr else traced.jaxpr  # open where it was open

    return {name: other(value) for name, value in params.items()}


@dataclass(frozen=True)
class Scan:
    """A `lax.scan`: `body(*fixed, *carry, *slices) -> (*carry, *slices)`."""

    body: Program
    fixed: list
    carry: list
    sliced: list
    """The arrays of which each step takes a slice along axis 0."""
    length: int
    reverse: bool


def scan(equation: JaxprEqn, values: Sequence[Any]) -> Scan:
    """Return the parts of a `scan` equation on these values.

    Sliced operands have one axis more outside the body; JAX 0.11 took their number out of params.
    """
    # Operands are (fixed, carry, slices), results (carry, slices). A sliced array has one axis less
    # in the body, a carry has the same type inside and outside: so ranks tell how many of each.
    body = equation.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)

    def slice_changed(outside, inside):
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in pairs)

    slices = slice_changed(equation.invars, inner.invars)
    carry = len(equation.outvars) - slice_changed(equation.outvars, inner.outvars)
    fixed = len(values) - carry - slices
    begin, end = fixed, fixed + carry
    length, reverse = equation.params["length"], equation.params["reverse"]
    return Scan(body, [*values[:begin]], [*values[begin:end]], [*values[end:]], length, reverse)


@dataclass(frozen=True)
class While:
    """A `lax.while_loop`: while `condition(*tested, *carry)`, carry = `body(*fixed, *carry)`."""

    condition: Program
    body: Program
    tested: list
    fixed: list
    carry: list


def while_loop(equation: JaxprEqn, values: Sequence[Any]) -> While:
    """Return the parts of a `while` equation on these values."""
    params = equation.params
    m = params["cond_nconsts"]
    n = m + params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    return While(condition, body, [*values[:m]], [*values[m:n]], [*values[n:]])


def is_program(value: Any) -> bool:
    return isinstance(value, Jaxpr) or isinstance(getattr(value, "jaxpr", None), Jaxpr)


def _like(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
