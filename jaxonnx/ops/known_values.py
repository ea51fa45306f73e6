"""Known, concrete and traced values: which operators may look at which."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxonnx._limits import compilable
from jaxonnx.errors import NodeError, StaticError
from jaxonnx.ops.common import canonical


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
