"""`train`: one readable loop around any optax transformation."""

from jaxonnx.train._history import History
from jaxonnx.train._result import Result
from jaxonnx.train._train import train

__all__ = ["History", "Result", "train"]
