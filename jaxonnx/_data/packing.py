"""Pack short texts into rows of nearly equal length."""

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
    """Concatenate short texts to rows of at most `capacity` tokens.

    The first label of each text is ignored: the last token of the text before would predict it.

    Args:
      tokens, labels: of each text.
      capacity: the most tokens of a row.
      ignored: the label that losses ignore.
      number: a function of the lengths of a row's texts that returns, for each token, the number by
        which the model tells texts apart.

    Returns:
      For each row the tokens, the labels, and the results of `number`.
    """
    rows, numbers, wanted = [], [], []
    for chosen in fit_rows([len(ids) for ids in tokens], capacity):
        rows.append(np.concatenate([tokens[i] for i in chosen]))
        numbers.append(number([len(tokens[i]) for i in chosen]))
        first = (np.concatenate([[ignored], labels[i][1:]]) for i in chosen)
        wanted.append(np.concatenate([*first]))
    return rows, wanted, numbers


def fit_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign texts to rows by best-fit-decreasing bin packing.

    Longest texts first, each goes into the fullest row that has room for it. Johnson,
    "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest rows, plus one.

    Returns:
      The numbers of the texts of each row.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(spaces, (lengths[i], -1))
        space, row = spaces.pop(place) if place < len(spaces) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(spaces, (space - lengths[i], row))
    return rows
