"""Metrics, as sums over the examples of an epoch on the device, and a value of the sums.

Each metric is exact over the epoch: nothing is a mean of the batches' values. Examples of weight 0
(the fill of a short batch) and labels that the loss ignores do not count. Metrics of classes take
the decisions that a `Reader` makes of outputs and targets; they are NaN where an output or a target
that counts is NaN.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.inputs_and_targets import is_zero_or_one
from jaxonnx._data.ragged import IGNORED
from jaxonnx._require import require
from jaxonnx.errors import TrainingError
from jaxonnx.losses import Loss, check_classes, totals
from jaxonnx.training._objective.tables import ConfusionMatrix, Curves, PerClass

Sums = Any
"""A pytree of float32 arrays; zeros are the sums of no examples."""


class Metric(NamedTuple):
    """How a metric is computed, batch by batch."""

    sums: Callable[[Any, Any, jax.Array], Sums]
    """Of a batch: (outputs, targets, weight of each example)."""
    value: Callable[[Sums], Any]
    """The metric of the examples in the sums: a number, or one of the tables of `evaluate`."""
    merge: Callable[[Sums, Sums], Sums] | None
    """None for a metric that needs the predictions of all examples, which are gathered."""
    number: bool = True


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
    """The meaning of outputs and targets.

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
        if targets.shape == outputs.shape:
            outputs = jnp.where(targets != targets, jnp.nan, outputs)
        axis = self.class_axis(outputs.shape, targets.shape)
        if axis is None:
            return self._binary(outputs, targets, weight)
        scores = jnp.moveaxis(outputs, axis, -1)
        if targets.ndim == outputs.ndim:
            targets = jnp.moveaxis(targets, axis, -1).argmax(-1)
        weight = jnp.broadcast_to(_beside(weight, targets.ndim), targets.shape)
        ignored = None if self.loss is None else self.loss.ignore_index
        # without a loss that says so, the fill of texts whose lengths differ
        weight = jnp.where(targets == (IGNORED if ignored is None else ignored), 0, weight)
        scores = scores.reshape(-1, scores.shape[-1])
        labels = targets.reshape(-1).astype(int)  # floats that `check_labels` finds whole
        return Choices(scores, labels, weight.reshape(-1))

    def _binary(self, outputs: Any, targets: Any, weight: jax.Array) -> Answers:
        outputs = outputs.reshape(targets.shape)  # which may lack an axis of one score
        weight = jnp.broadcast_to(_beside(weight, targets.ndim), targets.shape)
        predicted, true = outputs > (self.threshold or 0.0), targets > 0.5
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
        axis 1 if only that fits. A single score there says yes or no: it is no class.
        """
        if self.loss is not None and self.loss.class_axis is not None:
            return self.loss.class_axis
        if outputs == targets:
            one_hot = self.loss is not None and self.loss.one_hot
            return -1 if one_hot or self.ending in ("Softmax", "LogSoftmax") else None
        for axis in (-1, 1):
            rest = [size for i, size in enumerate(outputs) if i != axis % len(outputs)]
            if rest == [*targets] and len(outputs) > 1:
                return axis if outputs[axis] > 1 else None
        raise TrainingError(
            f"metrics of classes need labels of shape {outputs[:-1]}, or targets like the outputs "
            f"{outputs}; they have {targets}"
        )


def _beside(weight: jax.Array, rank: int) -> jax.Array:
    return weight.reshape(-1, *(1,) * (rank - 1))


def add(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)


def _ratio(sums: Sums) -> jax.Array:
    """Return a mean, which is NaN where nothing counts."""
    total, count = sums
    return jnp.where(count > 0, _divide(total, count), jnp.nan)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def _is_undecided(decisions: Choices | Answers) -> jax.Array:
    """Check whether each prediction counts and has a score that is NaN."""
    return (decisions.scores != decisions.scores).any(1) & (decisions.weight > 0)


def _mean(right: jax.Array, decisions: Choices | Answers) -> Sums:
    """Return the sums of a mean over predictions, which is NaN where one is undecided."""
    right = jnp.where(_is_undecided(decisions), jnp.nan, right)
    return (right * decisions.weight).sum(), decisions.weight.sum()


def _count_right(decisions: Choices | Answers) -> Sums:
    if isinstance(decisions, Choices):
        right = decisions.scores.argmax(1) == decisions.labels
    else:
        right = (decisions.given == decisions.true).mean(1)
    return _mean(right, decisions)


def _negative_log_probability(ending: str | None, decisions: Choices) -> Sums:
    """Return the sum of the negative log probabilities of the labels, and their weight."""
    scores = decisions.scores.astype(float)
    logs = jnp.log(scores) if ending == "Softmax" else jax.nn.log_softmax(scores, 1)
    label = jnp.clip(decisions.labels, 0, scores.shape[1] - 1)[:, None]
    losses = jnp.where(decisions.weight > 0, -jnp.take_along_axis(logs, label, 1)[:, 0], 0)
    return _mean(losses, decisions)


def _among_best(count: int, decisions: Choices) -> Sums:
    _, best = jax.lax.top_k(decisions.scores, count)
    return _mean((best == decisions.labels[:, None]).any(1), decisions)


def _matrix(decisions: Choices | Answers) -> Sums:
    """Return the confusion matrix, unweighted, and how many predictions it leaves out as NaN."""
    if isinstance(decisions, Choices):
        classes, chosen = decisions.scores.shape[1], decisions.scores.argmax(1)
        true = decisions.labels
    else:
        classes, chosen = 2, decisions.given[:, 0].astype(int)
        true = decisions.true[:, 0].astype(int)
    undecided = _is_undecided(decisions)
    counts = (true >= 0) & (true < classes) & (decisions.weight > 0) & ~undecided
    place = jnp.where(counts, true * classes + chosen, classes**2)
    matrix = jnp.zeros(classes**2, jnp.int32).at[place].add(1, mode="drop")
    return matrix.reshape(classes, classes), undecided.sum()


def _gather_predictions(decisions: Choices | Answers) -> Sums:
    """Return scores, truth and weight of each prediction."""
    if isinstance(decisions, Choices):
        return decisions.scores, decisions.labels, decisions.weight
    return decisions.scores, decisions.true, decisions.weight


class _Confusion(NamedTuple):
    """Per class, how often it is chosen, true and both."""

    chosen: jax.Array
    true: jax.Array
    both: jax.Array


def _confusion(decisions: Choices | Answers) -> Sums:
    if isinstance(decisions, Choices):
        classes = decisions.scores.shape[1]
        chosen = jax.nn.one_hot(decisions.scores.argmax(1), classes, dtype=bool)
        true = jax.nn.one_hot(decisions.labels, classes, dtype=bool)
    else:
        chosen, true = decisions.given, decisions.true
    undecided = _is_undecided(decisions)[:, None]
    chosen, both = (jnp.where(undecided, jnp.nan, x) for x in (chosen, chosen & true))
    counts = ((decisions.weight[:, None] * x).sum(0) for x in (chosen, true, both))
    # of classes those that occur count, of yes or no all: both as in scikit-learn
    always = isinstance(decisions, Answers) * decisions.weight.sum()
    return _Confusion(*counts), always


def _macro(of_class: Callable[[_Confusion], jax.Array]) -> Callable[[Sums], jax.Array]:
    def value(sums):
        counts, always = sums
        occurs = counts.chosen + counts.true + always > 0
        mean = _divide((of_class(counts) * occurs).sum(), occurs.sum())
        return jnp.where(jnp.isnan(counts.chosen).any(), jnp.nan, mean)

    return value


def _error(power: int, outputs, targets, weight) -> Sums:
    return totals(jnp.abs(outputs - targets).astype(float) ** power, weight)


class _Moments(NamedTuple):
    """Moments of targets, and the squared error, per column."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array
    """The sum of squared distances from the mean."""
    error: jax.Array


