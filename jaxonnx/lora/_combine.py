"""One adapter of several, as `add_weighted_adapter` of PEFT makes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Factors = tuple[np.ndarray, np.ndarray]
"""A (rank, inputs) and B (outputs, rank) of a change."""


def combine(
    pairs: Sequence[Factors], weights: Sequence[float], method: str, density: float
) -> Factors:
    """Combine the factors of changes.

    Args:
      pairs: of each change.
      weights: the factor of each change, its scale included.
      method: "cat", "linear" or "ties".
      density: the share of numbers that "ties" keeps.
    """
    if method == "cat":
        a = np.concatenate([a for a, _ in pairs], axis=-2)
        return a, np.concatenate([w * b for (_, b), w in zip(pairs, weights, strict=True)], axis=-1)
    roots = np.sqrt(np.abs(weights))
    signs = np.where(np.asarray(weights) < 0, -1, 1)  # on one side: a change is a product
    merge = _add if method == "linear" else _merge_signs
    stacks = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = (merge(x, f, density) for x, f in zip(stacks, (roots * signs, roots), strict=True))
    return a, b


def _add(stack: np.ndarray, weights: np.ndarray, density: float) -> np.ndarray:
    return np.tensordot(weights, stack, 1).astype(np.float32)


def _merge_signs(stack: np.ndarray, weights: np.ndarray, density: float) -> np.ndarray:
    """Merge by the sign of the majority: Yadav et al., "TIES-Merging", 2023 (arXiv:2306.01708)."""
    flat = stack.reshape(len(stack), -1)
    trimmed = np.zeros_like(flat)
    for row, result in zip(flat, trimmed, strict=True):
        # a packed matrix has zeros where only some of its parts are adapted
        count = int(density * np.count_nonzero(row))
        largest = np.argsort(-np.abs(row), kind="stable")[:count]
        result[largest] = row[largest]
    agrees = np.sign(trimmed) == np.where(trimmed.sum(0) >= 0, 1, -1)
    total = np.tensordot(weights, trimmed * agrees, 1)
    return (total / np.maximum(agrees.sum(0), 1)).reshape(stack.shape[1:]).astype(np.float32)
