"""A training step: its interface, as pure functions, and its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxonnx._data.batches import Batch, drop_fill
from jaxonnx._data.inputs_and_targets import count_examples, split_inputs, split_weights
from jaxonnx._data.ragged import derived_inputs, with_derived
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model, start_at_zeros
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.precision import PRECISIONS, LossScale

SMALL = 2**10
"""Elements up to which an array is checked for non-finite numbers after its update."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of training; a pytree of arrays.

    A loop of your own may carry more: a subclass with further fields, which is a frozen dataclass
    and registered (`jax.tree_util.register_dataclass`) as well, goes through `update` as it is.
    """

    params: dict[str, jax.Array]
    """As the step keeps them; `Step.view` has them as the file does."""
    state: dict[str, jax.Array]
    """Running statistics: the part of the model's state that training renews."""
    optimizer: Any
    """The state of the optimizer, of parameters as the step keeps them."""
    average: dict[str, jax.Array] | None
    """The moving average of the parameters, in float32 at least, where one is taken (`ema`)."""
    count: jax.Array
    """The number of steps; random operators fold it into their key."""
    taken: jax.Array
    """Those of them that were finite: their loss, gradients, statistics and update."""
    finite: jax.Array
    """False once a step was not finite and none is skipped; from then on nothing changes."""
    scale: LossScale | None
    """The scale of the loss, where there is one (`precision="fp16"`)."""

    def replace(self, **changes: Any) -> Self:
        """Return a state with other values of some fields."""
        return replace(self, **changes)


class CompiledStep(NamedTuple):
    """The functions of a `Step` for a loop of your own, compiled at the first batch of a shape."""

    update: Callable[[State, Any], tuple[State, jax.Array]]
    """`Step.update` of a state and a batch. The state is donated: use the one returned."""
    evaluate: Callable[[Any, State, Any], Any]
    """`Step.evaluate` of sums, a state and a batch; nothing is donated."""


