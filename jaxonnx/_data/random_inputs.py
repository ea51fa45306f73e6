"""Draw inputs that a network accepts: tokens within their table, masks, pictures, empty caches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.ragged import derived_inputs, masks_and_positions, with_derived
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import Caches, find_caches
from jaxonnx._graph.values import Value
from jaxonnx._limits import machine
from jaxonnx.errors import Error, InputError

_COLORS = 3
_SIDE = 32
"""Open sides of pictures are multiples of it, which networks divide by two up to five times."""


def draw_inputs(
    inputs: Sequence[Value],
    batch: int,
    sizes: Mapping[str, int] | None = None,
    *,
    length: int | None = None,
    graph: Graph | None = None,
    seed: int,
) -> dict[str, np.ndarray]:
    """Draw a value for each input.

    Floating-point inputs are normal numbers, tokens rows of their table, masks 1 for the tokens of
    each example (all of them, where there are caches or `length` is None), positions count them,
    bytes of pictures 0 to 255, other integers 0 or 1.

    Args:
      inputs: the inputs of the network.
      batch: the first dimension, where it is open, and others of its name.
      sizes: other open dimensions by name.
      length: the size of open dimensions that `sizes` does not name; of sides of pictures times 8,
        rounded up to a multiple of 32, and pictures have 3 colors.
      graph: that of the inputs, if caches among them are to be empty.
      seed: of the random numbers.

    Raises:
      InputError: an open dimension has no size, or an input is no array of numbers.
    """
    caches = None if graph is None else find_caches(graph, inputs)
    return _draw_inputs(inputs, batch, sizes or {}, length, caches, seed)


def _draw_inputs(
    inputs: Sequence[Value],
    batch: int,
    sizes: Mapping[str, int],
    length: int | None,
    caches: Caches | None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    first = {value.shape[0] for value in inputs if value.shape}
    batches = {name: batch for name in first if isinstance(name, str)}  # on other axes as well
    sizes = {**batches, **sizes}
    hidden: set[str] = set() if caches is None else caches.names
    drawn = [value for value in inputs if value.name not in hidden]
    derived, (masks, positions) = derived_inputs(drawn), masks_and_positions(drawn)
    if any(mask.name not in derived for mask in masks):  # of queries and keys: tells no positions
        derived = [name for name in derived if name not in positions]
    columns = [
        None if v.name in derived else _draw(v, _shape(v, batch, sizes, length), random)
        for v in drawn
    ]
    filled = with_derived(columns, drawn) if derived else columns
    values = {v.name: np.asarray(x) for v, x in zip(drawn, filled, strict=True)}
    if caches is not None:
        joined = dict.fromkeys(caches.joined, length or 1)
        empty = caches.empty(batch, {**joined, **sizes})
        for value in (value for value in inputs if value.name in hidden):
            if (x := empty[value.name]) is None:
                shape = [
                    d if isinstance(d, int) else sizes.get(d or "", 0) for d in value.shape or ()
                ]
                x = np.zeros([batch, *shape[1:]], value.dtype)
            values[value.name] = x
    elif length is not None:
        for mask in masks:
            if mask.name in derived:  # the first example is as long as all positions
                x = values[mask.name]
                ends = random.integers(1, x.shape[1] + 1, len(x))
                ends[:1] = x.shape[1]
                values[mask.name] = (np.arange(x.shape[1]) < ends[:, None]).astype(x.dtype)
    return {value.name: values[value.name] for value in inputs}


def _shape(
    value: Value, batch: int, sizes: Mapping[str, int], length: int | None
) -> tuple[int, ...]:
    if value.dtype is None or value.dtype == object or value.shape is None:
        raise InputError(f"there are no random numbers for input {value}: pass data=DATA (--data)")
    usual: list[int | None] = [length] * len(value.shape)
    if length is not None and len(usual) == 4 and value.dtype.kind not in "bi":
        side = -(-8 * length // _SIDE) * _SIDE
        sides = _sides(value.shape)
        usual = [side if axis in sides else _COLORS for axis in range(4)]
    shape = []
    for axis, size in enumerate(value.shape):
        if not isinstance(size, int):
            size = sizes.get(size or "?", batch if axis == 0 else usual[axis])
        if size is None:
            raise InputError(
                f"dimension {axis} of input {value} is open: give --dim NAME=N, or --data"
            )
        shape.append(size)
    if 8 * math.prod(shape) > machine():  # bytes of normal numbers
        raise InputError(f"input {value} of shape {shape} does not fit into memory")
    return tuple(shape)


def _sides(shape: Sequence[Any]) -> Sequence[int]:
    """Return the axes of height and width of pictures, of four axes.

    They are the last two, or those before the channels, as TensorFlow has them, where the file
    says how many these are and leaves the height open.
    """
    channels_last = isinstance(shape[-1], int) and not isinstance(shape[1], int)
    return range(1, 3) if channels_last else range(2, 4)


def _draw(value: Value, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if value.dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
        return random.standard_normal(shape).astype(value.dtype)
    if value.rows is not None:
        return random.integers(0, value.rows, shape).astype(value.dtype)
    is_picture = value.dtype == np.uint8 and len(shape) > 2
    return random.integers(0, 256 if is_picture else 2, shape).astype(value.dtype)


_Run = Callable[[Mapping[str, Any]], Sequence[Any]]
_MORE_PLACES = 5
"""The most places of a table of positions that are not of patches: a class token, registers."""


def find_sizes(
    graph: Graph,
    inputs: Sequence[Value],
    run: _Run,
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Find open sizes of inputs that the network asks for: of caches, and sides of pictures.

    Args:
      graph: the network, whose outputs `run` returns.
      shapes: of its tensors.
      sizes: other open dimensions, by name.

    Returns:
      Sizes by name, without those of `sizes`.
    """
    caches = find_caches(graph, inputs)
    lengths = _find_cache_sizes(graph, inputs, caches, run, sizes)
    sizes = {**lengths, **sizes}
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
    sizes_of_sides = (shape[axis] for shape in pictures for axis in _sides(shape))
    names = {size for size in sizes_of_sides if isinstance(size, str)}
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
            values = _draw_inputs(inputs, 1, {**sides, **sizes}, 2, caches)
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
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Find sizes of caches that the file leaves open and that do not grow, from those it returns.

    Returns:
      Sizes by name. None of them, if an operator asks for the size: `sizes` has to say it.
    """
    if caches is None or not caches.omissible:
        return {}
    values = _draw_inputs(inputs, 1, sizes, 2, caches)
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
