"""Matrices in few bits as numbers on grids: read from a file's tensors, and stored again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxonnx._graph.uses import Use
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.quantized import BNB4, pack_bits, unpack_bits


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
    """Whether scales may be negative, as onnxruntime makes them without zero points."""

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
    for row, own in zip(result, members, strict=True):
        row[: len(own)] = own
    return result


def _read_linear(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read a tensor of unpacked codes with one scale, scales per axis or scales per block.

    The codes are the input of a DequantizeLinear, or the weight of a product on integers, whose
    scales are those of its columns.
    """
    node = use.node
    direct = node.op.name != "DequantizeLinear"
    axis = codes.ndim - 1 if direct else node.attributes.get("axis", 1)
    block = 0 if direct else node.attributes.get("block_size", 0)
    axis, kind = axis % max(codes.ndim, 1), codes.dtype
    # products of integers take one scale beside zero points per column, and the reverse
    count = max(scale.size, 1 if zero is None else zero.size)
    # Where `axis` goes: blocks run along it, so it becomes the last one (columns); an axis with a
    # scale per index becomes the first one (rows).
    turned = -1 if block and count > 1 else 0

    def arrange(x: np.ndarray) -> np.ndarray:
        if count == 1:
            return x.reshape(1, -1)
        x = np.moveaxis(x, axis, turned)
        return x.reshape(-1, x.shape[-1]) if turned else x.reshape(len(x), -1)

    def restore(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Undo `arrange` for a tensor of this shape."""
        if count == 1:
            return x.reshape(shape)
        order = [*shape]
        order.insert(len(order) if turned else 0, order.pop(axis))
        return np.moveaxis(x.reshape(order), turned, axis)

    rows = arrange(codes)
    groups = _block_groups(rows.shape[1], block if count > 1 else 0)

    # scales and zero points have the rank of the codes if there are blocks, else they are vectors
    def arrange_scales(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        return arrange(x) if turned else np.broadcast_to(x.reshape(-1, 1), (count, 1))

    def restore_scales(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return restore(x, shape) if turned else x[: math.prod(shape)].reshape(shape)

    whole = jnp.issubdtype(kind, jnp.integer)
    limits = (ml_dtypes.iinfo(kind).min, ml_dtypes.iinfo(kind).max) if whole else (0, 0)
    return Grid(
        rows.astype(np.float32),
        arrange_scales(scale),
        np.zeros((1, 1), np.float32) if zero is None else arrange_scales(zero),
        groups,
        arrange,
        lambda x: restore(x.astype(kind), codes.shape),
        lambda x: restore_scales(x, scale.shape),
        scale.dtype,
        None if zero is None else lambda x: restore_scales(x.astype(kind), zero.shape),
        None if zero is None else kind,
        None if whole else _all_numbers(kind),
        limits,
        is_shared=scale.size < count,
    )


def _all_numbers(kind: np.dtype) -> np.ndarray:
    """Return the finite numbers of a type of at most 8 bits, in ascending order."""
    bits = ml_dtypes.finfo(kind).bits
    numbers = np.arange(2**bits, dtype=np.uint8).view(kind).astype(np.float32)
    return np.unique(numbers[np.isfinite(numbers)])


def _read_n_bits(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read the weight of MatMulNBits: packed rows of K numbers, a row for each of N outputs."""
    node = use.node
    rows, columns, block = (node.attributes[key] for key in ("N", "K", "block_size"))
    return _read_bytes(codes.reshape(rows, -1), codes.shape, scale, zero, index,
                       node.attributes.get("bits", 4), columns, block)  # fmt: skip


def _read_bytes(
    packed: np.ndarray,
    shape: tuple[int, ...],
    scale: np.ndarray,
    zero: np.ndarray | None,
    index: np.ndarray | None,
    bits: int,
    columns: int,
    block: int,
) -> Grid:
    """Read rows of unsigned codes that are packed into bytes, with a scale per block.

    Args:
      packed: (rows, bytes), uint8.
      shape: the shape of the codes in the file.
      scale: (rows, blocks) in some shape.
      zero: packed like the codes (uint8), or one number for each block; None stands for the middle
        of the codes.
      index: the group of each column, where groups are not adjacent columns.
      bits: the bits of a code.
      columns: the number of codes in a row; the bytes may hold more, which pad the last block.
      block: the number of codes in a block.
    """
    rows, count = len(packed), -(-columns // block)
    numbers = np.asarray(unpack_bits(packed, bits))
    zero_numbers = None
    if zero is not None:
        in_bytes = zero.dtype == np.uint8
        zero_numbers = zero.reshape(rows, -1)
        zero_numbers = np.asarray(unpack_bits(zero_numbers, bits)) if in_bytes else zero_numbers

    def store(x: np.ndarray) -> np.ndarray:
        result = numbers.copy()  # keeps the padding of the last block
        result[:, :columns] = x
        return pack_bits(result, bits).reshape(shape)

    def store_zero(x: np.ndarray) -> np.ndarray:
        assert zero is not None
        assert zero_numbers is not None
        result = zero_numbers.copy()
        result[:, :count] = x
        return (pack_bits(result, bits) if zero.dtype == np.uint8 else result).reshape(zero.shape)

    middle = np.full((1, 1), 2 ** (bits - 1), np.float32)
    return Grid(
        numbers[:, :columns].astype(np.float32),
        scale.reshape(rows, count).astype(np.float32),
        middle if zero_numbers is None else zero_numbers[:, :count].astype(np.float32),
        _block_groups(columns, block)
        if index is None or not index.size
        else _index_groups(index, count),
        lambda x: x.reshape(rows, columns),
        store,
        lambda x: x.reshape(scale.shape),
        scale.dtype,
        None if zero_numbers is None else store_zero,
        None if zero_numbers is None else zero_numbers.dtype,
        limits=(0, 2**bits - 1),
        negative=True,
    )


def _read_bnb4(use: Use, codes: Any, scale: Any, zero: Any = None, index: Any = None) -> Grid:
    """Read the weight of MatMulBnb4: one row of N * K codes in blocks, indices of 16 levels."""
    node = use.node
    size = node.attributes["N"] * node.attributes["K"]
    table = BNB4[node.attributes["quant_type"]]
    # bitsandbytes packs the first of two numbers into the high bits of a byte; MatMulNBits and
    # `unpack_bits` have it in the low bits
    numbers = np.asarray(unpack_bits(codes.reshape(-1), 4)).reshape(-1, 2)[:, ::-1].reshape(-1)
    groups = _block_groups(size, node.attributes["block_size"])
    order = np.argsort(table, kind="stable")

    def store(x: np.ndarray) -> np.ndarray:
        result = numbers.copy()
        result[:size] = order[np.searchsorted(table[order], x.reshape(-1))]
        return pack_bits(result.reshape(-1, 2)[:, ::-1].reshape(-1), 4).reshape(codes.shape)

    return Grid(
        table[numbers[:size]][None],
        scale.reshape(-1)[: len(groups)].astype(np.float32)[None],
        np.zeros((1, 1), np.float32),
        groups,
        lambda x: x.reshape(1, -1),
        store,
        lambda x: x.reshape(scale.shape),
        scale.dtype,
        levels=np.unique(table),
    )


def _read_table(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read the table of GatherBlockQuantized, packed into bytes with blocks along its last axis.

    Raises:
      InputError: the table has another form.
    """
    options = use.node.attributes
    if codes.dtype != np.uint8 or options.get("quantize_axis", 1) % codes.ndim != codes.ndim - 1:
        raise InputError(
            f"the table of {use.node.label} is not in bytes with blocks along its last axis: "
            "use adapters='nodes', or leave it out of where="
        )
    bits, block = options.get("bits", 4), options.get("block_size", 128)
    columns = codes.shape[-1] * (8 // bits)
    rows = codes.reshape(-1, codes.shape[-1])
    return _read_bytes(rows, codes.shape, scale, zero, None, bits, columns, block)


def _read_experts(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read the matrices (experts, outputs, inputs) of QMoE.

    Zero points per row (without blocks) cannot change: the grid only reads them.

    Raises:
      InputError: they are in float4.
    """
    form = use.node.op.form(use.position)
    assert form is not None
    assert form.storage is not None
    stored = form.storage(codes.shape, codes.dtype, use.node.attributes)
    if stored is None or stored.type == "fp4":
        raise InputError(
            f"'{use.name}' is in float4 at {use.node.label}, which cannot be quantized again: "
            "leave it out of where=, or save the adapters separately (Adapters.save)"
        )
    bits, columns = int(stored.type.removeprefix("int")), stored.shape[-1]
    rows, blocks = codes.shape[0] * codes.shape[1], scale.size // (codes.shape[0] * codes.shape[1])
    packed = codes.reshape(rows, -1)
    in_blocks = scale.ndim > 2
    block_zero = zero if in_blocks else None
    block = -(-columns // blocks)
    grid = _read_bytes(packed, codes.shape, scale, block_zero, None, bits, columns, block)
    if zero is None or in_blocks:
        return grid
    numbers = np.asarray(unpack_bits(zero.reshape(codes.shape[0], -1), bits))
    return replace(grid, zero=numbers[:, : codes.shape[1]].reshape(-1, 1).astype(np.float32))


READERS: Mapping[str, Callable[..., Grid]] = {
    "DequantizeLinear": _read_linear,
    "DynamicQuantizeMatMul": _read_linear,
    "GatherBlockQuantized": _read_table,
    "MatMulBnb4": _read_bnb4,
    "MatMulIntegerToFloat": _read_linear,
    "MatMulNBits": _read_n_bits,
    "QMoE": _read_experts,
}
"""How each operator's weight is read: from a use, codes, scales, zero points and group index, the
last two of which may be None."""
