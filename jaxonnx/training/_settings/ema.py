"""A moving average of the parameters (`ema=`)."""

from typing import Annotated, Any, TypedDict

import jax
import jax.numpy as jnp
import optax

from jaxonnx._arguments import Argument
from jaxonnx._display import format_count
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.accumulate import find_accumulation
from jaxonnx.training._step import copy
from jaxonnx.training._step.optimizers import evaluation_params

INITIAL_SHARE = 0.1
"""The share of the initial weights in an average above which a note says so."""


class EmaArguments(TypedDict, total=False):
    """A moving average of the parameters."""

    ema: Annotated[
        float | None,
        Argument(
            form="X",
            above=0,
            below=1,
            expected="a decay between 0 and 1, like 0.999",
            resume=True,
            needs_loss=True,
        ),
    ]
    """The decay of an exponential moving average of the parameters, like 0.999.

    It is between 0 and 1. The average starts at the initial weights, and a note in the history says
    if a run was too short to leave them. Validation, checkpoints and
    the resulting model have the average. Running statistics, which follow the weights that are
    trained, are recomputed for it from the training data (up to 200 batches) at the end of each
    epoch. So they are for the weights at which `optax.contrib.schedule_free`, `optax.lookahead` and
    `optax.contrib.sam` want the network evaluated; `statistics="batch"` keeps them. With
    `sparsity`, the average is masked with the current mask."""


def start_average(settings: Settings, params: dict[str, jax.Array]) -> dict[str, jax.Array] | None:
    """Return the average before the first step, in float32 at least; None if none is taken."""
    if settings.ema is None:
        return None
    return {name: copy(_widen(x)) for name, x in params.items()}


def move_average(
    settings: Settings, average: Any, params: dict[str, jax.Array], memory: Any
) -> dict[str, jax.Array] | None:
    """Return the average after a step.

    Args:
      params: those after the step.
      memory: the state of the optimizer after the step.
    """
    if settings.ema is None:
        return None
    # the parameters move with the last batch of a group, and so does their average
    waiting, part = find_accumulation(memory), 1 - settings.ema
    part = part if waiting is None else jnp.where(waiting.step == 0, part, 0)
    trained = jax.tree.map(_widen, evaluation_params(params, memory))
    moved: Any = optax.incremental_update(trained, average, part)
    return moved


def describe_average(settings: Settings, steps: int) -> list[str]:
    """Return a note if a run was too short for the average to leave the initial weights."""
    updates = -(-steps // settings.accumulate)
    if settings.ema is None or not updates or settings.ema**updates <= INITIAL_SHARE:
        return []
    return [
        f"ema={settings.ema} leaves {settings.ema**updates:.0%} of the initial weights in the "
        f"average after {format_count(updates, 'update')}; ema={0.01 ** (1 / updates):.2g} would "
        "leave 1 %"
    ]


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
