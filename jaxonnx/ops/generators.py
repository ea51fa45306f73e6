"""Tensors made from attributes, shapes and random keys.

A node's `seed` attribute takes the place of the node's own number in that key: nodes with equal
seeds draw alike under one key of the caller, and differently under another.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.registry import Key, Static, op, symbolic, xp


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


def _normal(key, shape, dtype, mean, scale):
    check_size(shape, dtype)
    sample = jax.random.normal(key, shape, _float(dtype))
    return sample * sample.dtype.type(scale) + sample.dtype.type(mean)


def _uniform(key, shape, dtype, low, high):
    check_size(shape, dtype)
    return jax.random.uniform(key, shape, _float(dtype), low, high)


def _float(dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        raise NodeError(f"the output must be of a floating-point type, got {dtype}; set dtype")
    return canonical(dtype)


def _dtype(x, code):
    return x.dtype if code is None else element_dtype(code)


@op("RandomNormal", since=1)
def random_normal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None, key: Key):
    return _normal(key(seed), tuple(shape), element_dtype(dtype), mean, scale)


@op("RandomNormalLike", since=1)
def random_normal_like(x, *, dtype=None, mean=0.0, scale=1.0, seed=None, key: Key):
    return _normal(key(seed), x.shape, _dtype(x, dtype), mean, scale)


@op("RandomUniform", since=1)
def random_uniform(*, shape, dtype=1, low=0.0, high=1.0, seed=None, key: Key):
    return _uniform(key(seed), tuple(shape), element_dtype(dtype), low, high)


@op("RandomUniformLike", since=1)
def random_uniform_like(x, *, dtype=None, low=0.0, high=1.0, seed=None, key: Key):
    return _uniform(key(seed), x.shape, _dtype(x, dtype), low, high)


@op("Bernoulli", since=15)
def bernoulli(p, *, dtype=None, seed=None, key: Key):
    """1 with probability p, else 0."""
    return jax.random.bernoulli(key(seed), p).astype(canonical(_dtype(p, dtype)))


@op("Multinomial", since=7)
def multinomial(logits, *, dtype=6, sample_size=1, seed=None, key: Key):
    """(batch, classes) unnormalised log-probabilities -> (batch, sample_size) class numbers."""
    if element_dtype(dtype) not in (np.int32, np.int64):
        raise NodeError(f"dtype must be int32 or int64, got {element_dtype(dtype)}")
    logits = jnp.asarray(logits)
    check_size((sample_size, *logits.shape), logits.dtype)
    samples = jax.random.categorical(key(seed), logits, shape=(sample_size, logits.shape[0]))
    return samples.T.astype(canonical(element_dtype(dtype)))
