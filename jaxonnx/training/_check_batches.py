"""Checks of batches against the model, the loss and the metrics."""

from collections import deque
from typing import Any

import jax
import numpy as np

from jaxonnx._data.batches import Batch, Source
from jaxonnx._data.inputs_and_targets import is_zero_or_one
from jaxonnx.errors import Error, TrainingError
from jaxonnx.training._step.step import Step

_LATE = 8
"""Batches after which labels on a device are checked, so that the host does not wait for them."""


class BatchChecks:
    """The checks of a run; each shape of batches is checked once.

    Args:
      first: a batch of the training data.

    Attributes:
      shapes: what `Step.check` returned for that batch.

    Raises:
      TrainingError: the batch does not fit.
    """

    def __init__(self, step: Step, first: Batch, examples: Source):
        self._step = step
        self.shapes = step.check(_with_all_weights(first, examples))
        self._checked = {_signature(first): self.shapes}
        self._late: deque[tuple[Any, Any, str]] = deque()

    def __call__(self, batch: Batch, what: str) -> None:
        """Check a batch; labels on a device are checked some batches later."""
        key = _signature(batch)
        if key not in self._checked:
            try:
                self._checked[key] = self._step.check(batch)
            except Error as error:
                raise TrainingError(f"{what}: {error}") from error
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(batch.targets)):
            self._late.append((batch.targets, self._checked[key], what))
            self.catch_up(_LATE)
        else:
            self._step.check_labels(batch.targets, self._checked[key], what)

    def catch_up(self, keep: int = 0) -> None:
        """Check the labels that are on a device, except those of the newest batches."""
        while len(self._late) > keep:
            targets, shapes, what = self._late.popleft()
            self._step.check_labels(jax.device_get(targets), shapes, what)

    def check_data(self, examples: Source, held_out: Source | None) -> None:
        """Refuse data in one piece that does not fit, before anything is compiled."""
        for data, what in ((examples, "data"), (held_out, "validation")):
            if data is None or is_unchecked(data):
                continue
            if data.checks_batches:
                for batch in data.batches(0):
                    self(batch, what)
                continue
            self._step.check_labels(data.targets, self.shapes, what, data.classes)
            if data is held_out:
                self(_with_all_weights(next(data.batches(0)), data), what)


def is_unchecked(data: Source) -> bool:
    """Check whether targets are known only batch by batch."""
    return data.targets is None and not data.checks_batches


def _signature(batch: Batch) -> tuple[Any, ...]:
    """Return structure, shapes and dtypes of a batch: all that checks depend on but labels."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, _is_fill(batch.weight), *((x.shape, x.dtype) for x in leaves)


def _is_fill(weight: Any) -> bool:
    """Check whether weights only mark examples that fill a batch; a device is not waited for."""
    return isinstance(weight, np.ndarray) and is_zero_or_one(weight)


def _with_all_weights(batch: Batch, data: Source) -> Batch:
    """Return a batch with the weights of all examples where these are known, for a check."""
    return batch if data.weights is None else batch._replace(weight=data.weights)
