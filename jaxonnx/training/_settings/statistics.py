"""The statistics of BatchNormalization (`statistics=`).

Running statistics are recomputed from training data where moving averages are not of the weights:
they have not converged, or they follow the weights that are trained, and others are validated and
returned.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal, TypedDict

import jax
import jax.numpy as jnp

from jaxonnx._arguments import Argument
from jaxonnx._data.batches import Batch, Source
from jaxonnx._display import format_count
from jaxonnx.errors import warn
from jaxonnx.model import MOST, apply_totals, batch_norms, find_single_values, zero_totals
from jaxonnx.training._loop.stopping import Interrupt
from jaxonnx.training._settings import Plan, Settings
from jaxonnx.training._step import State, Step


class StatisticsArguments(TypedDict, total=False):
    """The statistics of BatchNormalization."""

    statistics: Annotated[
        Literal["batch", "frozen", "recompute"] | None,
        Argument(form="choice", resume=True, needs_loss=True),
    ]
    """The statistics that BatchNormalization uses in training: "batch", "frozen" or "recompute".

    * "batch": those of the batch; the running statistics are updated.
    * "frozen": the running statistics, which stay as they are (`Model.with_statistics`).
    * "recompute": like "batch", and at the end of each epoch, before validation, the running
      statistics are recomputed from up to 200 batches of training data
      (`Model.recompute_statistics`).

    The default is "batch", and "recompute" at the ends of epochs up to step 5 / (1 - momentum),
    before which running averages have not converged. `history.notes` records this."""


def choose_statistics(plan: Plan) -> None:
    """Choose the statistics that BatchNormalization uses in training."""
    mode = plan.settings.statistics
    if mode is not None:
        plan.model = plan.model.with_statistics("batch" if mode == "recompute" else mode)


class Statistics:
    """The statistics of BatchNormalization at the end of an epoch.

    Args:
      settings: `statistics`.
      state: of the step, whose statistics are renewed.
    """

    def __init__(
        self, step: Step, examples: Source, settings: Settings, state: State, interrupt: Interrupt
    ):
        norms = [n for n in batch_norms(step.model) if {*n[:2]} <= state.state.keys()]
        self._norms = [] if settings.statistics == "batch" else norms
        self._others = step.has_second_weights(state)
        self._always = self._others or settings.statistics == "recompute"
        self._step, self._examples, self._interrupt = step, examples, interrupt
        self._add = step.compile(step.statistics)
        self._batches = self._steps = 0
        self._left = False

    def renew(self, state: State, epoch: int, steps: int, batches: int) -> State:
        """Return the state with statistics of its weights, if averages are not of these.

        Args:
          steps: those of the run until now.
          batches: those of the epoch.
        """
        self._left, self._batches = self._are_unsettled(steps), 0
        if not self._left or self._examples.spent or not batches:
            return state
        totals: Any = zero_totals(self._norms, state.state)
        self._batches, self._steps = min(batches, MOST), steps
        for batch in self._interrupt.iterate(self._read(epoch)):
            batch = self._step.put(batch, self._examples.in_shares)
            totals = self._add(totals, state, batch, self._step.frozen)
        if not all(jnp.isfinite(x).all() for x in totals.values()):
            return state
        self._left = False
        new = apply_totals(state.state, totals)
        return state.replace(state={n: _place(x, state.state[n]) for n, x in new.items()})

    def _are_unsettled(self, steps: int) -> bool:
        return bool(self._norms) and (
            self._always or not all(norm.settles(steps) for norm in self._norms)
        )

    def _read(self, epoch: int) -> Iterator[Batch]:
        return islice(self._examples.batches(epoch), self._batches)

    def notes(self, steps: int, whole: bool) -> Iterator[str]:
        """Describe the origin of the statistics of the result after so many steps.

        Args:
          whole: whether the result has the weights of the end of an epoch.
        """
        count = format_count(len(self._norms), "BatchNormalization")
        slowest = max((norm.momentum for norm in self._norms), default=0)

        def why(steps):
            if self._others:
                return "the weights that were trained are not those of the model"
            done = format_count(steps, "step")
            return f"running averages with momentum {slowest:.4g} do not converge in {done}"

        if self._are_unsettled(steps) and (self._left or not whole):
            yield (
                f"the running statistics of {count} are moving averages, and {why(steps)}: "
                "result.model.recompute_statistics(data) computes them from the data"
            )
        elif self._batches and whole:
            plain = self._always and not self._others
            reason = "statistics='recompute'" if plain else why(self._steps)
            yield (
                f"the running statistics of {count} were recomputed from "
                f"{self._batches:,} batch{'es' * (self._batches > 1)} of the training data with "
                f"the final weights: {reason}"
            )


def _place(x: jax.Array, old: jax.Array) -> jax.Array:
    """Return an array where another of its shape lies."""
    if x.sharding.is_equivalent_to(old.sharding, x.ndim):
        return x
    return jax.device_put(x, old.sharding)


def warn_of_single_values(step: Step, batch: Batch) -> None:
    """Warn of normalizations over one number, whose output is their bias whatever the input."""
    if not (names := find_single_values(step.model, batch.inputs)):
        return
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    warn(
        f"the BatchNormalization of '{names[0]}'{more} sees one value per channel, in a batch "
        "of one example: in training its output is its bias for any input, and no layer before it "
        "learns (PyTorch raises an error here). Train with larger batches (batch_size=, "
        "and for a file that fixes the batch to 1 jaxonnx.load(..., batch='any')), or with "
        "statistics='frozen'",
    )
