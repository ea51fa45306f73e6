"""Memory that a step does not fit into."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxonnx._run.failures import asked, exhausted
from jaxonnx.errors import Error, TrainingError
from jaxonnx.train._settings import Settings


@contextmanager
def fitting(settings: Settings) -> Iterator[None]:
    """Say what helps where memory is not enough for a batch or a step.

    Raises:
      TrainingError: it is not; the weights so far, which were in it, are lost but in checkpoints.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, Error) or not exhausted(error):
            raise
        kept = settings.checkpoint_dir
        raise TrainingError(
            f"memory is not enough{asked(error)}: a smaller batch_size, with accumulate= for the "
            "same mean gradient, remat=True, or a mesh= of more devices takes less"
            + ("" if kept is None else f"; resume=True goes on from the newest in '{kept}'")
        ) from error
