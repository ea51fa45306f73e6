"""Convert outputs and targets to predictions: one of several classes, or binary labels."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxonnx.errors import TrainingError
from jaxonnx.losses import Loss


class Choices(NamedTuple):
    """Predictions of one among several classes."""

    scores: jax.Array
    """(predictions, classes)"""
    labels: jax.Array
    """(predictions,), which need not be classes."""
    weight: jax.Array
    """(predictions,)"""


class Answers(NamedTuple):
    """Predictions of yes or no."""

    scores: jax.Array
    """(predictions, labels), greater for yes"""
    given: jax.Array
    """bool (predictions, labels)"""
    true: jax.Array
    """bool (predictions, labels)"""
    weight: jax.Array
    """(predictions,)"""


@dataclass(frozen=True)
class Reader:
    """What outputs and targets mean.

    Attributes:
      loss: of this output, if it is known.
      ending: the operator that the output comes from.
    """

    loss: Loss | None
    ending: str | None

    def decisions(self, outputs: Any, targets: Any, weight: jax.Array) -> Choices | Answers:
        """Return predictions in rows, from labels, distributions or yes-and-no targets."""
        if self.loss is not None:
            outputs, targets = self.loss.align(outputs, targets)
        axis = self.class_axis(outputs.shape, targets.shape)
        if axis is None:
            return self._binary(outputs, targets, weight)
        scores = jnp.moveaxis(outputs, axis, -1)
        if targets.ndim == outputs.ndim:
            targets = jnp.moveaxis(targets, axis, -1).argmax(-1)
        weight = jnp.broadcast_to(_beside(weight, targets.ndim), targets.shape)
        if self.loss is not None and self.loss.ignore_index is not None:
            weight = jnp.where(targets == self.loss.ignore_index, 0, weight)
        scores = scores.reshape(-1, scores.shape[-1])
        return Choices(scores, targets.reshape(-1), weight.reshape(-1))

    def _binary(self, outputs: Any, targets: Any, weight: jax.Array) -> Answers:
        weight = jnp.broadcast_to(_beside(weight, targets.ndim), targets.shape)
        predicted, true = outputs > self.threshold, targets > 0.5
        if targets.ndim == 2:  # (examples, labels)
            return Answers(outputs, predicted, true, weight[:, 0])
        outputs, predicted, true = (x.reshape(-1, 1) for x in (outputs, predicted, true))
        return Answers(outputs, predicted, true, weight.reshape(-1))

    @property
    def threshold(self) -> float | None:
        """Above it an output means yes; None where neither loss nor file tell."""
        if self.ending == "Sigmoid":
            return 0.5
        if self.loss is None or self.loss.name is None:
            return None
        return 0.0 if self.loss.logits_of == "Sigmoid" else 0.5

    def class_axis(self, outputs: tuple[int, ...], targets: tuple[int, ...]) -> int | None:
        """Return the axis of the classes; None for targets that say yes or no to each output.

        Where the loss does not tell, labels have the classes of the outputs on the last axis, or on
        axis 1 if only that fits.
        """
        if self.loss is not None and self.loss.class_axis is not None:
            return self.loss.class_axis
        if outputs == targets:
            one_hot = self.loss is not None and self.loss.one_hot
            return -1 if one_hot or self.ending in ("Softmax", "LogSoftmax") else None
        for axis in (-1, 1):
            rest = [size for i, size in enumerate(outputs) if i != axis % len(outputs)]
            if rest == [*targets] and len(outputs) > 1:
                return axis
        raise TrainingError(
            f"metrics of classes need labels of shape {outputs[:-1]}, or targets like the outputs "
            f"{outputs}; they have {targets}"
        )


def _beside(weight: jax.Array, rank: int) -> jax.Array:
    return weight.reshape(-1, *(1,) * (rank - 1))
