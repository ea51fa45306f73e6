"""Activations that the backward pass recomputes (`remat=`)."""

from typing import Annotated, TypedDict

from jaxonnx._arguments import Argument
from jaxonnx.training._settings import Plan


class RematArguments(TypedDict, total=False):
    """Activations that are recomputed."""

    remat: Annotated[bool, Argument(False, form="switch", needs_loss=True)]
    """Recompute most activations in the backward pass instead of storing them.

    For networks whose activations do not fit into memory (`Model.with_remat`)."""


def recompute_activations(plan: Plan) -> None:
    """Recompute most activations in the backward pass."""
    if plan.settings.remat:
        plan.model = plan.model.with_remat()
