"""Operators on known values, and known values that become traced ones."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from onnx import TensorProto

from jaxonnx import _limits as limits
from jaxonnx._run.failures import FOREIGN
from jaxonnx.errors import Error, LimitError
from jaxonnx.registry import Op, is_known, symbolic

FOLD_LIMIT = 1 << 16
"""Bytes; a folded result above it is computed in the graph instead of becoming a constant."""

SIZES = {
    *("Shape", "Size", "Identity", "Cast", "Gather", "Slice", "Split", "Concat", "Where"),
    *("Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose", "ReduceProd", "ReduceSum"),
    *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Max", "Min"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
}
"""Operators that compute with the symbolic dimensions of `jax.export`; others get them traced."""


def folds(op: Op, arguments: list, keywords: dict) -> bool:
    """Check whether a node is folded: its operator is evaluated while tracing.

    All arguments must be known. Arrays of symbolic dimensions (dtype object) count as known for
    integer results of the operators in `SIZES`, where the value is not a static argument.
    """
    if not is_known(*arguments):
        return False
    symbolic_positions = {i for i, value in enumerate(arguments) if symbolic(value)}
    if not symbolic_positions:
        return True
    gives_integers = keywords.get("to", TensorProto.INT64) in (TensorProto.INT32, TensorProto.INT64)
    return op.name in SIZES and gives_integers and symbolic_positions.isdisjoint(op.static)


def fold(op: Op, arguments: list, keywords: dict) -> tuple | None:
    """Evaluate an operator on known values, on the CPU and with 64-bit types.

    Returns:
      NumPy arrays; None if the evaluation takes too much memory or time or a result has more than
      `FOLD_LIMIT` bytes, since then the compiled graph should compute it.
    """
    vast = limits.may_exceed(arguments, keywords, limits.FOLDED) and not op.dynamic
    try:
        with limits.folding(), jax.enable_x64(True):
            # by an evaluation on shapes, before anything is allocated
            shapes = abstract(op.function, arguments, keywords, op.static) if vast else None
            sizes = (limits.count_elements(s.shape) * s.dtype.itemsize for s in shapes or ())
            if any(size > FOLD_LIMIT for size in sizes):
                return None
            with (
                jax.ensure_compile_time_eval(),
                jax.default_device(jax.local_devices(backend="cpu")[0]),
                np.errstate(all="ignore"),
            ):
                results = op.function(*arguments, **keywords)
                results = results if isinstance(results, tuple) else (results,)
                results = tuple(_to_numpy(result) for result in results)
    except LimitError:
        return None
    return results if all(size_of(result) <= FOLD_LIMIT for result in results) else None


def abstract(
    function: Callable, arguments: Sequence[Any], keywords: dict, static: Collection[int]
) -> list | None:
    """Evaluate a function on shapes.

    Args:
      static: the positions of arguments to pass as values.

    Returns:
      The ShapeDtypeStructs of its results; None if it needs the values of other arguments.

    Raises:
      LimitError: a result exceeds the limit of a single value.
    """

    def shape_of(x):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    values = {  # a `StoredArray` is a pytree of arrays
        i: jax.tree.map(shape_of, a)
        for i, a in enumerate(arguments)
        if i not in static and hasattr(a, "dtype") and a.dtype != object
    }

    def call(values):
        return function(*(values.get(i, a) for i, a in enumerate(arguments)), **keywords)

    try:
        return jax.tree.leaves(jax.eval_shape(call, values))
    except LimitError:
        raise
    except (Error, *FOREIGN):
        return None


def _to_numpy(value: Any) -> Any:
    """Convert a folded result to NumPy; None, maps and the structure of sequences stay."""
    if isinstance(value, list):
        return [_to_numpy(item) for item in value]
    if value is None or isinstance(value, dict):
        return value
    value = np.asarray(value)
    # arithmetic on symbolic dimensions may end in plain integers
    is_whole = value.dtype == object and all(isinstance(x, int) for x in value.flat)
    return value.astype(np.int64) if is_whole and value.size else value


def on_device(value: Any) -> Any:
    """Convert a known value to a traced one; strings, maps and sequences stay as they are."""
    if symbolic(value):
        return jnp.stack([jnp.asarray(size) for size in value.flat]).reshape(value.shape)
    is_number = isinstance(value, np.ndarray) and value.dtype != object
    if not is_number:
        return value
    return jnp.asarray(limits.compilable(value), jax.dtypes.canonicalize_dtype(value.dtype))


def is_traced(values: Iterable[Any]) -> bool:
    """Check whether any of the values is traced, or holds one that is."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(list(values)))


def broadcast_late(value: Any) -> Any:
    """Replace a large NumPy broadcast by a broadcast in the graph.

    As a constant of the graph it would be copied to its full size.
    """
    # `np.broadcast_to` gives the axes along which it repeats a stride of 0
    if size_of(value) <= FOLD_LIMIT or 0 not in value.strides:
        return value
    limits.check_size(value.shape, value.dtype)
    unrepeated = value[tuple(slice(None if stride else 1) for stride in value.strides)]
    return jnp.broadcast_to(on_device(unrepeated), value.shape)


def size_of(value: Any) -> int:
    """Return the bytes of a NumPy array of numbers; 0 for other values."""
    return value.nbytes if isinstance(value, np.ndarray) and value.dtype != object else 0
