"""Losses of class labels: of images, pixels or tokens.

The functions return a `ClassLoss`. optax has the losses with classes on the last axis and one label
for each example; these have the classes on axis 1 or the last one, weights of classes, and labels
that do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._require import check_arguments, require, require_choice
from jaxonnx.errors import TrainingError
from jaxonnx.losses._loss import Loss, WeighedLoss, register, widen_labels
from jaxonnx.lowering import merges
from jaxonnx.ops.training import negative_log_likelihood_loss, softmax_cross_entropy_loss

L = TypeVar("L", bound="ClassLoss")
LARGE = 1 << 26
"""The bytes of scores from which on they are summed in parts."""
PART = 1 << 24
"""The most bytes of scores of a part."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ClassLoss(WeighedLoss):
    """A loss of scores `(N, classes, *D)`, or `(N, *D, classes)`, and integer labels `(N, *D)`.

    Called with `(outputs, targets)` it returns the operator's result: a scalar, or `(N, *D)` for
    the reduction "none".
    """

    name: str | None
    operator: Callable[..., jax.Array]
    weight: np.ndarray | None
    ignore_index: int | None
    reduction: str
    class_axis: int = 1
    """The axis of the classes, 1 or -1."""
    logits_of: str | None = None
    smoothing: float = 0.0
    """The share of each label that all classes have alike."""
    takes = "ONNX's; classes on axis 1, integer labels: the index of the class"
    elementwise = smooths = True
    metrics: ClassVar[Sequence[Any]] = ("accuracy",)

    def __call__(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        targets = widen_labels(targets)
        if self.smoothing and self.reduction != "none":
            total, count = self.totals(outputs, targets, jnp.ones(len(targets)))
            return total / count if self.reduction == "mean" else total
        outputs, targets = self.align(jnp.asarray(outputs), targets)
        return self._apply(self.operator, outputs, targets, self.ignore_index, self.reduction)

    @property
    def denominator(self) -> str | None:
        if self.reduction == "none":
            return super().denominator
        return "none" if self.reduction == "sum" else None

    def totals(
        self, outputs: jax.Array, targets: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum over the examples, and the divisor of the reduction.

        Half precision, whose sums end at 65504, is summed in float32.
        """
        if self.reduction == "none":
            return super().totals(outputs, targets, weight)
        if self.class_weights:
            shares = self._weigh_classes(outputs.shape[self.class_axis])
            return replace(self, weight=shares, class_weights=None).totals(outputs, targets, weight)
        outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
        ignored = -1 if self.ignore_index is None else self.ignore_index
        if self.next_token:  # labels move: scores would be copied, and their gradient padded
            last = jnp.full_like(targets[:, :1], ignored)
            targets = jnp.concatenate([targets[:, 1:], last], axis=1)
        weight = weight.reshape(-1, *(1,) * (targets.ndim - 1))
        targets = jnp.where(weight > 0, targets, ignored)

        def weigh(outputs: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
            return (self._apply(self.operator, outputs, targets, ignored, "none") * weight).sum()

        add_up = _sum_rows if self.class_axis == -1 else lambda f, *arrays: f(*arrays)
        total = add_up(weigh, outputs, targets, jnp.broadcast_to(weight, targets.shape))
        if self.reduction == "sum":
            return total, ((targets != ignored) & (weight > 0)).any().astype(total.dtype)
        if self.weight is None:
            return total, ((targets != ignored) * weight).sum()
        # the weights of the labels that count: each has the negative log-likelihood 1
        count = negative_log_likelihood_loss
        shares = self._apply(count, jnp.full_like(outputs, -1), targets, ignored, "none")
        return total, (shares * weight).sum()

    def with_class_weights(self, classes: Mapping[int, float]) -> Loss:
        if self.weight is not None:
            raise TrainingError(
                f"the loss {self.name!r} has weights of classes already: leave them or "
                "class_weights out"
            )
        return super().with_class_weights(classes)

    def with_label_smoothing(self, share: float) -> Loss:
        return replace(self, smoothing=share)

    def check_shapes(self, outputs: Any, targets: Any, what: str) -> None:
        super().check_shapes(outputs, targets, what)
        if self.weight is not None and len(self.weight) != outputs.shape[self.class_axis]:
            raise TrainingError(
                f"{what} has weights of {len(self.weight)} classes; the outputs have "
                f"{outputs.shape[self.class_axis]}"
            )

    def _apply(self, operator, outputs, targets, ignored, reduction) -> jax.Array:
        shape = targets.shape
        if self.class_axis == -1:  # the operators have the classes on axis 1
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        loss = operator(outputs, targets, self.weight, ignore_index=ignored, reduction=reduction)
        if self.smoothing and operator is self.operator:
            even = self._even(outputs).astype(loss.dtype)
            loss = loss + self.smoothing * (jnp.where(targets == ignored, 0, even) - loss)
        return loss.reshape(shape) if reduction == "none" else loss

    def _even(self, outputs: jax.Array) -> jax.Array:
        """Return the loss of labels that are all classes alike, for the classes on axis 1."""
        logits = self.operator is softmax_cross_entropy
        scores = jax.nn.log_softmax(outputs, axis=1) if logits else outputs
        if self.weight is not None:
            scores = scores * self.weight.reshape(1, -1, *(1,) * (outputs.ndim - 2))
        return -scores.mean(axis=1)


def _sum_rows(
    function: Callable[..., jax.Array], scores: jax.Array, targets: jax.Array, weight: jax.Array
) -> jax.Array:
    """Return the sum of a function of scores (..., classes), targets (...) and weights (...).

    Logits of a large vocabulary are the largest arrays of a step. Some rows at a time are turned
    into the gradient, which takes the place of the scores; else there would be two arrays of their
    size. It has no forward mode. Devices that share a batch each have their part of the rows.
    """
    classes, count = scores.shape[-1], targets.size
    fixed = all(isinstance(n, int) for n in scores.shape)
    if not fixed or scores.size * scores.dtype.itemsize < LARGE or not merges():
        return function(scores, targets, weight)
    most = max(1, PART // (classes * scores.dtype.itemsize))
    size = max(n for n in range(1, min(most, count) + 1) if count % n == 0)

    def take(rows: jax.Array, i: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(rows, i * size, size)

    def replace_parts(part: Callable[..., Any], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Replace rows by the first result of `part(rows, i)`, and sum the second."""

        def step(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            new, value = part(take(carry[0], i), i)
            return lax.dynamic_update_slice_in_dim(carry[0], new, i * size, 0), carry[1] + value

        return lax.fori_loop(0, count // size, step, (rows, jnp.zeros((), rows.dtype)))

    def evaluate(rows: jax.Array, i: Any) -> jax.Array:
        return function(rows, take(targets.reshape(-1), i), take(weight.reshape(-1), i))

    def differentiate(rows: jax.Array, i: Any) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda rows: evaluate(rows, i), rows)
        return pull(jnp.ones_like(value))[0], value

    @jax.custom_vjp
    def add_up(rows: jax.Array) -> jax.Array:
        step = lambda i, total: total + evaluate(take(rows, i), i)  # noqa: E731
        return lax.fori_loop(0, count // size, step, jnp.zeros((), rows.dtype))

    def forward(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient, total = replace_parts(differentiate, rows)
        return total, gradient

    def backward(gradient: jax.Array, scale: jax.Array) -> tuple[jax.Array]:
        return (replace_parts(lambda part, _: (scale * part, 0.0), gradient)[0],)

    add_up.defvjp(forward, backward)
    return add_up(scores.reshape(-1, classes))


def cross_entropy(
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    axis: int = 1,
) -> ClassLoss:
    """Return the loss of the operator SoftmaxCrossEntropyLoss, for logits.

    Args:
      weight: one for each class, (classes,); None means 1 for all.
      ignore_index: labels of this value do not count; it need not be a class.
      reduction: "mean" divides by the sum of the weights of the labels that count, over the whole
        batch; "sum" does not divide; "none" keeps the loss of each label.
      axis: of the classes: 1, as in ONNX, or -1, as labels of tokens have it.

    `jaxonnx.train` gives a batch without a label that counts the loss 0, where the operator's mean
    is NaN, and makes no update of it.

    >>> loss = cross_entropy(weight=[1.0, 3.0], ignore_index=-1)
    >>> print(loss(jnp.zeros((3, 2)), jnp.array([0, 1, -1])).round(4))  # log 2
    0.6931

    Raises:
      TrainingError: an argument is none of these.
    """
    return make_class_loss(
        ClassLoss, "cross_entropy", softmax_cross_entropy, weight, ignore_index, reduction, axis
    )


def negative_log_likelihood(
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    axis: int = 1,
) -> ClassLoss:
    """Return the loss of the operator NegativeLogLikelihoodLoss, for log-probabilities.

    The arguments are those of `cross_entropy`.
    """
    operator = negative_log_likelihood_loss
    return make_class_loss(
        ClassLoss, "negative_log_likelihood", operator, weight, ignore_index, reduction, axis
    )


def softmax_cross_entropy(*arrays, **attributes) -> jax.Array:
    """Compute the losses of SoftmaxCrossEntropyLoss, without its second output."""
    return softmax_cross_entropy_loss(*arrays, **attributes)[0]


def make_class_loss(
    kind: type[L],
    name: str,
    operator: Any,
    weight: Any,
    ignore_index: Any,
    reduction: str,
    axis: int,
    **settings: Any,
) -> L:
    """Make a loss of classes of arguments that a user passes.

    Args:
      settings: further fields of that kind of loss.
    """
    check_arguments(make_class_loss, locals(), TrainingError)
    require(f"{name}: axis", axis, axis in (1, -1), "1 or -1", TrainingError)
    whole = ignore_index is None or isinstance(ignore_index, int)
    require(f"{name}: ignore_index", ignore_index, whole, "an integer", TrainingError)
    require_choice(f"{name}: reduction", reduction, ("mean", "sum", "none"), TrainingError)
    if weight is not None:
        weight = np.asarray(weight)
        fits = weight.ndim == 1 and weight.dtype.kind in "fiu"
        expected = "one number for each class, (classes,)"
        require(f"{name}: weight", weight, fits, expected, TrainingError)
        weight = weight.astype(np.float32)
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise TrainingError(f"{name}: a weight is negative or not finite: {weight}")
    return kind(
        name=name,
        operator=operator,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        class_axis=axis,
        logits_of="Softmax" if operator is softmax_cross_entropy else None,
        **settings,
    )


register("SoftmaxCrossEntropyLoss", cross_entropy(), also_called="crossentropy nllcrossentropy")
register("NegativeLogLikelihoodLoss", negative_log_likelihood(), also_called="nll")
