"""From an ONNX file to a pure JAX function and its parameters, trained, and back to ONNX."""

import importlib
from typing import TYPE_CHECKING, Any

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
from jaxonnx.training import History, Result, evaluate, train

if TYPE_CHECKING:
    from jaxonnx import sparse
    from jaxonnx._step_files.export import export_step
    from jaxonnx._step_files.load import import_step
    from jaxonnx.onnx_out import to_onnx

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
    "export_step",
    "import_step",
    "kernels_first",
    "labels",
    "load",
    "losses",
    "optim",
    "sparse",
    "to_onnx",
    "train",
]
__version__ = "0.1.0"


_LATER = {
    "to_onnx": "jaxonnx.onnx_out",
    "export_step": "jaxonnx._step_files.export",
    "import_step": "jaxonnx._step_files.load",
}


def __getattr__(name: str) -> Any:
    """Import at first use what few programs need."""
    if name in ("backend", "flax", "loggers", "sparse"):
        return importlib.import_module(f"jaxonnx.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'jaxonnx' has no attribute '{name}'")
