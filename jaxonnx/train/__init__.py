"""`train`: one readable loop around any optax transformation; `step`: what it loops over.

`evaluate`: losses and metrics of a model over all of some data.
"""

from jaxonnx._data.batches import Batch
from jaxonnx.train._assembly import step
from jaxonnx.train._evaluate import evaluate
from jaxonnx.train._history import History
from jaxonnx.train._optimizers import optimizer
from jaxonnx.train._result import Result
from jaxonnx.train._step import State, Step
from jaxonnx.train._tables import ConfusionMatrix, Curve, Curves, PerClass
from jaxonnx.train._train import train

__all__ = [
    "Batch",
    "ConfusionMatrix",
    "Curve",
    "Curves",
    "History",
    "PerClass",
    "Result",
    "State",
    "Step",
    "evaluate",
    "optimizer",
    "step",
    "train",
]
