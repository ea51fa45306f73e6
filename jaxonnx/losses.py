"""The losses that ONNX has operators for, as callables `(outputs, targets)`.

optax has the losses with classes on the last axis and one target for each example; these have the
classes on axis 1, weights of classes, and labels that do not count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import TrainingError
from jaxonnx.ops import loss as operators


@dataclass(frozen=True, eq=False)
class ClassLoss:
    """A loss of scores (N, classes, *D) and integer labels (N, *D).

    Called with `(outputs, targets)` it returns the operator's result: a scalar, or (N, *D) for the
    reduction "none".
    """

    name: str
    operator: Callable[..., jax.Array]
    weight: np.ndarray | None
    ignore_index: int | None
    reduction: str

    def __call__(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return self._apply(outputs, targets, self.ignore_index, self.reduction)

    def totals(
        self, outputs: jax.Array, targets: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the sum over the examples of weight 1, and the divisor of the reduction.

        Half precision, whose sums end at 65504, is summed in float32.
        """
        outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
        ignored = -1 if self.ignore_index is None else self.ignore_index
        counted = weight.reshape(-1, *(1,) * (targets.ndim - 1)) > 0
        targets = jnp.where(counted, targets, ignored)
        total = self._apply(outputs, targets, ignored, "sum")
        if self.reduction == "sum":
            return total, jnp.ones_like(total)
        # the weights of the labels that count: each has the negative log-likelihood 1
        return total, operators.negative_log_likelihood_loss(
            jnp.full_like(outputs, -1), targets, self.weight, ignore_index=ignored, reduction="sum"
        )

    def _apply(self, outputs, targets, ignored, reduction) -> jax.Array:
        return self.operator(
            outputs, targets, self.weight, ignore_index=ignored, reduction=reduction
        )


def cross_entropy(
    *, weight: Any = None, ignore_index: int | None = None, reduction: str = "mean"
) -> ClassLoss:
    """Return the loss of the operator SoftmaxCrossEntropyLoss, for logits.

    Args:
      weight: one for each class, (classes,); None means 1 for all.
      ignore_index: labels of this value do not count; it need not be a class.
      reduction: "mean" divides by the sum of the weights of the labels that count, over the whole
        batch; "sum" does not divide; "none" keeps the loss of each label.

    `jaxonnx.train` gives a batch without a label that counts the loss 0, where the operator's mean
    is NaN.

    >>> loss = cross_entropy(weight=[1.0, 3.0], ignore_index=-1)
    >>> print(loss(jnp.zeros((3, 2)), jnp.array([0, 1, -1])).round(4))  # log 2
    0.6931

    Raises:
      TrainingError: an argument is none of these.
    """
    return _loss("cross_entropy", _softmax_cross_entropy, weight, ignore_index, reduction)


def negative_log_likelihood(
    *, weight: Any = None, ignore_index: int | None = None, reduction: str = "mean"
) -> ClassLoss:
    """Return the loss of the operator NegativeLogLikelihoodLoss, for log-probabilities.

    The arguments are those of `cross_entropy`.
    """
    operator = operators.negative_log_likelihood_loss
    return _loss("negative_log_likelihood", operator, weight, ignore_index, reduction)


def _softmax_cross_entropy(*arrays, **attributes) -> jax.Array:
    return operators.softmax_cross_entropy_loss(*arrays, **attributes)[0]


def _loss(name: str, operator: Any, weight: Any, ignore_index: Any, reduction: str) -> ClassLoss:
    if reduction not in ("mean", "sum", "none"):
        raise TrainingError(f"{name}: reduction is {reduction!r}; there are 'mean', 'sum', 'none'")
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise TrainingError(f"{name}: ignore_index must be an integer, and is {ignore_index!r}")
    if weight is not None:
        weight = np.asarray(weight)
        if weight.ndim != 1 or weight.dtype.kind not in "fiu":
            raise TrainingError(
                f"{name}: weight must be one number for each class, (classes,), and is "
                f"{weight.dtype}{list(weight.shape)}"
            )
        weight = weight.astype(np.float32)
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise TrainingError(f"{name}: a weight is negative or not finite: {weight}")
    return ClassLoss(name, operator, weight, ignore_index, reduction)
