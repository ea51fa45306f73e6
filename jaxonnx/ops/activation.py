"""Activation functions.

All of them are stable for large inputs, and the branch that is not taken sees a harmless argument,
so that it can put no NaN into the gradient. Where left and right derivative differ, the gradient is
the one of PyTorch: at 0 it is 0 for Relu, `alpha` for LeakyRelu and `slope` for PRelu; it is 0 at
both kinks of HardSigmoid.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.ops.common import axis_of, widen
from jaxonnx.ops.elementwise import absolute
from jaxonnx.registry import op


def activation(name: str, since: int, **options):
    """Register an operator whose inputs are converted to JAX arrays first.

    In NumPy a known bfloat16 times a Python number would be a float32.
    """

    def register(function):
        @op(name, since=since, **options)
        @functools.wraps(function)
        def call_traced(*xs, **attributes):
            return function(*map(jnp.asarray, xs), **attributes)

        return function

    return register


def in_float32(function):
    """Decorate an activation: in float16 it is computed in float32 and rounded once.

    In float16 exp(-x) overflows below -11, where a logistic function would be 0, and its logarithm
    infinite.
    """

    @functools.wraps(function)
    def call_widened(x, **attributes):
        if x.dtype != np.float16:
            return function(x, **attributes)
        return function(x.astype(np.float32), **attributes).astype(x.dtype)

    return call_widened


@activation("Relu", since=1, pointwise=True)
def relu(x):
    # a maximum that XLA:CPU joins with a product before it would lose NaNs
    return jnp.where(x <= 0, 0, x)


@activation("LeakyRelu", since=1, pointwise=True)
def leaky_relu(x, *, alpha=0.01):
    return jnp.where(x > 0, x, alpha * x)


@activation("PRelu", since=7, params={"slope": 0.25}, pointwise=True)
def prelu(x, slope):
    return jnp.where(x > 0, x, slope * x)


@activation("PRelu", since=1, params={"slope": 0.25})
def prelu_1(x, slope):
    """One slope for all or one a channel (axis 1): opsets 1 to 6 do not broadcast."""
    if slope.ndim == 1 and slope.size > 1 and x.ndim > 1:
        slope = slope.reshape((-1,) + (1,) * (x.ndim - 2))
    return prelu(x, slope)


@activation("ThresholdedRelu", since=10, pointwise=True)
def thresholded_relu(x, *, alpha=1.0):
    return jnp.where(x > alpha, x, 0)


@activation("Shrink", since=9, pointwise=True)
def shrink(x, *, bias=0.0, lambd=0.5):
    shrunk = jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0))
    return shrunk.astype(x.dtype)


@activation("Elu", since=1, pointwise=True)
def elu(x, *, alpha=1.0):
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))


@activation("Celu", since=12, pointwise=True)
def celu(x, *, alpha=1.0):
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) / alpha))


@activation("Selu", since=6, pointwise=True)
def selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return gamma * elu(x, alpha=alpha)


@activation("Selu", since=1, pointwise=True)
def selu_1(x, *, alpha=1.6732, gamma=1.0507):
    return gamma * elu(x, alpha=alpha)


@activation("Sigmoid", since=1, pointwise=True)
@in_float32
def sigmoid(x):
    return jax.nn.sigmoid(x)


@activation("HardSigmoid", since=1, pointwise=True)
def hard_sigmoid(x, *, alpha=0.2, beta=0.5):
    y = alpha * x + beta
    return jnp.where(y <= 0, 0, jnp.where(y >= 1, 1, y))


@activation("HardSwish", since=14, pointwise=True)
def hard_swish(x):
    return x * hard_sigmoid(x, alpha=1 / 6, beta=0.5)


@activation("Swish", since=24, pointwise=True)
@in_float32
def swish(x, *, alpha=1.0):
    return x * jax.nn.sigmoid(alpha * x)


@activation("SwiGLU", since=28, pointwise=True, shapes="a (*D), b (*D)")
def swiglu(a, b, *, alpha=1.0):
    return swish(a, alpha=alpha) * b


@activation("Gelu", since=20, pointwise=True)
@in_float32
def gelu(x, *, approximate: Literal["none", "tanh"] = "none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * jax.lax.erfc(-math.sqrt(0.5) * x)  # which keeps the tail that 1 + erf cancels


@activation("Softplus", since=1, pointwise=True)
def softplus(x):
    return jax.nn.softplus(x)


@activation("Softsign", since=1, pointwise=True)
def softsign(x):
    return x / (1 + absolute(x))


@activation("Mish", since=18, pointwise=True)
@in_float32
def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


_SHORT = 32
"""The most numbers that Softmax sums in their own precision."""


def softmax(x, axis):
    """Compute exp(x - max) over its sum; a row of -inf gives NaN, and its gradient is zero.

    The difference is held at or below 0: when XLA computes x twice, once for the maximum and once
    for the difference, the two round differently, and what should be 0 can be large for large x.
    PyTorch's exporter writes attention whose rows may see no key as Softmax and Where(IsNaN, 0):
    a NaN within the division would reach the gradients of all weights as 0 * NaN.
    """
    if x.size == 0:
        return x
    # The error of a sum in half precision grows with its length. Short ones stay as ONNX's own
    # data have them, which differ from exact ones by less than the rounding of the result.
    size = x.shape[axis]
    wide = x if isinstance(size, int) and size <= _SHORT else widen(x)
    top, hidden = _maximum(wide, axis)
    shifted = wide - top
    e = jnp.exp(shifted - jax.lax.stop_gradient(jnp.maximum(shifted, 0)))
    y = e / jnp.where(hidden, 1, jnp.sum(e, axis, keepdims=True))
    return (y + jnp.where(hidden, jnp.nan, 0).astype(y.dtype)).astype(x.dtype)


def log_softmax(x, axis):
    """Compute x - log(sum(exp(x))); a row of -inf gives NaN, and its gradient is zero."""
    if x.size == 0:
        return x
    wide = widen(x)
    top, hidden = _maximum(wide, axis)
    shifted = wide - top
    total = jnp.sum(jnp.exp(shifted), axis, keepdims=True)
    y = shifted - jnp.log(jnp.where(hidden, 1, total))
    return jnp.where(hidden, jnp.nan, y).astype(x.dtype)


def _maximum(x, axis):
    """Return the maxima along an axis, without gradient, and which rows are all -inf.

    The maximum of such a row is 0, so that x - maximum is -inf and not NaN.
    """
    top = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True))
    hidden = top == -jnp.inf
    return jnp.where(hidden, 0, top), hidden


def hardmax(x, axis):
    if x.size == 0:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)


def _along_axis(name, function):
    @activation(name, since=13)
    def along_axis(x, *, axis=-1):
        return function(x, axis)

    @activation(name, since=1)
    def on_matrix(x, *, axis=1):
        """On a matrix: the axes before `axis` are its rows, the others its columns."""
        start = axis_of(axis, x.ndim)
        matrix = x.reshape(math.prod(x.shape[:start]), math.prod(x.shape[start:]))
        return function(matrix, 1).reshape(x.shape)


for _name, _function in {
    "Softmax": softmax,
    "LogSoftmax": log_softmax,
    "Hardmax": hardmax,
}.items():
    _along_axis(_name, _function)
