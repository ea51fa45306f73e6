"""Round matrices that adapters changed to the few bits that their file stores them in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.stored import find_own_parts
from jaxonnx._graph.uses import Use, direct_uses, uses_by_tensor, weights
from jaxonnx._weights import Storage
from jaxonnx.errors import InputError


class Loss(NamedTuple):
    """The Frobenius norm of the error of rounding a changed matrix, relative to two norms."""

    matrix: float
    """Relative to the changed matrix."""
    change: float
    """Relative to the change; dropping the change altogether would give 1."""


def requantize(
    graph: Graph, tensors: Mapping[str, Any], changes: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Loss]]:
    """Add changes to quantized matrices and round the sums to the types of the file.

    Types, block sizes and the kind of zero points stay. For each block the candidates for its scale
    are the present one, those that fit the new range, and a least-squares refinement of each; the
    one with the least squared error is taken. Zero points are chosen with it if they are not all
    equal. Scales and zero points that other weights share do not change.

    Args:
      graph: the bound graph.
      tensors: the values of its named tensors.
      changes: by the name of the weight, floating-point, with the axes of its matrix.

    Returns:
      The new values of codes, scales and zero points, by tensor name; and the error of each weight.

    Raises:
      InputError: a weight is dequantized in several ways, or by an operator whose weights cannot be
        quantized again.
    """
    uses_of = uses_by_tensor(graph, tensors)
    arrays: dict[str, np.ndarray] = {}
    losses: dict[str, Loss] = {}
    for name, change in changes.items():
        first, *others = direct_uses(uses_of[name])
        for use in others:
            if use.parts != first.parts or use.node.attributes != first.node.attributes:
                raise InputError(
                    f"'{name}' is dequantized in several ways, at {first.node.label} and "
                    f"{use.node.label}, so nothing can be merged into it: "
                    "use adapters='nodes'"
                )
        grid, free = _read(first, tensors), find_own_parts(uses_of, name)
        scale, zero, _ = first.parts
        rounded, losses[name] = _round(grid, change, scale in free, zero in free)
        parts = zip((name, scale, zero), rounded, strict=False)
        arrays |= {n: x for n, x in parts if n == name or n in free}
    return arrays, losses


def dequantize(
    graph: Graph, tensors: Mapping[str, Any], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return weights in float32, also those that are stored in few bits.

    Args:
      graph, tensors: the bound graph and its tensors.
      names: of the weights, or of their codes.

    Raises:
      InputError: a weight is read where it cannot be rounded again.
    """
    all_weights, uses_of = weights(graph, tensors), uses_by_tensor(graph, tensors)
    result = {}
    for name in names:
        if not all_weights[name].storage:
            result[name] = np.asarray(tensors[name], np.float32)
            continue
        grid = _read(direct_uses(uses_of[name])[0], tensors)
        present, shape = grid.groups >= 0, all_weights[name].shape
        group = np.empty(grid.codes.shape[1], int)
        group[grid.groups[present]] = np.nonzero(present)[0]
        zero = np.broadcast_to(grid.zero, grid.scale.shape)
        rows = (grid.codes - zero[:, group]) * grid.scale[:, group]
        matrix = np.empty(math.prod(shape), np.float32)
        matrix[grid.arrange(np.arange(matrix.size).reshape(shape)).ravel()] = rows.ravel()
        result[name] = matrix.reshape(shape)
    return result


def _read(use: Use, tensors: Mapping[str, Any]) -> Grid:
    """Read a matrix in few bits from its tensors.

    Raises:
      InputError: it cannot be rounded again.
    """
    storage = use.node.op.storage(use.position, tensors[use.name], use.node.attributes)
    if storage is None or storage.is_final:
        kind = "integers" if storage is None else storage.type
        raise InputError(
            f"'{use.name}' is in {kind} at {use.node.label}, which cannot be quantized again: "
            "leave it out of where=, or save the adapters separately (Adapters.save)"
        )
    parts: Any = (np.asarray(tensors[name]) if name else None for name in use.parts)
    return read_grid(storage, np.asarray(tensors[use.name]), *parts)


