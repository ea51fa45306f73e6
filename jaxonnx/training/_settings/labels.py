"""How labels of classes count in a loss (`class_weights=`, `label_smoothing=`)."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

import numpy as np

from jaxonnx._arguments import Argument
from jaxonnx._data import images
from jaxonnx._data.batches import Examples, PaddedExamples
from jaxonnx._display import list_some
from jaxonnx._require import is_one_of, require
from jaxonnx.errors import TrainingError
from jaxonnx.training._objective import Term
from jaxonnx.training._settings import Plan

_SHOWN = 8


class ClassWeightsArguments(TypedDict, total=False):
    """Weights of classes."""

    class_weights: Annotated[
        str | Mapping[Any, Any] | None,
        Argument(
            form="balanced|NAME=X...",
            expected="'balanced', a dict from classes to weights, or a dict of these by output",
            resume=True,
            needs_loss=True,
        ),
    ]
    """The weight of each class in the loss, by name or index; or "balanced".

    Weights apply in training and validation, and multiply the weights of examples. Classes that are
    not listed have weight 1. "balanced" gives each class of the data the same total weight, of
    one-hot labels and mixtures that of their shares; it is not available for iterables. Only losses
    with class labels accept it. If there are several, pass a dict by output name, like
    {"kind": {2: 5.0}, "color": "balanced"}. Metrics ignore it."""


def weigh_classes(plan: Plan) -> None:
    """Apply class weights to the loss that takes them.

    Raises:
      TrainingError: there is no such class, nothing to balance, or not one loss of classes.
    """
    weights, terms = plan.settings.class_weights, plan.goal.terms
    if weights is None:
        return
    chosen = [t for t in terms if t.loss.class_axis is not None or t.loss.one_hot] or [*terms]
    if not (
        isinstance(weights, Mapping) and any(isinstance(x, Mapping | str) for x in weights.values())
    ):
        if len(chosen) != 1:
            raise TrainingError(
                f"class_weights go with one loss of classes; there are {len(chosen)}: pass a dict "
                f"by output, like {{{chosen[0].output!r}: {{0: 2.0}}}}"
            )
        weights = {chosen[0].output: weights}
    outputs = [term.output for term in terms]
    if unknown := [name for name in weights if name not in outputs]:
        raise TrainingError(
            f"class_weights has {list_some([*map(repr, unknown)])} beside weights by output; the "
            f"outputs with a loss are {list_some([repr(name) for name in outputs if name])}"
        )
    labels = images.preparation(plan.model).labels
    weighed: list[Term] = []
    for term in terms:
        of_classes = class_weights_by_index(
            weights.get(term.output, {}), labels, plan.examples, term
        )
        loss = term.loss.with_class_weights(of_classes) if of_classes else term.loss
        weighed.append(replace(term, loss=loss))
    plan.goal = replace(plan.goal, terms=tuple(weighed))


def class_weights_by_index(
    weights: Any, labels: Sequence[str], data: Any, term: Term
) -> dict[int, float]:
    """Return weights by the number of the class.

    Args:
      weights: those of `class_weights` for one output.
      labels: the names of the classes, where they are known.
      data: to balance.
      term: the loss of the output. Labels that it ignores do not count.

    Raises:
      TrainingError: there is no such class, or nothing to balance.
    """
    if is_one_of(weights, ("balanced",)):
        return _balance(data, term)
    fits = isinstance(weights, Mapping) and all(
        isinstance(x, int | float | np.number) and not isinstance(x, bool) and 0 <= x < np.inf
        for x in weights.values()
    )
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


def _balance(data: Any, term: Term) -> dict[int, float]:
    """Return weights with which each class that occurs weighs as much as any other, 1 on average.

    They are those of scikit-learn: all labels / (classes * labels of the class). Of a mixture each
    class has its share.
    """
    targets = (
        data.columns.pair[1] if isinstance(data, PaddedExamples) else getattr(data, "targets", None)
    )
    if isinstance(targets, Mapping):
        targets = targets.get(term.output)
    kinds = "biuf" if term.loss.one_hot else "iu"
    if not isinstance(targets, np.ndarray) or targets.dtype.kind not in kinds:
        raise TrainingError(
            "class_weights='balanced' counts the labels of data in one piece, in one array of "
            "integers for each loss; for other data pass a dict of weights"
        )
    assert isinstance(data, Examples)
    chosen = targets[data.rows]
    if term.loss.one_hot:
        shares = np.nansum(chosen.reshape(-1, chosen.shape[-1]), 0)
        (classes,) = shares.nonzero()
        counts = shares[classes]
    else:
        ignored = [] if term.loss.ignore_index is None else [term.loss.ignore_index]
        classes, counts = np.unique(chosen[~np.isin(chosen, ignored)], return_counts=True)
    weights = counts.sum() / (len(classes) * counts)
    return dict(zip(classes.tolist(), weights.tolist(), strict=True))


class LabelSmoothingArguments(TypedDict, total=False):
    """Smoothed labels."""

    label_smoothing: Annotated[
        float | None, Argument(form="X", least=0, below=1, resume=True, needs_loss=True)
    ]
    """The share of each label that is spread over all classes alike, like 0.1.

    For cross entropies of classes and of tokens, in training and validation, as in PyTorch and
    transformers. With `class_weights`, each share counts with the weight of its own class. Labels
    that are ignored stay so."""


def smooth_labels(plan: Plan) -> None:
    """Smooth the labels of all cross entropies.

    Raises:
      TrainingError: no loss takes labels that can be smoothed.
    """
    terms, smoothing = plan.goal.terms, plan.settings.label_smoothing
    if not smoothing:
        return
    if not any(term.loss.smooths for term in terms):
        raise TrainingError(
            "label_smoothing goes with cross entropies of classes and of tokens, not with "
            f"{', '.join(str(term.loss.name or term.loss) for term in terms)}"
        )
    smoothed = (
        replace(term, loss=term.loss.with_label_smoothing(smoothing)) if term.loss.smooths else term
        for term in terms
    )
    plan.goal = replace(plan.goal, terms=tuple(smoothed))
