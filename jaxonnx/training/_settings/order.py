"""The settings of `train` in the order in which they change the plan of a step."""

from collections.abc import Callable, Sequence

from jaxonnx.training._settings.accumulate import accumulate_batches
from jaxonnx.training._settings.class_weights import weigh_classes
from jaxonnx.training._settings.dropout import change_dropout
from jaxonnx.training._settings.label_smoothing import smooth_labels
from jaxonnx.training._settings.lora import select_parameters
from jaxonnx.training._settings.mesh import split_over_mesh
from jaxonnx.training._settings.neftune import add_noise
from jaxonnx.training._settings.plan import Plan
from jaxonnx.training._settings.precision import round_gradient
from jaxonnx.training._settings.quantize import quantize_weights
from jaxonnx.training._settings.remat import recompute_activations
from jaxonnx.training._settings.sparsity import sparsify_weights
from jaxonnx.training._settings.statistics import choose_statistics
from jaxonnx.training._step import Step

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
