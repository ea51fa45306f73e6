"""Linear algebra: matrix products in every contraction, and decompositions composed in JAX.

ONNX has Det alone. What LAPACK leaves open, the signs of eigenvectors and singular vectors, is open
here as well.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import Refusal, composed, primitive

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
    x_free = _find_free_axes(x.ndim, x_sum, x_batch)
    y_free = _find_free_axes(y.ndim, y_sum, y_batch)
    if x.ndim == y.ndim == len(x_sum) == 1 and x.dtype.name in ("float32", "float64"):
        # onnxruntime takes ten times as long for a product of one row with one column
        if (getattr(x, "flat", None) or x) == (getattr(y, "flat", None) or y):
            return g("ReduceSumSquare", x, keepdims=0)
        return g.reduce("ReduceSum", g("Mul", x, y), [0])
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


def _find_free_axes(ndim: int, *taken: tuple) -> tuple:
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


SWEEPS = 12
"""Sweeps of Jacobi's method over all pairs of columns; it converges quadratically in the end."""


def _map_matrices(function: Callable, *arrays: Any) -> Any:
    """Map a function of matrices over the leading axes of arrays."""
    for _ in range(arrays[0].ndim - 2):
        function = jax.vmap(function)
    return function(*arrays)


def _places(a: Any) -> tuple[Any, Any]:
    """Return the row indices, (m, 1), and the column indices, (1, n), of a matrix."""
    m, n = a.shape
    return jnp.arange(m)[:, None], jnp.arange(n)[None]


def _row(a: Any, k: Any) -> Any:
    return lax.dynamic_index_in_dim(a, k, 0, keepdims=False)


def _column(a: Any, k: Any) -> Any:
    return lax.dynamic_index_in_dim(a, k, 1, keepdims=False)


@composed("cholesky")
def cholesky(a):
    return _map_matrices(_cholesky, a)


def _cholesky(a):
    rows, columns = _places(a)

    def step(k, lower):
        # column k of the factor; columns from k on are still zero
        column = _column(a, k) - lower @ _row(lower, k)
        column = column / jnp.sqrt(_row(column, k))
        return jnp.where((columns == k) & (rows >= k), column[:, None], lower)

    lower = lax.fori_loop(0, a.shape[0], step, jnp.zeros_like(a))
    return jnp.where(jnp.isnan(lower).any(), jnp.nan, lower)


@composed("triangular_solve")
def triangular_solve(a, b, *, left_side, lower, transpose_a, unit_diagonal):
    def solve(a, b):
        if not left_side:  # x a = b is a' x' = b'
            b = b.T
        if transposed := transpose_a == left_side:
            a = a.T
        solve_rows = _solve_lower if lower != transposed else _solve_upper
        x = solve_rows(a, b, unit_diagonal)
        return x if left_side else x.T

    return _map_matrices(solve, a, b)


def _solve_lower(a, b, unit):
    """Solve a x = b for a lower triangular matrix, whose diagonal is 1 if `unit`."""
    rows, _ = _places(b)

    def step(k, x):
        row = jnp.where(jnp.arange(a.shape[0]) < k, _row(a, k), 0)
        value = _row(b, k) - row @ x
        return jnp.where(rows == k, value if unit else value / _row(_row(a, k), k), x)

    return lax.fori_loop(0, a.shape[0], step, jnp.zeros_like(b))


def _solve_upper(a, b, unit):
    """Solve a x = b for an upper triangular matrix: reversed along both axes it is lower."""
    return _solve_lower(a[::-1, ::-1], b[::-1], unit)[::-1]


@composed("lu")
def lu(a):
    return _map_matrices(_lu, a)


def _lu(a):
    """Factor a matrix by Gaussian elimination with partial pivoting.

    Returns:
      Both factors in one matrix, the row swapped with row k at step k, and the permutation of rows.
    """
    rows, columns = _places(a)
    places = jnp.arange(a.shape[0])

    def step(k, carry):
        a, pivots, permutation = carry
        best = jnp.argmax(jnp.where(places >= k, jnp.abs(_column(a, k)), -1))
        best = best.astype(places.dtype)
        order = jnp.where(places == k, best, jnp.where(places == best, k, places))
        a, permutation = a[order], permutation[order]
        pivot = _row(_row(a, k), k)
        factors = jnp.where(places > k, _column(a, k) / jnp.where(pivot == 0, 1, pivot), 0)
        rest = jnp.where(columns[0] > k, _row(a, k), 0)
        a = jnp.where((rows > k) & (columns == k), factors[:, None], a - jnp.outer(factors, rest))
        return a, jnp.where(jnp.arange(pivots.size) == k, best, pivots), permutation

    steps = min(a.shape)
    carry = a, jnp.zeros(steps, places.dtype), places
    a, pivots, permutation = lax.fori_loop(0, steps, step, carry)
    return a, pivots.astype(jnp.int32), permutation.astype(jnp.int32)


@composed("lu_pivots_to_permutation")
def lu_pivots_to_permutation(pivots, *, permutation_size):
    places = jnp.arange(permutation_size, dtype=jnp.int32)

    def permute(pivots):
        def step(k, permutation):
            other = _row(pivots, k)
            order = jnp.where(places == k, other, jnp.where(places == other, k, places))
            return permutation[order]

        return lax.fori_loop(0, pivots.size, step, places)

    for _ in range(pivots.ndim - 1):
        permute = jax.vmap(permute)
    return permute(pivots)


