"""`train`: one readable loop around any optax transformation; `step`: what it loops over."""

from jaxonnx.train._assembly import step
from jaxonnx.train._batches import Batch
from jaxonnx.train._history import History
from jaxonnx.train._result import Result
from jaxonnx.train._step import State, Step
from jaxonnx.train._train import train

__all__ = ["Batch", "History", "Result", "State", "Step", "step", "train"]
