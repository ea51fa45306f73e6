"""Knowledge distillation: the loss against the outputs of another model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx._require import check_arguments
from jaxonnx.errors import TrainingError


def distill(
    *, temperature: float = 2.0, soft: float = 1.0, ignore_index: int = -100
) -> Callable[[jax.Array, Any], jax.Array]:
    """Return the loss of a model that learns the outputs of another one.

    It is `temperature ** 2` times the divergence KL(teacher || student) of the softmaxes of logits
    (N, ..., classes) divided by the temperature, one mean for each example. Hinton, Vinyals and
    Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531).

    Targets are the teacher's logits; or a pair of these and labels (N, ...), of which those of
    `ignore_index` mark places that do not count, and the others are learned as well if `soft` is
    below 1. Labels of tokens are those of the next place: `tokens[:, 1:]` with one ignored at the
    end.

    >>> loss = distill(temperature=1.0)
    >>> print(loss(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.25, 0.75]]))).round(4))
    [0.1308]

    Args:
      temperature: above 0.
      soft: the share of the divergence, from 0 to 1; the rest is cross entropy of the labels.

    Raises:
      TrainingError: an argument is out of its range.
    """
    check_arguments(distill, locals(), TrainingError)
    if not temperature > 0 or not 0 <= soft <= 1:
        raise TrainingError(
            f"distill: temperature is above 0 and soft from 0 to 1; they are {temperature}, {soft}"
        )

    def loss(outputs: jax.Array, targets: Any) -> jax.Array:
        teacher, labels = targets if isinstance(targets, tuple | list) else (targets, None)
        if not hasattr(teacher, "astype"):
            raise TrainingError(
                "distill: targets must be the teacher's logits, or a pair of these and labels, got "
                f"{type(teacher).__name__}"
            )
        student = jax.nn.log_softmax(outputs.astype(jnp.float32) / temperature)
        teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
        values = temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1)
        if labels is None:
            return values.reshape(len(values), -1).mean(1)
        counts = labels != ignore_index
        scores = jax.nn.log_softmax(outputs.astype(jnp.float32))
        taken = jnp.take_along_axis(scores, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
        values = jnp.where(counts, soft * values - (1 - soft) * taken, 0)
        values, counts = (x.reshape(len(x), -1).sum(1) for x in (values, counts))
        return values / jnp.maximum(counts, 1)

    return loss
