"""Errors of a node, with what a user needs to find it: its label, its inputs, their origin."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._graph.bind import Node
from jaxonnx.errors import Error, NodeError, StaticError


def warn(_: str, text: str) -> None:
    """Warn the user of what an evaluation noticed (a `Context.note`)."""
    warnings.warn(text, stacklevel=2)


def at(node: Node, error: Error) -> Any:
    """Return an error with the node that it is about."""
    error.node, error.index = node.label, node.index
    return error


def message(node: Node, arguments: Sequence[Any], error: Exception) -> str:
    """Return the message of an error with the node and its inputs."""

    def one(value: Any) -> str:
        if hasattr(value, "dtype"):
            return f"{value.dtype}{list(value.shape)}"
        return "omitted" if value is None else type(value).__name__

    pairs = zip(node.inputs, arguments, strict=False)
    listed = ", ".join(f"{name or '-'}: {one(value)}" for name, value in pairs)
    return f"{node.label}: {error}" + (f" [inputs {listed}]" if listed else "")


def static_error(
    node: Node, what: str, inputs: Sequence[str], others: Sequence[str]
) -> StaticError:
    """Return the error of a node that needs to know a value while tracing.

    The value is computed from `inputs` of the main graph, by name, and from `others`, in words.
    """
    roots = [f"input '{name}'" for name in inputs] + [*others]
    error = StaticError(
        f"{node.label}: {what} must be known while tracing, because the shape of the result "
        f"depends on its value, and is computed from {', '.join(roots) or 'what is traced'}. "
        "Pass that input as a NumPy array that is not an argument of jit (a constant of the "
        "traced function), or call the model outside jit."
    )
    error.inputs = () if others else tuple(inputs)
    return at(node, error)


def check_range(arguments: Sequence[Any]) -> None:
    """Raise a NodeError for 64-bit constants that 32-bit arithmetic would cut silently."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return
    for value in arguments:
        if isinstance(value, np.ndarray) and value.dtype in (np.int64, np.uint64) and value.size:
            limits = np.iinfo(np.int32 if value.dtype == np.int64 else np.uint32)
            if value.min() < limits.min or value.max() > limits.max:
                raise NodeError(
                    f"a constant of type {value.dtype} ({value.min()} to {value.max()}) does not "
                    "fit 32 bits, and 64-bit types are off; set jax_enable_x64"
                )
