"""Read the data arguments of `train` as sources of batches."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._data.augmented import add_image_augmentation
from jaxonnx._data.batches import Examples, Source
from jaxonnx._data.images.batches import Pictures
from jaxonnx._data.images.folder import Folder, find_folders
from jaxonnx._data.padding import fit_padding
from jaxonnx._data.ragged import PLAIN, Padding
from jaxonnx._data.rows import SHAPES, Rows, check_shape, choose_splits, open_rows
from jaxonnx._data.sources import check_size, examples_of, rename_columns, size_of_batches
from jaxonnx._data.streams import Portions
from jaxonnx._data.texts import TextSettings, read_texts
from jaxonnx._graph.values import Value
from jaxonnx.errors import TrainingError
from jaxonnx.losses import find_by_output
from jaxonnx.model import Model
from jaxonnx.training._loss_needs import find_needs
from jaxonnx.training._packed_rows import take_packed_rows
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import target_names


class ReadData(NamedTuple):
    """Data as sources of batches.

    Attributes:
      model: the model, whose file has the preprocessing and the classes of images.
      examples: those to train with.
      held_out: those of `validation`.
      notes: for the history; of a stream as far as it has been read.
      long: the number of texts that were "cut", "split" or skipped ("skip"), likewise.
    """

    model: Model
    examples: Source
    held_out: Source | None
    notes: Sequence[str]
    long: Mapping[str, int]


def open_data(data: Any, settings: Settings) -> tuple[Any, Settings, list[str]]:
    """Open data: splits by name, rows of texts and streams, new names of columns.

    Returns:
      The data; the settings, whose validation is opened likewise; notes for the history.

    Raises:
      TrainingError: a split or a column is missing, or a file cannot be read.
    """
    names, (data, validation, notes) = settings.columns, choose_splits(data, settings.validation)
    opened = []
    for what, part in (("data", data), ("validation", validation)):
        opened.append(rename_columns(open_rows(part, what, names), names, what))
    return opened[0], replace(settings, validation=opened[1]), notes


def read_data(model: Model, settings: Settings, data: Any, *, training: bool = True) -> ReadData:
    """Read data in any form that `train` documents.

    Args:
      model: fitted to the data.
      data: as `open_data` returns it.
      settings: `validation`, `seed`, and those of the data.
      training: else the examples keep their order, and none are held out.

    Raises:
      TrainingError: the data has none of these forms, or does not fit the model.
    """
    validation, seed = (settings.validation, settings.seed) if training else (None, None)
    preprocess = add_image_augmentation(settings.preprocess, settings.augment, data)
    of_texts = [isinstance(x, Rows) and bool(x.find_shape()) for x in (data, validation)]
    if any(of_texts):
        packs = TextSettings.of(preprocess).pack
        _check_answers(settings.loss, {"data": data, "validation": validation}, packs)
        model = take_packed_rows(model) if training and packs else model
    padding, notes, long = padding_of(model, settings), [], {}
    names = [value.name for value in model.inputs]
    for what, part in (("data", data), ("validation", validation)):
        if model.folder is not None:
            check_shape(part, what, names)
    if any(of_texts):
        read = read_texts(data, validation, model, preprocess, padding)
        data, validation, padding, notes, long = read
    else:
        data, validation, model = find_folders(data, validation, model, preprocess, training)
    if training and validation is None and settings.metrics is not None:
        raise TrainingError("metrics are computed on validation data: pass validation= as well")
    padding = fit_padding(padding, model)
    size, targets = settings.batch_size, target_names(model)
    examples, held_out = sources(data, validation, model.inputs, size, seed, padding, targets)
    if training and settings.steps_per_epoch is not None:
        examples = Portions(examples, settings.steps_per_epoch)
    return ReadData(model, examples, held_out, notes, long)


def _check_answers(loss: Any, read: Mapping[str, Any], packs: bool) -> None:
    """Refuse rows of single texts for a loss that compares answers, and packing for any of groups.

    Args:
      loss: as `train` takes it.
      read: data and validation by name.
      packs: whether several texts become one row.
    """
    for each in find_by_output(loss).values():
        if each.group > 1 and packs:
            raise TrainingError(
                f"preprocess={{'pack': True}} joins texts to rows, and the loss {each.name!r} "
                "compares rows: leave it out"
            )
        for name, rows in read.items() if each.answers is not None else ():
            shape = rows.find_shape(True) if isinstance(rows, Rows) else None
            if shape is not None and each.answers not in shape.columns:
                wanted = next(other for other in SHAPES if each.answers in other.columns)
                raise TrainingError(
                    f"{name} has rows with {', '.join(map(repr, rows.rename(rows.first)))}, and "
                    f"the loss {each.name!r} takes rows like {wanted.example}"
                )


def sources(
    data: Any,
    validation: Any,
    inputs: Sequence[Value],
    batch_size: int | None,
    seed: int | None,
    padding: Padding = PLAIN,
    target_names: Collection[str] = (),
) -> tuple[Source, Source | None]:
    """Return the examples to train with, and those held out.

    Args:
      validation: like `data`, a share of it between 0 and 1, or None.
      inputs: the model's; where they are fixed to a batch size, data in one piece takes it.
      batch_size: for data in one piece; the batches of an iterable have their own size.
      seed: of the order of data in one piece, which depends on it and on the epoch only, and of
        which examples are held out; None and validation data keep their order.
      padding: of sequences of unequal length.
      target_names: names that are of targets, which weights of examples could have, too.
    """

    def read(data: Any, name: str, seed: int | None = None) -> Source:
        if not isinstance(data, Folder):
            options: Any = {"padding": padding, "target_names": target_names}
            return examples_of(data, inputs, batch_size, seed, name, **options)
        if padding.needs.group != 1:
            group = padding.needs.group
            raise TrainingError(f"{name}: a folder of images has no groups of {group}")
        return Pictures.of(data, size_of_batches(inputs, batch_size), seed)

    examples = read(data, "data", seed)
    check_size(examples, batch_size)
    if validation is None:
        return examples, None
    if isinstance(validation, int | float):
        return _split(examples, validation)
    return examples, read(validation, "validation")


def padding_of(model: Model, settings: Settings) -> Padding:
    """Return the padding settings that the loss needs.

    Raises:
      TrainingError: an argument of the wrong form, or an unknown loss.
    """
    needs, pad = find_needs(model, settings.loss)
    padding = Padding.of(settings.pad, settings.length_buckets, needs=needs)
    return replace(padding, pad={**pad, **padding.pad})


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
    size = round(count * share) if 0 < share < 1 else 0
    if isinstance(share, bool) or not 0 < size < count:
        raise TrainingError(
            f"validation={share!r} must be a share between 0 and 1 of the {count} "
            f"{'examples' if examples.group == 1 else 'groups of examples'} that leaves some on "
            "either side"
        )
    order = np.random.default_rng(np.random.SeedSequence(examples.seed, spawn_key=(0,)))
    chosen = np.sort(order.permutation(count)[:size])
    rest, held_out = np.delete(groups, chosen, axis=0).reshape(-1), groups[chosen].reshape(-1)
    return replace(examples, rows=rest), replace(examples, rows=held_out, seed=None)
