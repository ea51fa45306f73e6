"""First values of weights drawn anew, by what a weight is to its operator."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import Layout, Use, layout, uses

Initializer = Callable[..., jax.Array]
"""`(key, shape, dtype) -> array`, like those of `jax.nn.initializers`."""

_SLOPE = 0.25
"""Of PRelu (He et al., 2015)."""


def restarted(
    graph: Graph,
    tensors: Mapping[str, Any],
    names: Iterable[str],
    rng: jax.Array,
    initializer: Initializer,
) -> dict[str, jax.Array]:
    """New values of the tensors `names`: as `Model.reinitialize` says."""
    first: dict[str, Use] = {}
    for use in uses(graph, tensors):
        if use.node.op.role(use.position) is not None:
            first.setdefault(use.name, use)
    names = list(names)
    keys = jax.random.split(rng, len(names))
    return {
        name: _restarted(tensors[name], first.get(name), key, initializer)
        for name, key in zip(names, keys, strict=True)
    }


def _restarted(value: Any, use: Use | None, key: jax.Array, initializer: Initializer) -> jax.Array:
    shape, dtype = value.shape, jnp.asarray(value).dtype
    number = _constant(use, math.prod(shape) == max(shape, default=1))
    if number is not None:
        return jnp.full(shape, number, dtype)
    place = None if use is None else layout(use)
    if place is None:
        return initializer(key, shape, dtype)
    order = _order(place)
    moved = [shape[axis] for axis in order]
    batch = math.prod(moved[: len(place.batch)])
    one = tuple(moved[len(place.batch) :])
    drawn = jnp.stack([initializer(k, one, dtype) for k in jax.random.split(key, batch)])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return drawn.reshape(moved).transpose(inverse)


def _order(place: Layout) -> tuple[int, ...]:
    """The axes as initializers want them; what is summed over an embedding is its columns."""
    if place.lookup:
        return place.output, place.input
    return (*place.batch, *place.kernel, place.input, place.output)


def _constant(use: Use | None, vector: bool) -> float | None:
    """The value that the operator starts from, for vectors and statistics."""
    if use is None:
        return 0.0 if vector else None
    op = use.node.op
    if use.position in op.state:
        return float(op.state.index(use.position) == 1)  # a mean, or a variance
    if op.name == "PRelu":
        return _SLOPE
    if "Norm" in op.name and use.position == op.params[0]:
        return 1.0
    # a recurrent layer has a vector for each direction
    bias = op.name in ("GRU", "LSTM", "RNN") and use.position > 2
    return 0.0 if vector or bias else None
