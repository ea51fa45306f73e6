"""A schedule of optax, or any JAX function of a count, as ONNX nodes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._io.build import Writer, onnx_type
from jaxonnx.onnx_out import Nodes, Tensor


def append(
    writer: Writer, schedule: Callable[[jax.Array], Any], count: str, dtype: np.dtype, opset: int
) -> str:
    """Append nodes that compute schedule(count); return their output's name.

    Args:
      writer: receives nodes and the initializers that they need.
      schedule: a function of an int32 scalar that returns a scalar.
      count: the name of an int64 scalar.
      dtype: float32 or float64, the type of the result and of the arithmetic.
      opset: that of the model.

    Raises:
      UnsupportedError: naming the JAX primitive that has no operator.
    """
    argument = writer.node("Cast", count, name="schedule", to=onnx_type(np.int32))
    with jax.enable_x64(dtype == np.float64):
        closed = jax.make_jaxpr(schedule)(jax.ShapeDtypeStruct((), jnp.int32))
        g = Nodes(writer, opset)
        (value,) = g.program(closed, [Tensor(argument, (), np.int32)])
    return writer.node("Cast", g.name(value), name="learning_rate", to=onnx_type(dtype))
