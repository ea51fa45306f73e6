"""Accumulate the gradients of several batches to that of one batch of all their rows.

`optax.MultiSteps` takes the mean of the batches' means. A loss that is divided by what counts in a
batch (tokens, weights of examples or of classes) would give the tokens of a batch with few of them
more weight. Here numerators and denominators are summed, and divided once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from jaxonnx._arguments import Argument
from jaxonnx.training._settings import Plan


class AccumulateArguments(TypedDict, total=False):
    """Updates of several batches."""

    accumulate: Annotated[int, Argument(1, form="N", least=1, resume=True, needs_loss=True)]
    """The number of batches whose gradients make one update.

    It is the update of one batch of all their rows: the gradients of the losses are summed, and
    divided once by what counts in all these batches (tokens, weights of examples and classes).
    The batches that are left at the end of an epoch or of the run make an update of their own, of
    all their rows, as in PyTorch Lightning and transformers: an epoch of 10 batches has three
    updates with `accumulate=4`. A step of the history is one batch, and so is a step of the
    schedule of `sparsity`, whose phases are whole epochs."""


class AccumulationState(NamedTuple):
    """The state of `accumulate`, with sums over the batches since the last update."""

    step: jax.Array
    """int32: the number of these batches."""
    sums: jax.Array
    """float32[2, n]: the numerators and the denominators of the losses."""
    gradients: list[Any]
    """The gradients of the numerators: n trees like the parameters, in float32 at least."""
    inner: Any


def accumulate_batches(plan: Plan) -> None:
    """Make one update of several batches (`accumulate=`)."""
    if plan.settings.accumulate > 1:
        divided = [name != "none" for name in plan.goal.denominators]
        plan.optimizer = accumulate(plan.optimizer, plan.settings.accumulate, divided)


def accumulate(
    inner: optax.GradientTransformation, every: int, divided: Sequence[bool]
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that it makes one update of `every` batches.

    An update takes the gradients of the n losses of a batch: of the first one as `updates`, of the
    rest as the extra argument `others`. The extra argument `sums` [2, n] has the numerators and the
    denominators of the losses. `inner` gets the gradient of one batch of all rows, also as `grad`,
    and its loss as `value`. Batches in which nothing counts make no update. With the extra argument
    `ends` a batch ends its group, however many came before.

    Args:
      inner: an optimizer.
      every: the number of batches.
      divided: of each loss, whether it has a denominator, or is a sum that has none.
    """
    inner = optax.with_extra_args_support(inner)

    def zeros(x):
        return jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))

    def init(params):
        gradients = [jax.tree.map(zeros, params) for _ in divided]
        sums = jnp.zeros((2, len(divided)), jnp.float32)
        return AccumulationState(jnp.int32(0), sums, gradients, inner.init(params))

    def update(updates, state, params=None, **extra):
        sums, others = extra.pop("sums"), extra.pop("others")
        ends = (state.step + 1 == every) | extra.pop("ends", False)

        def add(total, gradient, count):
            return jax.tree.map(lambda t, g: t + count * g.astype(t.dtype), total, gradient)

        def divide(like, *totals):
            total: Any = sum(map(jnp.divide, totals, divisors))
            return total.astype(like.dtype)

        gradients = [*map(add, state.gradients, (updates, *others), sums[1])]
        sums = state.sums + sums.astype(jnp.float32)
        divisors = jnp.where(jnp.array(divided) & (sums[1] > 0), sums[1], 1)
        gradient = jax.tree.map(divide, updates, *gradients)
        extra |= {"value": (sums[0] / divisors).sum(), "grad": gradient}
        moved, memory = inner.update(gradient, state.inner, params, **extra)
        choose = partial(jnp.where, ends & (sums[1] > 0).any())
        moved = jax.tree.map(lambda x: choose(x, jnp.zeros_like(x)), moved)
        memory = jax.tree.map(choose, memory, state.inner)
        new = AccumulationState(state.step + 1, sums, gradients, ())
        new = jax.tree.map(lambda x: jnp.where(ends, jnp.zeros_like(x), x), new)
        return moved, new._replace(inner=memory)

    return optax.GradientTransformationExtraArgs(init, update)


def find_accumulation(memory: Any) -> AccumulationState | None:
    """Return the state of `accumulate` within that of an optimizer."""

    def is_one(node):
        return isinstance(node, AccumulationState)

    return next(filter(is_one, jax.tree.leaves(memory, is_leaf=is_one)), None)
