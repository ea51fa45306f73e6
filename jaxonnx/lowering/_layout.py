"""The order in which convolution weights (M, C, *kernel) are kept while a program runs.

Loops along a short last axis are slow on CPU, and on TPU it fills few of 128 lanes. With the kernel
first, (*kernel, C, M), an update of Adam takes a fifth of the time on CPU, and a step of ResNet-18
on a TPU reads and writes 1783 MB instead of 1957, with 6 copies instead of 108. Files, checkpoints
and all that a user sees have ONNX's order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxonnx._require import check_arguments, require
from jaxonnx.lowering._stored_array import KernelFirst

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


def store(
    tensors: Mapping[str, Any],
    names: Collection[str],
    factors: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Store convolution weights in the order of axes that is fast on their platform.

    Args:
      tensors: arrays by name.
      names: the tensors that may be stored in another order.
      factors: a vector by name; an array in host memory is multiplied by it along its first axis.

    Returns:
      The tensors, some of them as `KernelFirst`.
    """
    stored, elsewhere = {**tensors}, {}
    for name, x in tensors.items():
        axes = order(x) if name in names else None
        factor = (factors or {}).get(name)
        if axes is not None and not is_in_memory(x):
            elsewhere[name] = x
        elif axes is not None or factor is not None:
            # NumPy needs no compilation for each shape, and holds only one weight twice at a time
            value = np.asarray(x)
            if factor is not None:
                value = value * factor.reshape(-1, *(1,) * (x.ndim - 1))
            value = placed_as(x, value if axes is None else value.transpose(axes))
            stored[name] = value if axes is None else KernelFirst(value)
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
    def back(self) -> "Transposition":
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

    def replaced(path, x):
        if special and isinstance(x, types):
            return special[type(x)](x)
        turn = turns.get(getattr(path[-1], "key", "")) if path else None
        return turn(x) if turn is not None and x.shape == turn.shape else x

    def is_leaf(x):
        return isinstance(x, types) and x is not tree

    return jax.tree_util.tree_map_with_path(replaced, tree, is_leaf=is_leaf) if turns else tree
