"""Inputs of the networks that are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxonnx._data.random_inputs import draw_inputs
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import Caches
from jaxonnx._graph.values import Value
from jaxonnx.errors import Error


def find_cache_sizes(
    graph: Graph,
    inputs: Sequence[Value],
    caches: Caches | None,
    run: Callable[[Mapping[str, Any]], Sequence[Any]],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Find sizes of caches that the file leaves open and that do not grow, from those it returns.

    Args:
      graph: the network, whose outputs `run` returns.
      sizes: other open dimensions, by name.

    Returns:
      Sizes by name. None of them, if an operator asks for the size: `sizes` has to say it.
    """
    if caches is None or not caches.omissible:
        return {}
    values = draw_inputs(inputs, 1, sizes, length=2, caches=caches)
    try:
        outputs = jax.eval_shape(lambda: run(values))
    except Error:
        return {}
    shapes = {name: y.shape for name, y in zip(graph.outputs, outputs, strict=True)}
    return {
        size: shapes[caches.pairs[value.name]][axis]
        for value in caches.values
        for axis, size in enumerate(value.shape or ())
        if axis and size in caches.sizes[value.name]
    }
