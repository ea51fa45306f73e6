"""The settings of `train`: their arguments, and the order in which they change the plan of a step.

A setting is a class of declarations in a module of this folder, and a function that changes a
`Plan`; or the model before the data is read (`head`), or the state of a step (`ema`).
"""

from collections.abc import Callable, Sequence

from jaxonnx._arguments import (
    BasicArguments,
    DataArguments,
    LossArguments,
    OptimizerArguments,
    RunArguments,
)
from jaxonnx.training._settings import Plan
from jaxonnx.training._settings.accumulate import AccumulateArguments, accumulate_batches
from jaxonnx.training._settings.activations import (
    DropoutArguments,
    NeftuneArguments,
    RematArguments,
    add_noise,
    change_dropout,
    recompute_activations,
)
from jaxonnx.training._settings.ema import EmaArguments
from jaxonnx.training._settings.labels import (
    ClassWeightsArguments,
    LabelSmoothingArguments,
    smooth_labels,
    weigh_classes,
)
from jaxonnx.training._settings.mesh import MeshArguments, split_over_mesh
from jaxonnx.training._settings.parameters import HeadArguments, LoraArguments, select_parameters
from jaxonnx.training._settings.precision import PrecisionArguments, round_gradient
from jaxonnx.training._settings.quantize import QuantizeArguments, quantize_weights
from jaxonnx.training._settings.sparsity import SparsityArguments, sparsify_weights
from jaxonnx.training._settings.statistics import StatisticsArguments, choose_statistics
from jaxonnx.training._step import Step


class ModelArguments(
    HeadArguments,
    LoraArguments,
    StatisticsArguments,
    DropoutArguments,
    NeftuneArguments,
    SparsityArguments,
    QuantizeArguments,
    total=False,
):
    """Arguments that choose the tensors to train: a head, adapters, sparse or rounded weights."""


class UpdateArguments(
    BasicArguments,
    ClassWeightsArguments,
    LabelSmoothingArguments,
    AccumulateArguments,
    EmaArguments,
    PrecisionArguments,
    RematArguments,
    MeshArguments,
    total=False,
):
    """Arguments of a step's computation: metrics, precision, devices, non-finite steps."""


class StepArguments(OptimizerArguments, ModelArguments, UpdateArguments, total=False):
    """The arguments of one step."""


class TrainArguments(LossArguments, StepArguments, DataArguments, RunArguments, total=False):
    """All arguments of `train` besides model and data."""


Change = Callable[[Plan], None]

MODEL: Sequence[Change] = (
    quantize_weights,
    choose_statistics,
    change_dropout,
    add_noise,
    select_parameters,
    recompute_activations,
)
"""These change the model, mostly by a view; what is trained is known after them."""

OBJECTIVE: Sequence[Change] = (weigh_classes, smooth_labels)
"""These change the losses, before metrics are chosen that fit them."""

OPTIMIZER: Sequence[Change] = (accumulate_batches, round_gradient, sparsify_weights)
"""These wrap the optimizer of the run, or the gradient that it gets."""

STEP: Sequence[Callable[[Step], Step]] = (split_over_mesh,)
"""These wrap the step."""
