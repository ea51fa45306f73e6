"""Ratios of Dropout (`dropout=`)."""

from jaxonnx.training._settings.plan import Plan


def change_dropout(plan: Plan) -> None:
    """Set the ratios of Dropout, and insert Dropout where they name other values."""
    if plan.settings.dropout is not None:
        plan.model = plan.model.with_dropout(plan.settings.dropout)
