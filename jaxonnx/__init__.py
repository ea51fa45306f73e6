"""From an ONNX file to a pure JAX function and its parameters, trained, and back to ONNX."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxonnx import (
    _command,  # noqa: F401, before the imports that take seconds
    losses,
    optim,
)
from jaxonnx.errors import (
    Error,
    InputError,
    LimitError,
    ModelError,
    NodeError,
    SparsityError,
    StaticError,
    TrainingError,
    UnsupportedError,
)
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.lowering import kernels_first
from jaxonnx.model import Model, Value, add_training, labels, load
from jaxonnx.train import History, Result, evaluate, train

if TYPE_CHECKING:
    from jaxonnx import sparse

__all__ = [
    "Adapters",
    "Error",
    "History",
    "InputError",
    "LimitError",
    "LoRA",
    "Model",
    "ModelError",
    "NodeError",
    "Result",
    "SparsityError",
    "StaticError",
    "TrainingError",
    "UnsupportedError",
    "Value",
    "add_training",
    "evaluate",
    "kernels_first",
    "labels",
    "load",
    "losses",
    "optim",
    "sparse",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import the submodules that few programs need at first use."""
    if name in ("backend", "flax", "loggers", "sparse"):
        return importlib.import_module(f"jaxonnx.{name}")
    raise AttributeError(f"module 'jaxonnx' has no attribute '{name}'")
