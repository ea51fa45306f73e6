"""Keep the leading axes of a product apart where devices may split one of them.

PyTorch's attention makes rows of (steps, batch) before the product with a matrix, and takes them
apart after it. Devices that share the batch have no contiguous part of such rows, so that each
would need all of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxonnx.lowering._product import merges
from jaxonnx.lowering._stored_array import StoredArray


class MergedRows(StoredArray):
    """A matrix (A * B, K) that is stored as (A, B, K); `shape` is that of the matrix."""

    value: Any

    @property
    def shape(self) -> tuple[int, int]:
        a, b, k = self.value.shape
        return a * b, k

    def to_array(self) -> Any:
        return self.value.reshape(self.shape)

    def map(self, function: Callable[[Any], Any]) -> "MergedRows":
        """Apply a function of matrices that acts on rows independently."""
        return MergedRows(jax.vmap(function)(self.value))


def map_rows(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function of matrices that acts on rows independently; merged rows stay merged."""
    return x.map(function) if isinstance(x, MergedRows) else function(x)


def reshape_rows(x: Any, shape: list[int]) -> Any:
    """Reshape x; under a mesh, (A, B, ...) that becomes (A * B, K) is a `MergedRows` instead."""
    if isinstance(x, MergedRows):
        return x.value if (*shape,) == x.value.shape else x.to_array().reshape(shape)
    if merges() or isinstance(x, np.ndarray) or x.ndim < 3 or len(shape) != 2:
        return x.reshape(shape)
    if not all(isinstance(n, int) for n in (*x.shape, *shape)):  # sizes that jax.export leaves open
        return x.reshape(shape)
    (count, width), length = shape, x.shape[0]
    if not 1 < length < count or count % length:
        return x.reshape(shape)
    return MergedRows(x.reshape(length, count // length, width))
