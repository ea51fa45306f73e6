"""The training loop (`train`), its step as pure functions (`step`), and `evaluate`.

`evaluate`: losses and metrics of a model over all of some data.
"""

# for other rooms of the package
from jaxonnx._arguments import OPTIMIZERS, DataArguments
from jaxonnx._data.batches import Batch
from jaxonnx._data.kinds import Data, Reading, register_data
from jaxonnx._io.checkpoints import TrainingCheckpoint, read_training_checkpoint
from jaxonnx.training._checkpoints.restore import restore_checkpoint
from jaxonnx.training._data import open_data, read_data
from jaxonnx.training._evaluate import evaluate
from jaxonnx.training._loop.history import History, shade
from jaxonnx.training._loop.stopping import Interrupt
from jaxonnx.training._objective.tables import ConfusionMatrix, Curve, Curves, PerClass
from jaxonnx.training._preview import Preview, preview
from jaxonnx.training._quantize import quantize, sensitivity
from jaxonnx.training._report import has_other_card
from jaxonnx.training._result import Result
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.order import StepArguments, TrainArguments
from jaxonnx.training._settings.parameters import with_heads
from jaxonnx.training._step import CompiledStep, State, Step, as_batch, target_names
from jaxonnx.training._step.build import build_step, step
from jaxonnx.training._step.optimizers import optimizer
from jaxonnx.training._train import train

__all__ = [
    "Batch",
    "CompiledStep",
    "ConfusionMatrix",
    "Curve",
    "Curves",
    "Data",
    "History",
    "PerClass",
    "Preview",
    "Reading",
    "Result",
    "State",
    "Step",
    "TrainingCheckpoint",
    "evaluate",
    "optimizer",
    "preview",
    "read_training_checkpoint",
    "register_data",
    "restore_checkpoint",
    "step",
    "train",
]
