"""The optimizer of a step: by name, fitted to the arguments of a step, and its own weights.

The gradient is taken at `State.params`. Other weights are validated, saved and returned where a run
keeps two sets of them. They are the result of

* `ema=`: their moving average;
* `optax.contrib.schedule_free`: the average x, of which the params are the point y;
* `optax.lookahead`: the slow weights;
* `optax.contrib.sam`: the weights before an adversarial step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import SAMState, ScheduleFreeState, schedule_free_eval_params

from jaxonnx._arguments import OPTIMIZERS, RATE
from jaxonnx._graph.uses import uses_by_tensor, weights
from jaxonnx._require import check_arguments, require, require_choice
from jaxonnx.errors import TrainingError
from jaxonnx.lowering import group_updates
from jaxonnx.model import Model
from jaxonnx.training._settings.sparsity import masks
from jaxonnx.training._step import State

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
    uses_of = uses_by_tensor(model.graph, model.tensors)

    def is_vector(name: str) -> bool:
        declared = (not use.node.op.pointwise for use in uses_of[name] if not use.passes)
        return named[name].is_vector or any(declared)

    named = {name: meanings[name] for name in model.params if name in uses_of}
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


CHOICES = (("value", "grad", "value_fn"), ("value", "grad", "obj_fn"), ("grad_fn",))
"""The arguments of optimizers besides gradient and parameters, of which most take any.

They are the loss of a step, its gradient, and functions of the parameters on its batch, for line
searches, for Hessians (`sophia`), and for `sam`, which refuse what they do not take.
"""

_SMALL = 2**15
"""The elements of an array up to which copying it costs less than operators of its own."""

FUNCTIONS = ("value_fn", "obj_fn", "grad_fn")


def fit_to_step(
    optimizer: optax.GradientTransformation, params: Mapping[str, Any], accumulates: bool
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes the parameters as a dict, and all arguments of a step.

    It gets those of the arguments that it can take.

    Args:
      params: arrays, or their shapes.
      accumulates: an update has the gradients of several batches, so that there are no `FUNCTIONS`.

    Raises:
      TrainingError: the optimizer cannot make an update of these.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}

    def loss(params, *_):
        return sum(jnp.sum(x) for x in params.values())

    def update(names, params):
        values = {"value": loss(params), "grad": params, "value_fn": loss, "obj_fn": loss}
        values["grad_fn"] = jax.grad(loss)
        chosen = {name: values[name] for name in names}
        return optimizer.update(params, optimizer.init(params), params, **chosen)

    first = None
    for choice in CHOICES:
        names = [name for name in choice if not (accumulates and name in FUNCTIONS)]
        try:
            with _without_warnings():
                memory = jax.eval_shape(optimizer.init, shapes)
            parts = jax.tree.leaves(memory, is_leaf=_is_lookahead)
            if first is None and any(map(_is_lookahead, parts)):
                optimizer = keep_slow_weights(optimizer)
            jax.eval_shape(partial(update, names), shapes)
            return _choose(optimizer, names)
        except jax.errors.JAXTypeError:  # it computes with the numbers of the parameters
            return optimizer
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            first = first or error
    why = " ".join(str(first).split("\n")[0].split())
    more = f"; with accumulate= it gets no {', '.join(FUNCTIONS)}" if accumulates else ""
    raise TrainingError(
        f"the optimizer cannot update parameters that are a dict of arrays by name ({why}){more}"
    ) from first


def find_groups(
    optimizer: optax.GradientTransformationExtraArgs, params: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Group small parameters that an optimizer updates alike, to do so in one vector.

    Weights of its own are needed by name.
    """
    if any(True for _ in _states(jax.eval_shape(optimizer.init, params))):
        return {}
    return group_updates(optimizer, params, _SMALL)


def _choose(
    inner: optax.GradientTransformationExtraArgs, names: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it gets no other arguments than these."""

    def update(updates, state, params=None, **extra):
        chosen = {name: x for name, x in extra.items() if name in names}
        return inner.update(updates, state, params, **chosen)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _is_lookahead(state: Any) -> bool:
    return isinstance(state, optax.LookaheadState)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore the warning that `optax.lookahead` logs about parameters that are not two sets."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_not_of_lookahead)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_lookahead)


def _is_not_of_lookahead(record: logging.LogRecord) -> bool:
    return "lookahead" not in record.pathname


class SlowWeights(NamedTuple):
    """The state of `keep_slow_weights`."""

    slow: dict[str, jax.Array]
    inner: Any


def visible_params(state: State) -> dict[str, jax.Array]:
    """Return the parameters to validate, to save and to return.

    Sparse weights are averaged over masks that change; what the mask hides now is zero.
    """
    if not has_second_weights(state):
        return state.params
    if state.average is None:
        params = evaluation_params(state.params, state.optimizer)
    else:
        params = state.average
    shown = masks(state.optimizer)
    return {
        name: jnp.where(shown.get(name, True), x, 0).astype(state.params[name].dtype)
        for name, x in params.items()
    }


def has_second_weights(state: State) -> bool:
    """Check whether the visible parameters may differ from those that are trained."""
    return state.average is not None or any(True for _ in _states(state.optimizer))


def evaluation_params(params: Mapping[str, Any], memory: Any) -> dict[str, Any]:
    """Return the parameters at which an optimizer wants its network to be evaluated.

    Args:
      memory: the state of the optimizer.
    """
    params = {**params}
    for state in _states(memory):
        if isinstance(state, ScheduleFreeState):
            z: Any = state.z
            names = _names_of(z)
            part = state._replace(z={name: z[name] for name in names})
            x: Any = schedule_free_eval_params(part, {name: params[name] for name in names})
            params |= x
        elif isinstance(state, SAMState):
            synced: Any = state.cache
            is_synced = state.steps_since_sync == 0
            params |= {n: jnp.where(is_synced, params[n], synced[n]) for n in _names_of(synced)}
        else:
            params |= state.slow
        params = evaluation_params(params, tuple(state))
    return params


def _states(memory: Any) -> Iterator[Any]:
    """Yield the outermost states in that of an optimizer that have weights of their own."""

    def is_one(node):
        # opaque SAM takes all steps within one update, and keeps nothing
        kinds = ScheduleFreeState, SAMState, SlowWeights
        return isinstance(node, kinds) and getattr(node, "cache", node) is not None

    yield from filter(is_one, jax.tree.leaves(memory, is_leaf=is_one))


def _names_of(weights: Any) -> list[str]:
    """Return the names of the parameters that an optimizer has weights of."""
    if not isinstance(weights, Mapping):
        raise TrainingError(
            "the optimizer keeps weights to be evaluated that have no names: put optax.flatten "
            "inside of schedule_free and sam"
        )
    return [name for name, x in weights.items() if not isinstance(x, optax.MaskedNode)]


def keep_slow_weights(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optax.lookahead`, which takes two sets of parameters, to take the fast one."""

    def init(params: Any):
        return SlowWeights(params, inner.init(optax.LookaheadParams(params, params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        both = optax.LookaheadParams(params, state.slow)
        moved: Any
        moved, memory = inner.update(updates, state.inner, both, **extra)
        slow: Any = optax.apply_updates(state.slow, moved.slow)
        return moved.fast, SlowWeights(slow, memory)

    return optax.GradientTransformationExtraArgs(init, update)
