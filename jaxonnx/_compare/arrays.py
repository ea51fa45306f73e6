"""Compare outputs: integers exactly, numbers to the rounding of sums in another order."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

ROUNDING = {2: 2e-2, 4: 1e-4, 8: 1e-4}
"""Tolerances by the bytes of a number, relative to the largest number of an output."""
_HALF = 5e-3
"""The tolerance of float16, which has three more bits than bfloat16."""


class Difference(NamedTuple):
    """The largest difference of two arrays, and how much it may be."""

    size: float
    """Relative to the largest number; infinite if shapes, types or finiteness differ."""
    tolerance: float
    text: str = ""
    """What differs, if it is not a number."""

    @property
    def ok(self) -> bool:
        return self.size <= self.tolerance

    def __str__(self) -> str:
        return self.text or f"{self.size:.1e} of the largest (tolerance {self.tolerance:.0e})"


def compare_arrays(ours: Any, theirs: Any, tolerance: float | None = None) -> Difference:
    """Compare two outputs of a network: arrays, or sequences of them.

    Args:
      tolerance: of numbers, relative to the largest one; by default by their type.
    """
    if isinstance(theirs, list | tuple):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            return _differ("sequences of different lengths")
        return largest(
            [compare_arrays(*pair, tolerance) for pair in zip(ours, theirs, strict=True)]
        )
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            return _differ("maps of different keys")
        return largest([compare_arrays(ours[key], x, tolerance) for key, x in theirs.items()])
    if theirs is None or ours is None:
        return Difference(0, 0) if ours is theirs else _differ("only one is absent")
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape:
        return _differ(f"shapes {[*a.shape]} and {[*b.shape]}")
    if b.dtype.kind in "OUS":
        return Difference(0, 0) if a.tolist() == b.tolist() else _differ("different strings")
    if a.dtype.kind == "V" != b.dtype.kind and a.dtype.itemsize == b.dtype.itemsize:
        b = b.view(a.dtype)  # onnxruntime gives the bits of bfloat16 as integers
    if not (_is_real(a) and _is_real(b)):
        unequal = np.count_nonzero(a != b)
        return _differ(f"{unequal} of {a.size} integers differ") if unequal else Difference(0, 0)
    if tolerance is None:
        narrow = min(a.dtype, b.dtype, key=lambda kind: kind.itemsize)
        tolerance = _HALF if narrow == np.float16 else ROUNDING.get(narrow.itemsize, 2e-2)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return _differ("NaN or infinite in one alone")
    scale = np.abs(b[finite]).max(initial=0)
    error = np.abs(a[finite] - b[finite]).max(initial=0)
    return Difference(float(error / max(scale, 1e-2)), tolerance)


def largest(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is the largest in units of its tolerance."""
    return max(
        differences,
        key=lambda d: (not d.ok, d.size / max(d.tolerance, 1e-30)),
        default=Difference(0, 0),
    )


def _differ(text: str) -> Difference:
    return Difference(float("inf"), 0, text)


def _is_real(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
