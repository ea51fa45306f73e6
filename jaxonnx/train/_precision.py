"""Mixed precision: matrix products and convolutions of bfloat16 numbers in a float32 program.

What a graph computes is not cast as a whole: its float32 constants, norms, softmaxes and losses
stay what they are. Only the products, of the forward pass and of both gradients, take their factors
in bfloat16 (and accumulate in float32), wherever they are: in loops, branches and attention alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, primitives

from jaxonnx.lowering._contract import contract_p

_WIDE = {"preferred_element_type": jnp.dtype(jnp.float32), "precision": None}
_PRODUCTS: dict[Primitive, dict[str, Any]] = {
    primitives.conv_general_dilated_p: _WIDE,
    primitives.dot_general_p: _WIDE,
    contract_p: {},
}
"""Primitives that are products of their two operands, and their changed parameters."""


def products_in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose products of two float32 arrays take them rounded to bfloat16.

    Apply it to a gradient, not to what is differentiated.
    """

    def rounded(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _evaluate(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return rounded


def _evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a jaxpr with its products in bfloat16."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def value(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        primitive, params = equation.primitive, equation.params
        if "call_jaxpr" in params:  # what has a derivative of its own, which was taken before
            results = _evaluate(params["call_jaxpr"], *given)
        else:
            product = primitive in _PRODUCTS and all(x.dtype == jnp.float32 for x in given)
            if product:
                given = [x.astype(jnp.bfloat16) for x in given]
                params = params | _PRODUCTS[primitive]
            params = {name: _rounded(x) for name, x in params.items()}
            with equation.ctx.manager:
                found = primitive.bind(*given, **params)
            results = found if primitive.multiple_results else [found]
            results = [x.astype(jnp.float32) for x in results] if product else results
        values.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _rounded(parameter: Any) -> Any:
    """A parameter of a primitive; the programs in it with their products in bfloat16."""
    if type(parameter) is tuple:
        return tuple(map(_rounded, parameter))
    if isinstance(parameter, ClosedJaxpr):
        given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in parameter.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: _evaluate(parameter, *args))(*given)
    if isinstance(parameter, Jaxpr):
        return _rounded(ClosedJaxpr(parameter, ())).jaxpr
    return parameter
