"""Mixed precision: products of 16-bit numbers in a float32 program, and loss scaling for float16.

A graph is not cast as a whole: its float32 constants, norms, softmaxes and losses stay in float32.
Only the products, of the forward pass and of both gradients, take their factors in 16 bits (and
accumulate in float32), wherever they are: in loops, branches and attention alike.

The gradients of float16 products underflow where those of bfloat16 do not. The loss is therefore
scaled by a factor that halves when a gradient overflows and doubles after many steps without
(Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, primitives

from jaxonnx._arguments import Argument
from jaxonnx._jaxpr import Program, inner_program, interpret, programs, retrace_params
from jaxonnx.lowering import LOOPS, Dot, RoundedForm, contract, contract_p, has_units
from jaxonnx.training._settings import Plan, Settings

_PRODUCTS = (primitives.conv_general_dilated_p, primitives.dot_general_p, contract_p)
"""Primitives that are products of their two operands."""

PRECISIONS = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
"""The type of the operands, by the name of the precision."""

_GROWTH = 2000
"""Steps in a row without overflow after which the scale doubles."""


class PrecisionArguments(TypedDict, total=False):
    """Products in 16 bits."""

    precision: Annotated[
        Literal["bf16", "fp16"] | None, Argument(form="choice", resume=True, needs_loss=True)
    ]
    """Compute matrix products and convolutions in 16 bits: "bf16" or "fp16".

    This applies to the forward pass and both gradients, and is fast on accelerators; "bf16" also on
    CPUs with AVX512_BF16, AMX or ARM's BF16, which leave in float32 what is not faster, and on x86
    round the results of products as well. Weights, updates, normalization, softmax and losses stay
    in float32, and so do validation and the resulting model. With "fp16" the loss is scaled: by
    2**15 at first, by half as much after each gradient that overflows, by twice as much after 2000
    steps without overflow. A step that overflows changes nothing and is not listed in
    `history.events`. Use "fp16" for float16 files, whose small gradients would be zero otherwise,
    and for hardware without bfloat16."""


class LossScale(NamedTuple):
    """The factor of the loss while its gradient is taken."""

    factor: jax.Array
    steps: jax.Array
    """Those since the factor changed."""

    def apply(self, loss: jax.Array) -> jax.Array:
        return loss.astype(jnp.float32) * self.factor

    def remove(self, gradient: jax.Array) -> jax.Array:
        return (gradient / self.factor).astype(gradient.dtype)

    def shrink(self) -> LossScale:
        """Return the scale after an overflow."""
        return LossScale(self.factor / 2, jnp.int32(0))

    def grow(self) -> LossScale:
        """Return the scale after a step without overflow."""
        doubles = self.steps + 1 >= _GROWTH
        factor = jnp.where(doubles, jnp.minimum(2 * self.factor, 2.0**24), self.factor)
        return LossScale(factor, jnp.where(doubles, 0, self.steps + 1))


def start_scale(settings: Settings) -> LossScale | None:
    """Return the scale before the first step; None where the loss is not scaled."""
    return LossScale(jnp.float32(2**15), jnp.int32(0)) if settings.precision == "fp16" else None


def round_gradient(plan: Plan) -> None:
    """Compute the products of forward and backward pass in 16 bits (`precision=`)."""
    name = plan.settings.precision
    if name is not None:
        notes = []
        if plan.storage.platform == "cpu":
            pays = "this processor has units for large products of this type"
            costs = "this processor has no known units for it, so steps take longer than in float32"
            verdict = pays if has_units(PRECISIONS[name]) else costs
            measure = "jaxonnx.training.preview(...) with and without it measures both"
            notes.append(f"precision={name!r}: {verdict}; {measure}")
        if name == "fp16":
            notes.append("the loss is scaled while its gradient is taken, by what float16 can hold")
        plan.notes += notes
        plan.gradient_wrappers.append(
            lambda gradient, _: round_products(gradient, PRECISIONS[name])
        )


def round_products(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Return a function whose products of two float32 arrays take them rounded to a type.

    Apply it to a gradient, not to the function that is differentiated.
    """
    run = partial(_run, dtype)

    def run_rounded(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = run(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run_rounded


def _run(dtype: Any, program: Program, *args: Any) -> list[Any]:
    """Evaluate a program with its products in a type."""
    rule = partial(_step, dtype, _find_transposed(program))
    return interpret(program, rule, args, enter=_has_derivative)


def _has_derivative(equation: JaxprEqn) -> Program | None:
    """Inline calls of custom_jvp and custom_vjp, which are differentiated by now, and the loops of
    recurrences, for their products; keep other calls."""
    inlined = "call_jaxpr" in equation.params or equation.primitive in LOOPS
    return inner_program(equation) if inlined else None


def _find_transposed(program: Program) -> set[Any]:
    """Return the variables of matrices that are used once, by a transposition.

    So the derivative of a product leaves the gradient of its weight.
    """
    jaxpr = getattr(program, "jaxpr", program)
    uses = Counter(id(x) for equation in jaxpr.eqns for x in equation.invars)
    uses.update(map(id, jaxpr.outvars))
    inner = [p for e in jaxpr.eqns if _has_derivative(e) for p in programs(e.params)]
    here = {
        equation.invars[0]
        for equation in jaxpr.eqns
        if equation.primitive is primitives.transpose_p
        and equation.params["permutation"] == (1, 0)
        and uses[id(equation.invars[0])] == 1
    }
    return here.union(*map(_find_transposed, inner))


def _step(dtype: Any, transposed: set[Any], equation: JaxprEqn, inputs: list) -> list:
    primitive = equation.primitive
    if primitive in _PRODUCTS and all(x.dtype == jnp.float32 for x in inputs):
        with equation.ctx.manager:
            return [_multiply(dtype, equation, inputs, equation.outvars[0] in transposed)]
    params = retrace_params(equation.params, partial(_run, dtype))
    with equation.ctx.manager:
        results = primitive.bind(*inputs, **params)
    return results if primitive.multiple_results else [results]


def _multiply(dtype: Any, equation: JaxprEqn, inputs: list, is_transposed: bool) -> jax.Array:
    """Return the result of a product whose factors are rounded."""
    primitive, params = equation.primitive, equation.params
    if primitive is contract_p:
        return contract(RoundedForm(params["form"], dtype), params["out"], *inputs)
    if primitive is primitives.dot_general_p and params["out_sharding"] is None:
        contracted, mapped = params["dimension_numbers"]
        dot = Dot(contracted, mapped, is_transposed)
        return contract(RoundedForm(dot, dtype), 2, *inputs)
    params = params | {"preferred_element_type": jnp.dtype(jnp.float32), "precision": None}
    return primitive.bind(*(x.astype(dtype) for x in inputs), **params)
