"""Weights with a low-rank change, which rows are multiplied by without a gradient of the whole.

The gradients of the factors need two small products with the rows each, where that of the whole
weight needs one large product; devices that share the rows sum only the small results. The forward
pass merges the change into the weight where there are many rows, which is cheaper than products
with each of them.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxonnx.lowering._packed import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The matrix w + a b, its columns (or rows, with `by_row`) scaled to given norms, if any."""

    w: Any
    a: Any
    b: Any
    magnitude: Any = None
    """The norms."""
    by_row: bool = field(default=False, metadata={"static": True})

    __array_ufunc__ = None  # NumPy leaves its products to this class, too

    @property
    def ndim(self) -> int:
        return self.w.ndim

    @property
    def dtype(self) -> Any:
        return self.w.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    @property
    def T(self) -> "LowRank":
        return LowRank(self.w.T, self.b.T, self.a.T, self.magnitude, not self.by_row)

    def change(self, x: Any) -> Any:
        """Return x @ a @ b, the term that the adapter adds to x @ w."""
        return ((x @ self.a) @ self.b).astype(x.dtype)

    def merge(self) -> Any:
        w = self.w.merge() if isinstance(self.w, Packed) else self.w
        total = w + (self.a @ self.b).astype(w.dtype)
        if self.magnitude is None:
            return total
        axis = int(self.by_row)
        return (total * jnp.expand_dims(self._factors(), axis)).astype(w.dtype)

    def _factors(self) -> Any:
        """Return the scales of the columns (rows)."""
        w, a, b = jax.lax.stop_gradient((self.w, self.a, self.b))
        axis = int(self.by_row)
        if isinstance(w, Packed):
            return _ratio(self.magnitude, w.squares(a, b, axis))
        return _ratio(self.magnitude, jnp.square(w.astype(a.dtype) + a @ b).sum(axis))

    def __rmatmul__(self, x: Any) -> Any:
        if self.magnitude is not None:
            plain, scale = replace(self, magnitude=None), self._factors()
            y = (x * scale).astype(x.dtype) @ plain if self.by_row else (x @ plain) * scale
            return y.astype(x.dtype)
        inner, outer = self.shape
        if isinstance(self.w, Packed) or math.prod(x.shape[:-1]) * (inner + outer) < inner * outer:
            return x @ self.w + self.change(x)
        return _product(x, self.w, self.a, self.b)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChangedWeight:
    """A stored tensor of any rank, and the change b a of what it is dequantized to."""

    w: Any
    a: Any
    """(..., rank, inputs)"""
    b: Any
    """(..., outputs, rank)"""
    place: Any = field(metadata={"static": True})
    """The meaning of the axes (`Matrix`)."""
    magnitude: Any = None
    """The norms that the outputs are scaled to, if any, in the order of the tensor's axes."""

    __array_ufunc__ = None

    @property
    def ndim(self) -> int:
        return self.w.ndim

    @property
    def dtype(self) -> Any:
        return self.w.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    def merge_into(self, matrix: Any) -> Any:
        """Add the adapter to the dequantized tensor, if its axes are those of the matrix."""
        return merge_change(matrix, self.a, self.b, self.magnitude, self.place)


def merge_change(w: Any, a: Any, b: Any, magnitude: Any, place: Any) -> Any:
    """Return w + b a of any rank, with its outputs scaled to norms, if any."""
    total = w + unfold_change(a, b, place, w.shape)
    if magnitude is not None:
        total = total * norm_factors(total, magnitude, place.summed)
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
    return x @ LowRank(w, a, b).merge()


@partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(primals, tangents):
    x, w, a, b = primals
    terms = {
        0: lambda dx: dx @ LowRank(w, a, b).merge(),
        1: lambda dw: x @ dw,
        2: lambda da: (x @ da) @ b,
        3: lambda db: (x @ a) @ db,
    }
    changes = [terms[i](t) for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    return _product(*primals), sum(changes[1:], changes[0])
