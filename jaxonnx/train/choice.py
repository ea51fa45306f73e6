"""Which parameters are trained, and which of them sparse."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax

from jaxonnx import sparse
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model


def select(
    params: Mapping[str, jax.Array],
    trainable: str | Iterable[str] | Callable[[str, jax.Array], bool] | None,
) -> set[str]:
    """The names that `trainable` means: names, expressions matched in full, or a predicate."""
    if trainable is None:
        chosen = set(params)
    elif callable(trainable):
        chosen = {name for name, value in params.items() if trainable(name, value)}
    else:
        chosen = set()
        for wanted in [trainable] if isinstance(trainable, str) else trainable:
            found = {n for n in params if n == wanted or re.fullmatch(wanted, n)}
            if not found:
                raise TrainingError(
                    f"trainable={wanted!r} matches no parameter; there are {', '.join(params)}"
                )
            chosen |= found
    if not chosen:
        raise TrainingError("no parameter is to be trained; print(model) shows what the model has")
    return chosen


def sparsify(
    model: Model,
    optimizer: optax.GradientTransformation,
    sparsity: str | Mapping[str, Any],
    epochs: int,
    steps: int | None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer inside `sparse.three_phase`, with phases in epochs.

    Without lengths, a third of the epochs is dense, half have a dynamic mask, the rest a fixed one.
    """
    if steps is None:
        raise TrainingError(
            "sparsity needs the number of batches in an epoch: pass arrays, or an iterable with a "
            "length"
        )
    options = {"pattern": sparsity} if isinstance(sparsity, str) else dict(sparsity)
    if not {"dense", "dynamic", "fixed"} & {*options}:
        options |= {"dense": epochs // 3, "dynamic": max(1, epochs // 2)}
    options = {"dense": 0, "dynamic": None} | options
    options.setdefault("exclude", {})
    return sparse.three_phase(optimizer, steps_per_epoch=steps, **options)
