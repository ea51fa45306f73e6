"""Modules of Flax as functions of named weights."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Weights = Mapping[str, Any]


def split_weights(function: Any) -> tuple[Callable, Weights]:
    """Split a function into a pure function of (weights, *arguments), and its weights.

    Args:
      function: an `nnx.Module`, a bound linen module (`net.bind(variables)`), or any other
        function, which has no weights.

    Returns:
      The pure function, and the weights by their path in the module.
    """
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    if nnx is not None and isinstance(function, nnx.Module):
        definition, state = nnx.split(function)
        return _flatten(state, lambda state, *xs: nnx.merge(definition, state)(*xs))
    if linen is not None and isinstance(function, linen.Module):
        module, variables = function.unbind()
        return _flatten(variables, module.apply)
    return lambda weights, *arguments: function(*arguments), {}


def _flatten(tree: Any, apply: Callable) -> tuple[Callable, Weights]:
    """Return `apply` as a function of a flat dictionary in place of a tree, and the dictionary.

    PRNG keys (of dropout) are not weights: the function captures them.
    """
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
