"""The operators of the domain com.acme."""

import jax

from jaxonnx import registry


@registry.op("Swish", since=1, domain="com.acme", params=("scale",), pointwise=True)
def swish(x, scale, *, alpha: float = 1.0):
    return scale * x * jax.nn.sigmoid(alpha * x)
