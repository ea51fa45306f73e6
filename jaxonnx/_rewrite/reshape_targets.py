"""Targets of Reshape: where the batch can be in them."""

import math

import numpy as np

Shape = tuple[int, ...]


def batch_axes(before: Shape, now: Shape, after: Shape, size: int) -> list[int]:
    """Return the axes of a Reshape's result that the batch can be in, the likeliest first.

    Args:
      before, now: the shape of the data for the file's batch size, and for another one.
      after: the shape of the result for the file's batch size.
      size: the batch size of the file.
    """
    if len(before) != len(now) or size == 0:
        return []
    moved = [axis for axis, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    if len(moved) != 1:
        return []
    (axis,) = moved
    # In C order the batch axis is where as many elements lie behind it (`end`), or from it on
    # (`start`), as in the data. Only one of the two fits where Reshape merged it with neighbours.
    start, end = math.prod(before[axis:]), math.prod(before[axis + 1 :])
    ranked = []
    for place, length in enumerate(after):
        if length % size:
            continue
        starts = math.prod(after[place:]) == start
        ends = math.prod(after[place + 1 :]) == end
        if starts or ends:
            # an axis of its own; or the outer part of one with the axes behind it (heads), rather
            # than of the last one (features); or the inner part of one with those before it (time)
            last = place == len(after) - 1
            rank = 0 if length == size else 1 if starts and not last else 2 if ends else 3
            ranked.append((rank, abs(place - axis), place))
    return [place for _, _, place in sorted(ranked)]


def resolve_target(target: np.ndarray, shape: Shape) -> list[int] | None:
    """Resolve the 0 and -1 of a Reshape's target for data of a shape; None if it does not fit."""
    new = [shape[i] if d == 0 and i < len(shape) else int(d) for i, d in enumerate(target)]
    rest = math.prod(d for d in new if d != -1)
    if -1 in new:
        if rest == 0 or math.prod(shape) % rest:
            return None
        new[new.index(-1)] = math.prod(shape) // rest
    return new if math.prod(new) == math.prod(shape) else None
