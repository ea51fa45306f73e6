"""Training a file by the algorithm that it carries (`training_info`)."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import TrainingError
from jaxonnx.model import Model, load
from jaxonnx.train._data import Arrays, Batch, Stream
from jaxonnx.train._history import History
from jaxonnx.train._progress import Bar
from jaxonnx.train._record import Hook, Record


def follow(
    model: Model,
    examples: Arrays | Stream,
    held_out: Arrays | Stream | None,
    *,
    epochs: int,
    seed: int,
    hooks: Sequence[Hook],
    progress: bool | None,
) -> tuple[Model, History]:
    """Runs `model.training` from the state in the file; the result carries the new state.

    The loss that is recorded is the first scalar among the metrics of the algorithm. A short batch
    is filled up with other examples, which count: the file's loss knows no weights.
    """
    training, history = model.training, History()
    names = [value.name for value in model.inputs]
    targets = [n for n in dict.fromkeys(sum(training.inputs, ())) if n not in names]

    def as_inputs(batch: Batch) -> dict[str, Any]:
        given = batch.targets if isinstance(batch.targets, Mapping) else {None: batch.targets}
        if None in given and len(targets) == 1:
            given = {targets[0]: batch.targets}
        if {*given} != {*targets}:
            raise TrainingError(
                f"the file's algorithm takes {', '.join(targets) or 'nothing'} besides the inputs "
                "of the network; give one array for one, or a dict by these names"
            )
        return {**dict(zip(names, batch.inputs, strict=True)), **given}

    # the first batch tells the shapes; an iterator cannot be asked for it again
    batches = examples.batches(0)
    first = next(batches)
    batches = chain([first], batches)
    state, finite = training.state, jnp.bool(True)
    metric = _metric(training, state, as_inputs(first))

    @jax.jit
    def update(state, finite, batch, key):
        new, outputs = training.step(state, batch, key=key)
        loss = outputs[metric]
        finite &= jnp.isfinite(loss)
        state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return state, finite, jnp.stack([loss, finite.astype(loss.dtype)])

    with Bar(progress, epochs, examples.steps) as bar, ExitStack() as stack:
        record = Record(history, hooks, bar)
        stack.callback(record.close)
        for epoch in range(epochs):
            began, before = time.perf_counter(), record.step
            for batch in batches if epoch == 0 else examples.batches(epoch):
                key = jax.random.fold_in(jax.random.key(seed), record.started)
                state, finite, seen = update(state, finite, as_inputs(batch), key)
                if not record.add(seen):
                    break
            if not record.flush():
                history.stopped = f"{record.trouble}; the weights are those before it"
                break
            row: dict[str, Any] = {"epoch": epoch, "step": record.step}
            row["loss"] = float(np.mean(history.losses[before:]))
            if held_out is not None:
                # A step whose new state is dropped: the file's own loss at these weights.
                steps = [training.step(state, as_inputs(b)) for b in held_out.batches(epoch)]
                row["validation_loss"] = float(np.mean([out[metric] for _, out in steps]))
            record.close_epoch(row | {"seconds": time.perf_counter() - began})
    return load(training.to_onnx(state)), history


def _metric(training: Any, state: Any, batch: Any) -> str:
    _, outputs = jax.eval_shape(training.step, state, batch)
    for name in training.metrics:
        if outputs[name].shape == () and jnp.issubdtype(outputs[name].dtype, jnp.floating):
            return name
    raise TrainingError(
        "the file's algorithm has no scalar output besides the values of its variables, so there "
        "is no loss to follow; run model.training.step yourself"
    )
