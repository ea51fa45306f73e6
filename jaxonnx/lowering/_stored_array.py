"""Arrays that are kept in another form than the file's, and have the file's shape all the same.

An operator declares the forms that it computes with (`registry.op(accepts=...)`). The evaluator
converts all others before it calls one (`jaxonnx._run.array_forms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

import jax
import numpy as np
from jax import lax

from jaxonnx.lowering._product import merges


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class StoredArray:
    """An array in another form than the file's, as a pytree.

    Subclasses become frozen dataclasses. Their fields are arrays, but for those with
    `metadata={"static": True}`, which belong to the structure of the pytree.
    """

    value: Any
    """The array as it is stored."""

    __array_ufunc__ = None  # makes NumPy leave `array @ stored` to `__rmatmul__`

    def __init_subclass__(cls):
        jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file's form."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_array(self) -> Any:
        """Convert to an array in the file's form."""
        return self.value

    def map(self, function: Callable[[Any], Any]) -> Any:
        """Apply a function, to the stored array where the result can be in the same form."""
        return function(self.to_array())


def to_array(value: Any) -> Any:
    """Convert a `StoredArray` to an array in the file's form; return any other value as it is."""
    while isinstance(value, StoredArray):
        value = value.to_array()
    return value


class Transposed(StoredArray):
    """An array that is stored with its axes in another order."""

    value: Any

    @property
    def places(self) -> tuple[int, ...]:
        """The axis of `value` for each axis in the file's order."""
        return (*range(self.value.ndim),)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape[axis] for axis in self.places)

    def to_array(self) -> Any:
        return self.value.transpose(*self.places)


class KernelFirst(Transposed):
    """A weight (M, C, *kernel) that is stored as (*kernel, C, M); `shape` is in ONNX's order."""

    @property
    def places(self) -> tuple[int, ...]:
        rank = self.value.ndim
        return (rank - 1, rank - 2, *range(rank - 2))


class ChannelsLast(Transposed):
    """Images (N, C, *D) that are stored as (N, *D, C); `shape` is in ONNX's order."""

    @property
    def places(self) -> tuple[int, ...]:
        rank = self.value.ndim
        return (0, rank - 1, *range(1, rank - 1))


# Quantized arrays whose gradient goes to the numbers that they were rounded from.


class RoundedArray(StoredArray):
    """A quantized array together with the numbers that it was rounded from."""

    value: Any
    """The quantized array, which has no gradient."""
    real: Any
    """The numbers before rounding, in units of the scale; gradients go to these."""
    source: Any = None
    """The numbers before the division by the scale."""
    scale: Any = None
    """The scale, as the operator got it that rounded the source."""
    codes: Any = None
    """The quantized array, in float32 where its type is an integer."""

    def map(self, function: Callable[[Any], Any]) -> RoundedArray:
        source, codes = (None if x is None else function(x) for x in (self.source, self.codes))
        return RoundedArray(function(self.value), function(self.real), source, self.scale, codes)

    def __getitem__(self, index: Any) -> RoundedArray:
        return self.map(lambda x: x[index])


@jax.custom_jvp
def with_gradient_of(value, real):
    """Return `value` in float32, with the derivative of `real`."""
    # without a barrier XLA fuses the rounding into loops over the taps of a convolution, and
    # repeats it for each
    return lax.convert_element_type(lax.optimization_barrier(value), np.float32)


@with_gradient_of.defjvp
def _with_gradient_jvp(primals, tangents):
    return with_gradient_of(*primals), tangents[1]


def to_float32(x):
    """Convert quantized numbers; those of a `RoundedArray` have the derivative of the real ones."""
    return (
        with_gradient_of(x.value, x.real) if isinstance(x, RoundedArray) else x.astype(np.float32)
    )


# Keep the leading axes of a product apart where devices may split one of them.
#
# PyTorch's attention makes rows of (steps, batch) before the product with a matrix, and takes them
# apart after it. Devices that share the batch have no contiguous part of such rows, so that each
# would need all of them.


class MergedRows(StoredArray):
    """A matrix (A * B, K) that is stored as (A, B, K); `shape` is that of the matrix."""

    value: Any

    @property
    def shape(self) -> tuple[int, int]:
        a, b, k = self.value.shape
        return a * b, k

    def to_array(self) -> Any:
        return self.value.reshape(self.shape)

    def map(self, function: Callable[[Any], Any]) -> MergedRows:
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
