"""Helpers for several families: element types, axes, indices; known, concrete and traced values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxonnx import lowering
from jaxonnx._limits import compilable
from jaxonnx.errors import NodeError, StaticError
from jaxonnx.registry import is_known, symbolic

INDEX = np.dtype(np.int64)
"""The element type of shapes and indices; `canonical(INDEX)` for traced ones."""


def element_dtype(code: int) -> np.dtype:
    """Return the dtype of a `TensorProto.DataType`: of attributes such as `dtype` and `to`."""
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(code)))
    except KeyError:
        raise NodeError(f"{code} is not the number of a tensor element type") from None


def sizes(dimensions: Any) -> np.ndarray:
    """Return dimensions as a known int64 value, or as an object array if some are symbolic."""
    value = np.array(dimensions, object)
    return value if symbolic(value) else value.astype(INDEX)


def canonical(dtype: Any) -> np.dtype:
    """Return the dtype of a traced value: with x64 off, 64-bit types become 32-bit ones."""
    return jax.dtypes.canonicalize_dtype(dtype)


def cast(x, dtype):
    """Cast by the rules of NumPy and JAX, not of ONNX; a traced value to the canonical dtype."""
    if x.dtype == dtype:  # `astype` of JAX takes a while to find this
        return x
    return x.astype(dtype if isinstance(x, np.ndarray) else canonical(dtype))


FIXED_BATCH = (
    "; if axis 0 is the batch, the exporter wrote the size of its example into the file: pass as "
    "many examples at a time, or export with a dynamic batch"
)
"""The end of messages about a size along axis 0 that a node has from the file."""


def widen(x, dtype: Any = np.float32) -> jax.Array:
    """Convert `x` to a JAX array of `dtype`, or of its own dtype if that is wider."""
    return jnp.asarray(x).astype(jnp.promote_types(x.dtype, dtype))


def divide(x, y) -> Any:
    """Return x / y in floating point, rounded once, so that Floor and the like are exact."""
    return x / y if is_known(x, y) else lowering.divide(x, y)


def axis_of(axis: int, rank: int) -> int:
    """Return an axis, which may count from the end, as one in [0, rank); raise if out of range."""
    if not -rank <= axis < rank:
        raise NodeError(f"axis {axis} is out of range for a tensor of rank {rank}")
    return int(axis) % rank


def axes_of(axes, rank: int) -> tuple[int, ...]:
    """Return axes as distinct numbers in [0, rank); all of them where `axes` is None."""
    if axes is None:
        return tuple(range(rank))
    if np.ndim(axes) > 1:  # a scalar is one axis to exporters
        raise NodeError(f"axes must be a vector, got {[*np.shape(axes)]}")
    normal = tuple(axis_of(int(axis), rank) for axis in np.ravel(axes))
    if len(set(normal)) < len(normal):
        raise NodeError(f"axes {np.ravel(axes).tolist()} name an axis of rank {rank} twice")
    return normal


def index_of(indices, size: int):
    """Normalize known indices along an axis to [0, size); return traced indices as they are.

    Traced indices cannot be checked. With one outside [-size, size) a read gives NaN (for integers
    the least one), and a write does nothing, as in JAX.

    Raises:
      NodeError: a known index is out of range.
    """
    if not isinstance(indices, np.ndarray):
        return indices
    # a comparison of a scalar with a symbolic size is a plain bool
    wrong = np.asarray((indices < -size) | (indices >= size), bool)
    if wrong.any():
        raise NodeError(f"index {indices[wrong][0]} is out of range for an axis of size {size}")
    negative = indices < 0
    return np.where(negative, indices + size, indices) if negative.any() else indices


def is_traced(*values) -> bool:
    """Check whether any leaf of the values is a tracer."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def concrete(value, what: str) -> np.ndarray:
    """Return `value` as an `np.ndarray`; raise a StaticError that names `what` if it is traced."""
    if is_traced(value):
        raise StaticError(
            f"{what} cannot be compiled: it needs the values themselves. Call the model outside "
            "jax.jit, vmap and grad, or cut the graph before this node."
        )
    return np.asarray(value)


def array(value) -> Any:
    """Convert a known value, or a list of them, to JAX arrays that control flow can carry.

    Raises:
      StaticError: it contains strings or a map.
    """
    if isinstance(value, list):
        return [array(item) for item in value]
    if value is None or isinstance(value, jax.Array):
        return value
    if isinstance(value, dict) or value.dtype == object:
        raise StaticError("strings and maps cannot be carried by compiled control flow")
    return jnp.asarray(compilable(table(value)))


def table(values, dtype=None) -> np.ndarray:
    """Convert constants of the file to a NumPy array of the canonical dtype.

    Raises:
      NodeError: an integer does not fit 32 bits, and x64 is off.
    """
    values = np.asarray(values, dtype)
    if values.dtype == object:
        return values
    cut = values.astype(canonical(values.dtype))
    if values.dtype.kind in "iu" and not np.array_equal(cut, values):
        raise NodeError("a constant does not fit 32 bits, and 64-bit types are off: enable x64")
    return cut


def forward_only(value, message: str):
    """Return `value` unchanged; its reverse-mode derivative raises a StaticError with `message`."""
    return jax.tree.map(lambda leaf: _forward_only.bind(leaf, message=message), value)


def _refuse(cotangent, value, *, message):
    raise StaticError(message)


# An identity that is linear but has no transpose. JAX refuses such loops too, but without a word
# about the model.
_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda value, *, message: value)
_forward_only.def_abstract_eval(lambda value, *, message: value)
ad.deflinear2(_forward_only, _refuse)
batching.defvectorized(_forward_only)
mlir.register_lowering(_forward_only, lambda context, value, *, message: [value])
