"""The step of a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import DictKey

from jaxonnx._arrays import make_key
from jaxonnx._data.batches import Batch
from jaxonnx._graph.roles import running_statistics
from jaxonnx._rewrite.network import leave
from jaxonnx._run.call_form import prepare_tensors
from jaxonnx.errors import TrainingError
from jaxonnx.lowering import separate_heads
from jaxonnx.model import Model, batch_norms, pool_batch, renew_statistics
from jaxonnx.quantization import MovingRanges
from jaxonnx.training._settings import Plan
from jaxonnx.training._settings.accumulate import AccumulationState, find_accumulation
from jaxonnx.training._settings.ema import move_average, start_average
from jaxonnx.training._settings.precision import start_scale
from jaxonnx.training._settings.sparsity import restore_phase
from jaxonnx.training._step import (
    SMALL,
    State,
    Step,
    as_batch,
    copy,
    finite,
    own_buffers,
    stays_finite,
)
from jaxonnx.training._step.optimizers import has_second_weights, visible_params
from jaxonnx.views import CallView

SELECTING = {"tpu", "gpu"}
"""Platforms whose compilers select old or new values in the pass that computes them, and turn all
weights for a conditional and back. Elsewhere selecting would copy all weights in each step."""


class GradientStep(Step):
    """The step that minimizes an objective.

    Args:
      plan: has a model, an objective, an optimizer and a storage. Of its settings, `seed`,
        `accumulate`, `ema`, `precision`, `remat`, `mesh` and `nan` act here as well.
    """

    def __init__(self, plan: Plan):
        model = plan.model
        renewed = running_statistics(model.graph)
        fixed = {name: x for name, x in model.state.items() if name not in renewed}
        self.model = model
        self.frozen = prepare_tensors(model.program, fixed)
        self.notes = tuple(plan.notes)
        self._goal = plan.goal
        self._optimizer = plan.optimizer
        self._storage = plan.storage
        self.settings = plan.settings
        self._gradient_wrappers = plan.gradient_wrappers
        self.updates, self.phases, self.last_phase = plan.updates, plan.phases, plan.last_phase

    def init(self, params: Any = None) -> State:
        model = self.model.replace(params=params)
        names = running_statistics(model.graph)
        state = {name: x for name, x in model.state.items() if name in names}
        params, state = copy((self._storage.store(self._storage.widen(model.params)), state))
        memory = self._memory(self._storage.join(params))
        memory = own_buffers(jax.tree.map(jnp.asarray, memory), params)
        average = start_average(self.settings, params)
        scale = start_scale(self.settings)
        counts = jnp.int32(0), jnp.int32(0), jnp.bool(True)  # buffers of their own, to be donated
        return State(params, state, memory, average, *counts, scale)

    def advance(self, state: State, batch: Any, frozen: Any = None) -> tuple[State, Any, Any]:
        batch = self.as_batch(batch)
        frozen = self.frozen if frozen is None else frozen
        key = jax.random.fold_in(make_key(self.settings.seed), state.count)
        accumulates = self.settings.accumulate > 1

        # 1. The losses of the batch, and the statistics that the model renews.
        def objective(params):
            params = self._storage.apply_params(self._read(params))
            tensors = {**self._read(frozen), **state.state}
            outputs, new = self._run(params, tensors, key, *batch.inputs)
            renewed = {name: new[name] for name in state.state}
            means = self._goal.means(outputs, batch)
            first, *others = (mean for mean, _ in means)
            value: Any = sum(others, first)
            parts = jnp.stack([first, *others]) if accumulates else value
            scaled = parts if state.scale is None else state.scale.apply(parts)
            return scaled, (value, means, renewed)

        # 2. Their gradients, as the settings wrap them: in 16 bits, with sparse products.
        def differentiate(params):
            """Return the gradients of the loss, one for each denominator if they accumulate."""
            parts, pull, results = jax.vjp(objective, params, has_aux=True)
            units = np.eye(parts.size, dtype=parts.dtype).reshape(-1, *parts.shape)
            return [pull(unit)[0] for unit in units], results

        gradient: Callable[[Any], Any] = differentiate
        for wrap in self._gradient_wrappers:
            gradient = wrap(gradient, state.optimizer)
        gradients, (value, means, renewed) = gradient(state.params)
        if state.scale is not None:
            gradients = jax.tree.map(state.scale.remove, gradients)
        gradients = [*map(self._storage.join, gradients)]
        # 3. Whether the step is taken: all is finite, and something counts.
        good = finite((value, gradients)) & stays_finite(state.state, renewed)
        # among batches that accumulate, one without anything that counts has its place
        empty = good & (sum(count for _, count in means) <= 0) & (not accumulates)
        stay, goes_on = self._reject_step(state, good | ~jnp.isfinite(value), empty)
        good &= state.finite & ~empty
        sums = jnp.array([(mean * count, count) for mean, count in means]).T

        # 4. The update. Some optimizers evaluate the loss and its gradient themselves.
        def loss(params, *_):
            return objective(params)[1][0]

        def loss_gradient(params, *_):
            (first, *_), _ = gradient(params)
            return first if state.scale is None else jax.tree.map(state.scale.remove, first)

        functions = {"value_fn": loss, "obj_fn": loss, "grad_fn": loss_gradient}

        def move(good=None):
            first, *others = gradients
            extra = (
                {"sums": sums, "others": others} if accumulates else functions | {"value": value}
            )
            return self._apply_update(state.replace(state=renewed), stay, first, extra, good)

        if self._storage.platform in SELECTING:
            moved = move(good)
        else:
            moved = jax.lax.cond(good, move, lambda: stay)
        # 5. The report: the loss, and whether the step went as it should.
        report = jnp.stack([value, ((moved.taken > state.taken) | goes_on).astype(value.dtype)])
        return moved, report, sums

    def flush(self, state: State) -> tuple[State, jax.Array]:
        waiting = find_accumulation(state.optimizer)
        if waiting is None:
            return state, jnp.bool(True)
        zeros = jax.tree.map(jnp.zeros_like, self._storage.join(state.params))
        sums = jnp.zeros_like(waiting.sums)
        extra = {"sums": sums, "others": [zeros] * (sums.shape[1] - 1), "ends": True}

        def clear(node):
            if not isinstance(node, AccumulationState):
                return node
            zeros = jax.tree.map(jnp.zeros_like, node._replace(inner=()))
            return zeros._replace(inner=node.inner)

        def move():
            memory = jax.tree.map(
                clear, state.optimizer, is_leaf=lambda node: isinstance(node, AccumulationState)
            )
            goes_on = jnp.bool(self.settings.nan == "skip")
            stay = state.replace(optimizer=memory, finite=goes_on)
            moved = self._apply_update(state, stay, zeros, extra)
            # the batches have been counted, by the phases of sparsity as well
            counts = {"count": state.count, "taken": state.taken, "scale": state.scale}
            counts["optimizer"] = restore_phase(moved.optimizer, state.optimizer)
            return moved.replace(**counts), moved.taken > state.taken

        return jax.lax.cond(
            state.finite & (waiting.step > 0), move, lambda: (state, jnp.bool(True))
        )

    def _reject_step(self, state: State, counts: Any, empty: Any) -> tuple[State, jax.Array]:
        """Return the state after a rejected step, and whether the rejection is expected.

        Args:
          counts: the step is finite, or its loss is not. If it does not count, the gradient alone
            overflowed, and a smaller scale may help.
          empty: the step is finite, and its batch has nothing that counts.
        """
        expected, scale = state.finite & empty, state.scale
        if scale is not None:
            retry = state.finite & ~counts & (scale.factor > 1)
            scale = jax.tree.map(partial(jnp.where, retry), scale.shrink(), scale)
            expected |= retry
        goes_on = expected | (self.settings.nan == "skip")
        count, finite = state.count + goes_on, state.finite & goes_on
        return state.replace(count=count, finite=finite, scale=scale), expected

    def _memory(self, params: dict[str, Any]) -> Any:
        """Return the optimizer's first state, made by one program where the storage proved it can.

        Otherwise its zeros take a program for each shape, half a second for a MobileNet; but they
        lie where the parameters were put, which those of one program do not.
        """
        about, init = self.settings, self._optimizer.init
        arrays = [x for x in jax.tree.leaves(params) if not isinstance(x, Tracer)]
        placed = about.mesh or any(x.committed for x in arrays)
        traces = self._storage.names and about.sparsity is None
        return (jax.jit(init) if traces and not placed else init)(params)

    @property
    def _run(self) -> Callable:
        """Evaluate `Model.apply_train`, in the formulation of the platform."""
        run = self._goal.model.apply_train
        on_one = self._storage.platform == "tpu" and self.settings.mesh is None
        return separate_heads(run) if on_one else run

    def _read(self, tensors: Any) -> Any:
        """Return tensors as the model reads them.

        With `remat` nothing whole is kept for the gradient: each part gathers what it reads.
        """
        return tensors if self.settings.remat else self.gather(tensors)

    def _apply_update(
        self, state: State, stay: State, gradient: Any, extra: dict[str, Any], good: Any = None
    ) -> State:
        """Return the state after an update of the parameters, or `stay` where `good` is false.

        A number whose update is not finite stays as it was. If a small array has such a
        number, as all have after an infinite rate, the step is not taken.

        Args:
          extra: further arguments of the optimizer.
        """
        storage = self._storage
        params = storage.join(state.params)
        updates, memory = self._optimizer.update(
            gradient, state.optimizer, params, grad=gradient, **extra
        )
        selecting = good is not None

        def move(new: Any, good: Any = None) -> State:
            """Return the state with new weights; what it was where `good` is false."""
            if good is not None:
                new = jax.tree.map(partial(_keep_finite, good), params, new)
            moved_params = storage.split(new, state.params)
            moved = state.replace(
                params={},
                optimizer=memory,
                average=move_average(self.settings, state.average, moved_params, memory),
                count=state.count + 1,
                taken=state.taken + 1,
                scale=None if state.scale is None else state.scale.grow(),
            )

            def select(path, new, old):
                if good is None:
                    return new
                if selecting or not jnp.issubdtype(new.dtype, jnp.floating):
                    return _select(good, new, old)
                # weights are computed from new moments, which a choice on CPU would make copies of
                first = next((key.key for key in path if isinstance(key, DictKey)), "")
                sizes = [state.params[n].size for n in storage.groups.get(first, ())]
                sizes = sizes if sum(sizes) == new.size else [new.size]
                small = sum(size for size in sizes if size <= SMALL)  # they come first in a group
                if small in (0, new.size):
                    return _select(good, new, old) if small else new
                return jnp.concatenate([_select(good, new[:small], old[:small]), new[small:]])

            chosen = jax.tree_util.tree_map_with_path(select, moved, stay.replace(params={}))
            return chosen.replace(params=moved_params)

        def check() -> State:
            new: Any = optax.apply_updates(params, updates)
            after = storage.split(new, state.params)
            small = stays_finite(state.params, after, small=True)
            return move(new, good & small if selecting else small)

        narrow = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(updates))
        if storage.platform != "onnx" or narrow:
            return check()

        # A choice for each number costs more there than a sum that detects the usual case. Each
        # branch adds the updates itself, as results: to return what is computed before copies it.
        return jax.lax.cond(
            _is_bounded(updates), lambda: move(optax.apply_updates(params, updates)), check
        )

    def as_batch(self, batch: Any) -> Batch:
        batch = as_batch(batch, self.model, self._goal.derive_targets)
        if not jax.tree.leaves(batch.targets):
            raise TrainingError("the batch has no targets: pass (x, y), or a dict with the targets")
        return batch

    def check(self, batch: Any) -> Any:
        return self._goal.check(self.as_batch(batch))

    def check_labels(self, targets: Any, shapes: Any, what: str, classes: Any = None) -> None:
        self._goal.check_labels(targets, shapes, what, classes)

    def counts_fill(self, batch: Any, shapes: Any, metrics: bool) -> bool:
        return self._goal.counts_fill(shapes, self.as_batch(batch).targets, metrics)

    def sums(self, batch: Any, shapes: Any = None) -> Any:
        shapes = self.check(batch) if shapes is None else shapes
        return self._goal.start(shapes, self.as_batch(batch))

    def evaluate(self, sums: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        batch = self.as_batch(batch)
        frozen = self.frozen if frozen is None else frozen
        params = self._storage.apply_params(self._read(visible_params(state)))
        tensors = {**self._read(frozen), **state.state}
        outputs = self._goal.model.apply(params, *batch.inputs, state=tensors)
        return self._goal.add(sums, outputs, batch)

    def statistics(self, totals: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        batch = self.as_batch(batch)
        frozen = self.frozen if frozen is None else frozen
        params = self._storage.apply_params(self._read(visible_params(state)))
        key = jax.random.fold_in(make_key(self.settings.seed), state.count)

        def renew(zeros):
            tensors = {**self._read(frozen), **state.state, **zeros}
            return renew_statistics(self._goal.model, params, tensors, key, batch.inputs)

        return pool_batch(batch_norms(self.model), totals, renew, len(batch.weight))

    def row(self, sums: Any) -> dict[str, float]:
        return self._goal.row(sums)

    def has_second_weights(self, state: State) -> bool:
        return has_second_weights(state)

    def view(self, state: State) -> dict[str, jax.Array]:
        return self._storage.round(self._storage.view(visible_params(state)))

    def to_model(self, params: Any, state: Any) -> Model:
        model = self.model.replace(params=params, state={**self.model.state, **state})
        return leave(model, CallView, MovingRanges)

    def to_file(self, state: State) -> State:
        return self._storage.view(state)

    def from_file(self, state: State) -> State:
        return self._storage.store(state)

    def columns(self, validated: bool) -> list[str]:
        return self._goal.columns(validated)


@jax.jit
def _keep_finite(good: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(good & jnp.isfinite(new), new, old)


def _is_bounded(updates: Any) -> jax.Array:
    """Check whether no sum of a finite weight and its update overflows, by the sum of squares.

    An update whose square is finite is less than half the distance of the greatest numbers.
    """
    squares = [jnp.vdot(x, x) for x in jax.tree.leaves(updates)]
    return jnp.isfinite(jnp.stack([jnp.float32(0), *squares])).all()


@jax.jit
def _select(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(condition, x, y)
