"""Values and gradients of one operator at chosen points."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.registry import lookup


def operator(name, opset=28):
    """A default-domain operator."""
    return lookup("", name, opset)


def assert_point(name, inputs, values, *gradients, static=(), opset=28, **attributes):
    """Checks the (first) output and, for each input, the gradient of its sum, NaN included."""
    inputs = [np.asarray(x, np.float32) for x in inputs]

    def total(*xs):
        result = operator(name, opset)(*xs, *static, **attributes)
        result = result[0] if isinstance(result, tuple) else result
        return jnp.sum(result), result

    f = jax.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)
    actual, result = jax.jit(f)(*inputs)
    np.testing.assert_allclose(result, np.asarray(values, np.float32), rtol=1e-6)
    assert len(gradients) == len(inputs)
    for a, b in zip(actual, gradients, strict=True):
        np.testing.assert_allclose(a, np.asarray(b, np.float32), rtol=1e-5, atol=1e-38)
