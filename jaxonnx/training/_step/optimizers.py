"""Optimizers of optax by name, with a schedule, and the learning rate in their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any, Literal

import jax
import optax

from jaxonnx._arguments import OPTIMIZERS, RATE
from jaxonnx._graph.uses import uses_by_tensor, weights
from jaxonnx._require import check_arguments, require, require_choice
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model

DECAYING = ("adamw", "lion")
"""The optimizers whose weights decay by default."""


def optimizer(
    name: str = "adam",
    rate: float | Callable[[Any], Any] = RATE,
    steps: int | None = None,
    *,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup: float = 0.0,
    clip: float | None = None,
    weight_decay: float | None = None,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of optax with a schedule, clipped gradients and weight decay.

    Its state has the learning rate as a hyperparameter (`optax.inject_hyperparams`), where `train`
    finds it for `history.rates`, for logs and for the progress bar.

    >>> made = optimizer("adamw", 3e-4, 1000, schedule="cosine", warmup=0.1, clip=1.0)
    >>> float(made.init({})[-1].hyperparams["learning_rate"])  # of the first step
    0.0

    Args:
      name: "adam", "adamw", "adagrad", "lion", "rmsprop" or "sgd", with the settings of optax.
      rate: the learning rate, with a schedule the greatest one; or a schedule of optax itself.
      steps: the updates of the run. `train` knows them, and takes a function of them: `lambda
        steps: jaxonnx.training.optimizer("sgd", 0.1, steps, schedule="linear")`.
      schedule: after the warmup the rate is "constant", or falls to zero at the end of the run, on
        a line or on half a period of the cosine.
      warmup: the updates in which the rate rises from zero; below one, their share of `steps`.
      clip: the greatest norm of all gradients together, to which longer ones are scaled down.
      weight_decay: the share of each parameter that an update takes away, times the rate, as in
        `optax.adamw`, of which "adam" with weight decay is another name. By default that of the
        optimizer in optax: 1e-4 for "adamw", 1e-3 for "lion", none for others.
      mask: the parameters that decay, as in `optax.adamw`: a tree of booleans, or a function of the
        parameters that returns one. All by default; `train(optimizer="adamw")` leaves out biases,
        normalizations and other vectors.

    Raises:
      TrainingError: a setting does not fit.
    """
    check_arguments(optimizer, locals(), TrainingError)
    require_choice("optimizer", name, OPTIMIZERS, TrainingError)
    if not callable(rate):
        _positive("rate", rate)
    _positive("warmup", warmup, zero=True)
    if clip not in (None, math.inf):
        _positive("clip", clip)
    if weight_decay is not None:
        _positive("weight_decay", weight_decay, zero=True)
    rule: Any = getattr(optax, name)
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    options = {**decay, "mask": mask} if name in DECAYING else {}
    parts = [] if clip is None else [optax.clip_by_global_norm(clip)]
    parts.append(rule(-1.0, **options))  # the last part has the rate, and the sign
    if decay and not options:
        parts.append(optax.add_decayed_weights(**decay, mask=mask))
    rates = _rates(rate, steps, schedule, warmup)
    parts.append(optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=rates))
    return optax.with_extra_args_support(optax.chain(*parts))


def named_optimizer(
    name: str, spared: Collection[str], learning_rate: float = RATE, **chosen: Any
) -> Any:
    """Return the optimizer of `train`'s arguments: a function of the updates if a schedule is.

    Args:
      spared: the names of parameters that do not decay.
    """

    def mask(params):
        return {name: name not in spared for name in params}

    def make(steps):
        return optimizer(name, learning_rate, steps, **chosen, mask=mask)

    plans = chosen.get("schedule", "constant") != "constant" or 0 < chosen.get("warmup", 0) < 1
    return make if plans else make(None)


def find_vectors(model: Model) -> set[str]:
    """Return the parameters that are biases, scales of normalizations, or other vectors.

    Biases of recurrent layers have two axes, and so have those of layers that are stacked in one
    tensor. Tables of positions are no vectors: an elementwise operator adds these.
    """
    meanings = weights(model.graph, model.tensors)
    read = uses_by_tensor(model.graph, model.tensors)

    def is_vector(name: str) -> bool:
        declared = (not use.node.op.pointwise for use in read[name] if not use.passes)
        return named[name].is_vector or any(declared)

    named = {name: meanings[name] for name in model.params if name in read}
    free = {name for name, x in named.items() if x.matrix is None and x.start is not None}
    return set(filter(is_vector, free))


def _rates(rate: Any, steps: int | None, schedule: str, warmup: float) -> Any:
    """Return the rate, or the rate of each update."""
    if schedule == "constant" and not warmup:
        return rate
    if callable(rate):
        raise TrainingError("rate is a schedule: leave schedule= and warmup= out")
    if steps is None and (schedule != "constant" or warmup < 1):
        what = f"the schedule {schedule!r}" if schedule != "constant" else f"warmup={warmup}"
        raise TrainingError(
            f"{what} needs steps=, the updates of the run; train(optimizer=) takes a function of "
            "them, like lambda steps: optimizer('adam', 1e-3, steps, schedule='cosine')"
        )
    rising = round(warmup * steps) if warmup < 1 and steps is not None else round(warmup)
    rest = max(1, (steps or rising) - rising)
    after = {
        "constant": lambda: optax.constant_schedule(rate),
        "linear": lambda: optax.linear_schedule(rate, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest),
    }[schedule]()
    if not rising:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, rate, rising), after], [rising])


def rate_of(memory: Any) -> jax.Array | None:
    """Return the learning rate of the last update, if the state of an optimizer has just one."""
    kind = optax.InjectStatefulHyperparamsState
    leaves = jax.tree.leaves(memory, is_leaf=lambda x: isinstance(x, kind))
    hyperparameters = [x.hyperparams for x in leaves if isinstance(x, kind)]
    rates: list[Any] = [x["learning_rate"] for x in hyperparameters if "learning_rate" in x]
    return rates[0] if len(rates) == 1 else None


def _positive(what: str, value: Any, zero: bool = False) -> None:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    least = "of at least" if zero else "above"
    fits = 0 < number < math.inf or (zero and number == 0)
    require(what, value, fits, f"a finite number {least} 0", TrainingError)
