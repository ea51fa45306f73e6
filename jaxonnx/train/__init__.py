"""`train`: one readable loop around any optax transformation."""

from jaxonnx.train.history import History
from jaxonnx.train.loop import Result, train

__all__ = ["History", "Result", "train"]
