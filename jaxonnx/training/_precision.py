"""Mixed precision: matrix products and convolutions of bfloat16 numbers in a float32 program.

What a graph computes is not cast as a whole: its float32 constants, norms, softmaxes and losses
stay what they are. Only the products, of the forward pass and of both gradients, take their factors
in bfloat16 (and accumulate in float32), wherever they are: in loops, branches and attention alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive, primitives

from jaxonnx._jaxpr import Program, inner_program, interpret, retrace_params
from jaxonnx.lowering import contract_p

_WIDE = {"preferred_element_type": jnp.dtype(jnp.float32), "precision": None}
_PRODUCTS: dict[Primitive, dict[str, Any]] = {
    primitives.conv_general_dilated_p: _WIDE,
    primitives.dot_general_p: _WIDE,
    contract_p: {},
}
"""Primitives that are products of their two operands, and their changed parameters."""


def products_in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose products of two float32 arrays take them rounded to bfloat16.

    Apply it to a gradient, not to what is differentiated.
    """

    def run_rounded(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _run(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run_rounded


def _run(program: Program, *args: Any) -> list[Any]:
    """Evaluate a program with its products in bfloat16."""
    return interpret(program, _step, args, enter=_has_derivative)


def _has_derivative(equation: JaxprEqn) -> Program | None:
    """Return what has a derivative of its own, which was taken before; other calls stay calls."""
    return inner_program(equation) if "call_jaxpr" in equation.params else None


def _step(equation: JaxprEqn, inputs: list) -> list:
    primitive, params = equation.primitive, retrace_params(equation.params, _run)
    product = primitive in _PRODUCTS and all(x.dtype == jnp.float32 for x in inputs)
    if product:
        inputs = [x.astype(jnp.bfloat16) for x in inputs]
        params |= _PRODUCTS[primitive]
    with equation.ctx.manager:
        results = primitive.bind(*inputs, **params)
    results = results if primitive.multiple_results else [results]
    return [x.astype(jnp.float32) for x in results] if product else results
