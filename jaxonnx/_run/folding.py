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
"""Operators that compute with the open sizes of `jax.export`; for others these are traced."""


def folds(op: Op, arguments: list, keywords: dict) -> bool:
    """Check whether an operator is evaluated while tracing."""
    opened = {i for i, value in enumerate(arguments) if symbolic(value)}
    if not is_known(*arguments) or not opened:
        return is_known(*arguments)
    whole = keywords.get("to", TensorProto.INT64) in (TensorProto.INT32, TensorProto.INT64)
    return op.name in SIZES and whole and opened.isdisjoint(op.static)


def fold(op: Op, arguments: list, keywords: dict) -> tuple | None:
    """Evaluate on known values, on the CPU and with 64-bit types; return NumPy arrays.

    None if that takes too much memory or time, or gives more than `FOLD_LIMIT`: then it is better
    computed in the graph.
    """
    vast = limits.may_exceed(arguments, keywords, limits.FOLDED) and not op.dynamic
    try:
        with limits.folding(), jax.enable_x64(True):
            if vast and _largest(op, arguments, keywords) > FOLD_LIMIT:
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


def _largest(op: Op, arguments: list, keywords: dict) -> int:
    """Return the bytes of the largest array that an operator gives, without computing it."""
    shapes = abstract(op.function, arguments, keywords, op.static)
    return max((limits.count_elements(s.shape) * s.dtype.itemsize for s in shapes or ()), default=0)


def abstract(
    function: Callable, arguments: Sequence[Any], keywords: dict, static: Collection[int]
) -> list | None:
    """Return shapes and types of results; None where a function needs to see the values.

    Raises:
      LimitError: it asks for more than a value may take.
    """

    def shape_of(x):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    values = {  # images and kernels in orders of their own are trees of one array
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
    if isinstance(value, list):
        return [_to_numpy(item) for item in value]
    if value is None or isinstance(value, dict):
        return value
    value = np.asarray(value)
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
    """Turn a large NumPy broadcast into one of the graph, so that it never takes memory."""
    if size_of(value) <= FOLD_LIMIT or 0 not in value.strides:
        return value
    limits.check_size(value.shape, value.dtype)
    once = value[tuple(slice(None if stride else 1) for stride in value.strides)]
    return jnp.broadcast_to(on_device(once), value.shape)


def size_of(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) and value.dtype != object else 0
