"""Start recurrent states at zeros where data has none."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxonnx._data.augmented import Augmented
from jaxonnx._data.batches import Batch, Source
from jaxonnx._data.inputs_and_targets import drop_targets, lacks_batch_axis
from jaxonnx._graph.caches import find_states
from jaxonnx._graph.values import list_values
from jaxonnx._rewrite.network import Network, enter
from jaxonnx._text import list_some
from jaxonnx.errors import TrainingError
from jaxonnx.model._transforms import with_fixed_inputs
from jaxonnx.views import FixedInputs, Outputs

M = TypeVar("M", bound=Network)


def start_at_zeros(model: M, batch: Any) -> tuple[M, list[str]]:
    """Return a model whose recurrent states start at zeros if the data lacks them, and notes.

    The outputs that continue the states are left out.

    Args:
      batch: the data or a batch of it with targets, or what `inputs_alone` returns.

    Raises:
      TrainingError: the first axis of the sequences is not the batch, which the states have; or a
        size of the states is not known.
    """
    states = find_states(model.graph, model.inputs)
    if not states:
        return model, []
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) in (2, 3) else batch
    count = len(x) if isinstance(x, tuple) else int(hasattr(x, "shape"))
    lacks = count == len(model.inputs) - len(states)
    if isinstance(x, Mapping):
        lacks = states.keys().isdisjoint(x)
    if not lacks:
        return model, []
    values = [v for v in model.inputs if v.name in states]
    sizes = {n for v in values for n in v.shape or ()}
    fixed = {}
    for v in values:
        lengths = [n for n in v.shape or () if isinstance(n, int)]
        if len(lengths) < len(v.shape or ()) - 1:
            raise TrainingError(
                f"the data lacks the state {v}, whose sizes are not all known, so that it cannot "
                f"start at zeros: fixed={{{v.name!r}: np.zeros(...)}}, with the batch size among "
                "its sizes, does"
            )
        fixed[v.name] = np.zeros(lengths, v.dtype)
    started = with_fixed_inputs(model, fixed)
    outputs = {*model.graph.outputs} - {*states.values()}
    started = enter(started, Outputs.among(started.graph, outputs))
    first, *_ = started.inputs
    size = (first.shape or (1,))[0]
    if not (isinstance(size, int) or size in sizes or lacks_batch_axis(batch, started.inputs)):
        raise TrainingError(
            f"the first axis of input {first} is not the batch, as the states "
            f"{list_values(values)} show: pass examples with one more axis in front of these"
        )
    return started, [
        f"the data lacks the states {list_some(states, '')}: they are zeros at the start of each "
        "example. The saved file has them as before"
    ]


def inputs_alone(model: Network, batch: Any) -> Any:
    """Return a batch of `predict`, which may lack targets, in the form with targets."""
    return drop_targets(batch, [value.name for value in model.inputs]), None


def add_states(model: Network, started: Network, source: Source) -> Source:
    """Return batches of all inputs of a model, of batches that lack the states.

    Args:
      started: what `start_at_zeros` returned for the model.
    """
    fixed = started.program.find(FixedInputs)
    if started is model or fixed is None:
        return source
    names = [value.name for value in started.inputs]

    def add(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
        inputs = dict(zip(names, batch.inputs, strict=True))
        inputs |= {name: x.repeat(inputs) for name, x in fixed.values.items() if name not in inputs}
        return batch._replace(inputs=tuple(inputs[value.name] for value in model.inputs))

    return Augmented(source, add, jax.random.key(0))
