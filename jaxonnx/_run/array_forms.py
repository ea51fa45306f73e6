"""Arrays in the form that an operator takes: the file's, or another (`lowering.StoredArray`).

ONNX has images as (N, C, *D), and convolutions, on CPU above all, are quickest on (N, *D, C). From
the first operator that has channels (`registry.Channels`) to the first that needs ONNX's order, the
values of a graph are kept with their channels last: the order is changed once for a chain of
operators instead of twice in each. Other forms (weights with adapters, in few bits, kernel first)
reach the operators that declare them (`accepts`), and become plain arrays before all others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxonnx.errors import UnsupportedError
from jaxonnx.lowering import (
    ChannelsLast,
    KernelFirst,
    RoundedArray,
    StoredArray,
    platform_of,
    to_array,
)
from jaxonnx.registry import Op


def choose(op: Op, arguments: Sequence[Any]) -> list[Any]:
    """Convert the arguments of an operator to the forms that are best for its evaluation.

    Images go channels last into operators on channels (convolutions, pools), elementwise operators
    keep the order of the images that they get, and all others get ONNX's order.
    """
    arguments = [
        a.value if isinstance(a, RoundedArray) and not op.takes(i, RoundedArray) else a
        for i, a in enumerate(arguments)
    ]
    if _find_reordered(op, arguments) is not None:
        return arguments
    if op.channels and _is_image(arguments[0]):
        x, *others = arguments
        return [_to_channels_last(x, x.ndim), *(_fit(op, i, a) for i, a in enumerate(others, 1))]
    if op.pointwise:
        ranks = {a.ndim for a in arguments if isinstance(a, ChannelsLast)}
        if len(ranks) == 1 and all(np.ndim(a) <= max(ranks) for a in arguments if a is not None):
            return [_to_channels_last(a, max(ranks)) for a in arguments]
    return [_fit(op, i, a) for i, a in enumerate(arguments)]


def call(op: Op, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Call an operator on the arguments that `choose` returned; its results have the same order."""
    if op.view and not op.same_axes and isinstance(arguments[0], RoundedArray):
        return arguments[0].map(lambda part: op.function(part, *arguments[1:], **keywords))
    images = (a for a in arguments if isinstance(a, ChannelsLast))
    reordered = _find_reordered(op, arguments) if op.per_axis else next(images, None)
    if reordered is None:
        return op.function(*arguments, **keywords)
    form, rank, in_order = type(reordered), reordered.ndim, keywords
    axis = None if op.channels else keywords.get("axis", op.defaults.get("axis"))
    if axis is not None and -rank <= axis < rank:  # the operator refuses another axis
        in_order = keywords | {"axis": reordered.places[axis]}
    unwrap = partial(_map_parts, lambda part: part.value if isinstance(part, form) else part)
    try:
        results = op.function(*map(unwrap, arguments), **in_order)
    except (TypeError, ValueError):
        if not op.channels:  # in ONNX's order the message has the shapes that the file has
            op.function(*(_map_parts(to_array, a) for a in arguments), **keywords)
        raise

    def mark(i: int, y: Any) -> Any:
        is_reordered = i == 0 if op.channels else y.ndim == rank
        return _map_parts(form, y) if is_reordered else y

    return tuple(map(mark, count(), results if isinstance(results, tuple) else (results,)))


def _find_reordered(op: Op, arguments: Sequence[Any]) -> Any:
    """Return the first argument if an operator can work on the order of axes that it is stored in.

    None if it is stored in ONNX's order, or the operator needs that: it is not per axis, or one of
    its other arguments has more than one axis.
    """
    if not op.per_axis:
        return None
    x, *others = arguments
    x = x.value if isinstance(x, RoundedArray) else x
    vectors = all(np.ndim(a) < 2 for a in others if a is not None)
    return x if isinstance(x, ChannelsLast | KernelFirst) and vectors else None


def _fit(op: Op, position: int, value: Any) -> Any:
    """Convert an argument to ONNX's order, and to a plain array unless the operator takes more.

    An operator that takes a form takes its subclasses.
    """
    if isinstance(value, StoredArray) and op.takes(position, *type(value).mro()):
        return value.map(to_array) if isinstance(value, RoundedArray) else value
    return to_array(value)


def _map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to both arrays of a `RoundedArray`."""
    return value.map(function) if isinstance(value, RoundedArray) else function(value)


def _to_channels_last(value: Any, rank: int) -> Any:
    """Store an array that broadcasts against images of this rank with its channels last.

    Axes are added in front until it has that rank. Scalars and None need no order.
    """
    if isinstance(value, ChannelsLast) or value is None or not np.ndim(value):
        return value
    value = to_array(value)
    value = value.reshape((1,) * (rank - value.ndim) + value.shape)
    is_known = isinstance(value, np.ndarray)
    return ChannelsLast(np.moveaxis(value, 1, -1) if is_known else jnp.moveaxis(value, 1, -1))


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


# Integers of two bits, whose programs XLA compiles for CPU alone: elsewhere it may abort.

TYPES = {np.dtype(ml_dtypes.int2): "INT2", np.dtype(ml_dtypes.uint2): "UINT2"}


def on_cpu(x: Any, node: str, tensor: str) -> Any:
    """Return a value unchanged; refuse arrays of two-bit integers on devices other than the CPU.

    A traced array gets an identity primitive whose lowering for another platform raises.

    Args:
      x: any value.
      node, tensor: the label of the node and the name of the value, for the error.

    Raises:
      UnsupportedError: at once if the array is on another device, else at lowering.
    """
    if getattr(x, "dtype", None) not in TYPES or isinstance(x, np.ndarray | np.generic):
        return x

    def bind(leaf: Any) -> Any:
        is_few = leaf.dtype in TYPES  # not the integers of a LowRank
        return _on_cpu_p.bind(leaf, node=node, tensor=tensor) if is_few else leaf

    return jax.tree.map(bind, x)


def _refuse(dtype: Any, node: str, tensor: str, platform: str) -> NoReturn:
    name = TYPES[np.dtype(dtype)]
    raise UnsupportedError(
        f"{node}: tensor '{tensor}' is {name}, and XLA aborts on integers of two bits when it "
        f"compiles for {platform.upper()}: run the model on the CPU (with "
        'jax.default_device(jax.devices("cpu")[0])), or cast the '
        f"tensor to {name.replace('2', '8')} in the file"
    )


_on_cpu_p = Primitive("on_cpu")
_on_cpu_p.plain = lambda x, **_: x  # type: ignore[attr-defined]  # for readers of a jaxpr
_on_cpu_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_on_cpu_p, lambda context, x, **_: [x])


@_on_cpu_p.def_impl
def _(x, *, node, tensor):
    if (platform := platform_of(x)) != "cpu":
        _refuse(x.dtype, node, tensor, platform)
    return x


def _batch(arguments, axes, **params):
    return _on_cpu_p.bind(*arguments, **params), axes[0]


def _lower(platform: str, context, _, *, node, tensor):
    _refuse(context.avals_in[0].dtype, node, tensor, platform)


batching.primitive_batchers[_on_cpu_p] = _batch
for _platform in ("tpu", "cuda", "rocm"):
    mlir.register_lowering(_on_cpu_p, partial(_lower, _platform), platform=_platform)