@primitive("custom_linear_solve")
def custom_linear_solve(g, *operands, const_lengths, jaxprs):
    """Write the program that solves; the other programs, of products, are for gradients."""
    before = const_lengths.matvec + const_lengths.vecmat
    constants = operands[before : before + const_lengths.solve]
    return g.program(jaxprs.solve, [*constants, *operands[sum(const_lengths) :]])


@composed("qr")
def qr(a, *, full_matrices, pivoting):
    if pivoting:
        raise Refusal("pivoting is not supported")
    return _map_matrices(lambda a: _qr(a, full_matrices), a)


def _qr(a, full):
    """Factor a matrix by Householder reflections, with the signs of LAPACK."""
    m, n = a.shape
    places = jnp.arange(m)
    _, columns = _places(a)

    def step(k, carry):
        q, r = carry
        column = jnp.where(places >= k, _column(r, k), 0)
        first = _row(column, k)
        below = jnp.where(places > k, column, 0)
        length = jnp.sqrt(jnp.sum(column * column))
        is_done = jnp.all(below == 0)  # the column is zero below the diagonal: no reflection
        target = jnp.where(first < 0, length, -length)
        v = jnp.where(places == k, first - target, below)
        v = v / jnp.where(is_done, 1, first - target)
        tau = jnp.where(is_done, 0, (target - first) / jnp.where(is_done, 1, target))
        r = r - tau * jnp.outer(v, v @ r)
        r = jnp.where((columns == k) & (places[:, None] > k), 0, r)
        return q - tau * jnp.outer(q @ v, v), r

    q, r = lax.fori_loop(0, min(m, n), step, (jnp.eye(m, dtype=a.dtype), a))
    size = m if full else min(m, n)
    return q[:, :size], r[:size]


def _rotation(n, p, q, cotangent_of_double):
    """Return the rotation matrix (n, n) of axes p and q of a Jacobi step.

    Args:
      n: the size of the matrix.
      p, q: the axes.
      cotangent_of_double: the cotangent of twice the angle. Of the two angles that have it, the one
        of at most 45 degrees is taken, for which the method converges.
    """
    t = cotangent_of_double
    tangent = jnp.where(t < 0, -1, 1) / (jnp.abs(t) + jnp.sqrt(1 + t * t))
    tangent = jnp.where(jnp.isfinite(t), tangent, 0)
    cosine = lax.rsqrt(1 + tangent * tangent)
    sine = tangent * cosine
    rows, columns = jnp.arange(n)[:, None], jnp.arange(n)[None]
    same = (rows == columns) & ((rows == p) | (rows == q))
    turn = jnp.where(same, cosine, jnp.eye(n, dtype=t.dtype))
    turn = jnp.where((rows == p) & (columns == q), sine, turn)
    return jnp.where((rows == q) & (columns == p), -sine, turn)


def _sweep(n: int, turn: Callable, carry: Any) -> Any:
    """Apply `turn(p, q, carry)` to all pairs p < q of n columns, `SWEEPS` times in order."""
    if n < 2:
        return carry
    first, second = np.triu_indices(n, 1)
    pairs = np.tile(np.stack([first, second], 1).astype(np.int32), (SWEEPS, 1))
    return lax.scan(lambda carry, pair: (turn(pair[0], pair[1], carry), None), carry, pairs)[0]


@composed("eigh")
def eigh(a, *, lower, sort_eigenvalues=True, subset_by_index=None):
    if subset_by_index not in (None, (0, a.shape[-1])):
        raise Refusal("a subset of eigenvalues is not supported")

    def decompose(a):
        n = a.shape[0]
        half = jnp.tril(a, -1) if lower else jnp.triu(a, 1).T
        a = half + half.T + jnp.diag(jnp.diagonal(a))

        def turn(p, q, carry):
            a, v = carry
            off = _row(_row(a, p), q)
            apart = _row(_row(a, q), q) - _row(_row(a, p), p)
            g = _rotation(n, p, q, apart / (2 * off))
            return g.T @ a @ g, v @ g

        a, v = _sweep(n, turn, (a, jnp.eye(n, dtype=a.dtype)))
        values = jnp.diagonal(a)
        order = jnp.argsort(values)
        return v[:, order], values[order]

    return _map_matrices(decompose, a)


@composed("svd")
def svd(a, *, full_matrices, compute_uv, subset_by_index=None):
    if subset_by_index is not None:
        raise Refusal("a subset of singular values is not supported")

    def decompose(a):
        wide = a.shape[0] < a.shape[1]
        s, u, v = _svd(a.T if wide else a, full_matrices)
        return (s, v, u.T) if wide else (s, u, v.T)

    s, u, v = _map_matrices(decompose, a)
    return (s, u, v) if compute_uv else (s,)


def _svd(a, full):
    """Decompose a tall matrix by one-sided Jacobi.

    Pairs of columns are rotated until all are orthogonal; their lengths are the singular values. A
    QR decomposition normalizes them, and completes the basis if `full`.

    Returns:
      The singular values in descending order, the left vectors as columns, and the right ones.
    """
    n = a.shape[1]

    def turn(p, q, carry):
        b, v = carry
        x, y = _column(b, p), _column(b, q)
        g = _rotation(n, p, q, (y @ y - x @ x) / (2 * (x @ y)))
        return b @ g, v @ g

    b, v = _sweep(n, turn, (a, jnp.eye(n, dtype=a.dtype)))
    s = jnp.sqrt(jnp.sum(b * b, 0))
    order = jnp.argsort(-s)
    s, b, v = s[order], b[:, order], v[:, order]
    u, r = _qr(b, full)
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(a.dtype)
    signs = jnp.concatenate([signs, jnp.ones(u.shape[1] - n, a.dtype)])
    return s, u * signs, v
