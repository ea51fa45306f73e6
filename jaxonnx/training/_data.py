"""Convert the data arguments of `train` to sources of batches."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxonnx._data.batches import Examples, Source
from jaxonnx._data.images.batches import Pictures
from jaxonnx._data.images.folder import Folder
from jaxonnx._data.ragged import IGNORED, PLAIN, Padding
from jaxonnx._data.sources import check_size, examples_of, size_of_batches
from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.training._losses import find
from jaxonnx.training._sequences import is_next_token, shift_labels


def padding_of(pad: Any, length_buckets: Any, loss: Any, model: Model) -> Padding:
    """Return the padding settings that a loss needs.

    Raises:
      TrainingError: an argument of the wrong form, or an unknown loss.
    """
    several = isinstance(loss, Mapping)
    given = loss.items() if several else () if loss is None else [(None, loss)]
    found = {o: find(one[0] if isinstance(one, tuple) and one else one) for o, one in given}
    labels = {o: IGNORED if l.ignore_index is None else l.ignore_index for o, l in found.items()}
    next_token = is_next_token(loss)
    padding = Padding.of(
        pad,
        length_buckets,
        ignored=labels if several and not next_token else next(iter(labels.values()), IGNORED),
        next_token=next_token,
        untargeted=bool(found) and not any(l.takes_targets for l in found.values()),
        group=math.lcm(*(l.rows for l in found.values())),
    )
    return shift_labels(padding, model, loss)


def sources(
    data: Any,
    validation: Any,
    inputs: Sequence[Value],
    batch_size: int | None,
    seed: int,
    padding: Padding = PLAIN,
    target_names: Collection[str] = (),
) -> tuple[Source, Source | None]:
    """Return the examples to train with and those held out, in the forms that `train` documents.

    Args:
      validation: like `data`, a share of it between 0 and 1, or None.
      inputs: the model's; where they are fixed to a batch size, data in one piece takes it.
      batch_size: for data in one piece; the batches of an iterable have their own size.
      seed: of the order of data in one piece, which depends on it and on the epoch only, and of
        which examples are held out; validation data keeps its order.
      padding: of sequences of unequal length.
      target_names: names that are of targets, which weights of examples could have, too.
    """
    examples = source(data, inputs, batch_size, seed, padding, target_names)
    if validation is None:
        return examples, None
    if isinstance(validation, int | float):
        return _split(examples, validation)
    return examples, _source(
        validation, inputs, batch_size, None, "validation", padding, target_names
    )


def source(
    data: Any,
    inputs: Sequence[Value],
    batch_size: int | None,
    seed: int | None = None,
    padding: Padding = PLAIN,
    target_names: Collection[str] = (),
) -> Source:
    """Return a source of examples, unshuffled without a seed."""
    examples = _source(data, inputs, batch_size, seed, "data", padding, target_names)
    check_size(examples, batch_size)
    return examples


def _source(
    data: Any,
    inputs: Sequence[Value],
    batch_size: int | None,
    seed: int | None,
    what: str,
    padding: Padding,
    target_names: Collection[str],
) -> Source:
    if isinstance(data, Folder):
        if padding.group != 1:
            raise TrainingError(f"{what}: a folder of images has no groups of {padding.group}")
        return Pictures.of(data, size_of_batches(inputs, batch_size), seed)
    return examples_of(
        data, inputs, batch_size, seed, what, padding=padding, target_names=target_names
    )


def _split(examples: Source, share: float) -> tuple[Examples, Examples]:
    """Return examples without a share of them, and that share; the seed alone chooses."""
    if not isinstance(examples, Examples):
        raise TrainingError(
            f"validation={share} is a fraction, and data is an iterable: pass "
            "validation data like it"
        )
    if any(getattr(examples, "whole", ())):
        raise TrainingError(
            f"validation={share} is a share of examples, and batching= passes inputs whole: pass "
            "validation data, like (inputs, targets, weights) with the weight 0 for what is trained"
        )
    groups = examples.rows.reshape(-1, examples.group)
    count = len(groups)
    held = round(count * share) if 0 < share < 1 else 0
    if isinstance(share, bool) or not 0 < held < count:
        raise TrainingError(
            f"validation={share!r} must be a share between 0 and 1 of the {count} "
            f"{'examples' if examples.group == 1 else 'groups of examples'} that leaves some on "
            "either side"
        )
    order = np.random.default_rng(np.random.SeedSequence(examples.seed, spawn_key=(0,)))
    chosen = np.sort(order.permutation(count)[:held])
    rest, held_out = np.delete(groups, chosen, axis=0).reshape(-1), groups[chosen].reshape(-1)
    return replace(examples, rows=rest), replace(examples, rows=held_out, seed=None)