def _round(
    grid: Grid, change: np.ndarray, free_scale: bool, free_zero: bool
) -> tuple[list[np.ndarray], Loss]:
    """Round a changed matrix to its grid.

    Args:
      grid: the matrix without the change.
      change: the addition, with the axes of the matrix.
      free_scale, free_zero: whether scales and zero points may change.

    Returns:
      The new tensors of codes, scales and (if there are any) zero points, and the error.
    """
    # 1. The changed matrix by groups. Arrays below are (rows, groups, members) or (rows, groups);
    # `present` marks the members that are columns of the matrix, the others pad a group.
    present = grid.groups >= 0
    columns = grid.groups[present]

    def split_groups(x: np.ndarray) -> np.ndarray:
        """Return the columns of `x` as (rows, groups, members), with 0 for padding."""
        result = np.zeros((len(x), *present.shape), np.float32)
        result[:, present] = x[:, columns]
        return result

    zero = np.broadcast_to(grid.zero, grid.scale.shape).astype(np.float32)
    best, scale = split_groups(grid.codes), grid.scale
    added = split_groups(grid.arrange(change).astype(np.float32))
    target = np.where(present, (best - zero[..., None]) * scale[..., None] + added, 0)

    def error(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
        """Return the squared error of each group."""
        rounded = (codes - zero[..., None]) * scale[..., None]
        return (np.where(present, rounded - target, 0) ** 2).sum(-1)

    def nearest(scale: np.ndarray, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scales rounded to the type of the file, and the nearest codes for them."""
        scale = scale.astype(grid.scale_type).astype(np.float32)
        safe = np.where(scale == 0, 1, scale)[..., None]
        return scale, grid.nearest(target / safe + zero[..., None])

    def candidates(
        scale: np.ndarray, zero: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield scales, codes and zero points to choose from, group by group."""
        yield (*nearest(scale, zero), zero)
        if not free_scale:
            return
        # zero points that are all equal come from a symmetric scheme, which is kept
        moves = free_zero and grid.zero_type is not None and bool(np.ptp(zero) > 0)
        moves = moves and not grid.is_shared
        for start, shift in [(scale, zero), *_fit_ranges(grid, target, zero, moves)]:
            if grid.is_shared:
                start = np.full_like(start, start.max())
            fitted, codes = nearest(start, shift)
            yield fitted, codes, shift
            # least squares: the best scale for these codes is <parts, wanted> / <parts, parts>
            parts = np.where(present, codes - shift[..., None], 0)
            axes = None if grid.is_shared else -1
            norm = np.broadcast_to((parts**2).sum(axes), fitted.shape)
            fitted = np.divide((parts * target).sum(axes), norm, out=fitted.copy(), where=norm > 0)
            yield (*nearest(fitted if grid.negative else np.abs(fitted), shift), shift)

    # 2. For each group the candidate of the least error. The start is the unchanged matrix, so that
    # groups without a change keep their codes.
    least = error(best, scale, zero)
    for fitted, codes, shift in candidates(scale, zero):
        lost = error(codes, fitted, shift)
        better = np.isfinite(fitted) & (lost < least)
        if grid.is_shared:
            better = np.full_like(better, np.isfinite(fitted).all() and lost.sum() < least.sum())
        least, best = np.where(better, lost, least), np.where(better[..., None], codes, best)
        scale, zero = np.where(better, fitted, scale), np.where(better, shift, zero)
    codes = grid.codes.copy()
    codes[:, columns] = best[:, present]
    lost, size, moved = (np.sqrt(np.sum(x, dtype=np.float64)) for x in (least, target**2, added**2))
    loss = Loss(float(lost / size) if size else 0.0, float(lost / moved) if moved else 0.0)
    stored = [grid.store(codes), grid.store_scale(scale.astype(grid.scale_type))]
    return stored + ([] if grid.store_zero is None else [grid.store_zero(zero)]), loss


def _fit_ranges(
    grid: Grid, target: np.ndarray, zero: np.ndarray, moves: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield scales and zero points that fit the range of each group, as quantizers choose them.

    Args:
      grid: the matrix, for its types and limits.
      target: (rows, groups, members), the numbers to round, with 0 for padding.
      zero: (rows, groups), the present zero points.
      moves: choose zero points, too.
    """
    low, high = grid.limits if grid.levels is None else (grid.levels[0], grid.levels[-1])
    # every range contains 0, which must be representable
    least, most = np.minimum(target.min(-1), 0), np.maximum(target.max(-1), 0)
    if moves and grid.zero_type is not None:
        scale = (most - least) / (high - low)
        scale = scale.astype(grid.scale_type).astype(np.float32)
        shift = low - least / np.where(scale == 0, 1, scale)
        if not jnp.issubdtype(grid.zero_type, jnp.floating):
            shift = np.clip(np.rint(shift), low, high)
        yield scale, shift.astype(grid.zero_type).astype(np.float32)
        return
    # with a fixed zero point, the scale is the larger of those that each end of the range needs
    below, above = low - zero, high - zero
    ends = [
        np.divide(x, n, out=np.zeros_like(x), where=n != 0)
        for x, n in ((least, below), (most, above))
    ]
    yield np.maximum(*ends), zero
    # onnxruntime's way: the end of greater magnitude gets the lowest code (there is one more code
    # below zero than above), by a negative scale if that end is the upper one
    if grid.negative:
        extreme = np.where(-least > most, least, most)
        yield np.divide(extreme, below, out=np.zeros_like(extreme), where=below != 0), zero


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
    """Pack zero points (rows, groups) into the tensor of the file, if it has one."""
    zero_type: np.dtype | None = None
    """The dtype of zero points before packing (integer or float); None without zero points."""
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
    # 1. the axis that has the scales, and the order of axes in which it is the rows or the columns
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

    # 2. the codes as rows, and the columns of each group
    rows = arrange(np.asarray(storage.unpack(codes, shape)))
    each = 1 if vector else count // len(rows)  # groups of a row
    if index is not None and index.size:
        members = [np.flatnonzero(index == i) for i in range(each)]
        groups = np.full((each, max(map(len, members))), -1)
        for group, columns in zip(groups, members, strict=True):
            group[: len(columns)] = columns
    else:  # blocks of adjacent columns, of which the last may be shorter; one for all if each is 1
        width = rows.shape[1]
        block = min((storage.block or -(-width // each)) if each > 1 else width, width)
        numbers = np.arange(-(-width // block) * block)
        groups = np.where(numbers < width, numbers, -1).reshape(-1, block)
    # 3. scales and zero points as (rows, groups), and back
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

    stored = not vector and zero is not None and zero.dtype == codes.dtype
    points = storage.unpack(zero, storage.blocks(scale.shape)) if stored else zero

    def store_zero(x: np.ndarray) -> np.ndarray:
        assert points is not None
        assert zero is not None
        x = restore_scales(x, points.shape).astype(points.dtype)
        return storage.pack(x, zero) if stored else x.reshape(zero.shape)

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
