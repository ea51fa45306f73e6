"""Check that a step fits into device memory, before it runs."""

from collections.abc import Callable, Iterator
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
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, state: State, batch: Any, *others: Any) -> tuple[State, jax.Array]:
        leaves, structure = jax.tree.flatten(batch)
        kind = structure, *((x.shape, x.dtype) for x in leaves)
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(state, batch, *others)
        return self._compiled[kind](state, batch, *others)

    def _compile(self, *arguments: Any) -> Callable[..., Any]:
        """Return the update for arguments like these, in pieces where the network is deep."""
        update = self._update.in_pieces(*arguments)
        with convert_errors("the compiled step"):
            if update is not self._update:
                more = update.pieces.measure()
                arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
                size, devices = sum(x.nbytes for x in arrays), arrays[0].devices()
            else:
                # the trace is kept for the call
                compiled = update.lower(update.trace(*arguments)).compile()
                devices = jax.tree.leaves(compiled.output_shardings)[0].addressable_devices
                size = more = None
                if (used := compiled.memory_analysis()) is not None:
                    size = used.argument_size_in_bytes
                    more = used.temp_size_in_bytes + used.output_size_in_bytes
                    more -= used.alias_size_in_bytes
        if size is not None and more is not None:
            _check(size, more, devices)
            self.planned = size + more
        return update


def _check(size: int, more: int, devices: Any) -> None:
    """Raise a MemoryError if a program takes more memory than its devices have left.

    Args:
      size: the bytes of its arguments.
      more: the bytes that it allocates.
      devices: where it runs.
    """
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            needed, room = more, stats["bytes_limit"] - stats["bytes_in_use"]
        else:  # the memory of the machine, of which nothing says what is free
            needed, room = more + size, memory()
        if room is not None and needed > room:
            raise MemoryError(
                f"a step allocates {needed} bytes, of which there are {format_bytes(room)}"
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
