"""What a second model computes of each batch, as targets: references of preferences, teachers.

The model is evaluated in inference mode, batch by batch, so that no table of all logits is kept.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxonnx._data.augmented import Augmented
from jaxonnx._data.batches import Batch, Source
from jaxonnx._data.ragged import with_derived
from jaxonnx.errors import TrainingError
from jaxonnx.losses import Distillation, GroupLoss, log_likelihoods
from jaxonnx.model import Model, as_model
from jaxonnx.training._losses import find_by_output
from jaxonnx.training._sequences import read_whole_sequences


def add_second_model(model: Model, loss: Any, sources: list[Any]) -> list[Any]:
    """Return sources whose targets have what the loss takes of a second model.

    Args:
      model: as it is before the training, the reference of preferences.
      loss: as `train` takes it; only a single loss takes a second model.
      sources: `Source`s, or None.

    Raises:
      TrainingError: the teacher does not take the inputs of the model.
    """
    losses = find_by_output(loss)
    function = next(iter(losses.values())).function if len(losses) == 1 else None
    if isinstance(function, GroupLoss) and function.reference:
        add = _compute_references(model, function)
    elif isinstance(function, Distillation) and function.teacher is not None:
        add = _ask_teacher(model, function)
    else:
        return sources
    return [source and _with_targets(source, add) for source in sources]


def _with_targets(source: Source, add: Callable[[Batch], Any]) -> Source:
    def change(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
        return batch._replace(targets=add(batch))

    return Augmented(source, change, jax.random.key(0))


def _compute_references(model: Model, loss: GroupLoss) -> Callable[[Batch], Any]:
    """Return a function that adds the log-likelihoods of rows by the model to their labels."""

    @jax.jit
    def compute(params, state, inputs, labels):
        logits = model.apply(params, *inputs, state=state)
        return log_likelihoods(logits, labels, loss.ignore_index)

    def add(batch: Batch) -> Any:
        targets = batch.targets
        targets = targets if isinstance(targets, Mapping) else {"labels": targets}
        if "reference" in targets:  # the user computed them
            return targets
        reference = compute(model.params, model.state, batch.inputs, targets["labels"])
        return {**targets, "reference": reference}

    return add


def _ask_teacher(model: Model, loss: Distillation) -> Callable[[Batch], Any]:
    """Return a function that adds what the teacher computes of a batch to its labels."""
    teacher = read_whole_sequences(as_model(loss.teacher), loss)
    names = [value.name for value in model.inputs]
    if len(teacher.outputs) != 1:
        raise TrainingError(
            f"distill: the teacher has {len(teacher.outputs)} outputs: choose that of the logits, "
            "with model.with_outputs(NAME)"
        )

    @jax.jit
    def compute(params, state, inputs):
        return loss.shorten(teacher.apply(params, *inputs, state=state))

    def add(batch: Batch) -> Any:
        named = dict(zip(names, batch.inputs, strict=True))
        inputs = [named.get(value.name) for value in teacher.inputs]
        if len(inputs) == len(names) == 1:
            inputs = batch.inputs
        if all(x is None for x in inputs):
            raise TrainingError(
                f"distill: the teacher takes {', '.join(v.name for v in teacher.inputs)}, and the "
                f"student {', '.join(names)}: they need inputs of the same names"
            )
        logits = compute(teacher.params, teacher.state, with_derived(inputs, teacher.inputs))
        return logits, batch.targets

    return add
