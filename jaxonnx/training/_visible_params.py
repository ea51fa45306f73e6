"""The weights that are validated, saved and returned, where a run keeps two sets of them.

The gradient is taken at `State.params`. Others are the result of

* `ema=`: their moving average;
* `optax.contrib.schedule_free`: the average x, of which the params are the point y;
* `optax.lookahead`: the slow weights;
* `optax.contrib.sam`: the weights before an adversarial step.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import SAMState, ScheduleFreeState, schedule_free_eval_params

from jaxonnx.errors import TrainingError
from jaxonnx.training._settings.sparsity import masks
from jaxonnx.training._step.step import State


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
