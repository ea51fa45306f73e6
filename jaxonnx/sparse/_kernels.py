"""The templates of a weight and their mask on TPU, by kernels that touch each of them once.

A vector of a TPU has 128 lanes, and an array whose last axis is short fills them with padding: an
axis of four, as in `blocks`, takes 32 times the memory. A kernel has a tile of the weight in the
chip's memory. There every fourth row is one read, and columns become rows by a transposition.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.sparse._templates import Axes, best_codes

LANES = 128
TILE = 4 * LANES
"""Rows and columns of a tile: every fourth of them fill the lanes."""


def search(w: jax.Array, axes: Axes, interpret: bool = False) -> list[jax.Array]:
    """Find what `_templates.search` finds."""
    from jax.experimental import pallas as pl

    rows, columns = sorted(axes)

    def kernel(w, found, whole, kept, wide, *turned):
        for lanes in _SLABS:
            wide[...] = w[:, lanes].astype(jnp.float32)
            for r in range(4):
                turned[r][lanes, :] = wide[pl.ds(r, LANES, stride=4), :].T
        places = [_place(cell, axes) for cell in range(16)]
        cells = [jnp.abs(turned[r][pl.ds(c, LANES, stride=4), :]) for r, c in places]
        code = best_codes(cells)
        found[...] = code.T.astype(jnp.int16)
        # what a tile at the edge has beyond it is anything
        column, row = (jax.lax.broadcasted_iota(jnp.int32, code.shape, axis) for axis in (0, 1))
        inside = row < shape[rows] // 4 - pl.program_id(1) * LANES
        inside &= column < shape[columns] // 4 - pl.program_id(2) * LANES
        ones = [jnp.where((code >> (15 - i)) & 1 == 1, x, 0) for i, x in enumerate(cells)]
        for sums, parts in (whole, cells), (kept, ones):
            sums[...] = jnp.where(inside, sum(parts), 0).reshape(-1, 8, LANES).sum(0)

    shape = w.shape
    outputs = (LANES, LANES, jnp.int16), *[(8, LANES, jnp.float32)] * 2
    found, *sums = _map_tiles(kernel, w, axes, (TILE, TILE), outputs, interpret)
    return [jax.lax.bitcast_convert_type(found, jnp.uint16), *(x.sum(axes) for x in sums)]


def expand(code: jax.Array, axes: Axes, interpret: bool = False) -> list[jax.Array]:
    """Return what `_templates.expand` returns."""
    from jax.experimental import pallas as pl

    def kernel(code, mask, wide, *turned):
        columns_first = code[...].astype(jnp.int32).T
        for cell in range(16):
            r, c = _place(cell, axes)
            bits = ((columns_first >> (15 - cell)) & 1).astype(jnp.float32)
            turned[r][pl.ds(c, LANES, stride=4), :] = bits
        for lanes in _SLABS:
            for r in range(4):
                wide[pl.ds(r, LANES, stride=4), :] = turned[r][lanes, :].T
            mask[:, lanes] = wide[...].astype(jnp.int8)

    signed = jax.lax.bitcast_convert_type(code, jnp.int16)
    (mask,) = _map_tiles(kernel, signed, axes, (LANES, LANES), [(TILE, TILE, jnp.int8)], interpret)
    return [mask.astype(bool)]


_SLABS = [slice(start, start + LANES) for start in range(0, TILE, LANES)]


def _place(cell: int, axes: Axes) -> tuple[int, int]:
    """Return where a cell of a block is, along the earlier and along the later of the axes."""
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
    """Apply a kernel to the tiles of the matrices along two axes, which count from 0.

    The kernel makes tiles of these sizes and types from one of x. It has five arrays of
    (TILE, LANES) to work with.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    pair = tuple(sorted(axes))
    x = jnp.moveaxis(x, pair, (-2, -1))
    *batch, rows, columns = x.shape
    x = x.reshape(-1, rows, columns)
    grid = len(x), pl.cdiv(rows, tile[0]), pl.cdiv(columns, tile[1])

    def like(height, width, dtype):
        # the last tile is whole where it is not one of x
        is_part = height * tile[1] == width * tile[0]
        sizes = (rows * height // tile[0], columns * width // tile[1]) if is_part else ()
        return jax.ShapeDtypeStruct(
            (len(x), *(sizes or (grid[1] * height, grid[2] * width))), dtype
        )

    shapes = [like(*result) for result in results]
    moved = x.nbytes + sum(np.prod(s.shape) * s.dtype.itemsize for s in shapes)
    made = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((None, *tile), lambda *place: place)],
        out_specs=[pl.BlockSpec((None, *sizes), lambda *place: place) for *sizes, _ in results],
        out_shape=shapes,
        scratch_shapes=[tpu.VMEM((TILE, LANES), jnp.float32)] * 5,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=int(moved)),
        interpret=interpret,
    )(x)
    return [jnp.moveaxis(y.reshape(*batch, *y.shape[1:]), (-2, -1), pair) for y in made]