def _sum_moments(outputs, targets, weight) -> Sums:
    outputs, targets = (x.reshape(len(weight), -1).astype(float) for x in (outputs, targets))
    weight = weight[:, None]
    mean = _divide((targets * weight).sum(0), weight.sum())
    squares = ((targets - mean[None]) ** 2 * weight).sum(0)
    error = jnp.where(weight > 0, (outputs - targets) ** 2 * weight, 0).sum(0)
    return _Moments(weight.sum(), mean, squares, error)


def _merge_moments(a: _Moments, b: _Moments) -> _Moments:
    """Merge as Chan, Golub and LeVeque (1983) do: no difference of large sums."""
    count = a.count + b.count
    step = b.mean - a.mean
    share = _divide(b.count, count)
    squares = a.squares + b.squares + step**2 * a.count * share
    return _Moments(count, a.mean + step * share, squares, a.error + b.error)


def _r_squared(sums: _Moments) -> jax.Array:
    constant = sums.squares == 0
    score = 1 - sums.error / jnp.where(constant, 1, sums.squares)
    of_constant = jnp.where(sums.error == 0, 1.0, jnp.where(jnp.isnan(sums.error), jnp.nan, 0.0))
    return jnp.where(constant, of_constant, score).mean()


_CLASSES = {
    "accuracy": (_count_right, _ratio),
    "dice": (_confusion, _macro(lambda n: _divide(2 * n.both, n.chosen + n.true))),
    "f1": (_confusion, _macro(lambda n: _divide(2 * n.both, n.chosen + n.true))),
    "iou": (_confusion, _macro(lambda n: _divide(n.both, n.chosen + n.true - n.both))),
    "precision": (_confusion, _macro(lambda n: _divide(n.both, n.chosen))),
    "recall": (_confusion, _macro(lambda n: _divide(n.both, n.true))),
}
"""Metrics of decisions: their sums, and the value."""

