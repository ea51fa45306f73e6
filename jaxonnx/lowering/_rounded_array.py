"""Quantized arrays whose gradient goes to the numbers that they were rounded from."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxonnx.lowering._stored_array import StoredArray


class RoundedArray(StoredArray):
    """A quantized array together with the numbers that it was rounded from."""

    value: Any
    """The quantized array, which has no gradient."""
    real: Any
    """The numbers before rounding, in units of the scale; gradients go to these."""

    def map(self, function: Callable[[Any], Any]) -> "RoundedArray":
        return RoundedArray(function(self.value), function(self.real))

    def __getitem__(self, index: Any) -> "RoundedArray":
        return self.map(lambda x: x[index])


@jax.custom_jvp
def with_gradient_of(value, real):
    """Return `value` in float32, with the derivative of `real`."""
    # without a barrier XLA fuses the rounding into loops over the taps of a convolution, and
    # repeats it for each
    return lax.convert_element_type(lax.optimization_barrier(value), np.float32)


@with_gradient_of.defjvp
def _with_gradient_jvp(primals, tangents):
    return with_gradient_of(*primals), tangents[1]


def to_float32(x):
    """Convert quantized numbers; those of a `RoundedArray` have the derivative of the real ones."""
    return (
        with_gradient_of(x.value, x.real) if isinstance(x, RoundedArray) else x.astype(np.float32)
    )
