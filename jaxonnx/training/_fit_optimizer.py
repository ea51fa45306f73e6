"""Fit an optimizer to what a training step can pass to it."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxonnx.errors import TrainingError
from jaxonnx.training._visible_params import keep_slow_weights

CHOICES = (("value", "grad", "value_fn"), ("value", "grad", "obj_fn"), ("grad_fn",))
"""The arguments of optimizers besides gradient and parameters, of which most take any.

They are the loss of a step, its gradient, and functions of the parameters on its batch, for line
searches, for Hessians (`sophia`), and for `sam`, which refuse what they do not take.
"""

FUNCTIONS = ("value_fn", "obj_fn", "grad_fn")


def fit_to_step(
    optimizer: optax.GradientTransformation, params: Mapping[str, Any], accumulates: bool
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes the parameters as a dict, and all arguments of a step.

    It gets those of the arguments that it can take.

    Args:
      params: arrays, or their shapes.
      accumulates: an update has the gradients of several batches, so that there are no `FUNCTIONS`.

    Raises:
      TrainingError: the optimizer cannot make an update of these.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}

    def loss(params, *_):
        return sum(jnp.sum(x) for x in params.values())

    def update(names, params):
        values = {"value": loss(params), "grad": params, "value_fn": loss, "obj_fn": loss}
        values["grad_fn"] = jax.grad(loss)
        chosen = {name: values[name] for name in names}
        return optimizer.update(params, optimizer.init(params), params, **chosen)

    first = None
    for choice in CHOICES:
        names = [name for name in choice if not (accumulates and name in FUNCTIONS)]
        try:
            with _without_warnings():
                memory = jax.eval_shape(optimizer.init, shapes)
            parts = jax.tree.leaves(memory, is_leaf=_is_lookahead)
            if first is None and any(map(_is_lookahead, parts)):
                optimizer = keep_slow_weights(optimizer)
            jax.eval_shape(partial(update, names), shapes)
            return _choose(optimizer, names)
        except jax.errors.JAXTypeError:  # it computes with the numbers of the parameters
            return optimizer
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            first = first or error
    why = " ".join(str(first).split("\n")[0].split())
    more = f"; with accumulate= it gets no {', '.join(FUNCTIONS)}" if accumulates else ""
    raise TrainingError(
        f"the optimizer cannot update parameters that are a dict of arrays by name ({why}){more}"
    ) from first


def _choose(
    inner: optax.GradientTransformationExtraArgs, names: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it gets no other arguments than these."""

    def update(updates, state, params=None, **extra):
        chosen = {name: x for name, x in extra.items() if name in names}
        return inner.update(updates, state, params, **chosen)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _is_lookahead(state: Any) -> bool:
    return isinstance(state, optax.LookaheadState)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore the warning that `optax.lookahead` logs about parameters that are not two sets."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_not_of_lookahead)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_lookahead)


def _is_not_of_lookahead(record: logging.LogRecord) -> bool:
    return "lookahead" not in record.pathname
