"""The step that a file carries itself (`training_info`)."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._arrays import make_key
from jaxonnx._data.batches import Batch, take_examples
from jaxonnx._graph.values import to_value
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model, load
from jaxonnx.training._objective import Objective
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import State, Step, copy, stays_finite


class TrainingInfoStep(Step):
    """The step of `model.training`, whose variables are the parameters of its states.

    The loss is the first scalar among the metrics of the algorithm. It has no weights of examples:
    a short batch is run at its own size, and refused where the file fixes the size.

    Args:
      goal: metrics of the file's outputs, and no loss.
      settings: `seed` and `nan`.
    """

    def __init__(self, model: Model, goal: Objective, settings: Settings):
        self.model = model
        self.frozen = {}
        self.notes = ()
        self._training = model.training
        network = {*model.tensors, *model.graph.readers}
        self.optimizer_variables = frozenset(self._training.variables) - network
        self._goal = goal
        self.settings = settings
        self._inputs = [value.name for value in model.inputs]
        names_read = dict.fromkeys(name for names in self._training.inputs for name in names)
        self._targets = [name for name in names_read if name not in self._inputs]
        values = [to_value(v) for info in model.proto.training_info for v in info.algorithm.input]
        targets = [value for value in values if value.name in self._targets]
        self._fixes_targets = any(v.shape and isinstance(v.shape[0], int) for v in targets)

    def init(self, params: Any = None) -> State:
        params = copy(self._training.state if params is None else dict(params))
        return State(params, {}, (), None, jnp.int32(0), jnp.int32(0), jnp.bool(True), None)

    @property
    def params(self) -> Mapping[str, Any]:
        return self._training.state

    def advance(self, state: State, batch: Any, frozen: Any = None) -> tuple[State, Any, Any]:
        key = jax.random.fold_in(make_key(self.settings.seed), state.count)
        new, outputs = self._training.step(state.params, self._values(batch), key=key)
        loss, count = self._loss(outputs, batch)
        good = state.finite & jnp.isfinite(loss) & stays_finite(state.params, new)
        moves = good & (count > 0)
        params = jax.tree.map(lambda new, old: jnp.where(moves, new, old), new, state.params)
        skip = self.settings.nan == "skip"
        state = state.replace(
            params=params,
            count=jnp.where(good | skip, state.count + 1, state.count),
            taken=jnp.where(moves, state.taken + 1, state.taken),
            finite=state.finite | skip if skip else good,
        )
        report = jnp.stack([loss, good.astype(loss.dtype)])
        return state, report, jnp.array([[loss * count], [count]])

    def check(self, batch: Any) -> Any:
        if not np.isin(self.as_batch(batch).weight, (0, 1)).all():
            raise TrainingError(
                "the algorithm of the file does not support weights of examples: leave them out, "
                "or pass loss= and optimizer="
            )
        values = self._values(batch)
        _, outputs = jax.eval_shape(self._training.step, self._training.state, values)
        shapes = self._goal.check(self._metric_batch(batch)) if self._goal.measures else None
        return shapes, self._find_loss(outputs).dtype

    def check_labels(self, targets: Any, shapes: Any, what: str, classes: Any = None) -> None:
        """Accept any labels: their meaning is defined by the file."""

    def counts_fill(self, batch: Any, shapes: Any, metrics: bool) -> bool:
        return True

    def drop_fill(self, batch: Batch, *, whole: bool = False) -> Batch:
        counted = np.flatnonzero(np.asarray(batch.weight))
        if not 0 < len(counted) < len(batch.weight):
            return batch
        whole = whole or self._fixes_targets
        inputs = None if whole else take_examples(batch.inputs, self.model.inputs, counted)
        if inputs is None:
            size = len(batch.weight)
            raise TrainingError(
                f"the algorithm of the file has no weights of examples, and the file, or a mesh, "
                f"takes batches of {size}, of which one has {len(counted)}: pass data of a "
                f"multiple of {size} examples without weights, or loss= and optimizer="
            )
        return Batch(
            inputs, jax.tree.map(lambda x: x[counted], batch.targets), batch.weight[counted]
        )

    def sums(self, batch: Any, shapes: Any = None) -> Any:
        shapes, dtype = self.check(batch) if shapes is None else shapes
        loss = np.zeros((), dtype), np.zeros((), dtype)
        return {"loss 0": loss} | self._goal.start(shapes, self._metric_batch(batch))

    def evaluate(self, sums: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        measures = {**sums}
        total, count = measures.pop("loss 0")
        # a step whose new state is dropped: the file's own loss at these weights
        _, outputs = self._training.step(state.params, self._values(batch))
        if self._goal.measures:
            batch = self._metric_batch(batch)
            inputs = dict(zip(self._inputs, batch.inputs, strict=True))
            values = self._training.inference(state.params, inputs)
            values = tuple(values[name] for name in self._goal.names)
            measures = self._goal.add(measures, values, batch)
        loss, weight = self._loss(outputs, batch)
        return {"loss 0": (total + loss * weight, count + weight)} | measures

    def row(self, sums: Any) -> dict[str, float]:
        measures = {**sums}
        total, count = measures.pop("loss 0")
        loss = float(total) / float(count) if count else math.nan
        return {"validation_loss": loss} | self._goal.row(measures)

    def view(self, state: State) -> dict[str, jax.Array]:
        return state.params

    def to_model(self, params: Any, state: Any) -> Model:
        return load(self._training.to_onnx(params))

    def columns(self, validated: bool) -> list[str]:
        return self._goal.columns(validated)

    def _values(self, batch: Any) -> dict[str, Any]:
        """Return the inputs of the network and of its algorithms, by name."""
        inputs, targets, _ = self.as_batch(batch)
        if not isinstance(targets, Mapping) and len(self._targets) == 1:
            targets = {self._targets[0]: targets}
        if not isinstance(targets, Mapping) or {*targets} != {*self._targets}:
            raise TrainingError(
                f"the file's algorithm takes {', '.join(self._targets) or 'nothing'} besides the "
                "inputs of the network; give one array for one, or a dict by these names"
            )
        return {**dict(zip(self._inputs, inputs, strict=True)), **targets}

    def _metric_batch(self, batch: Any) -> Batch:
        """Return the batch for metrics, for which the only target needs no name."""
        batch = self.as_batch(batch)
        single = len(self._targets) == 1 and isinstance(batch.targets, Mapping)
        return batch._replace(targets=batch.targets[self._targets[0]]) if single else batch

    def _loss(self, outputs: Mapping[str, Any], batch: Any) -> tuple[Any, Any]:
        """Return the loss and its weight, the number of examples; NaN if some of them weigh 0."""
        loss, weight = self._find_loss(outputs), jnp.asarray(self.as_batch(batch).weight)
        loss = jnp.where((weight == weight[0]).all(), loss, jnp.nan)
        return loss, weight.sum().astype(loss.dtype)

    def _find_loss(self, outputs: Mapping[str, Any]) -> Any:
        for name in self._training.metrics:
            x = outputs[name]
            if x.shape == () and jnp.issubdtype(x.dtype, jnp.floating):
                return x
        raise TrainingError(
            "the file's algorithm has no scalar output besides the values of its variables, so "
            "there is no loss to follow: make it an output of the algorithm, or run "
            "model.training.step yourself"
        )
