"""Images with their channels last, and kernels with theirs.

ONNX has images as (N, C, *D), and convolutions, on CPU above all, are quickest on (N, *D, C). From
the first operator that has channels (`registry.Channels`) to the first that needs ONNX's order, the
values of a graph are kept with their channels last: the order is changed once for a chain of
operators instead of twice in each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.registry import Op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChannelsLast:
    """An array (N, C, *D) that is kept as (N, *D, C); `shape` is the former."""

    value: Any

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        n, *size, c = self.value.shape
        return (n, c, *size)

    def first(self) -> Any:
        """The array in ONNX's order."""
        return jnp.moveaxis(self.value, -1, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelFirst:
    """A weight (M, C, *kernel) that is kept as (*kernel, C, M); `shape` is the former."""

    value: Any

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        *kernel, c, m = self.value.shape
        return (m, c, *kernel)

    def first(self) -> Any:
        """The array in ONNX's order."""
        return self.value.transpose(self.ndim - 1, self.ndim - 2, *range(self.ndim - 2))


SHORT = 16
"""A last axis below it is short."""


def kernel_first(shape: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a weight in the order of a KernelFirst, if it has a short last axis."""
    rank = len(shape)
    if rank < 3 or shape[-1] >= SHORT or shape[-1] >= max(shape[:2]):
        return None
    return (*range(2, rank), 1, 0)


def kernels_first(params: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Parameters whose convolution weights (M, C, *kernel) are kept as (*kernel, C, M).

    For a training loop of your own on CPU, where loops run along the last axis: an update of Adam
    takes five times as long on (M, C, 3, 3). `jaxonnx.train` does it by itself.

    Returns:
      a pytree for `Model.apply`, `Model.apply_train`, `jax.grad`, optax and `Model.replace`. An
      optimizer sees the arrays as they are kept.

    >>> import jaxonnx, jax.numpy as jnp
    >>> params = jaxonnx.kernels_first({"w": jnp.ones((8, 4, 3, 3)), "b": jnp.ones(8)})
    >>> params["w"].value.shape, params["w"].first().shape, params["b"].shape
    ((3, 3, 4, 8), (8, 4, 3, 3), (8,))
    """
    orders = {name: kernel_first(x.shape) for name, x in params.items()}
    return {
        name: x if orders[name] is None else KernelFirst(x.transpose(orders[name]))
        for name, x in params.items()
    }


def first(value: Any) -> Any:
    """The value in ONNX's order."""
    return value.first() if isinstance(value, ChannelsLast | KernelFirst) else value


def _last(value: Any, rank: int) -> Any:
    """An array that broadcasts against rank `rank`, in the order in which it broadcasts there."""
    if isinstance(value, ChannelsLast) or value is None or not np.ndim(value):
        return value
    value = first(value)
    value = value.reshape((1,) * (rank - value.ndim) + value.shape)
    is_known = isinstance(value, np.ndarray)
    return ChannelsLast(np.moveaxis(value, 1, -1) if is_known else jnp.moveaxis(value, 1, -1))


def choose(op: Op, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of an operator in the order in which it is best evaluated."""
    if op.channels and _is_image(arguments[0]):
        x, *others = arguments
        others = [a if i in op.kernels else first(a) for i, a in enumerate(others, 1)]
        return [_last(x, x.ndim), *others]
    if op.pointwise:
        ranks = {a.ndim for a in arguments if isinstance(a, ChannelsLast)}
        if len(ranks) == 1 and all(np.ndim(a) <= max(ranks) for a in arguments if a is not None):
            return [_last(a, max(ranks)) for a in arguments]
    return [first(a) for a in arguments]


def _is_image(value: Any) -> bool:
    if isinstance(value, ChannelsLast):
        return True
    return (
        isinstance(value, jax.Array)
        and value.ndim > 2
        and jnp.issubdtype(value.dtype, jnp.floating)
    )


def call(op: Op, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Calls an operator on what `choose` gives; its results are in the same order."""
    images = [a for a in arguments if isinstance(a, ChannelsLast)]
    if not images:
        return op.function(*arguments, **keywords)
    rank = images[0].ndim
    if "axis" in keywords and op.pointwise:
        keywords = keywords | {"axis": _axis(keywords["axis"], rank)}
    values = [a.value if isinstance(a, ChannelsLast) else a for a in arguments]
    results = op.function(*values, **keywords)
    if op.channels:
        y, *others = results if isinstance(results, tuple) else (results,)
        return (ChannelsLast(y), *others)
    wrap: Callable = lambda y: ChannelsLast(y) if y.ndim == rank else y  # noqa: E731
    return tuple(map(wrap, results)) if isinstance(results, tuple) else wrap(results)


def _axis(axis: int, rank: int) -> int:
    """Where an axis of ONNX's order is if the channels are last."""
    axis += rank if axis < 0 else 0
    return axis if axis == 0 else (rank - 1 if axis == 1 else axis - 1)
