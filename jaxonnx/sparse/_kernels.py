"""The templates of a weight and their mask on TPU, by kernels that touch each of them once.

A vector of a TPU has 128 lanes, and an array whose last axis is short fills them with padding: an
axis of four, as in `blocks`, takes 32 times the memory. A kernel has a tile of the weight in the
chip's memory. There every fourth row is one read, and columns become rows by a transposition.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.sparse._templates import Axes, best_codes

LANES = 128
TILE = 4 * LANES
"""Rows and columns of a tile: every fourth of them fill the lanes."""


def codes(w: jax.Array, axes: Axes, interpret: bool = False) -> jax.Array:
    """Find what `_templates.codes` finds."""
    from jax.experimental import pallas as pl

    def kernel(w, found, wide, *turned):
        for lanes in _SLABS:
            wide[...] = w[:, lanes].astype(jnp.float32)
            for r in range(4):
                turned[r][lanes, :] = wide[pl.ds(r, LANES, stride=4), :].T
        places = [_place(cell, axes) for cell in range(16)]
        found[...] = best_codes(
            [jnp.abs(turned[r][pl.ds(c, LANES, stride=4), :]) for r, c in places]
        ).T.astype(jnp.int16)

    found = _tiled(kernel, w, axes, TILE, LANES, jnp.int16, interpret)
    return jax.lax.bitcast_convert_type(found, jnp.uint16)


def expand(code: jax.Array, axes: Axes, interpret: bool = False) -> jax.Array:
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
    mask = _tiled(kernel, signed, axes, LANES, TILE, jnp.int8, interpret)
    return mask.astype(bool)


_SLABS = [slice(start, start + LANES) for start in range(0, TILE, LANES)]


def _place(cell: int, axes: Axes) -> tuple[int, int]:
    """Return where a cell of a block is, along the earlier and along the later of the axes."""
    row, column = divmod(cell, 4)
    return (row, column) if axes[0] < axes[1] else (column, row)


def _tiled(
    kernel: Callable, x: jax.Array, axes: Axes, before: int, after: int, dtype: Any, interpret: bool
) -> jax.Array:
    """Apply a kernel to the tiles of the matrices along two axes, which count from 0.

    The kernel makes a tile of `after` rows and columns from one of `before`. It has five arrays of
    (TILE, LANES) to work with.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    pair = tuple(sorted(axes))
    x = jnp.moveaxis(x, pair, (-2, -1))
    *batch, rows, columns = x.shape
    x = x.reshape(-1, rows, columns)
    shape = len(x), rows * after // before, columns * after // before
    moved = x.nbytes + np.prod(shape) * np.dtype(dtype).itemsize
    result = pl.pallas_call(
        kernel,
        grid=(len(x), pl.cdiv(rows, before), pl.cdiv(columns, before)),
        in_specs=[pl.BlockSpec((None, before, before), lambda *tile: tile)],
        out_specs=pl.BlockSpec((None, after, after), lambda *tile: tile),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        scratch_shapes=[tpu.VMEM((TILE, LANES), jnp.float32)] * 5,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=int(moved)),
        interpret=interpret,
    )(x)
    return jnp.moveaxis(result.reshape(*batch, *result.shape[1:]), (-2, -1), pair)
