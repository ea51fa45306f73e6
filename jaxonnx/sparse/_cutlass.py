"""2:4 matrices as CUTLASS's sparse matrix products take them.

CUTLASS (and with it the `SparseSemiStructuredTensor` of PyTorch) keeps the kept weights row by row,
and their places, two bits each, in metadata whose elements stand in the order in which the threads
of a tensor core read them: `reorder_meta` of `tools/util/include/cutlass/util/host_reorder.h`, laid
out by `ColumnMajorInterleaved<2>` of `include/cutlass/layout/matrix.h`. The compressed matrix of
cuSPARSELt is not documented: only the library itself makes it.
"""

import jax.numpy as jnp
import numpy as np

from jaxonnx._require import check_arguments, require
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._nm import Pattern
from jaxonnx.sparse._pack import Packed

_ROWS = 8
"""The rows of the matrix that one group of a tensor core's threads reads together."""


def to_cutlass(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Return a 2:4 matrix as the two operands of CUTLASS's sparse product.

    >>> import jaxonnx.sparse as sparse
    >>> w = np.tile(np.array([1, 0, 2, 0], np.float16), (32, 8))
    >>> values, metadata = to_cutlass(sparse.pack(w))
    >>> values.shape, metadata.shape, metadata.dtype, hex(metadata[0, 0])
    ((32, 16), (32, 2), dtype('uint16'), '0x8888')

    Args:
      packed: a matrix (`pack`) in float16, bfloat16 or int8. The other axis than the packed one,
        the rows, is a multiple of 32 (int8: 16), and the packed one of 32 (int8: 64).

    Returns:
      The kept weights, (rows, columns / 2), and the metadata: uint16 of shape (rows, columns / 16),
      or for int8 uint32 of shape (rows, columns / 32).

    Raises:
      SparsityError: another pattern, type or size.
    """
    check_arguments(to_cutlass, locals())
    values = np.asarray(packed.values)
    if packed.pattern not in (Pattern(2, 4), Pattern(2, 4, False)) or values.ndim != 3:
        raise SparsityError(f"CUTLASS takes 2:4 matrices, not {packed.pattern}{[*packed.shape]}")
    word, rows = _metadata_dtype(values.dtype), values.shape[0]
    columns = values.shape[1] * 4
    _check_size(rows, columns, word)
    metadata = np.asarray(packed.indices).view(word.newbyteorder("<")).astype(word)
    return values.reshape(rows, -1), _reorder(metadata.reshape(rows, -1))


def from_cutlass(values: np.ndarray, metadata: np.ndarray, *, axis: int = 1) -> Packed:
    """Return a matrix from the operands of CUTLASS's sparse product: the inverse of `to_cutlass`.

    Args:
      values: the kept weights, (rows, columns / 2).
      metadata: their places, as `to_cutlass` returns them; signed integers count as unsigned.
      axis: the axis of the matrix that is packed: with 0 the rows here are its columns.

    Raises:
      SparsityError: sizes that do not belong together, or places that are not in ascending order.
    """
    check_arguments(from_cutlass, locals())
    word = _metadata_dtype(values.dtype)
    require("values", values, values.ndim == 2, "a matrix", SparsityError)
    rows, half = values.shape
    _check_size(rows, 2 * half, word)
    if metadata.dtype.itemsize != word.itemsize or metadata.shape != (
        rows,
        half // word.itemsize // 4,
    ):
        raise SparsityError(
            f"metadata of {metadata.dtype}{[*metadata.shape]} for {values.dtype}{[*values.shape]}"
        )
    ordered = _restore(metadata.view(word)).astype(word.newbyteorder("<"))
    shape = (rows, 2 * half) if axis % 2 else (2 * half, rows)
    pairs, places = values.reshape(rows, -1, 2), np.ascontiguousarray(ordered).view(np.uint8)
    packed = Packed(pairs, places.reshape(-1), shape, axis % 2, Pattern(2, 4, False))
    if damage := packed.pattern.damage(pairs, places.reshape(-1), shape, axis % 2):
        raise SparsityError(f"metadata: {damage}")
    return packed


def _metadata_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the metadata elements for a matrix of `dtype`.

    Raises:
      SparsityError: the hardware has no 2:4 product of `dtype`.
    """
    if dtype == np.int8:
        return np.dtype(np.uint32)
    if dtype in (np.float16, jnp.bfloat16):
        return np.dtype(np.uint16)
    raise SparsityError(
        f"values must be float16, bfloat16 or int8, as in 2:4 products of the hardware, got {dtype}"
    )


def _check_size(rows: int, columns: int, word: np.dtype) -> None:
    # a tile of the metadata's layout: 32 x 32 elements of the matrix in half precision, 16 x 64
    # in int8
    group, width = 64 // word.itemsize, 16 * word.itemsize
    if rows % group or columns % width:
        raise SparsityError(
            f"{rows} x {columns}: CUTLASS takes multiples of {group} rows and {width} columns"
        )


def _reorder(metadata: np.ndarray) -> np.ndarray:
    """Reorder the elements of metadata (rows, columns) from row-major to the hardware's order."""
    rows, columns = metadata.shape
    lanes = 64 // metadata.itemsize // _ROWS  # groups of _ROWS rows that interleave: 4, int8: 2
    x = metadata.reshape(-1, lanes, _ROWS, columns).swapaxes(1, 2)  # interleave distant rows
    x = x.reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 3)  # transpose blocks of 2 x 2
    x = x.reshape(rows, columns // 2, 2).swapaxes(0, 1)  # pairs of columns, one below the other
    return np.ascontiguousarray(x).reshape(rows, columns)


def _restore(metadata: np.ndarray) -> np.ndarray:
    """Invert `_reorder`: its three steps backwards."""
    rows, columns = metadata.shape
    lanes = 64 // metadata.itemsize // _ROWS
    x = metadata.reshape(columns // 2, rows, 2).swapaxes(0, 1)
    x = x.reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 3)
    x = x.reshape(-1, _ROWS, lanes, columns).swapaxes(1, 2)
    return np.ascontiguousarray(x).reshape(rows, columns)
