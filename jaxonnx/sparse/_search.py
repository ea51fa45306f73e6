"""The search of templates and the expansion to masks, as primitives with a lowering by platform.

They are `_templates.search` and `_templates.expand`, and on TPU kernels that touch each weight
once. Programs that XLA splits over several devices have no kernels, which it cannot split.

A vector of a TPU has 128 lanes, and an array whose last axis is short fills them with padding: an
axis of four, as in `blocks`, takes 32 times the memory. A kernel has a tile of the weight in the
chip's memory. There every fourth row is one read, and columns become rows by a transposition.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxonnx._arrays import lower_fun
from jaxonnx._native import is_split
from jaxonnx.sparse import _templates
from jaxonnx.sparse._templates import Axes, best_codes

LANES = 128
TILE = 4 * LANES
"""The rows and columns of a tile, so that the 128 rows `r, r + 4, r + 8, ...` fill the lanes."""


def search_on_tpu(w: jax.Array, axes: Axes, interpret: bool = False) -> list[jax.Array]:
    """Find the best template of every 4x4 block on TPU: the results of `_templates.search`.

    Args:
      w: floating-point weight; both `axes` are multiples of 4.
      axes: the axes that become rows and columns of the blocks, non-negative.
      interpret: whether Pallas interprets the kernel, for tests on other platforms.
    """
    from jax.experimental import pallas as pl

    rows, columns = sorted(axes)

    def kernel(w, codes, whole, selected, wide, *transposed):
        # transposed[r] holds rows r, r + 4, ... of the tile as columns, so that a second strided
        # read along its first axis gives one cell of all 128 x 128 blocks, without a short axis
        for lanes in _SLABS:
            wide[...] = w[:, lanes].astype(jnp.float32)
            for r in range(4):
                transposed[r][lanes, :] = wide[pl.ds(r, LANES, stride=4), :].T
        places = [_cell_place(cell, axes) for cell in range(16)]
        cells = [jnp.abs(transposed[r][pl.ds(c, LANES, stride=4), :]) for r, c in places]
        code = best_codes(cells)  # [column of the block, row of the block]
        codes[...] = code.T.astype(jnp.int16)
        # a tile at the edge of the weight reads undefined values beyond it: leave them out of sums
        column, row = (jax.lax.broadcasted_iota(jnp.int32, code.shape, axis) for axis in (0, 1))
        inside = row < shape[rows] // 4 - pl.program_id(1) * LANES
        inside &= column < shape[columns] // 4 - pl.program_id(2) * LANES
        ones = [jnp.where((code >> (15 - i)) & 1 == 1, x, 0) for i, x in enumerate(cells)]
        # partial sums of 8 x 128, the smallest tile that a TPU writes; the caller adds them up
        for sums, parts in (whole, cells), (selected, ones):
            sums[...] = jnp.where(inside, sum(parts), 0).reshape(-1, 8, LANES).sum(0)

    shape = w.shape
    outputs = (LANES, LANES, jnp.int16), *[(8, LANES, jnp.float32)] * 2
    codes, *sums = _map_tiles(kernel, w, axes, (TILE, TILE), outputs, interpret)
    return [jax.lax.bitcast_convert_type(codes, jnp.uint16), *(x.sum(axes) for x in sums)]


def expand_on_tpu(code: jax.Array, axes: Axes, interpret: bool = False) -> list[jax.Array]:
    """Expand template codes to the boolean mask on TPU, as `_templates.expand` does."""
    from jax.experimental import pallas as pl

    def kernel(code, mask, wide, *transposed):  # the steps of the kernel of `search`, backwards
        columns_first = code[...].astype(jnp.int32).T
        for cell in range(16):
            r, c = _cell_place(cell, axes)
            bits = ((columns_first >> (15 - cell)) & 1).astype(jnp.float32)
            transposed[r][pl.ds(c, LANES, stride=4), :] = bits
        for lanes in _SLABS:
            for r in range(4):
                wide[pl.ds(r, LANES, stride=4), :] = transposed[r][lanes, :].T
            mask[:, lanes] = wide[...].astype(jnp.int8)

    signed = jax.lax.bitcast_convert_type(code, jnp.int16)
    (mask,) = _map_tiles(kernel, signed, axes, (LANES, LANES), [(TILE, TILE, jnp.int8)], interpret)
    return [mask.astype(bool)]


_SLABS = [slice(start, start + LANES) for start in range(0, TILE, LANES)]


def _cell_place(cell: int, axes: Axes) -> tuple[int, int]:
    """Return the index of a template's cell along the lower and along the higher of `axes`."""
    row, column = divmod(cell, 4)
    return (row, column) if axes[0] < axes[1] else (column, row)


