"""Restore the optimizer state of a checkpoint of onnxruntime-training."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._io.checkpoints import read_training_checkpoint
from jaxonnx._io.ties import sources
from jaxonnx._require import check_arguments
from jaxonnx.errors import TrainingError
from jaxonnx.optim import AdamState
from jaxonnx.training._step import State, Step


def restore_checkpoint(step: Step, path: str | os.PathLike[str]) -> State:
    """Return the state of a step where a run of onnxruntime-training ended.

    It has the parameters of the checkpoint, and the moments and the count of its AdamW in the place
    of those of `jaxonnx.optim.adam(rate, T=1)`, which continues with the same numbers. Tensors that
    are not trained are read by `jaxonnx.load(model, weights=path)`.

    Args:
      step: of `jaxonnx.training.step`.
      path: of a checkpoint that was saved with `include_optimizer_state=True`.

    Raises:
      ModelError: the file is not such a checkpoint, or is damaged.
      TrainingError: it has no moments of a parameter of the step, or of another shape; or the
        optimizer is not `jaxonnx.optim.adam`.
    """
    check_arguments(restore_checkpoint, locals())
    saved, where = read_training_checkpoint(path), f"'{os.fspath(path)}'"
    if not saved.moments:
        raise TrainingError(
            f"{where} has no optimizer moments: it was saved without include_optimizer_state; "
            "jaxonnx.load(model, weights=path) reads its parameters"
        )
    if incomplete := next((name for name, x in saved.moments.items() if len(x) != 2), None):
        raise TrainingError(
            f"{where} has {len(saved.moments[incomplete])} moments of '{incomplete}', and AdamW "
            "two: it is of SGD, which continues from its parameters alone, "
            "jaxonnx.load(model, weights=path)"
        )
    copies = sources(step.model.proto.graph, step.model.tensors)
    for name, x in step.params.items():
        if name not in saved.moments and copies.get(name) in saved.moments:
            raise TrainingError(
                f"{where} has '{copies[name]}' and '{name}', which the file has as its Identity, "
                "as one tensor: jaxonnx.load(model, weights=path, tied='identity') trains them so, "
                "as onnxruntime-training does"
            )
        arrays = [*saved.moments.get(name, ()), saved.params.get(name)]
        if [np.shape(y) for y in arrays] != [x.shape] * 3 or arrays[-1] is None:
            raise TrainingError(
                f"{where} lacks two moments and a value of the shape {[*x.shape]} for '{name}'; "
                f"it has those of {', '.join(saved.moments)}: trainable= chooses what is trained"
            )
    params = {name: jnp.asarray(saved.params[name], x.dtype) for name, x in step.params.items()}
    state = step.to_file(step.init(params))
    replaced = 0

    def replace(node):
        nonlocal replaced
        if not isinstance(node, AdamState):
            return node
        replaced += 1
        moments = (
            {name: jnp.asarray(saved.moments[name][i], x.dtype) for name, x in params.items()}
            for i in (0, 1)
        )
        return AdamState(jnp.asarray(saved.count, node.count.dtype), *moments)

    optimizer = jax.tree.map(
        replace, state.optimizer, is_leaf=lambda node: isinstance(node, AdamState)
    )
    if replaced != 1:
        raise TrainingError("the optimizer of the step must be one jaxonnx.optim.adam(rate, T=1)")
    count = jnp.int32(saved.count)
    return step.from_file(state.replace(optimizer=optimizer, count=count, taken=jnp.copy(count)))
