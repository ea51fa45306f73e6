"""Check that a step fits into device memory, before it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxonnx._data.batches import DataEnded
from jaxonnx._files import memory
from jaxonnx._limits import format_bytes
from jaxonnx._run.failures import convert_errors, is_out_of_memory, requested_size
from jaxonnx.errors import Error, TrainingError
from jaxonnx.training._loop.stopping import Stop
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import State

EXHAUSTED = (jax.errors.JaxRuntimeError, MemoryError)
"""Exceptions that a lack of memory raises, among others."""


class FitCheck:
    """Compiles an update for each shape of batch, and calls it if memory suffices.

    An update takes over the memory of the state: one that fails while it runs has lost the weights.

    Args:
      update: of `Step.compile`, which donates the state.

    Attributes:
      planned: the bytes that the program compiled last takes, as XLA plans, if it says.
    """

    planned: int | None = None

    def __init__(self, update: Any):
        self._update = update
        self._compiled: set[Any] = set()

    def __call__(self, state: State, batch: Any, *others: Any) -> tuple[State, jax.Array]:
        leaves, structure = jax.tree.flatten(batch)
        kind = structure, *((x.shape, x.dtype) for x in leaves)
        if kind not in self._compiled:
            traced = self._update.trace(state, batch, *others)  # kept for the call
            with convert_errors("the compiled step"):
                compiled = self._update.compile(traced)
            _check(compiled, jax.tree.leaves(compiled.output_shardings)[0].addressable_devices)
            self._compiled.add(kind)
            if (used := compiled.memory_analysis()) is not None:
                self.planned = used.argument_size_in_bytes + used.temp_size_in_bytes
                self.planned += used.output_size_in_bytes - used.alias_size_in_bytes
        return self._update(state, batch, *others)


def _check(compiled: jax.stages.Compiled, devices: Any) -> None:
    """Raise a MemoryError if a program takes more memory than its devices have left."""
    used = compiled.memory_analysis()
    if used is None:
        return
    more = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            size, room = more, stats["bytes_limit"] - stats["bytes_in_use"]
        else:  # the memory of the machine, of which nothing says what is free
            size, room = more + used.argument_size_in_bytes, memory()
        if room is not None and size > room:
            raise MemoryError(
                f"a step allocates {size} bytes, of which there are {format_bytes(room)}"
            )


def to_stop(error: Any, state: State, several: bool) -> Any:
    """Convert an error that leaves the weights as they are to a `Stop`; return others as is.

    These are the end of an iterator, and an out-of-memory error if the weights survive.

    Raises:
      JaxRuntimeError, MemoryError: the weights are lost, no step was taken, or other processes take
        part in the run.
      DataEnded: other processes take part in the run.
    """
    if isinstance(error, DataEnded):
        if several:
            raise error
        return Stop(str(error), int(state.count))
    if not isinstance(error, EXHAUSTED):
        return error
    if not is_out_of_memory(error) or isinstance(error, Error) or several or not _survives(state):
        raise error
    return Stop(_advice(error), int(state.count))


def _survives(state: State) -> bool:
    """Check that no array of a state was donated, and that a step was done."""
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        return False
    try:
        return bool(jax.block_until_ready(state).taken > 0)
    except jax.errors.JaxRuntimeError:  # what failed computes it
        return False


def _advice(error: Exception) -> str:
    return (
        f"memory is not enough{requested_size(error)}: a smaller batch_size, with accumulate= for "
        "the same mean gradient, remat=True, or a mesh= of more devices takes less"
    )


@contextmanager
def explain_memory_errors(settings: Settings) -> Iterator[None]:
    """Raise a TrainingError with remedies if a batch or a step does not fit into memory.

    Raises:
      TrainingError: it is not, and no step was taken, or the weights are lost but in checkpoints.
    """
    try:
        yield
    except EXHAUSTED as error:
        if isinstance(error, Error) or not is_out_of_memory(error):
            raise
        folder = settings.checkpoint_dir
        newest = "" if folder is None else f"; resume=True goes on from the newest in '{folder}'"
        raise TrainingError(_advice(error) + newest) from error
