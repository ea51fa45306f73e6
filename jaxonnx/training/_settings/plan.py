"""`Plan`: the parts of a training step, before it is built."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optax

from jaxonnx._data.batches import Source
from jaxonnx.model import Model
from jaxonnx.training._objective.objective import Objective
from jaxonnx.training._settings import Settings
from jaxonnx.training._step.weight_layout import WeightLayout

Gradient = Callable[[Any], Any]


@dataclass
class Plan:
    """The parts of a training step. Each setting of `train` changes some, in the order of `order`.

    `build_step` makes the parts one after another: objective, optimizer and storage are there for
    the settings that act on them.
    """

    model: Model
    """The model that is trained, with the views of settings."""
    settings: Settings
    epochs: int | None
    steps_per_epoch: int | None
    examples: Source | None
    """The data, where it is known."""
    held_out: Source | None
    """Validation data."""
    platform: str | None
    """That of the run; by default that of the model's arrays."""
    notes: list[str] = field(default_factory=list)
    """Notes for the history, on what is trained otherwise than the file says."""
    goal: Objective = field(init=False)
    """Its model has the parameters of `model`."""
    optimizer: optax.GradientTransformationExtraArgs = field(init=False)
    """Of parameters as they are stored."""
    storage: WeightLayout = field(init=False)
    gradient_wrappers: list[Callable[[Gradient, Any], Gradient]] = field(default_factory=list)
    """Functions of the gradient (a function of the parameters) and of the optimizer's state, which
    return the gradient that a step computes."""
    updates: int | None = None
    """The number of updates of the run, if the optimizer asked for it."""
    phases: list[int] | None = None
    """The epochs of the dense and the dynamic phase of sparsity, if it divides those of the run."""
