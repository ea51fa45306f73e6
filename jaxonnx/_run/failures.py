"""Errors of a node, with its label and its inputs."""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import onnx
from jax.extend.core import InconclusiveDimensionOperation, Primitive
from jaxlib.mlir.ir import MLIRError

from jaxonnx._graph.bind import Node
from jaxonnx._limits import SIX_BITS, format_bytes
from jaxonnx.errors import Error, LimitError, NodeError, StaticError

_OF_PYTHON = TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError

FOREIGN = (*_OF_PYTHON, RuntimeError, InconclusiveDimensionOperation, MLIRError)
"""Exceptions of NumPy and JAX inside an operator, JaxRuntimeError and RecursionError among it."""

_UNCOMPILED = (*_OF_PYTHON, NotImplementedError, jax.errors.JaxRuntimeError, MLIRError)
"""Exceptions of JAX and XLA for a traced program."""

_HOLD_BATCH = ("Concat", "GRU", "LSTM", "RNN")
"""Operators of which an exporter may have written an input for the batch of its example."""

_INTERNAL = re.compile(
    r"\blax\b|jnp|jax\.|jaxlib|mlir|loc\(|static extent|tuple index|unpack|itera(tor|ble)|"
    r"object has|not callable|NoneType|Tracer|<.* at 0x|__|strict=|argument \d|positional|keyword|"
    r"jaxpr|sequence item|division|modulo|_general|convert_element|reduce_window|_in_dim|select",
    re.IGNORECASE,
)
"""Words of messages about the implementation of an operator, not about the model."""


def at(node: Node, error: Error) -> Any:
    """Attach the label and index of a node to an error; return the error."""
    error.node, error.index = node.label, node.index
    return error


def message(node: Node, arguments: Sequence[Any], error: Exception | str) -> str:
    """Return the message of an error with the node and its inputs."""
    pairs = zip(node.inputs, arguments, strict=False)
    listed = ", ".join(f"{name or '-'}: {_kind(value)}" for name, value in pairs)
    return f"{node.label}: {error}" + (f" [inputs {listed}]" if listed else "")


def _kind(value: Any) -> str:
    """Describe a value by its element type and shape."""
    if hasattr(value, "dtype"):
        return f"{'string' if value.dtype == object else value.dtype}{list(value.shape)}"
    names = {list: "sequence", dict: "map"}
    return "omitted" if value is None else names.get(type(value), type(value).__name__)


def translate_error(node: Node, arguments: Sequence[Any], error: Exception) -> NodeError:
    """Return a NodeError for an exception that NumPy or JAX raised inside the node's operator.

    The text is about the model: types that the schema forbids, else the exception's message if it
    does not speak of the implementation, else the node's attributes.
    """
    # two exceptions that are not about the node's inputs come first
    if is_out_of_memory(error):
        return LimitError(message(node, arguments, f"memory is not enough{requested_size(error)}"))
    if isinstance(error, RecursionError):
        return NodeError(
            f"{node.label}: what it calls is nested deeper than Python's recursion limit of "
            f"{sys.getrecursionlimit()} allows; sys.setrecursionlimit sets another"
        )
    text = explain_jet(error) or str(error).strip().partition("\n")[0]
    if clashes := "; ".join(_clashes(node, arguments)):
        text = clashes
    elif not text or (
        not explain_jet(error) and (isinstance(error, KeyError) or _INTERNAL.search(text))
    ):
        values = {
            name: _kind(value) if isinstance(value, np.ndarray) else repr(value)
            for name, value in node.attributes.items()
        }
        short = {n: x if len(x) <= 60 else f"{x[:57]}..." for n, x in values.items()}
        listed = ", ".join(f"{name}={x}" for name, x in short.items())
        text = f"{node.op.name} does not take these inputs" + (f" with {listed}" if listed else "")
    if node.op.name in _HOLD_BATCH and not clashes:
        text = f"{text.rstrip(' :.')}; jaxonnx.load(path, batch='any') may open the batch"
    return NodeError(message(node, arguments, text))


def explain_jet(error: Exception) -> str:
    """Explain an error of `jax.experimental.jet`; "" for any other."""
    if isinstance(error, KeyError) and isinstance(error.args[0], Primitive):
        cause = f"has no rule for JAX's primitive '{error.args[0]}'"
    elif "JetTracer" in str(error) or "no attribute 'process_primitive'" in str(error):
        cause = "does not take functions with a custom derivative, as jax.nn.softplus has"
    else:
        return ""
    return f"jax.experimental.jet {cause}: nested jax.jvp computes the same derivatives"


def check_types(node: Node, arguments: Sequence[Any]) -> None:
    """Raise a NodeError for types that the schema forbids and that NumPy or XLA would not refuse.

    XLA aborts the process at constants of six-bit types, and NumPy computes with strings: + joins
    them, * repeats them.
    """
    if any(map(_needs_check, arguments)) and (clashes := "; ".join(_clashes(node, arguments))):
        raise NodeError(clashes)


