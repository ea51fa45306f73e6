"""Inputs of the networks that are compared."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxonnx._data.random_inputs import draw_inputs
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import Caches
from jaxonnx._graph.values import Value
from jaxonnx.errors import Error

_Run = Callable[[Mapping[str, Any]], Sequence[Any]]
_MORE_PLACES = 5
"""The most places of a table of positions that are not of patches: a class token, registers."""


def find_sizes(
    graph: Graph,
    inputs: Sequence[Value],
    caches: Caches | None,
    run: _Run,
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Find open sizes of inputs that the network asks for: of caches, and sides of pictures.

    Args:
      graph: the network, whose outputs `run` returns.
      shapes: of its tensors.
      sizes: other open dimensions, by name.

    Returns:
      Sizes by name, without those of `sizes`.
    """
    lengths = _find_cache_sizes(graph, inputs, caches, run, sizes)
    sizes = {**lengths, **(sizes or {})}
    return lengths | _find_sides(graph, inputs, caches, run, shapes, sizes)


def _find_sides(
    graph: Graph,
    inputs: Sequence[Value],
    caches: Caches | None,
    run: _Run,
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Find the sides of square pictures, if a table of positions for their patches fixes them."""
    pictures = [value.shape for value in inputs if value.shape and len(value.shape) == 4]
    names = {size for shape in pictures for size in shape[2:] if isinstance(size, str)}
    convolutions = [node for node in graph.nodes if node.op.name == "Conv"]
    steps = ((n.attributes.get("strides"), shapes.get(n.inputs[1], ())) for n in convolutions)
    patches = {stride[0] for stride, shape in steps if stride and [*stride] == [*shape[2:]]} - {1}
    readers = [node for node in graph.nodes if node.op.name in ("Add", "Gather")]
    tables = {name for node in readers for name in node.inputs if len(shapes.get(name, ())) > 1}
    rows = {shapes[name][-2] for name in tables}
    counts = {math.isqrt(n) for n in rows if n - math.isqrt(n) ** 2 <= _MORE_PLACES}
    candidates = [{}, *(dict.fromkeys(names, p * n) for p in patches for n in sorted(counts) if n)]

    def fits(sides: Mapping[str, int]) -> bool:
        try:
            values = draw_inputs(inputs, 1, {**sides, **sizes}, length=2, caches=caches)
            jax.eval_shape(lambda: run(values))
        except Error:
            return False
        return True

    return next(filter(fits, candidates), {}) if names and len(candidates) > 1 else {}


def _find_cache_sizes(
    graph: Graph,
    inputs: Sequence[Value],
    caches: Caches | None,
    run: _Run,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Find sizes of caches that the file leaves open and that do not grow, from those it returns.

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
