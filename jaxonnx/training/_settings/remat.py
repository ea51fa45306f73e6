"""Activations that the backward pass recomputes (`remat=`)."""

from jaxonnx.training._settings.plan import Plan


def recompute_activations(plan: Plan) -> None:
    """Recompute most activations in the backward pass."""
    if plan.settings.remat:
        plan.model = plan.model.with_remat()
