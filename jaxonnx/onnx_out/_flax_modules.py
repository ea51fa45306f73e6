"""Modules of Flax as functions of named weights."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Weights = Mapping[str, Any]


def parts(function: Any) -> tuple[Callable, Weights]:
    """Return a function of weights and arguments, and the weights, by their path in the module.

    Only Flax modules have weights. A module of linen is a bound one, `net.bind(params)`.
    """
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    if nnx is not None and isinstance(function, nnx.Module):
        definition, state = nnx.split(function)
        return _flat(state, lambda state, *xs: nnx.merge(definition, state)(*xs))
    if linen is not None and isinstance(function, linen.Module):
        module, variables = function.unbind()
        return _flat(variables, module.apply)
    return lambda weights, *arguments: function(*arguments), {}


def _flat(tree: Any, apply: Callable) -> tuple[Callable, Weights]:
    """Return `apply` on a flat dictionary of a tree's arrays; keys stay where they are."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [_name(path) for path, _ in leaves]
    weights = {
        name: leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }

    def call(weights, *arguments):
        values = [weights.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        return apply(jax.tree_util.tree_unflatten(structure, values), *arguments)

    return call, weights


def _name(path: Any) -> str:
    """Return "dense.kernel" for ['params']['dense']['kernel'] or .dense.kernel.value."""
    text = jax.tree_util.keystr(path, simple=True, separator=".")
    return text.removeprefix("params.").removesuffix(".value")
