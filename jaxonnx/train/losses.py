"""Losses: optax's by name, or any callable of outputs and targets."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx.errors import TrainingError

_CLASSES = (
    "softmax_cross_entropy_with_integer_labels",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
    "multiclass_sparsemax_loss",
)
"""Losses of scores (..., classes) and integer labels (...)."""


def _named() -> dict[str, Callable[..., jax.Array]]:
    """The losses of optax that need predictions and targets and nothing else."""
    found = {}
    for name in dir(optax.losses):
        function = getattr(optax.losses, name)
        if callable(function) and name not in ("smooth_labels", "ntxent"):
            parameters = inspect.signature(function).parameters.values()
            needed = [p for p in parameters if p.default is p.empty or p.name == "targets"]
            if len(needed) == 2:
                found[name] = function
    return found


@dataclass(frozen=True)
class Loss:
    """`function(outputs, targets)` is a scalar or has the examples along its first axis."""

    function: Callable[[Any, Any], jax.Array]
    name: str | None = None

    @property
    def counts_classes(self) -> bool:
        """Whether targets are labels, so that there is an accuracy."""
        return self.name in _CLASSES

    def mean(self, outputs: Any, targets: Any, weight: jax.Array) -> jax.Array:
        """The mean over the examples of weight 1; a scalar loss sees the fill as well."""
        values = self.function(outputs, targets)
        if values.ndim:
            values = values.reshape(len(values), -1).mean(1)
            values = jnp.where(weight > 0, values, 0).sum() / weight.sum()
        return values

    def check_outputs(self, outputs: Any, targets: Any) -> None:
        """Refuses shapes that do not fit, given arrays or `jax.ShapeDtypeStruct`s."""
        if self.name is not None:
            self._check_named(outputs, targets)
        loss = jax.eval_shape(self.function, outputs, targets)
        size = len(jax.tree.leaves(targets)[0])
        if not isinstance(loss, jax.ShapeDtypeStruct) or loss.shape[:1] not in ((), (size,)):
            raise TrainingError(
                f"the loss must be a scalar or have one value for each of {size} examples, "
                f"and is {loss}"
            )
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TrainingError(f"the loss must be a real floating number, and is {loss.dtype}")

    def _check_named(self, outputs: Any, targets: Any) -> None:
        if not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
            raise TrainingError(
                f"the loss {self.name!r} takes one output and one target; for a model with several "
                "pass a callable (outputs, targets) -> loss"
            )
        wanted = outputs.shape[:-1] if self.counts_classes else outputs.shape
        if targets.shape != wanted:
            raise TrainingError(
                f"the loss {self.name!r} needs targets of shape {wanted} for outputs of shape "
                f"{outputs.shape}; they have {targets.shape}"
            )
        if self.counts_classes and not jnp.issubdtype(targets.dtype, jnp.integer):
            raise TrainingError(
                f"the loss {self.name!r} needs integer labels; they are {targets.dtype}"
            )

    def check_labels(self, targets: Any, classes: int, what: str) -> None:
        """Refuses labels outside of 0 ... classes - 1, which optax would take for others."""
        if not self.counts_classes:
            return
        wrong = np.argwhere((targets < 0) | (targets >= classes))
        if len(wrong):
            first = tuple(wrong[0])
            raise TrainingError(
                f"{what} has {len(wrong)} labels outside of 0 ... {classes - 1}, "
                f"the first is {targets[first]} at {', '.join(map(str, first))}"
            )


def find(loss: str | Callable[[Any, Any], jax.Array]) -> Loss:
    """The loss of that name in `optax.losses`, or around that callable."""
    if callable(loss):
        return Loss(loss)
    named = _named()
    if loss not in named:
        near = difflib.get_close_matches(str(loss), named, n=3) or sorted(named)
        raise TrainingError(
            f"optax has no loss {loss!r} of predictions and targets; try {', '.join(near)}, "
            "or pass a callable (outputs, targets) -> loss"
        )
    return Loss(named[loss], loss)
