"""Tensors of a graph under construction, with their known properties and order of axes."""

from collections.abc import Sequence
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._jaxpr import programs

FOLDED = 4096
"""The most elements of a value that is computed during the export if it depends on no input."""

WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for wide, narrows in {
        np.int32: (np.bool_, np.int8, np.int16, np.uint8, np.uint16),
        np.int64: (np.uint32, np.uint64),
        np.float32: (jnp.bfloat16,),
    }.items()
    for narrow in narrows
}
"""For a dtype in which runtimes have no arithmetic, the dtype to compute in. ONNX's Cast to a
narrower integer drops the higher bits, so that sums and products wrap as in the narrow dtype."""


COMPUTED = {*map(np.dtype, ("float16", "float32", "float64", "int32", "int64")), *WIDE}
"""The dtypes in which a rule may compute, directly or in a wider one."""

MODULAR = {"Add", "Sub", "Mul"}
"""Operators that commute with wrapping: a sum of wrapped integers, wrapped, is the wrapped sum."""


def ordered_dtype(dtype: Any) -> np.dtype:
    """Return a dtype that holds all numbers of `dtype` and that runtimes can compare and sort.

    No such type is wider than uint64, which is returned as it is.
    """
    dtype = np.dtype(dtype)
    return dtype if dtype == np.uint64 else np.dtype(WIDE.get(dtype, dtype))


def least_of(dtype: Any) -> np.ndarray:
    """Return the neutral element of a maximum: the least number of a dtype, or -inf."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":  # bool(-inf) would be True
        return np.asarray(False)
    return np.asarray(np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf, dtype)


def greatest_of(dtype: Any) -> np.ndarray:
    """Return the neutral element of a minimum: the greatest number of a dtype, or inf."""
    dtype = np.dtype(dtype)
    return np.asarray(np.iinfo(dtype).max if dtype.kind in "iu" else np.inf, dtype)


KEPT = "turned", "flat", "windows", "product", "pieces", "scaled", "times", "sum", "negated"
"""The attributes of a `Tensor` that a copy of it with the same shape and dtype keeps."""


class Tensor(str):
    """The name of a tensor of the graph, with its shape, its dtype and how it was computed.

    The attributes below are None unless they are said to hold. Rules read them to write fewer
    nodes: a transpose of a transpose, say, reads the tensor behind both. Nodes that nothing reads
    in the end are removed.

    Attributes:
      shape: sizes, which may be symbolic.
      dtype: the NumPy dtype.
      thin: a tensor or array that was broadcast to this one.
      turned: (source, order), if this is the transpose of `source` by `order`.
      flat: a tensor of which this is a reshape.
      windows: the images, if this holds the number of the greatest element of each of their windows
        (`window_winner`).
      product: (x, whether x is transposed, y, whether y is), if this is the product of matrices.
      pieces: (axis, {start: tensor}), if this is zero except for these tensors along the axis.
      scaled: (tensor, factor), if this is their product and the factor broadcasts.
      times: two tensors of the same shape, if this is their product.
      sum: two tensors of the same shape, if this is their sum.
      negated: a tensor of which this is the negative.
    """

    shape: tuple[Any, ...]
    dtype: np.dtype
    thin: Any
    turned: "tuple[Tensor, tuple[int, ...]] | None"
    flat: "Tensor | None"
    windows: "Tensor | None"
    product: "tuple[Any, bool, Any, bool] | None"
    pieces: "tuple[int, dict[int, Any]] | None"
    scaled: "tuple[Tensor, Any] | None"
    times: "tuple[Tensor, Tensor] | None"
    sum: "tuple[Tensor, Tensor] | None"
    negated: "Tensor | None"

    def __new__(cls, name: str, shape: Sequence[Any], dtype: Any, thin: Any = None) -> Self:
        """Return a name with a shape and dtype."""
        tensor = super().__new__(cls, name)
        tensor.shape, tensor.dtype, tensor.thin = tuple(shape), np.dtype(dtype), thin
        same = (getattr(name, "shape", None), getattr(name, "dtype", None)) == (
            tensor.shape,
            tensor.dtype,
        )
        for attribute in KEPT:
            setattr(tensor, attribute, getattr(name, attribute, None) if same else None)
        return tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)


def all_known(shape: Sequence) -> bool:
    """Check whether all sizes are numbers, and none is symbolic."""
    return all(isinstance(size, (int, np.integer)) for size in shape)


def same_sizes(sizes: Sequence, others: Sequence) -> bool:
    """Check whether sizes are equal for all values of symbolic dimensions.

    Types are compared first: a symbolic size and a number raise where JAX cannot decide.
    """
    return all(type(a) is type(b) and a == b for a, b in zip(sizes, others, strict=True))


def plain(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an abstract value; for a PRNG key those of its key data."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def order_of(operands: Sequence[Any], out: Any) -> list[int] | None:
    """Return the order of axes in which an elementwise operator can read its operands as stored.

    Images, say, are stored with channels first, and JAX reads a transpose with channels last: the
    operator is then applied to the images as stored, and its result transposed.

    Args:
      operands: tensors or arrays.
      out: the shape and dtype of the result.

    Returns:
      The order that undoes the transpose of the operands; None if they do not have the same one.
    """
    full = [x for x in operands if isinstance(x, Tensor) and x.shape == out.shape]
    orders = {x.turned[1] for x in full if x.turned is not None and x.thin is None}
    if len(orders) != 1:
        return None
    return [int(i) for i in np.argsort(next(iter(orders)))]


def known_tensor(value: Any, aval: Any) -> np.ndarray:
    """Return a constant of a jaxpr as an array; for a PRNG key its key data."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value, aval.dtype)


def fold_equation(equation: Any, operands: list, outs: tuple) -> list | None:
    """Evaluate an equation whose operands are all known.

    Args:
      equation: of a jaxpr.
      operands: an array for each known operand, a `Tensor` for any other.
      outs: the shapes and dtypes of the results.

    Returns:
      The results as arrays; None if the model must compute them, because an operand is not known,
      the results are large, or the primitive draws random bits or calls a program.
    """
    if not operands or equation.effects or not all(isinstance(x, np.ndarray) for x in operands):
        return None
    if not all(all_known(out.shape) for out in outs):
        return None
    if equation.primitive.name != "reshape" and any(prod(out.shape) > FOLDED for out in outs):
        return None  # would make the file larger; a reshape does not, as it replaces its operand
    atoms = (*equation.invars, *equation.outvars)
    keys = any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in atoms)
    if keys or programs(equation.params) or equation.primitive.name.startswith("random_"):
        return None
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*operands, **equation.params)
    results = results if equation.primitive.multiple_results else [results]
    return [np.asarray(result) for result in results]
