"""Gather and scatter: rows along one axis by their own operators, all else by places in the flat
array."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._nodes import SCATTERED, Nodes, Tensor
from jaxonnx.onnx_out._rule_table import Refusal, primitive
from jaxonnx.onnx_out._tensors import all_known

REDUCTIONS = {
    "scatter": "none",
    "scatter-add": "add",
    "scatter-sub": "sub",
    "scatter_add": "add",
    "scatter-mul": "mul",
    "scatter_mul": "mul",
    "scatter_min": "min",
    "scatter-min": "min",
    "scatter_max": "max",
    "scatter-max": "max",
}


FURTHEST = 2**31 - 1
"""The greatest int32: flat indices are computed in this dtype."""


@dataclass(frozen=True)
class Windows:
    """The slices that a gather reads from an array, or that a scatter writes to it.

    The names in parentheses are those of `lax.GatherDimensionNumbers`. "All slices" is the result
    of the gather, or the updates of the scatter.

    Attributes:
      shape: the shape of the array.
      sizes: the shape of a slice.
      starts: the axes of the array that the last axis of the indices gives starts for
        (start_index_map).
      batch: pairs of an axis of the array and one of the indices that run in parallel
        (operand_batching_dims, start_indices_batching_dims).
      window: the axes of all slices that run within a slice (offset_dims).
      dropped: the axes of a slice, of size one, that all slices lack (collapsed_slice_dims).
      all: the shape of all slices.
    """

    shape: Sequence
    sizes: Sequence
    starts: Sequence[int]
    batch: Sequence[tuple[int, int]]
    window: Sequence[int]
    dropped: Sequence[int]
    all: Sequence

    @property
    def outer(self) -> list[int]:
        """The axes of all slices that run over slices, not within one."""
        return [i for i in range(len(self.all)) if i not in self.window]

    @property
    def inner(self) -> list[int]:
        """The axes of the array that run within a slice, in the order of `window`."""
        batch = [axis for axis, _ in self.batch]
        return [i for i in range(len(self.shape)) if i not in self.dropped and i not in batch]

    def rows(self) -> int | None:
        """Return the axis along which each slice is one whole row; None if slices are not rows."""
        if len(self.starts) != 1 or self.batch or tuple(self.dropped) != tuple(self.starts):
            return None
        (axis,) = self.starts
        whole = all(self._same(i) for i in range(len(self.shape)) if i != axis)
        return axis if whole and self.sizes[axis] == 1 else None

    def _same(self, axis: int) -> bool:
        a, b = self.sizes[axis], self.shape[axis]
        return type(a) is type(b) and a == b

    def flat(self, indices: Any) -> Any:
        """Return the index into the flattened array of each element, int32 of shape `all`.

        Args:
          indices: the starts, in bounds.

        Raises:
          Refusal: the array is too large for int32.
        """
        if all_known(self.shape) and prod(self.shape) > FURTHEST:
            raise Refusal(f"indices into an array of {prod(self.shape):,} elements exceed 2**31")
        strides = [prod(self.shape[i + 1 :], start=1) for i in range(len(self.shape))]
        # the first element of each slice, then the offsets within it
        starts = jnp.zeros(indices.shape[:-1], jnp.int32)
        for k, axis in enumerate(self.starts):
            starts = starts + indices[..., k].astype(jnp.int32) * strides[axis]
        for axis, place in self.batch:
            line = lax.broadcasted_iota(jnp.int32, starts.shape, place)
            starts = starts + line * strides[axis]
        outer = self.outer
        shape = [n if i in outer else 1 for i, n in enumerate(self.all)]
        places = jnp.broadcast_to(starts.reshape(shape), self.all)
        for axis, place in zip(self.inner, self.window, strict=True):
            places = places + lax.broadcasted_iota(jnp.int32, self.all, place) * strides[axis]
        return places

    def bounds(self) -> list:
        """Return the greatest start in bounds along each axis of `starts`."""
        return [self.shape[axis] - self.sizes[axis] for axis in self.starts]

    def clip_starts(self, indices: Any) -> Any:
        """Clip starts so that slices lie within the array."""
        last = jnp.stack([jnp.asarray(n, jnp.int32) for n in self.bounds()])
        return jnp.clip(indices.astype(jnp.int32), 0, last)

    def inside(self, indices: Any) -> Any:
        """Return a mask of the slices that lie within the array, broadcastable to `all`."""
        last = jnp.stack([jnp.asarray(n, jnp.int32) for n in self.bounds()])
        fits = ((indices >= 0) & (indices.astype(jnp.int32) <= last)).all(-1)
        return fits.reshape([n if i in self.outer else 1 for i, n in enumerate(self.all)])


@primitive("gather")
def gather(g, x, indices, *, out, dimension_numbers, slice_sizes, mode, fill_value):
    d = dimension_numbers
    batch = list(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    windows = Windows(
        x.shape, slice_sizes, d.start_index_map, batch, d.offset_dims, d.collapsed_slice_dims,
        out.shape,
    )  # fmt: skip
    starts = _starts(g, windows, indices)
    if (axis := windows.rows()) is not None:
        # whole rows: a Gather, which inserts the axes of the indices at `axis`
        y = g("Gather", x, g.reshape(starts, starts.shape[:-1]), axis=axis)
        order = [*windows.window[:axis], *windows.outer, *windows.window[axis:]]
        y = g.transpose(Tensor(y, [windows.all[i] for i in order], x.dtype), np.argsort(order))
    else:
        (places,) = g.run(windows.flat, starts)
        y = Tensor(g("Gather", g.reshape(x, [-1]), places, axis=0), out.shape, x.dtype)
    if "FILL" not in str(mode).upper() or _fit(windows, indices):
        return y
    fill = _fill(x.dtype) if fill_value is None else fill_value
    (inside,) = g.run(windows.inside, indices)
    return g.run(_or(fill), inside, y)[0]


for _name, _reduction in REDUCTIONS.items():

    @primitive(_name)
    def scatter(
        g, x, indices, updates, *, out, dimension_numbers, mode, update_jaxpr, reduction=_reduction
    ):
        """Write a scatter: ScatterND for rows that are added, else ScatterElements on a flat array.

        Updates that are out of bounds are dropped or, by the mode, clipped to fit.
        """
        if reduction == "none" and update_jaxpr is not None:
            raise Refusal("it applies a function in place; use x.at[i].set(f(x[i]))")
        if reduction != "none" and out.dtype == jnp.bfloat16:  # which runtimes do not add
            x, updates = g.cast(x, np.float32), g.cast(updates, np.float32)
            like = jax.ShapeDtypeStruct(out.shape, np.float32)
            y = scatter(
                *(g, x, indices, updates), out=like, dimension_numbers=dimension_numbers,
                mode=mode, update_jaxpr=update_jaxpr, reduction=reduction,
            )  # fmt: skip
            return g.cast(Tensor(y, out.shape, like.dtype), out.dtype)
        d = dimension_numbers
        batch = list(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
        inner = iter(d.update_window_dims)
        absent = {*d.inserted_window_dims, *d.operand_batching_dims}  # axes that updates lack
        sizes = [1 if i in absent else updates.shape[next(inner)] for i in range(x.ndim)]
        windows = Windows(
            x.shape, sizes, d.scatter_dims_to_operand_dims, batch, d.update_window_dims,
            d.inserted_window_dims, updates.shape,
        )  # fmt: skip
        if reduction == "sub":
            (updates,), reduction = g.run(jnp.negative, updates), "add"
        if g.opset < SCATTERED.get(reduction, 0):
            least = SCATTERED[reduction]
            raise Refusal(f"ONNX scatters by {reduction} from opset {least} on: pass opset={least}")
        starts = _starts(g, windows, indices)
        dropping = "FILL" in str(mode).upper() and not _fit(windows, indices)
        if windows.rows() == 0 and reduction == "add":
            if dropping:
                (inside,) = g.run(windows.inside, indices)
                (updates,) = g.run(
                    lambda a, b: jnp.where(a, b, jnp.zeros((), b.dtype)), inside, updates
                )
            order = [*windows.outer, *windows.window]
            starts, updates = g.cast(starts, np.int64), g.transpose(updates, order)
            return g("ScatterND", x, starts, updates, reduction=reduction)
        (places,) = g.run(windows.flat, starts)
        n = prod(x.shape, start=1)
        line = g.reshape(x, [n])
        if dropping:  # write them to a spare element at the end, and cut it off
            (inside,) = g.run(windows.inside, indices)
            (places,) = g.run(_or(n), inside, places)
            spare = Tensor(g("Concat", line, np.zeros(1, x.dtype), axis=0), (n + 1,), x.dtype)
            y = _elements(g, spare, places, updates, reduction)
            y = g.slice(Tensor(y, (n + 1,), x.dtype), [0], [n], [1])
        else:
            y = Tensor(_elements(g, line, places, updates, reduction), (n,), x.dtype)
        return g.reshape(y, x.shape)


def _elements(g, line, places, updates, reduction):
    """Append ScatterElements on a flat array."""
    places, updates = g.reshape(places, [-1]), g.reshape(updates, [-1])
    kind = {} if reduction == "none" else {"reduction": reduction}
    return g("ScatterElements", line, places, updates, axis=0, **kind)


def _starts(g: Nodes, windows: Windows, indices: Any) -> Any:
    """Return starts in bounds: XLA clips them in every mode, also where bounds are promised."""
    if _fit(windows, indices):
        return indices
    return g.run(windows.clip_starts, indices)[0]


def _fit(windows: Windows, indices: Any) -> bool:
    """Check whether starts are known to lie in bounds."""
    if not windows.starts:
        return True
    if not isinstance(indices, np.ndarray) or not all_known(windows.bounds()):
        return False
    return bool((indices >= 0).all() and (indices <= np.array(windows.bounds())).all())


def _or(value: Any) -> Any:
    """Return a function of (inside, x) that replaces x by `value` where `inside` is false."""
    return lambda inside, x: jnp.where(inside, x, jnp.asarray(value, x.dtype))


def _fill(dtype: np.dtype) -> Any:
    """Return the default value of JAX for elements that are out of bounds."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan
