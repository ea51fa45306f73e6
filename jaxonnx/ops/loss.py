"""Losses over class labels."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, widen
from jaxonnx.registry import op

Reduction = Literal["none", "mean", "sum"]


def _negative_log_likelihood(log_prob, target, weight, ignore_index, reduction):
    """Compute the loss of log_prob (N, C, *D) at target (N, *D).

    A label outside [0, C) that is not ignored gives NaN, or an error where it is known.
    """
    classes = log_prob.shape[1]
    counted = np.True_ if ignore_index is None else target != ignore_index
    inside = (target >= 0) & (target < classes)
    if isinstance(target, np.ndarray) and not (inside | ~counted).all():
        raise NodeError(f"a label is outside [0, {classes})")
    class_axis = jnp.arange(classes, dtype=canonical(target.dtype))
    class_axis = class_axis.reshape(-1, *(1,) * (target.ndim - 1))
    chosen = jnp.expand_dims(target, 1) == class_axis
    loss = -jnp.where(chosen, log_prob, 0).sum(1)
    loss = jnp.where(inside | ~counted, loss, jnp.nan)
    share = jnp.broadcast_to(counted, loss.shape).astype(loss.dtype)
    if weight is not None:
        weight = weight.reshape(-1, *(1,) * (target.ndim - 1))
        share = share * jnp.where(chosen, weight, 0).sum(1).astype(loss.dtype)
    loss = jnp.where(counted, loss * share, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / share.sum()


@op("NegativeLogLikelihoodLoss", since=12, shapes="x (N, C, *D), target (N, *D)")
def negative_log_likelihood_loss(
    x, target, weight=None, *, ignore_index=None, reduction: Reduction = "mean"
):
    """-x[n, target[n]], weighted by class; "mean" divides by the sum of the weights."""
    return _negative_log_likelihood(widen(x), target, weight, ignore_index, reduction).astype(
        x.dtype
    )


@op("SoftmaxCrossEntropyLoss", since=12, shapes="scores (N, C, *D), labels (N, *D)")
def softmax_cross_entropy_loss(
    scores, labels, weights=None, *, ignore_index=None, reduction: Reduction = "mean"
):
    """(loss, log_softmax(scores)) over axis 1."""
    log_prob = jax.nn.log_softmax(widen(scores), axis=1)
    loss = _negative_log_likelihood(log_prob, labels, weights, ignore_index, reduction)
    return loss.astype(scores.dtype), log_prob.astype(scores.dtype)
