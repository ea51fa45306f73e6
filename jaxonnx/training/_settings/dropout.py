"""Ratios of Dropout (`dropout=`)."""

from collections.abc import Mapping
from typing import Annotated, TypedDict

from jaxonnx._arguments import Argument
from jaxonnx.training._settings import Plan


class DropoutArguments(TypedDict, total=False):
    """Ratios of Dropout."""

    dropout: Annotated[
        float | Mapping[str, float] | None,
        Argument(form="X|NAME=X...", resume=True, needs_loss=True),
    ]
    """The ratio of all Dropout nodes, or ratios by value, node or module.

    A ratio by name also inserts Dropout where an exporter removed it (`Model.with_dropout`)."""


def change_dropout(plan: Plan) -> None:
    """Set the ratios of Dropout, and insert Dropout where they name other values."""
    if plan.settings.dropout is not None:
        plan.model = plan.model.with_dropout(plan.settings.dropout)
