"""Class weights: by name, by index, or balanced (`class_weights=`)."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

import numpy as np

from jaxonnx._arguments import Argument
from jaxonnx._data import images
from jaxonnx._data.batches import Examples, PaddedExamples
from jaxonnx._require import is_one_of, require
from jaxonnx.errors import TrainingError
from jaxonnx.losses import Loss
from jaxonnx.training._settings.plan import Plan

_SHOWN = 8


class ClassWeightsArguments(TypedDict, total=False):
    """Weights of classes."""

    class_weights: Annotated[
        str | Mapping[Any, float] | None,
        Argument(
            form="balanced|NAME=X...",
            expected="'balanced', or a dict from classes to weights",
            resume=True,
            needs_loss=True,
        ),
    ]
    """The weight of each class in the loss, by name or index; or "balanced".

    Weights apply in training and validation, and multiply the weights of examples. Classes that are
    not listed have weight 1. "balanced" gives each class of the data the same total weight; it is
    not available for iterables. Only losses with class labels accept it. Metrics ignore it."""


def weigh_classes(plan: Plan) -> None:
    """Apply class weights to the loss that takes them.

    Raises:
      TrainingError: there is no such class, nothing to balance, or not one loss of classes.
    """
    if plan.settings.class_weights is None:
        return
    terms, labels = plan.goal.terms, images.preparation(plan.model).labels
    losses = [term.loss for term in terms]
    weights = class_weights_by_index(plan.settings.class_weights, labels, plan.examples, losses)
    if not weights:
        return
    chosen = [t for t in terms if t.loss.class_axis is not None or t.loss.one_hot] or [*terms]
    if len(chosen) != 1:
        raise TrainingError(
            f"class_weights go with one loss of classes; there are {len(chosen)}: pass "
            "jaxonnx.losses.cross_entropy(weight=...) for each of them"
        )
    weighed = replace(chosen[0], loss=chosen[0].loss.with_class_weights(weights))
    plan.goal = replace(plan.goal, terms=tuple(weighed if t is chosen[0] else t for t in terms))


def class_weights_by_index(
    weights: Any, labels: Sequence[str], data: Any = None, losses: Sequence[Loss] = ()
) -> dict[int, float]:
    """Return weights by the number of the class.

    Args:
      weights: the argument `class_weights` of `train`.
      labels: the names of the classes, where they are known.
      data: to balance.
      losses: what the targets are for: labels that they ignore do not count.

    Raises:
      TrainingError: there is no such class, or nothing to balance.
    """
    if is_one_of(weights, ("balanced",)):
        return _balance(data, losses)
    fits = isinstance(weights, Mapping) and all(map(_is_weight, weights.values()))
    expected = (
        "'balanced', or a dict from classes (their names, or numbers from 0 on) to finite weights "
        "of at least 0"
    )
    require("class_weights", weights, fits, expected, TrainingError)
    return {_number(name, labels): float(weight) for name, weight in weights.items()}


def _number(name: Any, labels: Sequence[str]) -> int:
    if name in labels:
        return labels.index(name)
    if isinstance(name, str) and name.isdigit():  # of a TOML file or the command line
        return int(name)
    if isinstance(name, int | np.integer) and not isinstance(name, bool):
        return int(name)
    if isinstance(name, str) and not labels:
        raise TrainingError(
            f"class_weights has {name!r}, and the model does not say the names of its classes: "
            "write their numbers, or give it names (head=[...], or preprocess={'labels': [...]} "
            "with a folder of pictures)"
        )
    near = difflib.get_close_matches(str(name), labels, n=3) or [*labels[:_SHOWN]]
    raise TrainingError(
        f"class_weights has {name!r}, which is none of {len(labels)} classes: try "
        f"{', '.join(map(repr, near))}"
    )


def _balance(data: Any, losses: Sequence[Loss]) -> dict[int, float]:
    """Return weights with which each class that occurs weighs as much as any other, 1 on average.

    They are those of scikit-learn: all labels / (classes * labels of the class).
    """
    targets = (
        data.columns.pair[1] if isinstance(data, PaddedExamples) else getattr(data, "targets", None)
    )
    if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu":
        raise TrainingError(
            "class_weights='balanced' counts the labels of data in one piece, in one array of "
            "integers; for other data pass a dict of weights"
        )
    assert isinstance(data, Examples)
    chosen = targets[data.rows]
    if any(loss.one_hot for loss in losses):
        chosen = chosen.argmax(-1)
    ignored = [loss.ignore_index for loss in losses if loss.ignore_index is not None]
    classes, counts = np.unique(chosen[~np.isin(chosen, ignored)], return_counts=True)
    weights = counts.sum() / (len(classes) * counts)
    return dict(zip(classes.tolist(), weights.tolist(), strict=True))


def _is_weight(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return bool(number and np.isfinite(value) and value >= 0)
