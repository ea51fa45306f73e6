"""Weights with a low-rank change, which rows are multiplied by without a gradient of the whole.

The gradients of the factors need two small products with the rows each, where that of the whole
weight needs one large product; devices that share the rows sum only the small results. The forward
pass merges the change into the weight where there are many rows, which is cheaper than products
with each of them.
"""

import math
from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxonnx.lowering._packed import Packed
from jaxonnx.lowering._stored_array import StoredArray, to_array


class LowRank(StoredArray):
    """The matrix value + a b, whose columns (rows, with `by_row`) may be scaled to given norms."""

    value: Any
    a: Any
    b: Any
    magnitude: Any = None
    """The norms."""
    by_row: bool = field(default=False, metadata={"static": True})
    key: Any = None
    """In training, the random key by which inputs of a are dropped."""
    ratio: float = field(default=0.0, metadata={"static": True})
    """The share of these."""

    @property
    def T(self) -> "LowRank":
        return replace(self, value=self.value.T, a=self.b.T, b=self.a.T, by_row=not self.by_row)

    def transpose(self, axes: Any = None) -> "LowRank":
        return self if axes == [0, 1] else self.T

    def change(self, x: Any) -> Any:
        """Return x @ a @ b, the term that the adapter adds to x @ w."""
        return ((self._drop(x) @ self.a) @ self.b).astype(x.dtype)

    def _drop(self, x: Any) -> Any:
        if self.key is None:
            return x
        stays = jax.random.bernoulli(self.key, 1 - self.ratio, x.shape)
        return jnp.where(stays, x / (1 - self.ratio), 0).astype(x.dtype)

    def change_rows(self, indices: Any) -> Any:
        """Take rows of the change; those out of range are zero."""
        return jnp.take(self.a, indices, 0, mode="fill", fill_value=0) @ self.b

    def to_array(self) -> Any:
        if self.key is not None:
            raise TypeError(
                "inputs of an adapter are dropped, which this operator does not multiply"
            )
        w = to_array(self.value)
        total = w + (self.a @ self.b).astype(w.dtype)
        if self.magnitude is None:
            return total
        axis = int(self.by_row)
        return (total * jnp.expand_dims(self._factors(), axis)).astype(w.dtype)

    def map(self, function: Callable[[Any], Any]) -> "LowRank":
        """Apply a function to the matrix that is changed."""
        return replace(self, value=function(self.value))

    def _factors(self) -> Any:
        """Return the scales of the columns (rows)."""
        w, a, b = jax.lax.stop_gradient((self.value, self.a, self.b))
        axis = int(self.by_row)
        if isinstance(w, Packed):
            return _ratio(self.magnitude, w.squares(a, b, axis))
        return _ratio(self.magnitude, jnp.square(w.astype(a.dtype) + a @ b).sum(axis))

    def __rmatmul__(self, x: Any) -> Any:
        if self.magnitude is not None and self.key is not None:
            return self._scale_dropped(x)
        if self.magnitude is not None:
            plain, scale = replace(self, magnitude=None), self._factors()
            y = (x * scale).astype(x.dtype) @ plain if self.by_row else (x @ plain) * scale
            return y.astype(x.dtype)
        w, (inner, outer) = self.value, self.shape
        few = math.prod(x.shape[:-1]) * (inner + outer) < inner * outer
        if few or isinstance(w, Packed) or self.key is not None or w.dtype != self.a.dtype:
            return x @ w + self.change(x)
        return _product(x, w, self.a, self.b)

    def _scale_dropped(self, x: Any) -> Any:
        """Return the product with scaled outputs, whose change and scales see dropped inputs.

        PEFT computes it so: x w stays whole, and what DoRA adds to it drops.
        """
        plain, scale = replace(self, magnitude=None, key=None), self._factors()
        dropped = self._drop(x)
        if self.by_row:
            more = (dropped * (scale - 1)) @ self.value + plain.change(dropped * scale)
        else:
            more = (dropped @ self.value) * (scale - 1) + plain.change(dropped) * scale
        return (x @ self.value + more).astype(x.dtype)


