"""A model's outputs for any number of examples, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._data.batches import Examples, Stream
from jaxonnx.errors import InputError
from jaxonnx.model._progress import tracked

_AHEAD = 4
"""Batches under way; more would only take memory."""


def predictions(
    run: Callable[..., Any], names: Sequence[str], examples: Examples | Stream, show: bool | None
) -> Any:
    """Return the outputs for all examples as NumPy arrays, in a dict if there are several.

    Raises:
      InputError: an output does not have the examples along its first axis.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    waiting: deque[tuple[Any, np.ndarray]] = deque()

    def collect() -> None:
        outputs, real = waiting.popleft()
        rows = tuple(_rows(*pair, real) for pair in zip(names, outputs, strict=True))
        parts.append(rows)

    for batch in tracked(examples.batches(0), examples.steps, show):
        outputs = run(*batch.inputs)
        waiting.append((outputs if isinstance(outputs, tuple) else (outputs,), batch.weight > 0))
        if len(waiting) > _AHEAD:
            collect()
    while waiting:
        collect()
    whole = {
        name: _joined(name, columns)
        for name, columns in zip(names, zip(*parts, strict=True), strict=True)
    }
    return whole if len(names) > 1 else whole[names[0]]


def _rows(name: str, output: Any, real: np.ndarray) -> np.ndarray:
    """Return the rows of an output that belong to examples."""
    if not isinstance(output, jax.Array | np.ndarray) or output.shape[:1] != real.shape:
        what = f"has shape {output.shape}" if hasattr(output, "shape") else "is not an array"
        raise InputError(
            f"output '{name}' {what} for a batch of {len(real)}: predict joins outputs that have "
            "the examples along the first axis; call the model itself, or choose others with "
            "model.with_outputs"
        )
    rows = np.asarray(output)
    return rows if real.all() else rows[real]


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    if shapes := {part.shape[1:] for part in parts} - {parts[0].shape[1:]}:
        raise InputError(
            f"output '{name}' has rows of shape {parts[0].shape[1:]} in one batch and of "
            f"{shapes.pop()} in another: call the model itself"
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