def _needs_check(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype == object:  # strings, or symbolic dimensions
        return value.size > 0 and isinstance(value.flat[0], str)
    return getattr(value, "dtype", None) in SIX_BITS


def _clashes(node: Node, arguments: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each input whose type the schema of the operator does not allow."""
    try:
        schema = onnx.defs.get_schema(node.op.name, domain=node.op.domain)
    except onnx.defs.SchemaError:
        return
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    first: dict[str, tuple[str, str]] = {}
    for i, (name, value) in enumerate(zip(node.inputs, arguments, strict=False)):
        kind = _onnx_type(value)
        if kind is None or not schema.inputs:
            continue
        # inputs beyond the last formal one belong to it: it is variadic
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        types = allowed.get(formal.type_str, (formal.type_str,))
        # without x64, JAX has canonicalized a 64-bit value of the file to 32 bits
        if not {kind, _WIDE.get(kind, kind)} & {*types}:
            takes = " or ".join(sorted(map(_plain, types)))
            yield f"{formal.name} ('{name}') is {_plain(kind)}, it takes {takes}"
            continue
        other, same = first.setdefault(formal.type_str, (formal.name, kind))
        if _WIDE.get(kind, kind) != _WIDE.get(same, same) and formal.is_homogeneous:
            yield (
                f"{formal.name} ('{name}') is {_plain(kind)}, it must have the type of {other}, "
                f"{_plain(same)}"
            )


_WIDE = {
    "tensor(int32)": "tensor(int64)",
    "tensor(uint32)": "tensor(uint64)",
    "tensor(float)": "tensor(double)",
}
"""The 64-bit type that a 32-bit value may have in the file."""


def _onnx_type(value: Any) -> str | None:
    """Return the type of an array as schemas write it ("tensor(float)"); None for other values."""
    if not hasattr(value, "dtype"):
        return None
    try:
        code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    except (KeyError, ValueError, TypeError):  # of JAX alone, such as that of its random keys
        return None
    return f"tensor({onnx.TensorProto.DataType.Name(code).lower()})"


def _plain(kind: str) -> str:
    return kind.removeprefix("tensor(").removesuffix(")")


def is_out_of_memory(error: Exception) -> bool:
    """Check whether an error of NumPy or XLA says that memory is not enough."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def requested_size(error: Exception) -> str:
    """Return " for SIZE" with the size that an out-of-memory message names; "" if it names none."""
    numbers = re.search(r"allocat\w* ([\d.]+) ?(bytes|[KMGTPE]i?B)", str(error))
    if numbers is None:
        return ""
    size, unit = numbers.groups()
    return f" for {format_bytes(int(size)) if unit == 'bytes' else f'{size} {unit}'}"


@contextmanager
def convert_errors(what: str, *values: Mapping[str, Any]) -> Iterator[None]:
    """Convert exceptions of lowering, compiling and running a program to errors of jaxonnx.

    Args:
      what: the subject of the message.
      values: the arrays that the program gets, by name, for a message about memory.

    Raises:
      NodeError: the program cannot be compiled or run.
      LimitError: a device has too little memory. Without `values` the exception is not converted.
    """
    try:
        yield
    except _UNCOMPILED as error:
        if isinstance(error, Error) or (is_out_of_memory(error) and not values):
            raise
        if is_out_of_memory(error):
            every = (item for part in values for item in part.items())
            arrays = {name: value for name, value in every if hasattr(value, "dtype")}
            sizes = {n: math.prod(v.shape) * np.dtype(v.dtype).itemsize for n, v in arrays.items()}
            large = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
            listed = ", ".join(f"{name}: {_kind(arrays[name])}" for name in large)
            raise LimitError(
                f"memory of the device is not enough{requested_size(error)}; weights and inputs "
                f"take {format_bytes(sum(sizes.values()))} ({listed}). What helps: a smaller batch "
                "(model.predict has batch_size), weights in 16 bits, or a mesh of devices"
            ) from error
        if cause := explain_jet(error):
            raise NodeError(f"{what} does not run: {cause}") from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise NodeError(
            f"{what} does not run: {' '.join(lines[:3])}; under jax.disable_jit() it is evaluated "
            "node by node, and an error names the node"
        ) from error


def static_error(
    node: Node, what: str, inputs: Sequence[str], others: Sequence[str]
) -> StaticError:
    """Return the error of a node that needs a known value and got a traced one.

    Args:
      what: which value, as the subject of the message.
      inputs: the inputs of the main graph that the value is computed from.
      others: descriptions of its other sources (weights, inputs of bodies).
    """
    error = StaticError()
    error.why = (
        f"{node.label}: {what} must be known while tracing, because the shape of the result "
        "depends on its value, and is computed from"
    )
    return at(node, add_sources(error, inputs, others))


def add_sources(error: StaticError, inputs: Sequence[str], others: Sequence[str]) -> StaticError:
    """Set the sources of the value on an error, for its message (see `static_error`)."""
    error.inputs = () if others else tuple(inputs)
    if error.why:
        roots = [f"input '{name}'" for name in inputs] + [*others]
        error.args = (
            f"{error.why} {', '.join(roots) or 'what is traced'}. Fix that input with "
            "model.with_fixed_inputs, pass it as a NumPy array that is not an argument of jit (a "
            "constant of the traced function), or call the model outside jit.",
        )
    return error


def check_range(arguments: Sequence[Any]) -> None:
    """Raise a NodeError for 64-bit constants that would be truncated to 32 bits without x64."""
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
