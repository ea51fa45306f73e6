"""Tensors made from attributes and shapes."""

import math

import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.registry import Static, op, symbolic, xp


@op("Constant", since=1)
def constant_1(*, value):
    return value


@op("Constant", since=11)
def constant(
    *,
    value=None,
    sparse_value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    value_string=None,
    value_strings=None,
):
    """The one attribute that is set: a tensor, or Python numbers or strings."""
    attributes = [
        (value, None),
        (sparse_value, None),
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
        (value_string, object),
        (value_strings, object),
    ]
    present = [(v, dtype) for v, dtype in attributes if v is not None]
    if len(present) != 1:
        raise NodeError(f"exactly one attribute must hold the value, not {len(present)}")
    return np.array(*present[0], copy=None)


@op("ConstantOfShape", since=9, shapes="shape (r)")
def constant_of_shape(shape: Static, *, value=None):
    """One number, float32 0 by default, throughout `shape`; as a view, which takes no memory."""
    fill = np.zeros((), np.float32) if value is None else value.reshape(())
    check_size(shape.tolist(), object if fill.dtype == object else fill.dtype)
    m = jnp if symbolic(shape) else np
    return m.broadcast_to(fill, tuple(shape.tolist()))


@op("Range", since=11)
def range_(start: Static, limit: Static, delta: Static, *, stash_type=1):
    """start + i delta, i < (limit - start) / delta; halves are computed in `stash_type`."""
    dtype = delta.dtype
    first, last, step = (value.item() for value in (start, limit, delta))
    if step == 0:
        raise NodeError("a delta of 0 never reaches the limit")
    exact = dtype.kind in "iu"
    if not exact and not all(map(np.isfinite, (first, last, step))):
        raise NodeError(f"start {first}, limit {last} and delta {step} must be finite")
    count = max(0, -((first - last) // step) if exact else math.ceil((last - first) / step))
    check_size([count], dtype)
    if exact and isinstance(count, int) and count * dtype.itemsize <= 1 << 16:
        return np.arange(count, dtype=dtype) * dtype.type(step) + dtype.type(first)
    wide = dtype if exact or dtype.itemsize > 2 else element_dtype(stash_type)
    if not (exact or jnp.issubdtype(wide, jnp.floating)):
        raise NodeError(f"stash_type must be of a floating-point type, got {wide}")
    steps = jnp.arange(count, dtype=canonical(wide))
    return (steps * steps.dtype.type(step) + steps.dtype.type(first)).astype(canonical(dtype))


@op("EyeLike", since=9, shapes="x (N, M)")
def eye_like(x, *, dtype=None, k=0):
    """Ones on the k-th diagonal of a matrix that has the shape of `x`."""
    dtype = x.dtype if dtype is None else element_dtype(dtype)
    np_ = xp(x)
    return np_.eye(*x.shape, k=k, dtype=dtype if np_ is np else canonical(dtype))
