"""Prepare a run: fit model and data to each other, and build the step."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto

from jaxonnx._data.augmented import augment_examples
from jaxonnx._data.batches import Source
from jaxonnx._data.rows import Rows
from jaxonnx.model import Model, as_model
from jaxonnx.training._build_step import build_step
from jaxonnx.training._continuations import as_messages
from jaxonnx.training._data import open_data, read_data
from jaxonnx.training._fit_to_data import fit_to_data
from jaxonnx.training._head import choose_loss_of_texts, with_heads
from jaxonnx.training._loss_needs import ask_second_model, draw_batches
from jaxonnx.training._settings import Settings
from jaxonnx.training._step import Step


@dataclass(frozen=True)
class Prepared:
    """A step and its data.

    Attributes:
      step: the step.
      examples: those to train with, as the data has them.
      held_out: those of `validation`.
      sources: both as the step takes them: augmented, and with what a second model computes.
      settings: of the run, with the number of epochs.
      notes_on_model, notes_on_data: for the history; of a stream as far as it has been read.
      long: the number of texts that were "cut", "split" or skipped ("skip"), likewise.
    """

    step: Step
    examples: Source
    held_out: Source | None
    sources: Sequence[Any]
    settings: Settings
    notes_on_model: Sequence[str]
    notes_on_data: Sequence[str]
    long: Mapping[str, int]

    @property
    def notes(self) -> list[str]:
        return [*self.notes_on_model, *self.notes_on_data]


def prepare_run(
    model: Model | str | os.PathLike[str] | bytes | ModelProto, data: Any, settings: Settings
) -> Prepared:
    """Read the data of a run, and build its step.

    Raises:
      TrainingError: data, loss or settings do not fit the model.
    """
    net = with_heads(as_model(model, settings.mesh), settings)
    data, settings, splits = open_data(data, settings)
    settings, chosen = choose_loss_of_texts(net, settings, data)
    net, notes = fit_to_data(net, settings, data)
    read = read_data(net, settings, data)
    settings = settings.with_length(read.examples.steps)
    if isinstance(data, Rows) and data.is_chat:
        settings = replace(settings, samples=as_messages(settings.samples))
    step = build_step(
        *(read.model, settings, settings.epochs, read.examples.steps, read.examples),
        held_out=read.held_out,
    )
    changed = augment_examples(read.examples, settings.augment, settings.seed)
    sources = ask_second_model(read.model, settings.loss, [changed, read.held_out])
    sources = draw_batches(read.model, settings.loss, sources, settings.seed)
    return Prepared(
        *(step, read.examples, read.held_out, sources, settings),
        *([*splits, *chosen, *notes], read.notes, read.long),
    )
