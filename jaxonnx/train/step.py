"""The two compiled programs of a run: a training step and the evaluation of a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxonnx.model import Model
from jaxonnx.train.data import Batch
from jaxonnx.train.objective import Objective


class Carry(NamedTuple):
    """All that a step changes."""

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    optimizer: Any
    count: jax.Array
    finite: jax.Array
    """False once a loss or a gradient is not finite; from then on nothing changes."""


def start(model: Model, optimizer: optax.GradientTransformation) -> Carry:
    """The first carry. Steps give its memory to their results: the arrays are copies."""
    params, state = jax.tree.map(jnp.copy, (model.params, model.state))
    return Carry(params, state, optimizer.init(params), jnp.int32(0), jnp.bool(True))


def training(
    model: Model, goal: Objective, optimizer: optax.GradientTransformationExtraArgs, seed: int
) -> Callable[[Carry, Batch], tuple[Carry, jax.Array]]:
    """The step: (carry, batch) -> (carry, [loss, whether all is finite])."""

    @partial(jax.jit, donate_argnums=0)
    def step(carry, batch):
        key = jax.random.fold_in(jax.random.key(seed), carry.count)

        def objective(params):
            outputs, state = model.apply_train(params, carry.state, key, *batch.inputs)
            return goal.mean(outputs, batch.targets, batch.weight), state

        gradient = jax.value_and_grad(objective, has_aux=True)
        (value, state), gradients = gradient(carry.params)

        def move():
            updates, memory = optimizer.update(
                gradients, carry.optimizer, carry.params, value=value, grad=gradients
            )
            params = optax.apply_updates(carry.params, updates)
            return Carry(params, state, memory, carry.count + 1, finite)  # type: ignore[arg-type]

        # a conditional, because selecting old or new values would copy all of them in each step
        finite = carry.finite & _finite((value, gradients))
        carry = jax.lax.cond(finite, move, lambda: carry._replace(finite=finite))
        return carry, jnp.stack([value, finite.astype(value.dtype)])

    return step


def evaluation(goal: Objective) -> Callable[[Any, Carry, Batch], Any]:
    """Adds the sums of a batch to those of `goal`, in inference mode."""

    @jax.jit
    def evaluate(sums, carry, batch):
        outputs = goal.model.apply(carry.params, *batch.inputs, state=carry.state)
        return goal.add(sums, outputs, batch)

    return evaluate


def _finite(tree: Any) -> jax.Array:
    """Whether every number is finite; sums are several times as fast as tests of each number."""
    sums = [
        jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)
    ]
    return jnp.isfinite(jnp.stack(sums)).all()
