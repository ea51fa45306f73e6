"""Random tensors, drawn from the key that the evaluator derives for each node.

A node's `seed` attribute takes the place of the node's own number in that key: nodes with equal
seeds draw alike under one key of the caller, and differently under another.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, element_dtype
from jaxonnx.registry import Key, op


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
