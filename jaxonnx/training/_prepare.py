"""Prepare a run: fit model and data to each other, and build the step."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto

from jaxonnx._data.augmented import augment_examples
from jaxonnx.model import Model, as_model
from jaxonnx.training._data import ReadData, fit_to_data, open_data, read_data
from jaxonnx.training._objective.needs import complete_batches
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.head import with_heads
from jaxonnx.training._step.build import build_step
from jaxonnx.training._step.defaults import choose_loss
from jaxonnx.training._step.step import Step


@dataclass(frozen=True)
class Prepared:
    """A step and its data.

    Attributes:
      step: the step.
      sources: the data as the step takes it: augmented, and with what a second model computes.
      settings: of the run, with the number of epochs.
      notes_on_model: for the history.
      data: the examples as the data has them, and notes on them.
      title: the name of the data.
    """

    step: Step
    sources: Sequence[Any]
    settings: Settings
    notes_on_model: Sequence[str]
    data: ReadData
    title: str

    @property
    def notes(self) -> list[str]:
        return [*self.notes_on_model, *self.data.notes]


def prepare_run(
    model: Model | str | os.PathLike[str] | bytes | ModelProto, data: Any, settings: Settings
) -> Prepared:
    """Read the data of a run, and build its step.

    Raises:
      TrainingError: data, loss or settings do not fit the model.
    """
    net = with_heads(as_model(model, settings.mesh), settings)
    opened = open_data(data, settings)
    settings, chosen = choose_loss(net, settings, opened.data)
    net, notes = fit_to_data(net, settings, opened.data.first_batch)
    read = read_data(net, settings, opened)
    settings = settings.with_length(read.examples.steps)
    settings = replace(settings, samples=opened.data.make_prompts(settings.samples))
    step = build_step(
        *(read.model, settings, settings.epochs, read.examples.steps, read.examples),
        held_out=read.held_out,
    )
    changed = augment_examples(read.examples, settings.augment, settings.seed)
    sources = [changed, read.held_out]
    sources = complete_batches(read.model, settings.loss, sources, settings.seed)
    notes = [*opened.notes, *chosen, *notes]
    return Prepared(step, sources, settings, notes, read, opened.data.title)
