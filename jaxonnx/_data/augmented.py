"""Augmentation of training batches by a function of the user, on the device."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxonnx._data.batches import Batch, Derived, Source
from jaxonnx._data.images.augment import key_of
from jaxonnx.errors import TrainingError

_KEY = 2**32 - 4
"""Folded into the seed's key for the function; images and steps fold in others."""


class Augmented(Derived):
    """A source that applies a function to each batch of another source.

    Random changes depend only on the key, the epoch and the number of the batch, so that a resumed
    run draws the same.

    Args:
      source: the source of the batches.
      change: a function of (key, epoch, number of the batch, batch) that returns a batch.
      key: of the run.
    """

    def __init__(
        self, source: Source, change: Callable[[jax.Array, Any, Any, Batch], Batch], key: jax.Array
    ):
        super().__init__(source)  # batches are checked as they come: changing takes time
        self._change, self._key = change, key

    @property
    def steps(self) -> int | None:
        return self._source.steps

    def apply(self, batch: Batch) -> Batch:
        """Change a batch of the innermost source as if it were the first one."""
        batch = self._source.apply(batch) if isinstance(self._source, Augmented) else batch
        return self._change(self._key, np.uint32(0), np.uint32(0), batch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(self._source.batches(epoch, start), start):
            yield self._change(self._key, np.uint32(epoch), np.uint32(number), batch)


def augment_examples(examples: Source, augment: Any, seed: int) -> Source:
    """Return a source whose batches a user's function changes, on the device.

    Args:
      examples: the source.
      augment: a function of (key, x), or of (key, batch) if its second parameter has that name;
        for any other argument of `train` the source is returned as it is.
      seed: of the run.
    """
    if not callable(augment):
        return examples
    takes_batch = [*inspect.signature(augment).parameters][1:2] == ["batch"]
    apply = jax.jit(_on_batch(augment) if takes_batch else _on_inputs(augment))

    def change_batch(key: jax.Array, epoch: Any, number: Any, batch: Batch) -> Batch:
        if takes_batch:
            return apply(key, epoch, number, batch)
        # targets stay on the host, where those of a stream are checked
        return batch._replace(inputs=apply(key, epoch, number, batch.inputs))

    return Augmented(examples, change_batch, jax.random.fold_in(jax.random.key(seed), _KEY))


def _on_inputs(function: Callable) -> Callable:
    """Wrap a function of (key, x), where x is the only input or a tuple of all, and check it."""

    def apply(key: jax.Array, epoch: Any, number: Any, inputs: tuple) -> tuple:
        single = len(inputs) == 1
        x = function(key_of(key, epoch, number), inputs[0] if single else inputs)
        x = (x,) if single else x
        old, new = jax.tree.structure(inputs), jax.tree.structure(x)
        if old != new:
            raise TrainingError(f"augment must return what it takes, {old}, and returns {new}")
        _check_count(x, len(inputs[0]))
        return x

    return apply


def _on_batch(function: Callable) -> Callable:
    """Wrap a function of (key, batch), and check its result."""

    def apply(key: jax.Array, epoch: Any, number: Any, batch: Batch) -> Batch:
        new = function(key_of(key, epoch, number), batch)
        if not isinstance(new, Batch):
            raise TrainingError(
                "augment must return the batch with other values, like "
                f"batch._replace(inputs=...), and returns a {type(new).__name__}"
            )
        _check_count(new, len(batch.weight))
        return new

    return apply


def _check_count(new: Any, count: int) -> None:
    """Raise if a function changed the number of examples, by which epochs are counted."""
    shapes = [np.shape(x) for x in jax.tree.leaves(new)]
    if any(shape[:1] != (count,) for shape in shapes):
        raise TrainingError(
            f"augment must keep the {count} examples of a batch, and returns arrays of shape "
            f"{', '.join(map(str, shapes))}"
        )
