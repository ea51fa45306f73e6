"""Matrix products in every contraction."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import primitive

INTEGERS: dict[Any, Any] = {
    np.dtype(t): np.dtype(np.int32) for t in (np.int8, np.int16, np.uint8, np.uint16)
}


@primitive("dot_general")
def dot_general(g, x, y, *, dimension_numbers, out):
    dtype = INTEGERS.get(out.dtype, out.dtype)
    if dtype.name == "bfloat16":
        dtype = np.dtype(np.float32)
    z = contract(g, g.cast(x, dtype), g.cast(y, dtype), dimension_numbers, out.shape)
    return g.cast(Tensor(z, out.shape, dtype), out.dtype)


def contract(g: Nodes, x: Any, y: Any, numbers: Any, shape: Any) -> Any:
    """Write a `dot_general`: batch axes first, then the free axes of x, then those of y.

    Two matrices become one MatMul or Gemm on them as they are stored; anything else is transposed
    and reshaped to batches of matrices.

    Args:
      x, y: operands of one dtype.
      numbers: JAX's dimension numbers, ((x_sum, y_sum), (x_batch, y_batch)).
      shape: that of the result.
    """
    (x_sum, y_sum), (x_batch, y_batch) = (tuple(map(tuple, pair)) for pair in numbers)
    x_free = _others(x.ndim, x_sum, x_batch)
    y_free = _others(y.ndim, y_sum, y_batch)
    if x.ndim == y.ndim == 2 and len(x_sum) == 1 and not x_batch and x.dtype.kind == "f":
        (x, first), (y, second) = _as_stored(x, x_sum[0] == 0), _as_stored(y, y_sum[0] == 1)
        return g.product(x, first, y, second, shape)
    if not x_batch and x.ndim > 2 and y.ndim == 2 and x_sum == (x.ndim - 1,) and y_sum == (0,):
        return g("MatMul", x, y)
    batch = [x.shape[i] for i in x_batch]
    left = _matrices(g, x, (x_batch, x_free, x_sum), batch)
    right = _matrices(g, y, (y_batch, y_sum, y_free), batch)
    z = Tensor(g("MatMul", left, right), (*batch, left.shape[-2], right.shape[-1]), x.dtype)
    return g.reshape(z, shape)


def _as_stored(x: Any, turned: bool) -> tuple[Any, bool]:
    """Return the matrix behind a transpose, and whether a product must then transpose it.

    Args:
      x: a matrix, possibly the transpose of a stored one.
      turned: whether the product is with the transpose of x.
    """
    if getattr(x, "turned", None) is None or x.shape[0] == 1 or x.shape[1] == 1:
        return x, turned
    return x.turned[0], not turned


def _others(ndim: int, *taken: tuple) -> tuple:
    """Return the axes that are in none of the groups."""
    return tuple(i for i in range(ndim) if not any(i in axes for axes in taken))


def _matrices(g: Nodes, x: Any, groups: Any, batch: list) -> Any:
    """Return x as (*batch, rows, columns): a transpose and a reshape of three groups of axes."""
    first, rows, columns = groups
    sizes = x.shape
    x = g.transpose(x, [*first, *rows, *columns])
    return g.reshape(x, [*batch, _product(sizes, rows), _product(sizes, columns)])


def _product(sizes: Any, axes: Any) -> Any:
    result = 1
    for axis in axes:
        result = sizes[axis] * result
    return result


@primitive("packed_product")
def packed_product(g, x, *arrays, form):
    """Write a product with the matrix that `form` unpacks.

    Integer codes are initializers: a tensor is no known value, so that the floats which nodes
    compute from the codes are not folded into the file.
    """
    named = g.main.constants  # by the array of the file: forward and backward pass read one tensor
    operands = []
    for array in arrays:
        if isinstance(array, np.ndarray) and jnp.issubdtype(array.dtype, jnp.integer):
            kind = array.dtype
            if kind.itemsize == 1:  # also of less than a byte, which few operators take
                kind = np.dtype(np.uint8 if kind.name.startswith("uint") else np.int8)
            if id(array) not in named:
                name = g.main.writer.constant("codes", array.astype(kind), kind)
                named[id(array)] = name, array
            array = Tensor(named[id(array)][0], array.shape, kind)
        operands.append(array)
    (product,) = g.run(form.dense, x, *operands)
    return product