_TABLES = {
    "confusion_matrix": (_matrix, lambda sums: ConfusionMatrix.of(*sums), add),
    "per_class": (_confusion, lambda sums: PerClass.of(*sums[0]), add),
    "roc_curve": (_gather_predictions, partial(Curves.of, "roc"), None),
    "precision_recall_curve": (
        _gather_predictions,
        partial(Curves.of, "precision_recall"),
        None,
    ),
}
"""Metrics of decisions whose value is a table, for `evaluate`."""

_AREAS = {
    "roc_auc": lambda gathered: Curves.of("roc", gathered).area,
    "average_precision": lambda gathered: Curves.of("precision_recall", gathered).area,
}
"""Numbers that need the scores of all examples, for `evaluate`."""

_OF_SCORES = {*_AREAS, "roc_curve", "precision_recall_curve"}
"""Metrics of scores at all thresholds, which need none for decisions."""

_NUMBERS = {
    "mae": (lambda *batch: _error(1, *batch), _ratio, add),
    "mse": (lambda *batch: _error(2, *batch), _ratio, add),
    "r2": (_sum_moments, _r_squared, _merge_moments),
}
"""Metrics of outputs that are shaped like their targets."""

_NAMES = ", ".join([*_CLASSES, *_NUMBERS, "perplexity", "top_5 (and any number)"])
_OF_EVALUATE = ", ".join([*_AREAS, *_TABLES])


