"""Fit a model to the data: fixed inputs, a batch axis, an open batch size, whole sequences."""

import warnings
from dataclasses import replace
from typing import Any

from jaxonnx._data.sources import lacks_batch_axis
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.model import Model, batch_norms, start_at_zeros, with_any_batch, with_whole_inputs
from jaxonnx.training._head import has_own_algorithm
from jaxonnx.training._loss_needs import prepare_model
from jaxonnx.training._settings import Settings


def fit_to_data(model: Model, settings: Settings, data: Any) -> tuple[Model, list[str]]:
    """Return a model that trains on batches of the data, and notes for the history.

    Inputs of `fixed` have their value, those of `batching` no axis of examples. A file for one
    example is mapped over a batch, and a batch that the file fixes to 1 is opened. A decoder reads
    whole sequences. Only the open batch stays in the trained model.

    Raises:
      TrainingError: the batch cannot be opened, and `batch_size` asks for another; or a file for
        one example has BatchNormalization.
    """
    model, notes = _fit_batch_axis(model, settings, data)
    model, opened = _open_batch(model, settings)
    return prepare_model(model, settings.loss, data), [*notes, *opened]


def fit_to_evaluation(model: Model, settings: Settings, data: Any) -> Model:
    """Return a model that evaluates batches of the data, as `fit_to_data` fits one to training."""
    model, _ = _fit_batch_axis(model, replace(settings, statistics="frozen"), data)
    return prepare_model(model, settings.loss, data)


def _fit_batch_axis(model: Model, settings: Settings, data: Any) -> tuple[Model, list[str]]:
    """Return a model with the inputs and the batch axis of the data, and notes."""
    model = with_whole_inputs(model, settings.batching) if settings.batching else model
    model = model.with_fixed_inputs(settings.fixed or {})
    model, notes = start_at_zeros(model, data)
    if not lacks_batch_axis(data, model.inputs):
        return model, notes
    if settings.statistics != "frozen" and batch_norms(model):
        raise TrainingError(
            "the file takes one example, without a batch, and its BatchNormalization would see one "
            "example at a time: pass statistics='frozen', or export it with a batch axis"
        )
    return model.with_batch_axis(), [
        *notes,
        "the file takes one example, without a batch: batches are mapped over it (jax.vmap), and "
        "the saved file takes one example as before",
    ]


def _open_batch(model: Model, settings: Settings) -> tuple[Model, list[str]]:
    """Return a model whose batch is open where the file fixes it to 1, and notes.

    A batch that is fixed to more stays, unless `batch_size` is another number. The open model is
    compared with the file's on random numbers first. If it cannot be opened, training goes on with
    single examples, after a warning.

    Raises:
      TrainingError: the batch cannot be opened, and `batch_size` asks for another.
    """
    inputs = model.without_cache().inputs  # a switch of caches has one element, for all examples
    firsts = {v.shape[0] for v in inputs if v.shape and isinstance(v.shape[0], int)}
    if len(firsts) != 1 or settings.batching or has_own_algorithm(model, settings):
        return model, []
    (size,) = firsts
    wanted = settings.batch_size
    if wanted == size or (wanted is None and size > 1):
        return model, []
    try:
        opened = with_any_batch(model, prove=True)
    except InputError as error:
        if wanted is not None:
            raise TrainingError(
                f"batch_size={wanted}, but the model's inputs are fixed to batches of {size}, and "
                f"that cannot be opened: {error}"
            ) from error
        warnings.warn(
            "the file fixes the batch to 1, so that each step sees one example, and that cannot be "
            f"opened: {error}. batch_size=1 trains so without this warning; accumulate= makes one "
            "update of several steps",
            stacklevel=4,
        )
        return model, []
    return opened, [
        f"the file fixes the batch to {size}; it was opened, and two batches in one give what each "
        f"gives alone. The saved file takes batches of any size; batch_size={size} keeps it fixed"
    ]
