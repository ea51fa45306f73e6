"""Compute statistics of BatchNormalization, pooled over batches.

Running averages of `momentum` forget what they began with only after some 5 / (1 - momentum) steps,
and then lag behind the weights. Means over many batches at fixed weights do not (Wu and Johnson,
Rethinking "Batch" in BatchNorm, 2021, section 3: PreciseBN).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import data
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.views import FrozenStatistics

MOST = 200
"""Batches that statistics are computed from, at most; the greatest number in the paper."""

_HORIZON = 5.0
"""Time constants of a running average after which 0.7 % of its first value are left."""


class Norm(NamedTuple):
    """The running statistics of a BatchNormalization, by name."""

    mean: str
    variance: str
    momentum: float

    def settles(self, steps: int) -> bool:
        """Check whether a running average can have settled after so many steps."""
        return steps * (1 - self.momentum) >= _HORIZON


def find_norms(graph: Graph, state: Mapping[str, Any]) -> list[Norm]:
    """Return the normalizations whose statistics training updates, also within functions."""
    norms = []
    for node in graph.nodes:
        if node.op.normalizes:
            mean, variance = (node.inputs[i] for i in node.op.state)
            norms.append(Norm(mean, variance, float(node.attributes.get("momentum", 0.9))))
        if node.body is not None:
            outer = dict(zip(node.body.inputs, node.inputs, strict=False)) | dict(node.body.lifted)
            norms += [
                Norm(outer[norm.mean], outer[norm.variance], norm.momentum)
                for norm in find_norms(node.body, outer)
            ]
    return [n for n in norms if {n.mean, n.variance} <= state.keys() and n.momentum < 1]


def batch_norms(model: Network) -> list[Norm]:
    """Return the normalizations that use the statistics of the batch in training."""
    frozen = model.program.find(FrozenStatistics) is not None
    return [] if frozen else find_norms(model.graph, model.state)


def zero_totals(norms: Sequence[Norm], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pooled statistics of no examples; the key "" counts the examples."""
    names = {name for norm in norms for name in norm[:2]}
    zeros = {
        n: np.zeros(state[n].shape, jnp.promote_types(state[n].dtype, np.float32)) for n in names
    }
    return {"": np.zeros((), np.result_type(np.float32, *zeros.values()))} | zeros


def renew_statistics(
    model: Network, params: Any, state: Any, key: Any, inputs: Sequence[Any]
) -> dict[str, Any]:
    """Return the running statistics after a step; those in `state` may be wider than the model's.

    Args:
      inputs: of the model, in order; None where one is left out.
    """
    names = [value.name for value in model.inputs]
    values = {n: x for n, x in zip(names, inputs, strict=True) if x is not None}
    updates: dict[str, Any] = {}
    model.program.evaluate(params, state, values, key=key, training=True, updates=updates)
    return updates


def pool_batch(
    norms: Sequence[Norm],
    totals: Mapping[str, jax.Array],
    renew: Callable[[dict[str, jax.Array]], Mapping[str, jax.Array]],
    count: int,
) -> dict[str, jax.Array]:
    """Pool statistics with those of one more batch.

    Args:
      renew: a function from running statistics to those after a step.
      count: the number of examples in the batch.
    """
    # from zero, a step leaves the statistics of the batch times (1 - momentum)
    new = renew({name: jnp.zeros_like(x) for name, x in totals.items() if name})
    total = totals[""] + count
    part = count / total
    result = {"": total}
    for norm in norms:
        mean, variance = (new[name] / (1 - norm.momentum) for name in norm[:2])
        old, change = totals[norm.variance], mean - totals[norm.mean]
        result[norm.mean] = totals[norm.mean] + part * change
        # the variance of the union of two sets (Chan, Golub and LeVeque, 1983)
        result[norm.variance] = old + part * (variance - old) + part * (1 - part) * change**2
    return result


def apply_totals(
    state: Mapping[str, jax.Array], totals: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the state with the pooled statistics in place of its own, in its types."""
    return {n: totals[n].astype(x.dtype) if n in totals else x for n, x in state.items()}


def recompute(
    model: Network, batches: Iterable[Sequence[Any]], rng: jax.Array | None
) -> dict[str, jax.Array]:
    """Return the state of a model with its running statistics recomputed over `batches`.

    Raises:
      InputError: the model has no running statistics, or the new ones are not finite.
    """
    norms = find_norms(model.graph, model.state)
    if not norms:
        raise InputError("the model has no running statistics to recompute")
    key = jax.random.key(0) if rng is None else rng

    @jax.jit
    def add(totals, params, state, key, inputs):
        def renew(zeros):
            return renew_statistics(model, params, {**state, **zeros}, key, inputs)

        return pool_batch(norms, totals, renew, len(inputs[0]))

    totals: Any = zero_totals(norms, model.state)
    for number, inputs in enumerate(batches):
        batch_key = jax.random.fold_in(key, number)
        totals = add(totals, model.params, model.state, batch_key, tuple(inputs))
    if not all(jnp.isfinite(x).all() for x in totals.values()):
        raise InputError("the statistics of the data are not finite; those of the model are kept")
    return apply_totals(model.state, totals)


def find_single_values(model: Network, inputs: Sequence[Any]) -> list[str]:
    """Return the outputs of normalizations whose input has only one value for each channel."""
    learned = [n for n in model.graph.nodes if n.op.normalizes and not n.op.frozen]
    norms = [node for node in learned if node.inputs[0] and node.outputs[0]]
    if not norms or len(inputs[0]) != 1:
        return []
    names = list(dict.fromkeys(node.inputs[0] for node in norms))
    program = model.program.with_values(names)
    values = data({value.name: x for value, x in zip(model.inputs, inputs, strict=True)})
    shapes = jax.eval_shape(
        lambda params, state: program.evaluate(params, state, values, key=None, training=False),
        model.params,
        model.state,
    )
    shape_of = dict(zip(names, shapes[-len(names) :], strict=True))
    single = [
        node for node in norms if shape_of[node.inputs[0]].size == shape_of[node.inputs[0]].shape[1]
    ]
    return [node.outputs[0] for node in single]