def find(metric: Any, reader: Reader) -> tuple[str, Metric]:
    """Return the metric of that name, or around that callable, and its name.

    Raises:
      TrainingError: an unknown name, or a callable without a name.
    """
    if callable(metric):
        name = getattr(metric, "__name__", "")
        if not name.isidentifier():
            raise TrainingError(f"the metric {metric!r} has no name: define it with def")
        return name, Metric(
            lambda outputs, targets, weight: totals(
                jnp.asarray(metric(outputs, targets)).astype(float), weight
            ),
            _ratio,
            add,
        )
    named = isinstance(metric, str)
    if named and metric in _NUMBERS:
        return metric, Metric(*_NUMBERS[metric])
    best = re.fullmatch(r"top_([1-9]\d*)", metric) if named else None
    if best is None and not (
        named and (metric == "perplexity" or metric in {**_CLASSES, **_TABLES, **_AREAS})
    ):
        raise TrainingError(
            f"there is no metric {metric!r}; there are {_NAMES}, for jaxonnx.evaluate also "
            f"{_OF_EVALUATE}, or pass a function (outputs, targets) -> scalar or one value for "
            "each example"
        )

    def read(outputs, targets, weight) -> Any:
        return reader.decisions(outputs, targets, weight)

    if best is not None:
        count = int(best[1])
        return metric, Metric(lambda *batch: _among_best(count, read(*batch)), _ratio, add)
    if metric == "perplexity":
        return metric, Metric(
            lambda *batch: _negative_log_probability(reader.ending, read(*batch)),
            lambda sums: jnp.exp(_ratio(sums)),
            add,
        )
    if metric in _AREAS:
        return metric, Metric(
            lambda *batch: _gather_predictions(read(*batch)), _AREAS[metric], None
        )
    if metric in _TABLES:
        sums, value, merge = _TABLES[metric]
        return metric, Metric(lambda *batch: sums(read(*batch)), value, merge, number=False)
    sums, value = _CLASSES[metric]
    return metric, Metric(lambda *batch: sums(read(*batch)), value, add)


def check(
    name: str, metric: Any, reader: Reader, outputs: Any, targets: Any, weight: Any = None
) -> None:
    """Refuse a metric that does not fit outputs and targets, given their shapes, or weights."""
    if callable(metric):
        value = jax.eval_shape(metric, outputs, targets)
        size = len(jax.tree.leaves(targets)[0])
        fits = hasattr(value, "shape") and value.shape[:1] in ((), (size,))
        expected = f"a scalar or one value for each of {size} examples"
        require(f"the metric '{name}'", value, fits, expected, TrainingError)
        if not value.shape and not is_zero_or_one(weight):
            raise TrainingError(
                f"the metric '{name}' is a scalar, so example weights cannot be applied: return "
                f"one value for each of {size} examples"
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
    if axis is None and reader.threshold is None and metric not in _OF_SCORES:
        raise TrainingError(
            f"the metric '{name}' needs the threshold of a positive output: there is no named "
            "loss, and the model does not end in Sigmoid; pass the loss by its name, or the metric "
            "as a callable"
        )
    if metric == "perplexity" and axis is None:
        raise TrainingError(
            f"the metric '{name}' is for class labels, and the outputs {outputs.shape} say yes or "
            "no"
        )
    several = len(targets.shape) == 2 and targets.shape[1] > 1
    if metric == "confusion_matrix" and axis is None and several:
        raise TrainingError(
            f"the metric '{name}' is for single-label outputs, and those of shape {outputs.shape} "
            "are multi-label: use 'per_class'"
        )
    if metric.startswith("top_"):
        classes = None if axis is None else outputs.shape[axis]
        if classes is None or int(metric.removeprefix("top_")) > classes:
            raise TrainingError(
                f"the metric '{name}' needs as many classes; the outputs have shape {outputs.shape}"
            )


def check_labels(metric: Any, reader: Reader, outputs: Any, targets: Any, what: str) -> None:
    """Refuse labels that are not those of the outputs, unless a named loss has checked them."""
    if callable(metric) or metric in _NUMBERS:
        return
    loss = reader.loss
    if loss is not None and loss.name is not None:
        return
    axis = reader.class_axis((len(targets), *outputs.shape[1:]), targets.shape)
    if axis is None:
        wrong = targets[(targets < -1) | (targets > 1)]
        if wrong.size:
            raise TrainingError(
                f"{what} has targets like {wrong[0]}, and the metric '{metric}' takes 0 or 1 (or "
                "-1 or 1) for outputs that say yes or no; or pass the metric as a callable"
            )
    elif targets.ndim < outputs.ndim:
        check_classes(np.where(targets == IGNORED, 0, targets), outputs.shape, axis, None, what)