class Step(ABC):
    """One training step, as pure functions that `jax.jit`, `lax.scan`, a mesh or an exporter take.

    `jaxonnx.training.step` makes one. Nothing here is compiled but what `jit` returns.

    Attributes:
      model: the model that is trained, with adapters where `lora` puts them.
      settings: of the run, with the loss and the optimizer that they leave open.
      frozen: the tensors that no step changes. `update` and `evaluate` use them anyway; where they
        are large, pass them as an argument of what you compile, or they become constants in it.
        `jit` does.
      notes: differences between the trained network and the file.
      updates: those that its schedule is made for, where the optimizer asked for them.
      phases: the epochs of the dense and the dynamic phase of sparsity, where it shares them out.
      last_phase: the phase of sparsity that the run ends in: 2 with masks that move, 3 with fixed
        ones.
      gather: what a mesh does with tensors before the model reads them, within a program.
      optimizer_variables: parameters of its states that the network does not read: in a file that
        carries its step, the variables of its optimizer.
    """

    model: Model
    settings: Settings
    frozen: dict[str, Any]
    notes: tuple[str, ...]
    updates: int | None = None
    phases: list[int] | None = None
    last_phase: int = 3
    gather: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    optimizer_variables: frozenset[str] = frozenset()

    def jit(self) -> CompiledStep:
        """Compile `update` and `evaluate`, with the frozen tensors as an argument.

        >>> import numpy as np, optax
        >>> from jaxonnx import demo, training
        >>> loss = "softmax_cross_entropy_with_integer_labels"
        >>> one = training.step(demo.model(), loss, optax.sgd(0.1))
        >>> update, evaluate = one.jit()
        >>> batch = np.zeros((8, 1, 8, 8), np.float32), np.arange(8)
        >>> state, (value, finite) = update(one.init(), batch)
        """
        update, evaluate = self.compile(self.update, donate_argnums=0), self.compile(self.evaluate)
        return CompiledStep(
            lambda state, batch: update(state, batch, self.frozen),
            lambda sums, state, batch: evaluate(sums, state, batch, self.frozen),
        )

    def compile(self, function: Callable[..., Any], **settings: Any) -> Any:
        """Compile a function of this step as `jit` does: with the compiler's options for it.

        Args:
          function: `update`, `evaluate`, ..., or a function that calls one.
          settings: as for `jax.jit`.
        """
        precision = self.settings.precision
        rounded = None if precision is None else PRECISIONS[precision]
        return self.model.program.jit(function, rounded, **settings)

    @abstractmethod
    def init(self, params: Any = None) -> State:
        """Return the state before the first step, in memory of its own, which may be donated.

        Args:
          params: the model's parameters as the file has them; those of the model by default.
        """

    def update(self, state: State, batch: Any, frozen: Any = None) -> tuple[State, jax.Array]:
        """Return the state after a step, and [the loss before it, whether all is finite].

        Args:
          state: of `init` or of the step before.
          batch: a `Batch`, or inputs and targets in one of the other forms that `train` documents,
            like `(x, y)` or `(x, y, weight)`.
          frozen: `self.frozen`.
        """
        state, report, _ = self.advance(state, batch, frozen)
        return state, report

    @abstractmethod
    def advance(self, state: State, batch: Any, frozen: Any = None) -> tuple[State, Any, Any]:
        """Return the results of `update`, and [the numerators, the denominators] of the losses.

        There is one loss for all terms with the same denominator; most objectives have one.
        """

    def flush(self, state: State) -> tuple[State, jax.Array]:
        """Return the state after an update of the batches that wait for others (`accumulate`), and
        whether it is finite.

        `train` calls it at the end of an epoch. Where no batches wait, the state stays as it is.
        """
        return state, jnp.bool(True)

    @abstractmethod
    def check(self, batch: Any) -> Any:
        """Return the shapes of the model's results on a batch in training.

        Raises:
          TrainingError: the batch does not fit the model, the loss or the metrics.
        """

    @abstractmethod
    def check_labels(self, targets: Any, shapes: Any, what: str, classes: Any = None) -> None:
        """Refuse labels that are not classes of the loss.

        Args:
          targets: as NumPy arrays, of a batch or of all data.
          shapes: the result of `check`.
          what: where the targets are, for the error.
          classes: the names of all classes, where the data have them.
        """

    def counts_fill(self, batch: Any, shapes: Any, metrics: bool) -> bool:
        """Check whether the loss, or a metric, is a scalar, which includes what fills a batch.

        `train` then leaves it out, by `drop_fill`.

        Args:
          shapes: what `check` returned.
          metrics: whether to look at metrics, and not at the loss.
        """
        return False

    def drop_fill(self, batch: Batch, *, whole: bool = False) -> Batch:
        """Return a batch on the host of the examples whose weight is not 0.

        Inputs whose size is fixed keep all examples; the loss then takes as many outputs as there
        are weights.

        Args:
          whole: whether inputs keep all examples in any case, as devices that share them need.

        Raises:
          TrainingError: the size is fixed, and an example of weight 0 is before others, or the
            algorithm of the file is run, which has no weights.
        """
        return drop_fill(batch, () if whole else self.model.inputs)

    @abstractmethod
    def sums(self, batch: Any, shapes: Any = None) -> Any:
        """Return the zero sums that `evaluate` starts from, for batches like this one.

        Args:
          shapes: the result of `check`, if it was called.
        """

    @abstractmethod
    def evaluate(self, sums: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        """Return the sums with those of a batch, of losses and metrics in inference mode."""

    def statistics(self, totals: Any, state: State, batch: Any, frozen: Any = None) -> Any:
        """Return the pooled statistics of `zero_totals` with those of a batch in training.

        The weights are those of `view`. A step without BatchNormalization returns what it is given.
        """
        return totals

    @abstractmethod
    def row(self, sums: Any) -> dict[str, float]:
        """Return the numbers that sums come to, by the name that `History.epochs` has for them."""

    @abstractmethod
    def view(self, state: State) -> dict[str, jax.Array]:
        """Return the parameters to validate and to save, in the order of the file.

        These are the averages of `ema`, or the weights at which the optimizer wants the network to
        be evaluated (`optax.contrib.schedule_free_eval_params`, the slow ones of `optax.lookahead`,
        those before an adversarial step of `optax.contrib.sam`), where there are any
        (`has_second_weights`). Running statistics are those of `State.params`: in a loop of your
        own, `Model.recompute_statistics` makes them fit.
        """

    def has_second_weights(self, state: State) -> bool:
        """Check whether the parameters of `view` may be others than those that are trained."""
        return False

    @abstractmethod
    def to_model(self, params: Any, state: Any) -> Model:
        """Return the model with parameters of `view` and statistics (`State.state`)."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The initial parameters, in the order of the file."""
        return self.model.params

    def as_batch(self, batch: Any) -> Batch:
        """Return a batch of any form, traced or not.

        Raises:
          TrainingError: it does not have the model's inputs.
        """
        return as_batch(batch, self.model)

    def put(self, batch: Batch, shared: bool = False) -> Batch:
        """Return a batch with its arrays on the devices that share it, where there are several.

        Args:
          shared: each process has a share of the batch, instead of all of it.
        """
        return batch

    def to_file(self, state: State) -> State:
        """Return a state with all arrays in the order of the file, as checkpoints have it."""
        return state

    def from_file(self, state: State) -> State:
        """Return a state as steps take it, the inverse of `to_file`."""
        return state

    def columns(self, validated: bool) -> list[str]:
        """Return the names of the metrics that `monitor` can have."""
        return ["loss", "validation_loss"] if validated else ["loss"]


def as_batch(batch: Any, model: Model, derive_targets: Callable[[Any], Any] | None = None) -> Batch:
    """Return a batch of any form, traced or not; examples weigh one where nothing is said.

    Args:
      derive_targets: returns those of a batch that lacks them, from its inputs.

    Raises:
      TrainingError: the batch does not have the model's inputs.
    """
    if isinstance(batch, Batch):
        return batch
    names = [value.name for value in model.inputs]
    derived = derive_targets is not None
    batch, weight = split_weights(batch, names, target_names(model), derived)
    started, _ = start_at_zeros(model, batch)
    if started is not model:
        states = ", ".join(name for name in names if name not in {v.name for v in started.inputs})
        raise TrainingError(
            f"the batch lacks the states {states}: pass them (with the examples along their axis "
            "of the batch), or make the step of a model in which they start at zeros: "
            "model.with_fixed_inputs({name: np.zeros(...)}), without the axis of the batch"
        )
    x, y = split_inputs(batch, names, "the batch", derived_inputs(model.inputs))
    x = with_derived(x, model.inputs)
    if derive_targets is not None and not jax.tree.leaves(y):
        y = derive_targets(x)
    if weight is None:
        count = count_examples(x, y, model.inputs)
        weight = (np if isinstance(count, int) else jnp).ones(count, np.float32)
    return Batch(x, y, weight)


def target_names(model: Model) -> set[str]:
    """Return names that targets can have: those of outputs and of inputs of a file's algorithm."""
    training = [value for info in model.proto.training_info for value in info.algorithm.input]
    return {value.name for value in (*model.outputs, *training)}


def stays_finite(old: Any, new: Any, small: bool = False) -> jax.Array:
    """Check whether every number that was finite still is; others may be infinite by design.

    Args:
      small: look at small arrays only, and at the smallest one in any case. A test of large ones
        would be a second pass over what an update computes: a quarter of a step of Adam.
    """
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    floats = [(a, b) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.floating)]
    if small and floats:
        limit = max(SMALL, min(b.size for _, b in floats))
        floats = [(a, b) for a, b in floats if b.size <= limit]
    sums = [_new_nonfinite(a, b) for a, b in _join_small(floats)]
    return jnp.isfinite(jnp.stack([jnp.float32(0), *sums])).all()


