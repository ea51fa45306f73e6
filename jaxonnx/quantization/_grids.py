"""Matrices in few bits as numbers on grids: read from a file's tensors, and stored again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxonnx._few_bits import Storage


@dataclass(frozen=True)
class Grid:
    """A quantized matrix, unpacked: (code - zero) * scale, with one scale per row and group.

    Rows and columns are chosen such that groups are sets of columns; they need not be those of the
    matrix product.
    """

    codes: np.ndarray
    """(rows, columns), float32."""
    scale: np.ndarray
    """(rows, groups), float32."""
    zero: np.ndarray
    """Zero points, float32, broadcastable to (rows, groups)."""
    groups: np.ndarray
    """(groups, members), integer: the columns of each group, padded with -1."""
    arrange: Callable[[np.ndarray], np.ndarray]
    """Rearrange an array with the axes of the matrix to (rows, columns)."""
    store: Callable[[np.ndarray], np.ndarray]
    """Pack codes (rows, columns) into the tensor of the file."""
    store_scale: Callable[[np.ndarray], np.ndarray]
    """Rearrange scales (rows, groups) into the tensor of the file."""
    scale_type: np.dtype
    """The dtype of scales in the file."""
    store_zero: Callable[[np.ndarray], np.ndarray] | None = None
    """Pack zero points (rows, groups) into the tensor of the file; None if it has none."""
    zero_type: np.dtype | None = None
    """The dtype of zero points before packing (integer or float); None if there are none."""
    levels: np.ndarray | None = None
    """All codes in ascending order, where they are not the integers between `limits`."""
    limits: tuple[float, float] = (0, 0)
    """The least and the greatest integer code; unused where `levels` are given."""
    is_shared: bool = False
    """Whether the file has one scale for all rows, which have zero points of their own."""
    negative: bool = False
    """Whether scales may be negative, as onnxruntime and `quantize` make them."""

    def nearest(self, ratio: np.ndarray) -> np.ndarray:
        """Return the code nearest to each ratio (number / scale + zero)."""
        if self.levels is None:
            return np.clip(np.rint(ratio), *self.limits)
        between = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[np.searchsorted(between, ratio)]


def _block_groups(columns: int, block: int) -> np.ndarray:
    """Return `Grid.groups` for blocks of adjacent columns; the last may be shorter.

    A block of 0 stands for all columns.
    """
    block = min(block or columns, columns)
    numbers = np.arange(-(-columns // block) * block)
    return np.where(numbers < columns, numbers, -1).reshape(-1, block)


def _index_groups(index: np.ndarray, count: int) -> np.ndarray:
    """Return `Grid.groups` for `count` groups; `index` (columns,) has the group of each column."""
    members = [np.flatnonzero(index == i) for i in range(count)]
    result = np.full((count, max(map(len, members))), -1)
    for row, columns in zip(result, members, strict=True):
        row[: len(columns)] = columns
    return result


def read_grid(
    storage: Storage,
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None = None,
    index: np.ndarray | None = None,
) -> Grid:
    """Read a matrix in few bits.

    Args:
      storage: how its tensors hold it.
      codes, scale, zero: the tensors of the file.
      index: the group of each column, where groups are not adjacent columns.
    """
    shape, vector = storage.shape, storage.in_channels
    # products of integers take one scale beside zero points per column, and the reverse
    count = max(scale.size, 1 if zero is None else zero.size) if vector else scale.size
    place = storage.channels if vector else storage.axis
    flat, axis = count == 1 or place is None, place or 0
    # Where `axis` goes: blocks run along it, so it becomes the last one (columns); an axis with a
    # scale per index becomes the first one (rows).
    turned = 0 if vector else -1

    def arrange(x: np.ndarray) -> np.ndarray:
        if flat:
            return x.reshape(1, -1)
        x = np.moveaxis(x, axis, turned)
        return x.reshape(-1, x.shape[-1]) if turned else x.reshape(len(x), -1)

    def restore(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Undo `arrange` for a tensor of this shape."""
        if flat:
            return x.reshape(shape)
        order = [*shape]
        order.insert(len(order) if turned else 0, order.pop(axis))
        return np.moveaxis(x.reshape(order), turned, axis)

    rows = arrange(np.asarray(storage.unpack(codes, shape)))
    each = 1 if vector else count // len(rows)  # groups of a row
    if index is not None and index.size:
        groups = _index_groups(index, each)
    else:
        block = storage.block or -(-rows.shape[1] // each)
        groups = _block_groups(rows.shape[1], block if each > 1 else 0)
    divided = [each if i == place else n for i, n in enumerate(shape)]

    def arrange_scales(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        if vector:
            return np.broadcast_to(x.reshape(-1, 1), (count, 1))
        return x.reshape(1, -1) if flat else arrange(x.reshape(divided))

    def restore_scales(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        if vector or flat:
            return x[: math.prod(shape)].reshape(shape)
        return restore(x, divided).reshape(shape)

    held = not vector and zero is not None and zero.dtype == codes.dtype
    points = storage.unpack(zero, storage.blocks(scale.shape)) if held else zero

    def store_zero(x: np.ndarray) -> np.ndarray:
        assert points is not None
        assert zero is not None
        x = restore_scales(x, points.shape).astype(points.dtype)
        return storage.pack(x, zero) if held else x.reshape(zero.shape)

    levels = storage.levels
    return Grid(
        rows.astype(np.float32),
        arrange_scales(scale),
        np.full((1, 1), storage.middle, np.float32) if points is None else arrange_scales(points),
        groups,
        arrange,
        lambda x: storage.pack(restore(x, shape), codes),
        lambda x: restore_scales(x, scale.shape),
        scale.dtype,
        None if points is None else store_zero,
        None if points is None else points.dtype,
        levels,
        (0, 0) if levels is not None else storage.limits,
        is_shared=scale.size < count,
        negative=storage.middle > 0 or bool((scale < 0).any()),
    )
