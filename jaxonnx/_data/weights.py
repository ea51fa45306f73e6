"""Weights of examples."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxonnx.errors import TrainingError

KEY = "weight"
"""The name of the weights in a dict."""


def split_weights(data: Any, inputs: Collection[str], targets: Collection[str]) -> tuple[Any, Any]:
    """Split the weights of examples off data.

    They are the third of three arrays (x, y, weights), or the entry `KEY` of a dict that also has
    targets.

    Args:
      data: as the user passes it.
      inputs: the names of the model's inputs.
      targets: the names of targets; if `KEY` is one of them, it is not weights.

    Returns:
      The data without weights, and the weights or None.
    """
    if isinstance(data, tuple | list) and len(data) == 3 and _numbers(data[2]):
        return (data[0], data[1]), data[2]
    if isinstance(data, Mapping) and KEY in data and KEY not in {*inputs, *targets}:
        rest = {name: value for name, value in data.items() if name != KEY}
        if rest.keys() - {*inputs}:
            return rest, data[KEY]
    return data, None


def checked_weights(weights: Any, count: int, what: str) -> np.ndarray:
    """Return weights as float32.

    Raises:
      TrainingError: they are not one finite number of at least 0 for each example.
    """
    weights = np.asarray(weights)
    if weights.shape != (count,) or weights.dtype.kind not in "biuf":
        raise TrainingError(
            f"{what}: the weights must be one number for each of {count} examples, and are "
            f"{weights.dtype}{[*weights.shape]}"
        )
    weights = weights.astype(np.float32)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise TrainingError(f"{what}: a weight of an example is negative or not finite")
    return weights


def _numbers(value: Any) -> bool:
    """Check whether a value is an array or a list of numbers, rather than a batch."""
    if isinstance(value, list):
        return all(isinstance(x, int | float | np.number) for x in value)
    return hasattr(value, "__array__")


def is_zero_or_one(weight: Any) -> bool:
    """Check whether each example counts fully or not at all."""
    return weight is None or bool(np.isin(weight, (0, 1)).all())
