"""Meet the needs of a run's losses: of the model, of the data, and of each batch.

Each loss declares its needs (`losses.Loss`). Only a single loss prepares the model, changes
batches at random, or makes inputs of labels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._data.augment import AugmentedSource
from jaxonnx._data.batches import Batch
from jaxonnx._data.ragged import IGNORED, Needs
from jaxonnx.losses import Loss, find_by_output
from jaxonnx.model import Model


def find_only(loss: Any) -> Loss:
    """Return the only loss in the argument of `train`; one without needs if there are several."""
    losses = [*find_by_output(loss).values()]
    return losses[0] if len(losses) == 1 else Loss()


def prepare_model(model: Model, loss: Any, data: Any = None) -> Model:
    """Return the model that a loss trains, without caches unless data has values of them.

    None stands for no loss, for which only caches are left out.

    Args:
      data: the first batch, a dict or a pair with one, or anything else.

    Raises:
      TrainingError: the loss does not go with the model.
    """
    whole = model.without_cache()
    caches = {value.name for value in model.inputs} - {value.name for value in whole.inputs}
    inputs = data[0] if isinstance(data, tuple | list) and data else data
    if isinstance(inputs, Mapping):
        has_caches = not caches.isdisjoint(inputs)
    else:
        has_caches = isinstance(inputs, tuple) and len(inputs) == len(model.inputs)
    return find_only(loss).prepare(model if has_caches else whole)


def find_needs(model: Model, loss: Any) -> tuple[Needs, dict[str, Any]]:
    """Return the needs of losses of the data, and the padding of inputs that they make.

    Raises:
      TrainingError: an unknown loss.
    """
    losses = find_by_output(loss)
    ignored = {o: IGNORED if x.ignore_index is None else x.ignore_index for o, x in losses.items()}
    by_output = losses.keys() - {None} and not find_only(loss).of_tokens
    complete = find_only(loss).complete(model)
    needs = Needs(
        ignored if by_output else next(iter(ignored.values()), IGNORED),
        math.lcm(*(x.group for x in losses.values())),
        find_derivation(model, [*losses.values()]),
        {name: function for name, (function, _) in complete.items()},
        [*losses.values()],
    )
    return needs, {name: padding for name, (_, padding) in complete.items()}


def find_derivation(model: Model, losses: Sequence[Loss]) -> Any:
    """Return a function that makes targets of inputs, or None if the data must have some."""
    alone = len(losses) == 1
    derivations = [loss.derive(model) for loss in losses if alone or not loss.takes_targets]
    return derivations[0] if derivations and len(derivations) == len(losses) else None


def complete_batches(
    model: Model, loss: Any, sources: Sequence[Any], seed: int, trains: bool = True
) -> list[Any]:
    """Return sources whose batches have all that a loss takes.

    Args:
      model: as it is before the training.
      sources: that of training, that of validation; or None.
      seed: of the run.
      trains: whether `model` is trained; else no loss compares others with it.
    """
    only, sources = find_only(loss), [*sources]
    # 1. Targets of a second model. It is evaluated in inference mode, batch by batch, so that no
    # table of all logits is kept.
    losses = find_by_output(loss)
    adds = {o: x.second(model) for o, x in losses.items() if trains or not x.compares_with_start}
    if any(adds.values()):

        def ask(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
            for output, add in adds.items():
                targets = batch.targets
                if add is not None and isinstance(targets, Mapping) and output in targets:
                    added = add(batch._replace(targets=targets[output]))
                    batch = batch._replace(targets={**targets, output: added})
                elif add is not None and len(losses) == 1:  # `fit` refuses what several lack
                    batch = batch._replace(targets=add(batch))
            return batch

        sources = [source and AugmentedSource(source, ask, jax.random.key(0)) for source in sources]
    # 2. Changes at random, as `masked_lm` hides tokens. They depend on the seed, the epoch and the
    # number of a batch: a resumed run draws the same, and validation data is always changed alike.
    draw = only.draw(model)
    if draw is None:
        return sources

    def change(purpose: int) -> Any:
        def apply(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
            epoch = 0 if purpose else int(epoch)
            return draw(np.random.default_rng([seed, purpose, epoch, int(number)]), batch)

        return apply

    key = jax.random.key(0)
    return [source and AugmentedSource(source, change(i), key) for i, source in enumerate(sources)]
