"""Tensors of a graph under construction: what is known of them, and in which order they lie."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._jaxpr import programs
from jaxonnx.onnx_out import _dims as dims

FOLDED = 4096
"""Elements up to which a value that depends on no input is computed here, rather than by nodes."""

WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for wide, narrows in {
        np.int32: (np.bool_, np.int8, np.int16, np.uint8, np.uint16),
        np.int64: (np.uint32, np.uint64),
        np.float32: (jnp.bfloat16,),
    }.items()
    for narrow in narrows
}
"""The dtypes in which runtimes have arithmetic, for those in which they have none. ONNX's Cast
drops the higher bits of integers, so that sums and products are those of the narrow dtype."""


COMPUTED = {*map(np.dtype, ("float16", "float32", "float64", "int32", "int64")), *WIDE}
"""The dtypes of what nodes compute."""

MODULAR = {"Add", "Sub", "Mul"}
"""Operators whose result of wrapped integers is the wrapped result."""


def ordered_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which numbers have the same order, and runtimes more operators.

    No signed type holds all numbers of uint64, so that they stay as they are.
    """
    dtype = np.dtype(dtype)
    return dtype if dtype == np.uint64 else np.dtype(WIDE.get(dtype, dtype))


KEPT = "turned", "flat", "windows", "product", "pieces", "scaled", "times", "sum", "negated"
"""What another name of the same tensor knows of it, too."""


class Tensor(str):
    """The name of a tensor of the graph, which knows its shape and dtype.

    Attributes:
      thin: a tensor or array that broadcasts to this one, where there is one.
      turned: (another tensor, the order of its axes that gives this one), where it is a transpose.
      flat: a tensor of which this is another shape, where it is a reshape.
      windows: the images whose windows have these winners, where it is such a tensor.
      product: (x, whether x is turned, y, whether y is), where it is a product of two matrices.
      pieces: (an axis, {where it starts: a tensor}), where it is zero between these tensors.
      scaled: (another tensor, a smaller factor), where it is their product.
      times: two tensors of its shape, where it is their product.
      sum: two tensors of its shape, where it is their sum.
      negated: what it is the negative of.
    """

    shape: tuple
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

    def __new__(cls, name: str, shape: Sequence, dtype: Any, thin: Any = None):
        """Return a name with a shape and dtype."""
        tensor = super().__new__(cls, name)
        tensor.shape, tensor.dtype, tensor.thin = tuple(shape), np.dtype(dtype), thin
        same = (getattr(name, "shape", None), getattr(name, "dtype", None)) == (
            tensor.shape,
            tensor.dtype,
        )
        for kept in KEPT:
            setattr(tensor, kept, getattr(name, kept, None) if same else None)
        return tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)


def plain(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array; a key is the integers that it consists of."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def order_of(operands: Sequence[Any], out: Any) -> list[int] | None:
    """Return the order of axes in which an element-wise operator needs no transposition.

    That of images, say, whose channels stand first where JAX has them last.
    """
    full = [x for x in operands if isinstance(x, Tensor) and x.shape == out.shape]
    orders = {x.turned[1] for x in full if x.turned is not None and x.thin is None}
    if len(orders) != 1:
        return None
    return [int(i) for i in np.argsort(next(iter(orders)))]


def known_tensor(value: Any, aval: Any) -> np.ndarray:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value, aval.dtype)


def fold_equation(equation: Any, operands: list, outs: tuple) -> list | None:
    """Return the results of an equation of known operands, None where nodes must compute them."""
    if not operands or equation.effects or not all(isinstance(x, np.ndarray) for x in operands):
        return None
    if not all(dims.all_known(out.shape) for out in outs):
        return None
    if equation.primitive.name != "reshape" and any(prod(out.shape) > FOLDED for out in outs):
        return None  # a reshape stores the same numbers
    atoms = (*equation.invars, *equation.outvars)
    keys = any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in atoms)
    if keys or programs(equation.params) or equation.primitive.name.startswith("random_"):
        return None
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*operands, **equation.params)
    results = results if equation.primitive.multiple_results else [results]
    return [np.asarray(result) for result in results]
