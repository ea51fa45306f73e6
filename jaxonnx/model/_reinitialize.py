"""Reinitialize weights by their role in the operator."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.uses import Weight, weights
from jaxonnx._graph.weight_names import Places

Initializer = Callable[..., jax.Array]
"""`(key, shape, dtype) -> array`, like those of `jax.nn.initializers`."""


def reinitialize(
    graph: Graph,
    tensors: Mapping[str, Any],
    constants: Mapping[str, Any],
    selection: Select,
    rng: jax.Array,
    initializer: Initializer,
    places: Places,
) -> dict[str, Any]:
    """Return the tensors with new values for the selected ones, as in `Model.reinitialize`."""
    floats = {n: v for n, v in tensors.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    chosen = select(selection, floats, "names", places=places)
    names = [name for name in floats if name in chosen]
    meanings = weights(graph, {**constants, **tensors})
    keys = jax.random.split(rng, len(names))
    new = {
        name: _draw(tensors[name], meanings[name], key, initializer)
        for name, key in zip(names, keys, strict=True)
    }
    return {**tensors, **new}


def _draw(value: Any, weight: Weight, key: jax.Array, initializer: Initializer) -> jax.Array:
    shape, dtype = value.shape, jnp.asarray(value).dtype
    if weight.start is not None:
        return jnp.full(shape, weight.start, dtype)
    if weight.matrix is None:
        return initializer(key, shape, dtype)
    order, batch_axes = weight.matrix.order, len(weight.matrix.batch)
    permuted = [shape[axis] for axis in order]
    batch, matrix = math.prod(permuted[:batch_axes]), tuple(permuted[batch_axes:])
    matrices = jnp.stack([initializer(k, matrix, dtype) for k in jax.random.split(key, batch)])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape(permuted).transpose(inverse)
