"""Round matrices that adapters changed to the few bits that their file stores them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.stored import SCALES
from jaxonnx._graph.uses import uses
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.quantized import BNB4, pack_bits, unpack_bits


class Loss(NamedTuple):
    """What rounding a changed matrix loses, as Frobenius norms of the difference."""

    matrix: float
    """As a share of the changed matrix."""
    change: float
    """As a share of the change; 1 is what leaving it out would lose."""


def requantize(
    graph: Graph, tensors: Mapping[str, Any], changes: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Loss]]:
    """Return the tensors that store matrices with a change, and what the rounding loses.

    Types, block sizes and the kind of zero points stay. Of each block, among the scale that it has,
    those that its new range needs, and each of these refined by least squares, the one is taken
    that loses least; zero points change with it if they are not all equal. Scales and zero points
    that other weights share are kept.

    Args:
      graph: the bound graph.
      tensors: its tensors.
      changes: by the name of the weight, in the axes of its matrix.

    Raises:
      InputError: a weight is read in several ways, or where it cannot be rounded again.
    """
    readers: dict[str, list[tuple[Node, int]]] = {}
    for use in uses(graph, tensors):
        for name in {use.name} & {use.node.inputs[use.position]}:
            readers.setdefault(name, []).append((use.node, use.position))
    arrays: dict[str, np.ndarray] = {}
    losses: dict[str, Loss] = {}
    for name, change in changes.items():
        nodes = [node for node, _ in readers[name]]
        first = nodes[0]
        names = _names(name, first)
        if any(_names(name, n) != names or n.attributes != first.attributes for n in nodes[1:]):
            raise InputError(
                f"'{name}' is dequantized in several ways, at {first.label} and {nodes[-1].label}, "
                "so that no change can be merged into it: adapters='nodes' writes it beside"
            )
        free = {
            n
            for n in names[1:]
            if n and {one.index for one, _ in readers.get(n, ())} <= {one.index for one in nodes}
        }
        given = [None if not n else np.asarray(tensors[n]) for n in names]
        grid = _READERS[first.op.name](first, *given)
        rounded, losses[name] = _round(grid, change, names[1] in free, names[2] in free)
        arrays |= {n: x for n, x in zip(names, rounded, strict=False) if n == name or n in free}
    return arrays, losses


def _names(name: str, node: Node) -> tuple[str, ...]:
    """Return a weight, its scales, its zero points and its index of groups, "" for what is absent.

    Raises:
      InputError: the operator's weights cannot be rounded again.
    """
    if node.op.name not in _READERS:
        raise InputError(
            f"'{name}' is read by {node.label}, for which changed weights cannot be rounded: "
            "adapters='nodes' writes the change beside, or leave it out of where="
        )
    places = [*SCALES[node.op.name], 4 if node.op.name == "MatMulNBits" else -1]
    inputs = node.inputs
    return (name, *(inputs[i] if 0 <= i < len(inputs) else "" for i in places))


@dataclass(frozen=True)
class _Grid:
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


def _round(
    grid: _Grid, change: np.ndarray, free_scale: bool, free_zero: bool
) -> tuple[list[np.ndarray], Loss]:
    """Return new codes, scales and zero points as a file has them, and what they lose."""
    there = grid.groups >= 0
    columns = grid.groups[there]

    def grouped(x: np.ndarray) -> np.ndarray:
        """Return (rows, groups, members), 0 where a group is filled up."""
        result = np.zeros((len(x), *there.shape), np.float32)
        result[:, there] = x[:, columns]
        return result

    zero = np.broadcast_to(grid.zero, grid.scale.shape).astype(np.float32)
    best, scale = grouped(grid.codes), grid.scale
    added = grouped(grid.arrange(change).astype(np.float32))
    wanted = np.where(there, (best - zero[..., None]) * scale[..., None] + added, 0)

    def error(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
        made = (codes - zero[..., None]) * scale[..., None]
        return (np.where(there, made - wanted, 0) ** 2).sum(-1)

    def nearest(scale: np.ndarray, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a scale as the file can hold it, and the codes for it."""
        scale = scale.astype(grid.scale_type).astype(np.float32)
        safe = np.where(scale == 0, 1, scale)[..., None]
        return scale, grid.nearest(wanted / safe + zero[..., None])

    def tries(
        scale: np.ndarray, zero: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        yield (*nearest(scale, zero), zero)
        if not free_scale:
            return
        moves = free_zero and grid.zero_type is not None and bool(np.ptp(zero) > 0)
        for start, shift in [(scale, zero), *_starts(grid, wanted, zero, moves)]:
            own, codes = nearest(start, shift)
            yield own, codes, shift
            # the scale that is best for these codes, and the codes for that
            parts = np.where(there, codes - shift[..., None], 0)
            norm = (parts**2).sum(-1)
            own = np.divide((parts * wanted).sum(-1), norm, out=own.copy(), where=norm > 0)
            yield (*nearest(own if grid.negative else np.abs(own), shift), shift)

    least = error(best, scale, zero)  # as it is, where nothing changes
    for own, codes, shift in tries(scale, zero):
        lost = error(codes, own, shift)
        better = np.isfinite(own) & (lost < least)
        least, best = np.where(better, lost, least), np.where(better[..., None], codes, best)
        scale, zero = np.where(better, own, scale), np.where(better, shift, zero)
    codes = grid.codes.copy()
    codes[:, columns] = best[:, there]
    lost, size, moved = (np.sqrt(np.sum(x, dtype=np.float64)) for x in (least, wanted**2, added**2))
    loss = Loss(float(lost / size) if size else 0.0, float(lost / moved) if moved else 0.0)
    stored = [grid.store(codes), grid.store_scale(scale.astype(grid.scale_type))]
    return stored + ([] if grid.store_zero is None else [grid.store_zero(zero)]), loss


def _starts(
    grid: _Grid, wanted: np.ndarray, zero: np.ndarray, moves: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield scales and zero points for the range of each group, as quantizers choose them."""
    low, high = grid.limits if grid.levels is None else (grid.levels[0], grid.levels[-1])
    least, most = np.minimum(wanted.min(-1), 0), np.maximum(wanted.max(-1), 0)
    if moves and grid.zero_type is not None:
        scale = (most - least) / (high - low)
        scale = scale.astype(grid.scale_type).astype(np.float32)
        shift = low - least / np.where(scale == 0, 1, scale)
        if not jnp.issubdtype(grid.zero_type, jnp.floating):
            shift = np.clip(np.rint(shift), low, high)
        yield scale, shift.astype(grid.zero_type).astype(np.float32)
        return
    below, above = low - zero, high - zero
    ends = [
        np.divide(x, n, out=np.zeros_like(x), where=n != 0)
        for x, n in ((least, below), (most, above))
    ]
    yield np.maximum(*ends), zero
    if grid.negative:  # the end of greater magnitude is the lowest code, of which there is one more
        extreme = np.where(-least > most, least, most)
        yield np.divide(extreme, below, out=np.zeros_like(extreme), where=below != 0), zero


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


def _read_linear(node: Node, codes: Any, scale: Any, zero: Any, index: Any = None) -> _Grid:
    """Read codes of any type with scales of a tensor, of an axis or of blocks along it."""
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
    return _Grid(
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


def _read_n_bits(node: Node, codes: Any, scale: Any, zero: Any, index: Any = None) -> _Grid:
    """Read the matrix of MatMulNBits."""
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
) -> _Grid:
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
    return _Grid(
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


def _read_bnb4(node: Node, codes: Any, scale: Any, zero: Any = None, index: Any = None) -> _Grid:
    """Read the matrix of MatMulBnb4: a row of all numbers, in blocks, of 16 levels."""
    size = node.attributes["N"] * node.attributes["K"]
    table = BNB4[node.attributes["quant_type"]]
    numbers = np.asarray(unpack_bits(codes.reshape(-1), 4)).reshape(-1, 2)[:, ::-1].reshape(-1)
    groups = _in_blocks(size, node.attributes["block_size"])
    order = np.argsort(table, kind="stable")

    def store(x: np.ndarray) -> np.ndarray:
        result = numbers.copy()
        result[:size] = order[np.searchsorted(table[order], x.reshape(-1))]
        return pack_bits(result.reshape(-1, 2)[:, ::-1].reshape(-1), 4).reshape(codes.shape)

    return _Grid(
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


def _read_table(node: Node, codes: Any, scale: Any, zero: Any, index: Any = None) -> _Grid:
    """Read the rows of GatherBlockQuantized, in bytes or in a type of their own."""
    options = node.attributes
    if codes.dtype != np.uint8 or options.get("quantize_axis", 1) % codes.ndim != codes.ndim - 1:
        raise InputError(
            f"the table of {node.label} is not in bytes with blocks along its last axis: adapters="
            "'nodes' writes the change beside, or leave it out of where="
        )
    bits, block = options.get("bits", 4), options.get("block_size", 128)
    columns = codes.shape[-1] * (8 // bits)
    rows = codes.reshape(-1, codes.shape[-1])
    return _read_bytes(rows, codes.shape, scale, zero, None, bits, columns, block)


_READERS: Mapping[str, Callable[..., _Grid]] = {
    "DequantizeLinear": _read_linear,
    "DynamicQuantizeMatMul": _read_linear,
    "GatherBlockQuantized": _read_table,
    "MatMulBnb4": _read_bnb4,
    "MatMulIntegerToFloat": _read_linear,
    "MatMulNBits": _read_n_bits,
}
