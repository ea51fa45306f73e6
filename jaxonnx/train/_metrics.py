"""Metrics: sums over the examples of an epoch, kept on the device, and what they come to.

Each metric is exact over the epoch: nothing is a mean of the batches' values. Examples of weight 0
(the fill of a short batch) and labels that the loss ignores do not count.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxonnx.errors import TrainingError
from jaxonnx.train._losses import Loss, totals

Sums = Any
"""A pytree of float32 arrays; zeros are the sums of no examples."""


class Metric(NamedTuple):
    """How a metric is computed, batch by batch."""

    sums: Callable[[Any, Any, jax.Array], Sums]
    """Of a batch: (outputs, targets, weight of each example)."""
    value: Callable[[Sums], jax.Array]
    """The metric of the examples in the sums."""
    merge: Callable[[Sums, Sums], Sums]


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
        given, true = outputs > self.threshold, targets > 0.5
        if targets.ndim == 2:  # (examples, labels)
            return Answers(given, true, weight[:, 0])
        return Answers(given.reshape(-1, 1), true.reshape(-1, 1), weight.reshape(-1))

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


def add(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)


def _ratio(sums: Sums) -> jax.Array:
    return _divide(*sums)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def _right(found: Choices | Answers) -> Sums:
    if isinstance(found, Choices):
        right = found.scores.argmax(1) == found.labels
    else:
        right = (found.given == found.true).mean(1)
    return (right * found.weight).sum(), found.weight.sum()


def _among_best(count: int, found: Choices) -> Sums:
    _, best = jax.lax.top_k(found.scores, count)
    right = (best == found.labels[:, None]).any(1)
    return (right * found.weight).sum(), found.weight.sum()


class _Confusion(NamedTuple):
    """Per class, how often it is chosen, true and both."""

    chosen: jax.Array
    true: jax.Array
    both: jax.Array


def _confusion(found: Choices | Answers) -> Sums:
    if isinstance(found, Choices):
        classes = found.scores.shape[1]
        chosen = jax.nn.one_hot(found.scores.argmax(1), classes, dtype=bool)
        true = jax.nn.one_hot(found.labels, classes, dtype=bool)
    else:
        chosen, true = found.given, found.true
    counts = ((found.weight[:, None] * x).sum(0) for x in (chosen, true, chosen & true))
    # of classes those that occur count, of yes or no all: both as in scikit-learn
    always = isinstance(found, Answers) * found.weight.sum()
    return _Confusion(*counts), always


def _macro(of_class: Callable[[_Confusion], jax.Array]) -> Callable[[Sums], jax.Array]:
    def value(sums):
        counts, always = sums
        occurs = counts.chosen + counts.true + always > 0
        return _divide((of_class(counts) * occurs).sum(), occurs.sum())

    return value


def _error(power: int, outputs, targets, weight) -> Sums:
    return totals(jnp.abs(outputs - targets).astype(float) ** power, weight)


class _Spread(NamedTuple):
    """Moments of targets, and the squared error, per column."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array
    """The sum of squared distances from the mean."""
    error: jax.Array


def _spread(outputs, targets, weight) -> Sums:
    outputs, targets = (x.reshape(len(weight), -1).astype(float) for x in (outputs, targets))
    weight = weight[:, None]
    mean = (targets * weight).sum(0) / weight.sum()
    squares = ((targets - mean) ** 2 * weight).sum(0)
    error = jnp.where(weight > 0, (outputs - targets) ** 2, 0).sum(0)
    return _Spread(weight.sum(), mean, squares, error)


def _merge_spread(a: _Spread, b: _Spread) -> _Spread:
    """Merge as Chan, Golub and LeVeque (1983) do: no difference of large sums."""
    count = a.count + b.count
    step = b.mean - a.mean
    share = _divide(b.count, count)
    squares = a.squares + b.squares + step**2 * a.count * share
    return _Spread(count, a.mean + step * share, squares, a.error + b.error)