@jax.jit
def _new_nonfinite(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a number that is finite if no number of b has become infinite or NaN."""
    # a sum of zeros cannot overflow, and 0 * x is 0 unless x is infinite or NaN
    return jnp.sum(jnp.where(jnp.isfinite(a), 0 * b, 0), dtype=jnp.float32)


def finite(tree: Any) -> jax.Array:
    """Check whether every number is finite; sums are quicker than tests of each number."""
    sums = [
        jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
        for (x,) in _join_small([(x,) for x in jax.tree.leaves(tree)])
    ]
    return jnp.isfinite(jnp.stack(sums)).all()


def _join_small(rows: Sequence[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
    """Concatenate small arrays of one dtype: a loop for each would take longer."""
    large, small = [], defaultdict(list)
    for row in rows:
        split = any(axis is not None for x in row for axis in jax.typeof(x).sharding.spec)
        if split or row[0].size > SMALL:
            large.append(row)
        else:
            small[tuple(x.dtype for x in row)].append([x.reshape(-1) for x in row])
    columns = (zip(*group, strict=True) for group in small.values())
    return [*large, *(tuple(jnp.concatenate(column) for column in row) for row in columns)]


def copy(tree: Any) -> Any:
    """Copy into fresh buffers."""

    def copy_leaf(x):
        if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
            return jnp.copy(x)
        return jax.device_put(x, may_alias=False)  # without a program for each shape

    return jax.tree.map(copy_leaf, tree)


def own_buffers(tree: Any, others: Any) -> Any:
    """Copy the leaves of a tree that share memory with others or with each other.

    So all of them may be donated.
    """
    taken = {_address(x) for x in jax.tree.leaves(others)}

    def own(x):
        address = _address(x)
        if address in taken:
            return copy(x)
        taken.add(address)
        return x

    return jax.tree.map(own, tree)


def _address(x: Any) -> Any:
    """Return where an array lies in memory; of a traced one its identity."""
    if isinstance(x, Tracer):
        return id(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    part = x.addressable_data(0)
    try:
        return part.unsafe_buffer_pointer(), part.device
    except jax.errors.JaxRuntimeError:  # a platform without pointers
        return id(x)
