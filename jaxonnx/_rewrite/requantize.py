"""Round matrices that adapters changed to the few bits that their file stores them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.stored import SCALES
from jaxonnx._graph.uses import Use, uses
from jaxonnx._rewrite.stored_grids import READERS, Grid
from jaxonnx.errors import InputError


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
    readers: dict[str, list[Use]] = {}
    for use in uses(graph, tensors):
        if use.is_direct:
            readers.setdefault(use.name, []).append(use)
    arrays: dict[str, np.ndarray] = {}
    losses: dict[str, Loss] = {}
    for name, change in changes.items():
        first, *others = readers[name]
        names = storage_names(first)
        for use in others:
            if storage_names(use) != names or use.node.attributes != first.node.attributes:
                raise InputError(
                    f"'{name}' is dequantized in several ways, at {first.node.label} and "
                    f"{use.node.label}, so nothing can be merged into it: "
                    "use adapters='nodes'"
                )
        own = {use.node.index for use in readers[name]}
        free = {n for n in names[1:] if own.issuperset(u.node.index for u in readers.get(n, ()))}
        given = [np.asarray(tensors[n]) if n else None for n in names]
        grid = READERS[first.node.op.name](first, *given)
        rounded, losses[name] = _round(grid, change, names[1] in free, names[2] in free)
        arrays |= {n: x for n, x in zip(names, rounded, strict=False) if n == name or n in free}
    return arrays, losses


def storage_names(use: Use) -> tuple[str, ...]:
    """Return a weight, its scales, its zero points and its index of groups, "" for what is absent.

    Raises:
      InputError: the operator's weights cannot be rounded again.
    """
    node = use.node
    if node.op.name not in READERS:
        raise InputError(
            f"'{use.name}' is read by {node.label}, whose weights cannot be quantized again: "
            "use adapters='nodes', or leave it out of where="
        )
    places = [*SCALES[node.op.name, use.position], 4 if node.op.name == "MatMulNBits" else -1]
    inputs = node.inputs
    return (use.name, *(inputs[i] if 0 <= i < len(inputs) else "" for i in places))


def _round(
    grid: Grid, change: np.ndarray, free_scale: bool, free_zero: bool
) -> tuple[list[np.ndarray], Loss]:
    """Return new codes, scales and zero points as a file has them, and what they lose."""
    there = grid.groups >= 0
    columns = grid.groups[there]

    def split_groups(x: np.ndarray) -> np.ndarray:
        """Return (rows, groups, members), 0 where a group is filled up."""
        result = np.zeros((len(x), *there.shape), np.float32)
        result[:, there] = x[:, columns]
        return result

    zero = np.broadcast_to(grid.zero, grid.scale.shape).astype(np.float32)
    best, scale = split_groups(grid.codes), grid.scale
    added = split_groups(grid.arrange(change).astype(np.float32))
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
    grid: Grid, wanted: np.ndarray, zero: np.ndarray, moves: bool
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