def _determined(sums: _Spread) -> jax.Array:
    constant = sums.squares == 0
    score = 1 - sums.error / jnp.where(constant, 1, sums.squares)
    return jnp.where(constant, jnp.where(sums.error == 0, 1.0, 0.0), score).mean()


_CLASSES = {
    "accuracy": (_right, _ratio),
    "f1": (_confusion, _macro(lambda n: _divide(2 * n.both, n.chosen + n.true))),
    "precision": (_confusion, _macro(lambda n: _divide(n.both, n.chosen))),
    "recall": (_confusion, _macro(lambda n: _divide(n.both, n.true))),
}
"""Metrics of decisions: their sums, and the value."""

_NUMBERS = {
    "mae": (lambda *batch: _error(1, *batch), _ratio, add),
    "mse": (lambda *batch: _error(2, *batch), _ratio, add),
    "r2": (_spread, _determined, _merge_spread),
}
"""Metrics of outputs that are like their targets."""

_NAMES = ", ".join([*_CLASSES, *_NUMBERS, "top_5 (and any number)"])


def find(metric: Any, reader: Reader) -> tuple[str, Metric]:
    """Return the metric of that name, or around that callable, and its name.

    Raises:
      TrainingError: there is none of that name, or a callable without one.
    """
    if callable(metric):
        name = getattr(metric, "__name__", "")
        if not name.isidentifier():
            raise TrainingError(
                f"the metric {metric!r} has no name to stand in the history; define it with def"
            )
        return name, Metric(
            lambda outputs, targets, weight: totals(
                jnp.asarray(metric(outputs, targets)).astype(float), weight
            ),
            _ratio,
            add,
        )
    known = isinstance(metric, str)
    if known and metric in _NUMBERS:
        return metric, Metric(*_NUMBERS[metric])
    best = re.fullmatch(r"top_([1-9]\d*)", metric) if known else None
    if best is None and not (known and metric in _CLASSES):
        raise TrainingError(
            f"there is no metric {metric!r}; there are {_NAMES}, or pass a function "
            "(outputs, targets) -> scalar or one value for each example"
        )

    def read(outputs, targets, weight) -> Any:
        return reader.decisions(outputs, targets, weight)

    if best is not None:
        count = int(best[1])
        return metric, Metric(lambda *batch: _among_best(count, read(*batch)), _ratio, add)
    sums, value = _CLASSES[metric]
    return metric, Metric(lambda *batch: sums(read(*batch)), value, add)


def check(name: str, metric: Any, reader: Reader, outputs: Any, targets: Any) -> None:
    """Refuse a metric that does not fit outputs and targets, given their shapes."""
    if callable(metric):
        value = jax.eval_shape(metric, outputs, targets)
        size = len(jax.tree.leaves(targets)[0])
        if not hasattr(value, "shape") or value.shape[:1] not in ((), (size,)):
            raise TrainingError(
                f"the metric '{name}' must be a scalar or have one value for each of {size} "
                f"examples, and is {value}"
            )
        return
    if not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
        raise TrainingError(
            f"the metric '{name}' takes one output and one target; for a model with several pass "
            "a dict of metrics by output name, or a callable (outputs, targets)"
        )
    if metric in _NUMBERS:
        if outputs.shape != targets.shape:
            raise TrainingError(
                f"the metric '{name}' needs targets of the shape of the outputs, {outputs.shape}; "
                f"they have {targets.shape}"
            )
        return
    axis = reader.class_axis(outputs.shape, targets.shape)
    if axis is None and reader.threshold is None:
        raise TrainingError(
            f"the metric '{name}' cannot know which outputs mean yes, because the loss is a "
            "callable and the model does not end in Sigmoid; pass the metric as a callable as well"
        )
    if metric.startswith("top_"):
        classes = None if axis is None else outputs.shape[axis]
        if classes is None or int(metric.removeprefix("top_")) > classes:
            raise TrainingError(
                f"the metric '{name}' needs as many classes; the outputs have shape {outputs.shape}"
            )
