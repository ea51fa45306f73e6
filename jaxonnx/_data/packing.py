"""Short texts joined to rows of nearly one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np


def pack_texts(
    tokens: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    capacity: int,
    ignored: int,
    number: Callable[[Sequence[int]], np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return tokens and labels of rows, and what says which text each token is of.

    The first label of a text, which the last token of the text before it would predict, is ignored.

    Args:
      capacity: the tokens of a row at most.
      number: what says which text each token is of, by the lengths of the texts.
    """
    rows, numbers, wanted = [], [], []
    for chosen in fit_rows([len(ids) for ids in tokens], capacity):
        rows.append(np.concatenate([tokens[i] for i in chosen]))
        numbers.append(number([len(tokens[i]) for i in chosen]))
        first = (np.concatenate([[ignored], labels[i][1:]]) for i in chosen)
        wanted.append(np.concatenate([*first]))
    return rows, wanted, numbers


def fit_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which texts make a row, by best fit in decreasing order.

    Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest, plus one.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # of each row that has room, sorted
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(left, (lengths[i], -1))
        room, row = left.pop(place) if place < len(left) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(left, (room - lengths[i], row))
    return rows
