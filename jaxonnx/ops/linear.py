"""Matrix products and the determinant."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import lowering
from jaxonnx._weights import matrix
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import cast
from jaxonnx.registry import op

FACTORS = {"a": matrix(first=True, transpose="transA"), "b": matrix(transpose="transB")}
"""The weights of Gemm: A and B."""
MATRIX = {"b": lowering.LowRank | lowering.Packed}
OPERANDS = MATRIX | {"a": lowering.MergedRows}
"""The forms that products take: B of MatMul, A and B of Gemm."""


@op("MatMul", since=1, weights={"a": matrix(first=True), "b": matrix()}, accepts=MATRIX)
def matmul(a, b):
    """`numpy.matmul`; a matrix on the right makes one product of all leading axes of `a`."""
    if a.ndim > 2 and b.ndim == 2 and lowering.merges():
        count = math.prod(a.shape[:-1])
        y = (a.reshape(count, a.shape[-1]) @ b).reshape(*a.shape[:-1], b.shape[-1])
    else:
        y = a @ b
    # NumPy gives a product of bfloat16 matrices in float32.
    return cast(lowering.keep_apart(y), a.dtype)


MATRICES = "a (_, _), b (_, _)"


def affine(x, w, bias=None):
    """Return x @ w + bias of a matrix w; the sum is rounded once."""
    if bias is None:
        return matmul(x, w)
    return cast(lowering.rows(x, w) + bias, x.dtype)


def _gemm(a, b, c, alpha, beta, transpose_a, transpose_b):
    a = a.T if transpose_a else a
    single = alpha == 1 and (c is None or beta == 0)  # nothing is left to round
    if transpose_b and isinstance(b, jax.Array) and a.dtype == b.dtype and not lowering.is_half(b):
        # for a single row, XLA:CPU vectorizes this but not the product with the transposed matrix
        y = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())))
    else:
        b = b.T if transpose_b else b
        y = cast(a @ b, a.dtype) if single else lowering.product(a, b)
    y = lowering.keep_apart(y)
    dtype = y.dtype
    if alpha != 1:
        y = (alpha * y).astype(dtype)
    if c is None or beta == 0:
        return cast(y, a.dtype)
    if jnp.broadcast_shapes(y.shape, c.shape) != y.shape:
        raise NodeError(f"C of shape {c.shape} does not broadcast to the product's {y.shape}")
    return cast(y + (c if beta == 1 else (beta * c.astype(dtype)).astype(dtype)), a.dtype)


@op("Gemm", since=1, weights=FACTORS, params=("c",), bias="c", accepts=MATRIX, shapes=MATRICES)
def gemm_1(a, b, c, *, alpha=1.0, beta=1.0, transA=0, transB=0, broadcast=0):
    shape = a.shape[-1 if transA else 0], b.shape[0 if transB else -1]
    if not broadcast and c.shape != shape:
        raise NodeError(f"C has shape {c.shape}, not {shape}, and attribute broadcast is 0")
    return _gemm(a, b, c, alpha, beta, transA, transB)


@op(
    "Gemm",
    since=7,
    weights=FACTORS,
    params=("c",),
    bias="c",
    accepts=OPERANDS,
    shapes=MATRICES,
)
def gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """Y = alpha * A' B' + beta * C; as in BLAS, C is not read at all when beta is 0."""
    by_row = not transA and (c is None or c.ndim < 2 or c.shape[0] == 1)
    return lowering.map_rows(
        lambda a: _gemm(a, b, c, alpha, beta, transA, transB), a if by_row else lowering.to_array(a)
    )


@op("Det", since=11, shapes="x (*N, M, M)")
def det(x):
    """Determinants of the innermost matrices; half precision is computed in float32."""
    if x.shape[-1] == 0:
        return jnp.ones(x.shape[:-2], x.dtype)  # the derivative of JAX's rule needs a row
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return jnp.linalg.det(wide).astype(x.dtype)
