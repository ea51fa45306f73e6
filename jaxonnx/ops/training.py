"""Training: losses over class labels, and ai.onnx.preview.training: Gradient and the optimizers."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import optim
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, widen
from jaxonnx.optim import as_attribute
from jaxonnx.registry import Names, Outputs, op

DOMAIN = "ai.onnx.preview.training"
SCALARS = "R #1, T #1"
ALPHA, BETA, EPSILON = map(as_attribute, (0.9, 0.999, 1e-6))


@op("Gradient", since=1, domain=DOMAIN)
def gradient(*inputs, xs, y, zs=None, scope: Names, outputs: Outputs):
    """The derivatives of sum(y) by xs, where the graph is cut at xs and zs and fed with `inputs`.

    `scope.recompute` evaluates the nodes between the cut and y anew, as a pure function of the
    values fed; where these are the values that flow anyway, XLA merges both evaluations.
    """
    names = [*xs, *(zs or ())]
    scope[y]
    for cut in names:
        scope[cut]
        others = [name for name in names if name != cut]
        if len(others) < len(names) - 1:
            raise NodeError(f"'{cut}' stands twice in xs and zs; name each tensor once")
        if scope.depends(cut, others):
            raise NodeError(
                f"'{cut}' in xs and zs is computed from another tensor there, one of "
                f"{', '.join(others)}; the variables of y must be independent of each other"
            )
    if outputs > len(xs):
        raise NodeError(f"xs names {len(xs)} tensors, so there are no {outputs} outputs")
    if len(inputs) != len(names) or any(value is None for value in inputs):
        present = sum(value is not None for value in inputs)
        raise NodeError(f"xs and zs name {len(names)} tensors, but {present} inputs are given")
    values = dict(zip(names, inputs, strict=True))
    for name in xs:
        _check_float(values[name], f"'{name}' in xs")
    constants = {name: values[name] for name in names[len(xs) :]}

    def target(*variables):
        feeds = dict(zip(xs, variables, strict=True)) | constants
        return jnp.asarray(scope.recompute([y], feeds)[0])

    value, pull_back = jax.vjp(target, *(jnp.asarray(values[name]) for name in xs))
    _check_float(value, f"y, '{y}',")
    return pull_back(jnp.ones_like(value))


def _check_float(value, what):
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise NodeError(f"{what} has type {value.dtype}; only float tensors have a gradient")


def _optimize(rule, R, T, tensors, slots):
    """Apply `rule` to each tensor; `tensors` are all X, then all G, then each kind of state."""
    kinds = 2 + slots
    count, rest = divmod(len(tensors), kinds)
    if rest or not count or any(tensor is None for tensor in tensors):
        raise NodeError(
            f"{len(tensors)} inputs follow R and T; each optimized tensor has {kinds}: its value, "
            f"its gradient and {slots} of state"
        )
    R, T = jnp.reshape(R, ()), jnp.reshape(T, ())
    rows = []
    for i in range(count):
        X, *others = tensors[i::count]
        for other in others:
            if other.shape != X.shape or other.dtype != X.dtype:
                raise NodeError(
                    f"tensor {i} is {X.dtype}{list(X.shape)}, its gradient or state is "
                    f"{other.dtype}{list(other.shape)}; they must be alike"
                )
        dX, *state = rule(X, *others, R=R, T=T)
        rows.append((X + dX, *state))
    return tuple(tensor for kind in zip(*rows, strict=True) for tensor in kind)


@op("Adam", since=1, domain=DOMAIN, shapes=SCALARS)
def adam(
    R,
    T,
    *inputs,
    alpha=ALPHA,
    beta=BETA,
    epsilon=EPSILON,
    norm_coefficient=0.0,
    norm_coefficient_post=0.0,
):
    rule = partial(
        optim.adam_rule,
        alpha=alpha,
        beta=beta,
        epsilon=epsilon,
        norm_coefficient=norm_coefficient,
        norm_coefficient_post=norm_coefficient_post,
    )
    return _optimize(rule, R, T, inputs, slots=2)


@op("Adagrad", since=1, domain=DOMAIN, shapes=SCALARS)
def adagrad(R, T, *inputs, decay_factor=0.0, epsilon=EPSILON, norm_coefficient=0.0):
    rule = partial(
        optim.adagrad_rule,
        decay_factor=decay_factor,
        epsilon=epsilon,
        norm_coefficient=norm_coefficient,
    )
    return _optimize(rule, R, T, inputs, slots=1)


@op("Momentum", since=1, domain=DOMAIN, shapes=SCALARS)
def momentum(R, T, *inputs, alpha, beta, mode: Literal["standard", "nesterov"], norm_coefficient):
    rule = partial(
        optim.momentum_rule, alpha=alpha, beta=beta, mode=mode, norm_coefficient=norm_coefficient
    )
    return _optimize(rule, R, T, inputs, slots=1)


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
    class_axis = class_axis.reshape(1, -1, *(1,) * (target.ndim - 1))
    chosen = jnp.expand_dims(target, 1) == class_axis
    loss = -jnp.where(chosen, log_prob, 0).sum(1)
    loss = jnp.where(inside | ~counted, loss, jnp.nan)
    share = jnp.broadcast_to(counted, loss.shape).astype(loss.dtype)
    if weight is not None:
        weight = weight.reshape(1, -1, *(1,) * (target.ndim - 1))
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
