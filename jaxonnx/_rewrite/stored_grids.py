"""Matrices in few bits as numbers on grids: read from a file's tensors, and stored again."""

from __future__ import annotations

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
    """A matrix as numbers (code - zero) * scale, of which a group in a row has one scale.

    Its rows and columns need not be those of the product.
    """

    codes: np.ndarray
    """(rows, columns), in float32."""
    scale: np.ndarray
    """(rows, groups), in float32."""
    zero: np.ndarray
    """The same, or anything that broadcasts to it."""
    groups: np.ndarray
    """(groups, members): the columns of each group; -1 fills up."""
    arrange: Callable[[np.ndarray], np.ndarray]
    """Of the matrix's axes, rows and columns."""
    store: Callable[[np.ndarray], np.ndarray]
    """Make the file's tensor of codes."""
    store_scale: Callable[[np.ndarray], np.ndarray]
    scale_type: np.dtype
    store_zero: Callable[[np.ndarray], np.ndarray] | None = None
    zero_type: np.dtype | None = None
    """Of the numbers, before they are packed: an integer type or one in floating point."""
    levels: np.ndarray | None = None
    """The codes in ascending order, if they are not all whole numbers between `limits`."""
    limits: tuple[float, float] = (0, 0)
    negative: bool = False
    """Scales may be negative, as onnxruntime makes them where no zero points are."""

    def nearest(self, ratio: np.ndarray) -> np.ndarray:
        if self.levels is None:
            return np.clip(np.rint(ratio), *self.limits)
        between = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[np.searchsorted(between, ratio)]


def _in_blocks(columns: int, block: int) -> np.ndarray:
    """Return the columns of groups of equal size, of which the last may be shorter."""
    block = min(block or columns, columns)
    numbers = np.arange(-(-columns // block) * block)
    return np.where(numbers < columns, numbers, -1).reshape(-1, block)


def _of_index(index: np.ndarray, count: int) -> np.ndarray:
    """Return the columns of each of `count` groups, by the group of each column."""
    members = [np.flatnonzero(index == i) for i in range(count)]
    result = np.full((count, max(map(len, members))), -1)
    for row, own in zip(result, members, strict=True):
        row[: len(own)] = own
    return result


def _read_linear(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read codes of any type with scales of a tensor, of an axis or of blocks along it."""
    node = use.node
    direct = node.op.name != "DequantizeLinear"
    axis = codes.ndim - 1 if direct else node.attributes.get("axis", 1)
    block = 0 if direct else node.attributes.get("block_size", 0)
    axis, kind = axis % max(codes.ndim, 1), codes.dtype
    # rows are what has a scale of its own, or lies across the axis of the blocks
    turned = -1 if block and scale.size > 1 else 0

    def arrange(x: np.ndarray) -> np.ndarray:
        if scale.size == 1:
            return x.reshape(1, -1)
        x = np.moveaxis(x, axis, turned)
        return x.reshape(-1, x.shape[-1]) if turned else x.reshape(len(x), -1)

    def back(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        if scale.size == 1:
            return x.reshape(shape)
        order = [*shape]
        order.insert(len(order) if turned else 0, order.pop(axis))
        return np.moveaxis(x.reshape(order), turned, axis)

    rows = arrange(codes)
    groups = _in_blocks(rows.shape[1], block if scale.size > 1 else 0)

    def spread(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        return arrange(x) if turned else x.reshape(-1, 1)

    def fold(x: np.ndarray) -> np.ndarray:
        return back(x, scale.shape) if turned else x.reshape(scale.shape)

    whole = jnp.issubdtype(kind, jnp.integer)
    limits = (ml_dtypes.iinfo(kind).min, ml_dtypes.iinfo(kind).max) if whole else (0, 0)
    return Grid(
        rows.astype(np.float32),
        spread(scale),
        np.zeros((1, 1), np.float32) if zero is None else spread(zero),
        groups,
        arrange,
        lambda x: back(x.astype(kind), codes.shape),
        fold,
        scale.dtype,
        None if zero is None else lambda x: fold(x.astype(kind)),
        None if zero is None else kind,
        None if whole else _all_numbers(kind),
        limits,
    )


def _all_numbers(kind: np.dtype) -> np.ndarray:
    """Return the finite numbers of a type of at most 8 bits, in ascending order."""
    bits = ml_dtypes.finfo(kind).bits
    numbers = np.arange(2**bits, dtype=np.uint8).view(kind).astype(np.float32)
    return np.unique(numbers[np.isfinite(numbers)])


def _read_n_bits(use: Use, codes: Any, scale: Any, zero: Any, index: Any = None) -> Grid:
    """Read the matrix of MatMulNBits."""
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
    """Read rows of unsigned numbers in bytes, with scales per block, and zero points packed too."""
    rows, count = len(packed), -(-columns // block)
    numbers = np.asarray(unpack_bits(packed, bits))
    own = None
    if zero is not None:
        in_bytes = zero.dtype == np.uint8
        own = zero.reshape(rows, -1)
        own = np.asarray(unpack_bits(own, bits)) if in_bytes else own

    def store(x: np.ndarray) -> np.ndarray:
        result = numbers.copy()  # with what fills up the last block
        result[:, :columns] = x
        return pack_bits(result, bits).reshape(shape)

    def store_zero(x: np.ndarray) -> np.ndarray:
        assert zero is not None
        assert own is not None
        result = own.copy()
        result[:, :count] = x
        return (pack_bits(result, bits) if zero.dtype == np.uint8 else result).reshape(zero.shape)

    middle = np.full((1, 1), 2 ** (bits - 1), np.float32)
    return Grid(
        numbers[:, :columns].astype(np.float32),
        scale.reshape(rows, count).astype(np.float32),
        middle if own is None else own[:, :count].astype(np.float32),
        _in_blocks(columns, block) if index is None or not index.size else _of_index(index, count),
        lambda x: x.reshape(rows, columns),
        store,
        lambda x: x.reshape(scale.shape),
        scale.dtype,
        None if own is None else store_zero,
        None if own is None else own.dtype,
        limits=(0, 2**bits - 1),
        negative=True,
    )


def _read_bnb4(use: Use, codes: Any, scale: Any, zero: Any = None, index: Any = None) -> Grid:
    """Read the matrix of MatMulBnb4: a row of all numbers, in blocks, of 16 levels."""
    node = use.node
    size = node.attributes["N"] * node.attributes["K"]
    table = BNB4[node.attributes["quant_type"]]
    numbers = np.asarray(unpack_bits(codes.reshape(-1), 4)).reshape(-1, 2)[:, ::-1].reshape(-1)
    groups = _in_blocks(size, node.attributes["block_size"])
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
    """Read the rows of GatherBlockQuantized, in bytes or in a type of their own."""
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
    """Read matrices (experts, outputs, inputs) of QMoE; zero points stay where blocks are none."""
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
    own = zero if in_blocks else None
    grid = _read_bytes(packed, codes.shape, scale, own, None, bits, columns, -(-columns // blocks))
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
"""By operator; called with a use, the codes, scales, zero points and index of groups."""
