"""What the iterations of a Loop, a Scan and an If have in common.

Which form an iteration takes is decided while tracing:

- a Python loop where all values are known, so that they stay known; where the body needs its
  counter known, or its carried values change shape;
- else `lax.scan` where the number of iterations is known: compiled once, differentiable both ways;
  a traced condition masks the steps after the end, up to `control_flow.MASKED_LIMIT`;
- else `lax.while_loop`: differentiable in forward mode only.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import Error, NodeError, StaticError
from jaxonnx.ops.common import element_dtype
from jaxonnx.ops.known_values import array, is_traced
from jaxonnx.registry import is_known

LONGEST = 1 << 14
"""The most iterations that are unrolled; compiling that many takes hours."""

UNROLLED = 16
"""The most unrolled iterations that are not reported: compiling them is quick."""


def check_length(count, late, why):
    """Raise if too many iterations would be unrolled.

    Args:
      count: the iterations.
      late: whether they run on known values while tracing, and have taken long already.
      why: why the loop cannot be compiled as one; None if unknown.
    """
    if count > LONGEST:
        done = "run while tracing" if late else "compiled"
        reason = "" if why is None else f": {why}"
        raise NodeError(f"its {count} iterations would be {done} one by one{reason}")


def note_unrolling(body, count, results, why):
    """Report a loop that was unrolled into a program; on concrete values there is no program."""
    if count > UNROLLED and is_traced(results):
        body.note_unrolling(count, why)


def item(value):
    """Return the only element of a tensor of shape [] or [1]."""
    return np.asarray(value).reshape(()).item()


def as_declared(scalar, kind):
    """Return a scalar, as a vector of length one where the TypeProto of its input has rank 1."""
    return scalar.reshape(1) if kind and len(kind.tensor_type.shape.dim) == 1 else scalar


def types_of(values):
    """Return the shapes and dtypes of tensors as strings, for a message."""
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(values)]


def alike(old, new):
    """Return `new` as arrays; raise unless these have the shapes and dtypes of `old`.

    Compiled loops need that of the values that they carry.
    """
    new = [array(value) for value in new]
    if jax.tree.structure(old) != jax.tree.structure(new) or _avals(old) != _avals(new):
        raise StaticError(f"the carried values change from {types_of(old)} to {types_of(new)}")
    return new


def _avals(values):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(values)]


def stack(rows):
    """Stack the scan outputs of all iterations, each along a new first axis."""
    return tuple(
        np.stack(column) if is_known(*column) else jnp.stack([array(value) for value in column])
        for column in zip(*rows, strict=True)
    )


def empty(outputs, body, stacked):
    """Return the scan outputs of a loop without iterations: arrays with a first axis of size 0.

    Args:
      outputs: returns the scan outputs of one iteration; it is evaluated abstractly.
      body: the subgraph. If it cannot be evaluated, its declared shapes are used.
      stacked: the number of scan outputs.
    """
    if not stacked:
        return ()
    try:
        shapes = jax.eval_shape(lambda: [array(value) for value in outputs()])
        return tuple(np.zeros((0, *shape.shape), shape.dtype) for shape in shapes)
    except Error:
        declared = [kind for kind in body.output_types[-stacked:] if kind is not None]
        if len(declared) < stacked:
            raise
        types = [kind.tensor_type for kind in declared]
        return tuple(
            np.zeros((0, *(max(d.dim_value, 0) for d in t.shape.dim)), element_dtype(t.elem_type))
            for t in types
        )
