"""The two compiled programs of a run: a training step and the evaluation of a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxonnx._graph.roles import running_statistics
from jaxonnx.model import Model
from jaxonnx.train._data import Batch
from jaxonnx.train._objective import Objective
from jaxonnx.train._precision import products_in_bfloat16
from jaxonnx.train._sparsity import masks
from jaxonnx.train._storage import Storage


class Carry(NamedTuple):
    """All that a step changes; the parameters and what goes with them as a Storage has them."""

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    """What training renews of the model's state; the rest of it is `frozen`."""
    optimizer: Any
    average: dict[str, jax.Array] | None
    """The moving average of the parameters, in float32 at least, where one is taken."""
    count: jax.Array
    """The steps until now; random operators draw by it."""
    taken: jax.Array
    """Those of them that were finite."""
    finite: jax.Array
    """False once a loss or a gradient is not finite; from then on nothing changes."""


def start(
    model: Model, optimizer: optax.GradientTransformation, average: bool, storage: Storage
) -> Carry:
    """The first carry. Steps give its memory to their results: the arrays are copies."""
    names = running_statistics(model.graph)
    state = {name: x for name, x in model.state.items() if name in names}
    params, state = copy((storage.store(model.params), state))
    memory = jax.tree.map(jnp.asarray, optimizer.init(params))
    averages = {name: copy(_wide(x)) for name, x in params.items()} if average else None
    return Carry(params, state, memory, averages, jnp.int32(0), jnp.int32(0), jnp.bool(True))


def frozen(model: Model) -> dict[str, jax.Array]:
    """The state that no step changes."""
    names = running_statistics(model.graph)
    return {name: x for name, x in model.state.items() if name not in names}


def copy(tree: Any) -> Any:
    """The same in memory of its own."""
    return jax.tree.map(jnp.copy, tree)


def training(
    model: Model,
    goal: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    seed: int,
    storage: Storage,
    fixed: dict[str, jax.Array],
    *,
    accumulate: int = 1,
    ema: float | None = None,
    skip: bool = False,
    precision: str | None = None,
) -> Callable[[Carry, Batch], tuple[Carry, jax.Array]]:
    """The step: (carry, batch) -> (carry, [loss, whether all is finite]).

    Args:
      fixed: the state that no step changes.
      accumulate: finite steps that the optimizer makes an update of; the average moves after each.
      ema: the share of itself that the average keeps.
      skip: whether a step that is not finite changes nothing but the count. Otherwise no step after
        it changes anything either.
      precision: "bf16" for products of bfloat16 numbers, see `jaxonnx.train._precision`.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(carry, fixed, batch):
        key = jax.random.fold_in(jax.random.key(seed), carry.count)

        def objective(params):
            state = {**fixed, **carry.state}
            outputs, state = model.apply_train(storage.given(params), state, key, *batch.inputs)
            renewed = {name: state[name] for name in carry.state}
            return goal.mean(outputs, batch.targets, batch.weight), renewed

        gradient = jax.value_and_grad(objective, has_aux=True)
        if precision == "bf16":
            gradient = products_in_bfloat16(gradient)
        (value, state), gradients = gradient(carry.params)

        def move():
            updates, memory = optimizer.update(
                gradients, carry.optimizer, carry.params, value=value, grad=gradients
            )
            params: Any = optax.apply_updates(carry.params, updates)
            count, taken = carry.count + 1, carry.taken + 1
            average: Any = carry.average
            if ema is not None:
                part = jnp.where(taken % accumulate == 0, 1 - ema, 0)
                average = optax.incremental_update(jax.tree.map(_wide, params), average, part)
            return Carry(params, state, memory, average, count, taken, finite)

        # a conditional, because selecting old or new values would copy all of them in each step
        finite = carry.finite & _finite((value, gradients))
        stay = {"count": carry.count + 1} if skip else {"finite": finite}
        carry = jax.lax.cond(finite, move, lambda: carry._replace(**stay))
        return carry, jnp.stack([value, finite.astype(value.dtype)])

    # an argument: a constant of the program would be compiled with it
    given = model.program.stored(fixed)
    return lambda carry, batch: step(carry, given, batch)


def weights(carry: Carry, storage: Storage) -> dict[str, jax.Array]:
    """The parameters to hand out, in the order of the file."""
    return storage.view(_weights(carry))


def _weights(carry: Carry) -> dict[str, jax.Array]:
    """The parameters to validate and to hand out: the average if there is one.

    Sparse weights are averaged over masks that change; what the mask hides now is zero.
    """
    if carry.average is None:
        return carry.params
    shown = masks(carry.optimizer)
    return {
        name: jnp.where(shown.get(name, True), x, 0).astype(carry.params[name].dtype)
        for name, x in carry.average.items()
    }


def evaluation(
    goal: Objective, storage: Storage, fixed: dict[str, jax.Array]
) -> Callable[[Any, Carry, Batch], Any]:
    """Adds the sums of a batch to those of `goal`, in inference mode."""

    @jax.jit
    def evaluate(sums, carry, fixed, batch):
        state = {**fixed, **carry.state}
        params = storage.given(_weights(carry))
        outputs = goal.model.apply(params, *batch.inputs, state=state)
        return goal.add(sums, outputs, batch)

    given = goal.model.program.stored(fixed)
    return lambda sums, carry, batch: evaluate(sums, carry, given, batch)


def _finite(tree: Any) -> jax.Array:
    """Whether every number is finite; sums are several times as fast as tests of each number."""
    sums = [
        jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)
    ]
    return jnp.isfinite(jnp.stack(sums)).all()


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
