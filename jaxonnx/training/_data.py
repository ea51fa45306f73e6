"""Open data, choose its usual loss, fit a model to it, and read it as batches."""

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from jaxonnx._data.batches import Portions, Source
from jaxonnx._data.kinds import Data, Reading, find_fixed_sizes, read
from jaxonnx._data.kinds import open_data as open_kind
from jaxonnx._data.ragged import Padding
from jaxonnx.errors import InputError, TrainingError, warn
from jaxonnx.model import Model, fit_to_batch, with_any_batch, with_whole_inputs
from jaxonnx.training._objective.needs import find_needs, prepare_model
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import target_names


class OpenedData(NamedTuple):
    """Data and validation data, each as its kind.

    Attributes:
      data: that to train with, or to evaluate.
      validation: that of `validation`, a share of the data between 0 and 1, or None.
      notes: for the history.
    """

    data: Data
    validation: Data | float | None = None
    notes: tuple[str, ...] = ()


class DataSources(NamedTuple):
    """Data as sources of batches.

    Attributes:
      model: the model, whose file has the preprocessing and the classes of images.
      examples: those to train with.
      held_out: those of `validation`.
      reading: has the numbers of long texts, of a stream as far as it has been read.
    """

    model: Model
    examples: Source
    held_out: Source | None
    reading: Reading

    @property
    def notes(self) -> list[str]:
        """Notes for the history, of the data as far as it has been read."""
        return [*dict.fromkeys(chain.from_iterable(self.reading.notes))]


def open_data(data: Any, settings: Settings) -> OpenedData:
    """Open data and the validation data of the settings; choose among splits by name.

    Raises:
      TrainingError: a split, a column or validation data is missing, or a file cannot be read.
    """
    opened = open_kind(data, "data", settings.columns)
    opened, validation, notes = opened.split(settings.validation)
    for name in ("validate_every", "validate_first"):
        if validation is None and getattr(settings, name):
            raise TrainingError(f"{name} needs validation data: pass validation= as well")
    if validation is not None and not isinstance(validation, int | float):
        validation = open_kind(validation, "validation", settings.columns)
    return OpenedData(opened, validation, (*notes,))


def check_compiles(model: Model) -> None:
    """Refuse a model that takes strings, which compiled programs cannot.

    Raises:
      TrainingError: the message says how to train the part behind them.
    """
    if texts := [str(value) for value in model.inputs if value.dtype == object]:
        raise TrainingError(
            f"the model takes strings ({', '.join(texts)}), which compiled programs cannot: "
            "first, second = model.split(VALUE) divides it at numbers that are computed of them; "
            "train or quantize the second part on first.predict(data)"
        )


def has_own_algorithm(model: Model, settings: Settings) -> bool:
    """Check whether a run takes the algorithm that the file carries (`training_info`)."""
    carried = bool(model.proto.training_info) and not model.heads
    return carried and settings.loss is None and settings.optimizer is None


def choose_loss(model: Model, settings: Settings, data: Data) -> tuple[Settings, list[str]]:
    """Return settings with the usual loss of a kind of data, if they have none; a note.

    Raises:
      TrainingError: only a loss by name uses such data.
    """
    if settings.loss is not None or has_own_algorithm(model, settings):
        return settings, []
    chosen = data.choose_loss(model)
    if chosen is None:
        return settings, []
    loss, what = chosen
    return replace(settings, loss=loss), [f"loss: {loss} (default for {what})"]


