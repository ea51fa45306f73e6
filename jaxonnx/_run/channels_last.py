"""Images with their channels last between operators.

ONNX has images as (N, C, *D), and convolutions, on CPU above all, are quickest on (N, *D, C). From
the first operator that has channels (`registry.Channels`) to the first that needs ONNX's order, the
values of a graph are kept with their channels last: the order is changed once for a chain of
operators instead of twice in each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.lowering import ChangedWeight, KernelFirst, LowRank, MergedRows, Packed, in_file
from jaxonnx.registry import Op, Rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChannelsLast:
    """An array (N, C, *D) that is stored as (N, *D, C); `shape` is the former."""

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
        """Return the array in ONNX's order."""
        return jnp.moveaxis(self.value, -1, 1)

    def place(self, axis: int) -> int:
        """Return where an axis of ONNX's order is in `value`."""
        return _axis(axis, self.ndim)


def first(value: Any) -> Any:
    """Return the value in ONNX's order."""
    if isinstance(value, Rounded):
        return Rounded(first(value.value), first(value.real))
    return value.first() if isinstance(value, ChannelsLast) else in_file(value)


def _reordered(op: Op, arguments: Sequence[Any]) -> Any:
    """Return the first argument if an operator can work on the order of axes that it is stored in.

    None if it is stored in ONNX's order, or the operator needs that: it is not per axis, or one of
    its other arguments has more than one axis.
    """
    x, *others = arguments
    x = x.value if isinstance(x, Rounded) else x
    vectors = all(np.ndim(a) < 2 for a in others if a is not None)
    return x if op.per_axis and isinstance(x, ChannelsLast | KernelFirst) and vectors else None


def _to_channels_last(value: Any, rank: int) -> Any:
    """Return an array that broadcasts against images of this rank, with its channels last.

    Axes are added in front until it has that rank. Scalars and None need no order.
    """
    if isinstance(value, ChannelsLast) or value is None or not np.ndim(value):
        return value
    value = first(value)
    value = value.reshape((1,) * (rank - value.ndim) + value.shape)
    is_known = isinstance(value, np.ndarray)
    return ChannelsLast(np.moveaxis(value, 1, -1) if is_known else jnp.moveaxis(value, 1, -1))


def choose(op: Op, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of an operator in the order of axes that is best for its evaluation.

    Images go channels last into operators on channels (convolutions, pools), elementwise operators
    keep the order of the images that they get, and all others get ONNX's order.
    """
    if op.per_axis and _reordered(op, arguments) is not None:
        return [*arguments]
    if op.channels and _is_image(arguments[0]):
        x, *others = arguments
        others = [a if i in op.kernels else first(a) for i, a in enumerate(others, 1)]
        return [_to_channels_last(x, x.ndim), *others]
    if op.pointwise:
        ranks = {a.ndim for a in arguments if isinstance(a, ChannelsLast)}
        if len(ranks) == 1 and all(np.ndim(a) <= max(ranks) for a in arguments if a is not None):
            return [_to_channels_last(a, max(ranks)) for a in arguments]
    return [a if _takes(op, i, a) else first(a) for i, a in enumerate(arguments)]


def _takes(op: Op, position: int, value: Any) -> bool:
    """Check whether an operator computes with a low-rank, packed or merged value in that form."""
    if isinstance(value, ChangedWeight | LowRank | Packed):
        return position in op.factors
    return isinstance(value, MergedRows) and position in op.rows


def _is_image(value: Any) -> bool:
    """Check whether a value is stored channels last, or is to be.

    The latter are arrays of JAX of rank 3 and more, floating-point or of 8-bit integers.
    """
    if isinstance(value, ChannelsLast):
        return True
    return (
        isinstance(value, jax.Array)
        and value.ndim > 2
        and (jnp.issubdtype(value.dtype, jnp.floating) or value.dtype in (jnp.int8, jnp.uint8))
    )


def call(op: Op, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Call an operator on the arguments that `choose` returned; its results have the same order."""
    if op.per_axis and (reordered := _reordered(op, arguments)) is not None:
        return _call_in_order(op, reordered, arguments, keywords)
    images = [a for a in arguments if isinstance(a, ChannelsLast)]
    if not images:
        return op.function(*arguments, **keywords)
    rank, given = images[0].ndim, keywords
    if "axis" in keywords and op.pointwise:
        keywords = keywords | {"axis": _axis(keywords["axis"], rank)}
    values = [a.value if isinstance(a, ChannelsLast) else a for a in arguments]
    try:
        results = op.function(*values, **keywords)
    except (TypeError, ValueError):
        if op.pointwise:  # in ONNX's order the message has the shapes that the file has
            op.function(*map(first, arguments), **given)
        raise
    if op.channels:
        y, *others = results if isinstance(results, tuple) else (results,)
        return (ChannelsLast(y), *others)
    wrap: Callable = lambda y: ChannelsLast(y) if y.ndim == rank else y  # noqa: E731
    return tuple(map(wrap, results)) if isinstance(results, tuple) else wrap(results)


def _call_in_order(
    op: Op, reordered: Any, arguments: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    """Call an operator on the stored array of its first argument, with its axis translated.

    Args:
      reordered: the first argument (without `Rounded`), whose class wraps the result again.
    """
    (x, *others), given = arguments, keywords
    axis = keywords.get("axis", op.defaults.get("axis"))
    if axis is not None and -reordered.ndim <= axis < reordered.ndim:
        keywords = keywords | {"axis": reordered.place(axis)}
    x = Rounded(x.value.value, x.real.value) if isinstance(x, Rounded) else x.value
    try:
        y = op.function(x, *others, **keywords)
    except (TypeError, ValueError):
        op.function(*map(first, arguments), **given)  # the message has the shapes of the file
        raise
    if isinstance(y, Rounded):
        return Rounded(type(reordered)(y.value), type(reordered)(y.real))
    return type(reordered)(y)


def _axis(axis: int, rank: int) -> int:
    """Return where an axis of ONNX's order is in (N, *D, C)."""
    axis += rank if axis < 0 else 0
    return axis if axis == 0 else (rank - 1 if axis == 1 else axis - 1)
