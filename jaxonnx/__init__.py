"""From an ONNX file to a pure JAX function and its parameters, trained, and back to ONNX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxonnx import formats, loggers, losses, optim, sparse, training
    from jaxonnx._hub import export_safetensors, push_to_hub
    from jaxonnx._step_files.export import export_step
    from jaxonnx._step_files.load import average_states, import_step
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
    from jaxonnx.model import Model, Stack, Value, add_training, convert, labels, load, stack
    from jaxonnx.onnx_out import to_onnx
    from jaxonnx.quantization import Quantization, Sensitivity
    from jaxonnx.tools import RateCurve, find_rate
    from jaxonnx.training import History, Result, evaluate, quantize, sensitivity, train
    from jaxonnx.validation import Validation, validate

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
    "Quantization",
    "RateCurve",
    "Result",
    "Sensitivity",
    "SparsityError",
    "Stack",
    "StaticError",
    "TrainingError",
    "UnsupportedError",
    "Validation",
    "Value",
    "add_training",
    "average_states",
    "convert",
    "evaluate",
    "export_safetensors",
    "export_step",
    "find_rate",
    "formats",
    "import_step",
    "kernels_first",
    "labels",
    "load",
    "loggers",
    "losses",
    "optim",
    "push_to_hub",
    "quantize",
    "sensitivity",
    "sparse",
    "stack",
    "to_onnx",
    "train",
    "training",
    "validate",
]
__version__ = "0.1.0"

_MODULES = {
    "jaxonnx._hub": ("export_safetensors", "push_to_hub"),
    "jaxonnx._step_files.export": ("export_step",),
    "jaxonnx._step_files.load": ("average_states", "import_step"),
    "jaxonnx.lora": ("Adapters", "LoRA"),
    "jaxonnx.lowering": ("kernels_first",),
    "jaxonnx.model": (
        *("Model", "Stack", "Value", "add_training", "convert", "labels", "load", "stack"),
    ),
    "jaxonnx.onnx_out": ("to_onnx",),
    "jaxonnx.quantization": ("Quantization", "Sensitivity"),
    "jaxonnx.tools": ("RateCurve", "find_rate"),
    "jaxonnx.training": ("History", "Result", "evaluate", "quantize", "sensitivity", "train"),
    "jaxonnx.validation": ("Validation", "validate"),
}
"""Where public names are defined; errors and submodules aside."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `import jaxonnx` alone does not import JAX."""
    if name not in (*__all__, "backend", "flax"):
        raise AttributeError(f"module 'jaxonnx' has no attribute '{name}'")
    module = "jaxonnx.errors" if name.endswith("Error") else f"jaxonnx.{name}"
    module = next((m for m, names in _MODULES.items() if name in names), module)
    value = importlib.import_module(module)
    if module != f"jaxonnx.{name}":
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "backend", "flax"})
