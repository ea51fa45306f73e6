"""Arrays kept in another form than the file's: of the file's shape, or weights with axes reordered.

An operator declares the forms that it computes with (`registry.op(accepts=...)`). The evaluator
converts all others before it calls one (`jaxonnx._run.array_forms`).

Loops along a short last axis are slow on CPU, and on TPU it fills few of 128 lanes. With the kernel
first, (*kernel, C, M), an update of Adam takes a fifth of the time on CPU, and a step of ResNet-18
on a TPU reads and writes 1783 MB instead of 1957, with 6 copies instead of 108. Files, checkpoints
and all that a user sees have ONNX's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxonnx._require import check_arguments, require
from jaxonnx.lowering._contract import merges


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


class TransposedArray(StoredArray):
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


class KernelFirst(TransposedArray):
    """A weight (M, C, *kernel) that is stored as (*kernel, C, M); `shape` is in ONNX's order."""

    @property
    def places(self) -> tuple[int, ...]:
        rank = self.value.ndim
        return (rank - 1, rank - 2, *range(rank - 2))


class ChannelsLast(TransposedArray):
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


SHORT = 16
"""The length of a last axis below which loops along it are slow."""

Axes = tuple[int, ...]


def kernel_first(shape: Sequence[int]) -> Axes | None:
    """Return the transposition that stores a weight kernel first; None if it has no advantage."""
    # it has none if the last axis is long already, or at least as long as the channels, which would
    # be last instead
    rank = len(shape)
    if rank < 3 or shape[-1] >= SHORT or shape[-1] >= max(shape[:2]):
        return None
    return (*range(2, rank), 1, 0)


ORDERS: dict[str, Callable[[Sequence[int]], Axes | None]] = {
    "cpu": kernel_first,
    "tpu": kernel_first,
}
"""The rule for the order of axes, by platform; without one a weight keeps ONNX's order."""


def order(x: Any, platform: str | None = None) -> Axes | None:
    """Return the order of axes to store a weight in; None for ONNX's order.

    Args:
      x: an array, or a `jax.ShapeDtypeStruct` with the sharding it will have.
      platform: where it will be used; by default where it is.
    """
    rule = ORDERS.get(platform or platform_of(x))
    return None if rule is None else rule(x.shape)


def platform_of(x: Any) -> str:
    """Return the platform that an array is on; "" for a tracer, which has no device."""
    if isinstance(x, Tracer):
        return ""
    sharding = getattr(x, "sharding", None)
    return next(iter(sharding.device_set)).platform if sharding else jax.default_backend()


def store(tensors: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Store convolution weights in the order of axes that is fast on their platform.

    Args:
      tensors: arrays by name.
      names: the tensors that may be stored in another order.

    Returns:
      The tensors, some of them as `KernelFirst`.
    """
    stored, elsewhere = {**tensors}, {}
    for name, x in tensors.items():
        axes = order(x) if name in names else None
        if axes is not None and not is_in_memory(x):
            elsewhere[name] = x
        elif axes is not None:
            # NumPy needs no compilation for each shape, and holds only one weight twice at a time
            stored[name] = KernelFirst(placed_as(x, np.asarray(x).transpose(axes)))
    return {**stored, **_kernels_first(elsewhere)} if elsewhere else stored


def kernels_first(params: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return parameters whose convolution weights `(M, C, *kernel)` are kept as `(*kernel, C, M)`.

    For a training loop of your own on CPU, where loops run along the last axis (an update of Adam
    takes five times as long on (M, C, 3, 3)), or on TPU. `jaxonnx.train` does it by itself.

    Returns:
      A pytree for `Model.apply`, `Model.apply_train`, `jax.grad`, optax and `Model.replace`. An
      optimizer sees the arrays as they are kept.

    >>> import jaxonnx, jax.numpy as jnp
    >>> params = jaxonnx.kernels_first({"w": jnp.ones((8, 4, 3, 3)), "b": jnp.ones(8)})
    >>> params["w"].value.shape, params["w"].to_array().shape, params["b"].shape
    ((3, 3, 4, 8), (8, 4, 3, 3), (8,))
    """
    check_arguments(kernels_first, locals())
    are_arrays = all(hasattr(x, "shape") for x in params.values())
    require("params", params, are_arrays, "a dict of arrays")
    orders = {name: kernel_first(x.shape) for name, x in params.items()}
    return {
        name: x if orders[name] is None else KernelFirst(x.transpose(orders[name]))
        for name, x in params.items()
    }


_kernels_first = jax.jit(kernels_first)


def is_in_memory(x: Any) -> bool:
    """Check whether an array is unsharded and in host memory."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return False
    return len(x.sharding.device_set) == 1 and platform_of(x) == "cpu" and x.is_fully_addressable


def placed_as(x: jax.Array, value: np.ndarray) -> jax.Array:
    """Copy `value` to the device of `x`, committed if `x` is."""
    return jax.device_put(value, x.sharding if x.committed else None, may_alias=False)


@dataclass(frozen=True)
class Transposition:
    """A transposition of arrays of one shape."""

    shape: tuple[int, ...]
    axes: Axes

    def __call__(self, x: Any) -> Any:
        if not is_in_memory(x):
            return x.transpose(self.axes)
        # NumPy needs no compilation for each shape
        return placed_as(x, np.asarray(x).transpose(self.axes))

    @property
    def back(self) -> Transposition:
        inverse = tuple(self.axes.index(a) for a in range(len(self.axes)))
        return Transposition(tuple(self.shape[a] for a in self.axes), inverse)


def transpose_tree(
    tree: Any, turns: Mapping[str, Transposition], special: Mapping[type, Callable] | None = None
):
    """Transpose the arrays of a tree that belong to transposed parameters.

    What an optimizer keeps for a parameter has the parameter's name as its last key, and its shape.

    Args:
      tree: an optimizer state, say.
      turns: transpositions by parameter name.
      special: functions that replace whole nodes of some types, except for the root.
    """
    types = tuple(special or ())

    def transpose_leaf(path, x):
        if special and isinstance(x, types):
            return special[type(x)](x)
        turn = turns.get(getattr(path[-1], "key", "")) if path else None
        return turn(x) if turn is not None and x.shape == turn.shape else x

    def is_leaf(x):
        return isinstance(x, types) and x is not tree

    return (
        jax.tree_util.tree_map_with_path(transpose_leaf, tree, is_leaf=is_leaf) if turns else tree
    )
