"""Training a file by the algorithm that it carries (`training_info`)."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import TrainingError
from jaxonnx.loading import load
from jaxonnx.model import Model
from jaxonnx.train.data import Arrays, Batch, Stream
from jaxonnx.train.history import History
from jaxonnx.train.progress import Bar


def follow(
    model: Model,
    examples: Arrays | Stream,
    held_out: Arrays | Stream | None,
    *,
    epochs: int,
    seed: int,
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

    state = training.state
    metric = _metric(training, state, as_inputs(next(examples.batches(0))))

    @jax.jit
    def update(state, batch, key):
        new, outputs = training.step(state, batch, key=key)
        loss = outputs[metric]
        good = jnp.isfinite(loss)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state), loss

    with Bar(progress, epochs, examples.steps) as bar:
        for epoch in range(epochs):
            began, before = time.perf_counter(), len(history.losses)
            for batch in examples.batches(epoch):
                key = jax.random.fold_in(jax.random.key(seed), len(history.losses))
                state, loss = update(state, as_inputs(batch), key)
                history.losses.append(float(loss))
                if not np.isfinite(history.losses[-1]):
                    history.stopped = (
                        f"the loss, {float(loss)}, is not finite at step {len(history.losses)}; "
                        "the weights are those before it"
                    )
                    break
                bar.show(history)
            if history.stopped:
                break
            row: dict[str, Any] = {"epoch": epoch, "step": len(history.losses)}
            row["loss"] = float(np.mean(history.losses[before:]))
            if held_out is not None:
                # A step whose new state is dropped: the file's own loss at these weights.
                steps = [training.step(state, as_inputs(b)) for b in held_out.batches(epoch)]
                row["validation_loss"] = float(np.mean([out[metric] for _, out in steps]))
            history.epochs.append(row | {"seconds": time.perf_counter() - began})
            bar.show(history)
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