def _map_tiles(
    kernel: Callable,
    x: jax.Array,
    axes: Axes,
    tile: tuple[int, int],
    results: Sequence[tuple[int, int, Any]],
    interpret: bool,
) -> list[jax.Array]:
    """Apply a kernel to each tile of the matrices that `axes` span in x.

    Args:
      kernel: a function of a tile of x, a tile of each result, and five float32 scratch arrays of
        (TILE, LANES).
      axes: non-negative; all other axes are batch axes.
      tile: the rows and columns of a tile of x.
      results: for each result the rows, columns and dtype of its tile.

    Returns:
      The results, with `axes` at their places in x.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    pair = tuple(sorted(axes))
    x = jnp.moveaxis(x, pair, (-2, -1))
    *batch, rows, columns = x.shape
    x = x.reshape(-1, rows, columns)
    grid = len(x), pl.cdiv(rows, tile[0]), pl.cdiv(columns, tile[1])

    def like(height, width, dtype):
        # a result in proportion to x (codes, masks) ends where x ends; sums have whole tiles, also
        # for the tile of x that is cut off at the edge
        is_part = height * tile[1] == width * tile[0]
        sizes = (rows * height // tile[0], columns * width // tile[1]) if is_part else ()
        return jax.ShapeDtypeStruct(
            (len(x), *(sizes or (grid[1] * height, grid[2] * width))), dtype
        )

    shapes = [like(*result) for result in results]
    moved = x.nbytes + sum(np.prod(s.shape) * s.dtype.itemsize for s in shapes)
    arrays = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((None, *tile), lambda *place: place)],
        out_specs=[pl.BlockSpec((None, *sizes), lambda *place: place) for *sizes, _ in results],
        out_shape=shapes,
        scratch_shapes=[tpu.VMEM((TILE, LANES), jnp.float32)] * 5,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=int(moved)),
        interpret=interpret,
    )(x)
    return [jnp.moveaxis(y.reshape(*batch, *y.shape[1:]), (-2, -1), pair) for y in arrays]


class BestTemplates(NamedTuple):
    """The best templates of a weight.

    Attributes:
      codes: `uint16`, shaped like the weight with the two axes divided by 4.
      whole: float32 sums of |w| over the two axes, shaped like the other axes.
      kept: the same sums over what the templates keep.
    """

    codes: jax.Array
    whole: jax.Array
    kept: jax.Array


def search(w: jax.Array, axes: Axes) -> BestTemplates:
    """Find the best template for every block, as `_templates.search` does."""
    # an argmax has no derivative
    return BestTemplates(*_search_p.bind(jax.lax.stop_gradient(w), axes=_positive(w, axes)))


def expand(best: BestTemplates, axes: Axes) -> jax.Array:
    """Expand templates to the boolean mask, as `_templates.expand` does."""
    return _expand_p.bind(best.codes, axes=_positive(best.codes, axes))[0]


def _positive(x: jax.Array, axes: Axes) -> Axes:
    return axes[0] % x.ndim, axes[1] % x.ndim


def _primitive(name: str, plain: Callable, on_tpu: Callable) -> Primitive:
    """Return a primitive of one array and static `axes` that is lowered by platform.

    Args:
      name: what jaxprs show.
      plain: a function of the array and the axes that returns a list of arrays.
      on_tpu: a function with the same results, for programs on one TPU.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.plain = plain  # type: ignore[attr-defined]  # for readers of a jaxpr

    @partial(jax.jit, static_argnames="axes")
    def apply(x, *, axes):
        return primitive.bind(x, axes=axes)

    @primitive.def_impl
    def _(x, *, axes):
        # under jax.disable_jit `apply` would bind the primitive again, without an end
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        return plain(x, axes) if disabled else apply(x, axes=axes)

    @primitive.def_abstract_eval
    def _(x, *, axes):
        results = jax.eval_shape(partial(plain, axes=axes), jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [x.update(shape=y.shape, dtype=y.dtype, weak_type=False) for y in results]

    def batch_rule(arguments, at, *, axes):
        x = jnp.moveaxis(arguments[0], at[0], 0)
        results = primitive.bind(x, axes=(axes[0] + 1, axes[1] + 1))
        return results, [0] * len(results)

    def lower_rule(context, x, *, axes):
        function = plain if is_split(context) else on_tpu
        return lower_fun(partial(function, axes=axes))(context, x)

    batching.primitive_batchers[primitive] = batch_rule
    mlir.register_lowering(primitive, lower_fun(plain))
    mlir.register_lowering(primitive, lower_rule, platform="tpu")
    return primitive


_search_p = _primitive("search", _templates.search, search_on_tpu)
_expand_p = _primitive("expand", lambda code, axes: [_templates.expand(code, axes)], expand_on_tpu)
