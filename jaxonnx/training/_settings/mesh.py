"""A training step on a mesh of devices (`mesh=`, `sharding=`).

Shardings are given for the state and the batch only, before and after each step; XLA's partitioner
propagates them through everything between, and inserts the collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxonnx._arguments import Argument
from jaxonnx._arrays import put_array
from jaxonnx._data.batches import Batch, ShortBatch
from jaxonnx._mesh.rules import DATA, Sharding, axes_of, mesh_of, specs
from jaxonnx._mesh.shardings import Placement, inherit_shardings
from jaxonnx.errors import TrainingError
from jaxonnx.lowering import KernelFirst, kernel_first
from jaxonnx.model import Model
from jaxonnx.training._step import State, Step


class MeshArguments(TypedDict, total=False):
    """Devices, and how tensors lie on them."""

    mesh: Annotated[
        Mesh | Literal["all"] | None,
        Argument(
            form="all|NAME=N,...", words="All devices, or the sizes of axes like data=4,model=2"
        ),
    ]
    """The devices to train on: "all", or a `jax.sharding.Mesh`.

    "all" is a mesh with the one axis "data". The axis "data" splits the examples of each batch;
    `batch_size` is the total over all devices. Weights, statistics and optimizer state are placed
    according to `sharding`, also in the resulting model. Results equal those of one device up to
    rounding, and batch statistics are those of the whole batch."""
    sharding: Annotated[
        Sharding | None,
        Argument(
            form="data|fsdp|tensor",
            needs=("mesh",),
            reason="says how tensors are split over a mesh, and there is none: pass mesh='all' for "
            "all devices, or a jax.sharding.Mesh",
            words="How weights are placed on the mesh: data, fsdp or tensor",
        ),
    ]
    """How weights are placed on the mesh: "data", "fsdp" or "tensor"; or rules by name.

    * "data" (the default): all weights on each device.
    * "fsdp": each tensor is split along its largest axis that the number of devices divides. Small
      tensors are not split.
    * "tensor": pairs of matrix products (MLPs, attention) are split over the axis "model".
    * A dict of rules like `{"blocks.*weight": P(None, "model"), ".*": "fsdp"}`. Names match as in
      `trainable`, the first match counts, and a tensor without a match is not split.
    * A function of the name and the shape in the file.

    `model.shardings(mesh, sharding)` shows the placement."""


def split_over_mesh(step: Step) -> Step:
    """Return a step that runs on the devices of the mesh of its settings, if they have one."""
    mesh = step.settings.mesh
    return step if mesh is None else MeshStep(step, mesh, step.settings.sharding)


class MeshStep(Step):
    """A step of one device, on many: the same numbers up to rounding.

    The batch is split over the axis "data". Parameters and frozen tensors lie as the rules say, and
    what the optimizer keeps of a parameter lies as the parameter does, before and after each step:
    sums over the batch become sums over devices wherever the compiler meets one. The axes of the
    mesh are automatic here, whatever their type outside.

    Args:
      mesh, sharding: as in `train`.
    """

    def __init__(self, step: Step, mesh: Any, sharding: Sharding | None):
        self._step = step
        self._mesh = mesh_of(mesh)
        self.model, self.settings = step.model, step.settings
        tensors = {**self.model.state, **self.model.params, **step.params}
        split = specs(self.model, self._mesh, DATA if sharding is None else sharding, tensors)
        self._laid = {
            name: Placement(x.shape, self._by(split[name])) for name, x in tensors.items()
        }
        # The step may store parameters, and the optimizer's state for them, in another order than
        # the file. The shardings take the same way: `from_file` transposes a `Placement` as it does
        # an array, and the arrays of the state inherit them by the names of parameters.
        began = jax.eval_shape(step.init)
        bare = began.replace(params=self._laid, state={}, optimizer=(), average=None)
        stored = cast(dict[str, Placement], step.from_file(bare).params)  # as steps keep them
        self._state: State = inherit_shardings(began, stored, self._mesh)
        self._rows = self._by(PartitionSpec(DATA if DATA in self._mesh.shape else None))
        self._whole = self._by(PartitionSpec())
        self.frozen = {name: self._place_frozen(name, x) for name, x in step.frozen.items()}
        step.frozen = self.frozen  # no copy of them stays on one device
        # under FSDP the step gathers each weight explicitly (see `_gather`)
        lies = {**jax.tree.map(lambda x: x.sharding, self.frozen), **self._state.params}
        self._read = {
            name: jax.tree.map(_without_batch_axis, x)
            for name, x in lies.items()
            if any(DATA in axes_of(part) for laid in jax.tree.leaves(x) for part in laid.spec)
        }
        step.gather = self._gather
        self.updates, self.phases, self.last_phase = step.updates, step.phases, step.last_phase
        self.notes = (*step.notes, *_idle(self._mesh, split.values()))

    @property
    def params(self) -> Mapping[str, Any]:
        return self._step.params

    def init(self, params: Any = None) -> State:
        params = self.params if params is None else params
        with self._use_auto_mesh():
            return jax.jit(self._step.init, out_shardings=self._state)(self._put({**params}))

    def put(self, batch: Batch, shared: bool = False) -> Batch:
        if self._rows.is_fully_addressable:
            return jax.device_put(batch, jax.tree.map(self._sharding_of, batch))
        if not shared:
            self._check_size(batch)
            return jax.tree.map(lambda x: put_array(x, self._sharding_of(x)), batch)
        if isinstance(batch, ShortBatch):
            raise TrainingError(
                "the share of a process in a batch has fewer examples than those before, and "
                "the loss or a metric is a scalar of the examples of all processes: return one "
                "value for each example, or leave the last batch out"
            )
        place_share = partial(jax.make_array_from_process_local_data, self._rows)
        return jax.tree.map(lambda x: place_share(np.asarray(x)), batch)

    def advance(self, state: State, batch: Any, frozen: Any = None) -> tuple[State, Any, Any]:
        with self._use_auto_mesh():
            state, *reports = self._step.advance(state, self._split(batch), self._or_own(frozen))
            state, reports = self._constrain_state(state), _constrain(reports, self._whole)
        return state, *map(_leave_auto, reports)

    def flush(self, state: State) -> tuple[State, jax.Array]:
        with self._use_auto_mesh():
            state, finite = self._step.flush(state)
            state, finite = self._constrain_state(state), _constrain(finite, self._whole)
        return state, _leave_auto(finite)

    def evaluate(self, sums: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        with self._use_auto_mesh():
            sums = self._step.evaluate(sums, state, self._split(batch), self._or_own(frozen))
            return _constrain(sums, self._whole)

    def statistics(self, totals: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        with self._use_auto_mesh():
            totals = self._step.statistics(totals, state, self._split(batch), self._or_own(frozen))
            return _constrain(totals, self._whole)

    def as_batch(self, batch: Any) -> Batch:
        return self._step.as_batch(batch)

    def check(self, batch: Any) -> Any:
        batch = self.as_batch(batch)
        if self._rows.is_fully_addressable:  # else it may be the share of a process
            self._check_size(batch)
        return self._step.check(batch)

    def check_labels(self, targets: Any, shapes: Any, what: str, classes: Any = None) -> None:
        self._step.check_labels(targets, shapes, what, classes)

    def counts_fill(self, batch: Any, shapes: Any, metrics: bool) -> bool:
        return self._step.counts_fill(batch, shapes, metrics)

    def drop_fill(self, batch: Batch, *, whole: bool = True) -> Batch:
        return self._step.drop_fill(batch, whole=whole)

    def sums(self, batch: Any, shapes: Any = None) -> Any:
        return jax.tree.map(lambda x: put_array(x, self._whole), self._step.sums(batch, shapes))

    def row(self, sums: Any) -> dict[str, float]:
        return self._step.row(sums)

    def has_second_weights(self, state: State) -> bool:
        return self._step.has_second_weights(state)

    def view(self, state: State) -> dict[str, jax.Array]:
        with self._use_auto_mesh():
            return self._put(self._step.view(state))

    def to_model(self, params: Any, state: Any) -> Model:
        model = self._step.to_model(params, state)
        return model.replace(params=self._put(model.params), state=self._put(model.state))

    def to_file(self, state: State) -> State:
        with self._use_auto_mesh():
            return self._step.to_file(state)

    def from_file(self, state: State) -> State:
        with self._use_auto_mesh():
            return jax.device_put(self._step.from_file(state), self._state)

    def columns(self, validated: bool) -> list[str]:
        return self._step.columns(validated)

    def _constrain_state(self, state: State) -> State:
        """Lay out a state within a step."""
        placed = {
            field.name: _constrain(getattr(state, field.name), getattr(self._state, field.name))
            for field in fields(State)
        }
        return state.replace(**placed)

    def _by(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _put(self, tensors: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Place tensors, in the order of the file, by their shardings."""
        return {
            name: put_array(x, self._laid[name].sharding if name in self._laid else self._whole)
            for name, x in tensors.items()
        }

    def _gather(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors that are no longer split over the axis of the batch, within a step.

        Left to itself XLA gathers the weight or the batch for each product, and where many devices
        have little of the weight each it may be the batch.
        """
        return {
            name: _constrain(x, self._read[name]) if name in self._read else x
            for name, x in tensors.items()
        }

    def _place_frozen(self, name: str, x: Any) -> Any:
        laid = self._laid[name]
        if not isinstance(x, KernelFirst):
            return put_array(x, laid.sharding)
        axes: Any = kernel_first(laid.shape)
        return KernelFirst(put_array(x.value, laid.transpose(axes).sharding))

    def _or_own(self, frozen: Any) -> Any:
        return self.frozen if frozen is None else frozen

    def _split(self, batch: Any) -> Batch:
        """Convert a batch to `Batch` and split its arrays over the devices, within a step."""
        batch = self.as_batch(batch)
        self._check_size(batch)
        return jax.tree.map(lambda x: _constrain(_enter_auto(x), self._sharding_of(x)), batch)

    def _sharding_of(self, x: Any) -> NamedSharding:
        """Return the sharding of an array of a batch; short ones are whole on each device."""
        return self._whole if len(x) % self._mesh.shape.get(DATA, 1) else self._rows

    def _check_size(self, batch: Batch) -> None:
        """Refuse a batch that the devices cannot share."""
        size, count = len(batch.inputs[0]), self._mesh.shape.get(DATA, 1)
        if size % count:
            below, above = size // count * count, -(-size // count) * count
            near = f"{below} or {above}" if below else f"{above}"
            raise TrainingError(
                f"a batch of {size} examples does not divide over the {count} devices of the axis "
                f"'{DATA}' of the mesh; {near} would (batch_size=, or the batches of the data)"
            )

    def _use_auto_mesh(self) -> AbstractContextManager:
        """Return a context in which lowerings see the mesh, and XLA chooses shardings."""
        return jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh)


def _idle(mesh: Mesh, specs: Iterable[PartitionSpec]) -> Iterator[str]:
    """Yield a note for each mesh axis that neither splits the batch nor a tensor."""
    used = {DATA, *(axis for spec in specs for part in spec for axis in axes_of(part))}
    for axis, size in mesh.shape.items():
        if axis not in used and size > 1:
            yield f"the axis '{axis}' of the mesh splits nothing: its {size} devices do the same"


def _enter_auto(x: Any) -> Any:
    """Return an array of an explicit mesh where the axes of that mesh are automatic."""
    typed = isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    return jax.sharding.reshard(x, PartitionSpec()) if typed else x


def _leave_auto(x: Any) -> Any:
    """Return a small array as one of the mesh that the caller has set, if its axes are explicit."""
    mesh = jax.sharding.get_abstract_mesh()
    typed = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) if typed else x


def _without_batch_axis(laid: NamedSharding) -> NamedSharding:
    """Return a sharding without the axis that splits the batch."""
    rest = (tuple(axis for axis in axes_of(part) if axis != DATA) for part in laid.spec)
    return NamedSharding(laid.mesh, PartitionSpec(*(axes or None for axes in rest)))


def _constrain(tree: Any, shardings: Any) -> Any:
    return jax.lax.with_sharding_constraint(tree, shardings)


def automatic(mesh: Any) -> AbstractContextManager:
    """Return a context for a run on a mesh, also where the caller has set one of explicit axes."""
    typed = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.set_mesh(mesh_of(mesh)) if typed and mesh is not None else nullcontext()
