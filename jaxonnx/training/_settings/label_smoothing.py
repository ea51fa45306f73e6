"""Labels that are spread over all classes (`label_smoothing=`)."""

from dataclasses import replace
from typing import Annotated, TypedDict

from jaxonnx._arguments import Argument
from jaxonnx.errors import TrainingError
from jaxonnx.training._settings import Plan


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