class ChangedRows(LowRank):
    """A matrix of which some rows (columns, unless `by_row`) change: `a` has their indices, `b` the
    changes [rows, width].

    Products and lookups add the changes to their results, so that the other rows have no gradient.
    """

    @property
    def T(self) -> "ChangedRows":
        return replace(self, value=self.value.T, by_row=not self.by_row)

    def change(self, x: Any) -> Any:
        return (x[..., self.a] @ self.b if self.by_row else x @ self.b.T).astype(x.dtype)

    def change_rows(self, indices: Any) -> Any:
        return (indices[..., None] == self.a).astype(self.b.dtype) @ self.b

    def to_array(self) -> Any:
        w = to_array(self.value)
        b = self.b.astype(w.dtype)
        return w.at[self.a].add(b) if self.by_row else w.at[:, self.a].add(b.T)

    def __rmatmul__(self, x: Any) -> Any:
        y, change = x @ self.value, self.change(x)
        return y + change if self.by_row else y.at[..., self.a].add(change)


class ChangedWeight(StoredArray):
    """A quantized tensor of any rank, and the change b a of its dequantized values."""

    value: Any
    a: Any
    """(..., rank, inputs)"""
    b: Any
    """(..., outputs, rank)"""
    place: Any = field(metadata={"static": True})
    """The meaning of the axes (`Matrix`)."""
    magnitude: Any = None
    """The norms that the outputs are scaled to, if any, in the order of the tensor's axes."""

    def to_array(self) -> Any:
        raise TypeError("an adapter of a quantized tensor needs an operator that dequantizes it")

    def map(self, function: Callable[[Any], Any]) -> Any:
        """Dequantize the tensor by a function that keeps its axes, and change the result.

        In a scan over a stack of matrices, `function` dequantizes one of them to (outputs, inputs),
        and its change stays apart.
        """
        w, a, b = function(self.value), self.a, self.b
        if a.ndim < len(self.place.batch) + 2:
            return LowRank(w, b, a, self.magnitude, by_row=True)
        return merge_change(w, a, b, self.magnitude, self.place)


def map_changed(function: Callable[[Any], Any], w: Any) -> Any:
    """Apply a function to a weight without its change, if it has one, which the result gets."""
    return w.map(function) if isinstance(w, LowRank | ChangedWeight) else function(w)


def split_change(w: Any) -> tuple[Any, LowRank | None]:
    """Return a weight without its change, and with it; None if it has none."""
    return (w.value, w) if isinstance(w, LowRank) else (w, None)


def merge_change(w: Any, a: Any, b: Any, magnitude: Any, place: Any) -> Any:
    """Return w + b a of any rank, with its outputs scaled to norms, if any."""
    total = w + unfold_change(a, b, place, w.shape)
    if magnitude is not None:
        total = total * norm_factors(total, magnitude, place.summed_axes)
    return total.astype(w.dtype)


def norm_factors(total: Any, magnitude: Any, axes: tuple[int, ...]) -> Any:
    """Return the factors that scale the norms along `axes` to `magnitude` (DoRA, 2402.09353).

    The norms have no gradient (section 4.3). What has the norm 0 stays 0.
    """
    total = jax.lax.stop_gradient(total).astype(magnitude.dtype)
    return jnp.expand_dims(_ratio(magnitude, jnp.square(total).sum(axes)), axes)


def _ratio(magnitude: Any, squares: Any) -> Any:
    return magnitude / jnp.sqrt(jnp.where(squares > 0, squares, 1))


def norms(total: Any, axes: tuple[int, ...]) -> Any:
    """Return the Euclidean norms along axes."""
    return jnp.sqrt(jnp.square(total).sum(axes))


def unfold_change(a: Any, b: Any, place: Any, shape: tuple[int, ...]) -> Any:
    """Return b a, of the axes (batch..., output, input and kernel in one), in their order."""
    order = (*place.batch, place.output, place.input, *place.kernel)
    return (b @ a).reshape([shape[i] for i in order]).transpose(np.argsort(order))


@jax.custom_jvp
def _product(x, w, a, b):
    return x @ LowRank(w, a, b).to_array()


@partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(primals, tangents):
    x, w, a, b = primals
    terms = {
        0: lambda dx: dx @ LowRank(w, a, b).to_array(),
        1: lambda dw: x @ dw,
        2: lambda da: (x @ da) @ b,
        3: lambda db: (x @ a) @ db,
    }
    changes = [terms[i](t) for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    return _product(*primals), sum(changes[1:], changes[0])