def read_data(
    model: Model, settings: Settings, opened: OpenedData, *, training: bool = True
) -> DataSources:
    """Read data in any form that `train` documents.

    Args:
      model: fitted to the data.
      settings: `seed`, and those of the data.
      opened: as `open_data` returns it.
      training: else the examples keep their order, and none are held out.

    Raises:
      TrainingError: the data does not fit the model or the settings.
    """
    validation = opened.validation if training else None
    if training and validation is None and settings.metrics is not None:
        raise TrainingError("metrics are computed on validation data: pass validation= as well")
    needs, pad = find_needs(model, settings.loss)
    padding = Padding.of(settings.pad, settings.length_buckets, needs=needs)
    reading = Reading(
        model,
        replace(padding, pad={**pad, **padding.pad}),
        settings.batch_size,
        settings.seed if training else None,
        settings.preprocess,
        None if callable(settings.augment) else settings.augment,
        trains=training,
        target_names=target_names(model),
    )
    parts = {"data": opened.data}
    if isinstance(validation, int | float) and (
        divided := opened.data.hold_out(validation, reading)
    ):
        parts["data"], validation = divided
    if isinstance(validation, Data):
        parts["validation"] = validation
    examples, *others = read(parts, reading)
    if validation is None or isinstance(validation, Data):
        held_out = others[0] if others else None
    else:
        examples, held_out = examples.split(validation)
    if training and settings.steps_per_epoch is not None:
        examples = Portions(examples, settings.steps_per_epoch)
    return DataSources(reading.model, examples, held_out, reading)


def fit_to_data(model: Model, settings: Settings, batch: Any) -> tuple[Model, list[str]]:
    """Return a model that trains on batches of the data, and notes for the history.

    Inputs of `fixed` have their value, those of `batching` no axis of examples. A file for one
    example is mapped over a batch, and a batch that the file fixes to 1 is opened. A decoder reads
    whole sequences. Only the open batch stays in the trained model.

    Args:
      batch: the first batch (`Data.first_batch`).

    Raises:
      TrainingError: the batch cannot be opened, and `batch_size` asks for another; or a file for
        one example has BatchNormalization.
    """
    model, notes = _fit_batch_axis(model, settings, batch)
    model, opened = _open_batch(model, settings)
    return prepare_model(model, settings.loss, batch), [*notes, *opened]


def fit_to_evaluation(model: Model, settings: Settings, batch: Any) -> Model:
    """Return a model that evaluates batches of the data, as `fit_to_data` fits one to training."""
    model, _ = _fit_batch_axis(model, replace(settings, statistics="frozen"), batch)
    return prepare_model(model, settings.loss, batch)


def _fit_batch_axis(model: Model, settings: Settings, batch: Any) -> tuple[Model, list[str]]:
    """Return a model with the inputs and the batch axis of the data, and notes."""
    model = with_whole_inputs(model, settings.batching) if settings.batching else model
    model = model.with_fixed_inputs(settings.fixed or {})
    return fit_to_batch(model, batch, renews_statistics=settings.statistics != "frozen")


def _open_batch(model: Model, settings: Settings) -> tuple[Model, list[str]]:
    """Return a model whose batch is open where the file fixes it to 1, and notes.

    A batch that is fixed to more stays, unless `batch_size` is another number. The open model is
    compared with the file's on random numbers first. If it cannot be opened, training goes on with
    single examples, after a warning.

    Raises:
      TrainingError: the batch cannot be opened, and `batch_size` asks for another.
    """
    inputs = prepare_model(model, None).inputs  # a switch of caches has one element, for all
    firsts = {*find_fixed_sizes(inputs)}
    if len(firsts) != 1 or settings.batching or has_own_algorithm(model, settings):
        return model, []
    (size,) = firsts
    chosen = settings.batch_size
    if chosen == size or (chosen is None and size > 1):
        return model, []
    try:
        opened = with_any_batch(model, prove=True)
    except InputError as error:
        if chosen is not None:
            raise TrainingError(
                f"batch_size={chosen}, but the model's inputs are fixed to batches of {size}, and "
                f"that cannot be opened: {error}"
            ) from error
        warn(
            "the file fixes the batch to 1, so that each step sees one example, and that cannot be "
            f"opened: {error}. batch_size=1 trains so without this warning; accumulate= makes one "
            "update of several steps",
        )
        return model, []
    return opened, [
        f"the file fixes the batch to {size}; it was opened, and two batches in one give what each "
        f"gives alone. The saved file takes batches of any size; batch_size={size} keeps it fixed"
    ]
