"""`train`: one readable loop around any optax transformation."""

from jaxonnx.train.history import History
from jaxonnx.train.loop import train
from jaxonnx.train.result import Result

__all__ = ["History", "Result", "train"]
