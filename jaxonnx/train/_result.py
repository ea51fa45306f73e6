"""What a run gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxonnx.lora import Adapters
from jaxonnx.model import Model
from jaxonnx.train._history import History

_LISTED = 8


@dataclass(frozen=True, repr=False)
class Result:
    """The trained model, and what happened; `print` or the end of a cell says what changed."""

    model: Model
    history: History
    changes: dict[str, float] = field(default_factory=dict)
    """|new - old| / |old| (Euclidean norms) of each parameter and statistic; infinite from zero."""
    lora: Adapters | None = None
    """What a run with `lora=` trained, apart from the weights of the model."""

    def __str__(self) -> str:
        return "\n".join([str(self.history), *self.history.notes, *_listed(self)])

    __repr__ = __str__


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return how much each tensor changed, relative to what it was."""
    return {name: _change(np.asarray(before[name]), np.asarray(x)) for name, x in after.items()}


def _change(before: np.ndarray, after: np.ndarray) -> float:
    if np.array_equal(before, after):
        return 0.0
    old, new = (x.astype(np.float64).reshape(-1) for x in (before, after))
    size = np.linalg.norm(old)
    return float(np.linalg.norm(new - old) / size) if size else np.inf


def _listed(result: Result) -> list[str]:
    """Return what changed, the largest changes first."""
    if not result.changes:
        return []
    params = {n: c for n, c in result.changes.items() if n in result.model.params}
    moved = {n: c for n, c in params.items() if c}
    numbers = sum(result.model.params[name].size for name in moved)
    lines = [f"{len(moved)} of {len(params)} trained tensors changed ({numbers:,} numbers)"]
    order = sorted(moved.items(), key=lambda item: -item[1])
    for name, change in order[:_LISTED]:
        shape = list(result.model.params[name].shape)
        lines.append(f"  {name} {shape}: " + ("from zero" if np.isinf(change) else f"{change:.2%}"))
    if len(order) > _LISTED:
        lines.append(f"  and {len(order) - _LISTED} more, by {order[-1][1]:.2%} or more")
    if still := [name for name in params if name not in moved]:
        lines.append(f"not changed: {', '.join(still)}")
    renewed = sum(1 for n, c in result.changes.items() if n in result.model.state and c)
    if renewed:
        lines.append(f"{renewed} running statistics renewed")
    return lines
