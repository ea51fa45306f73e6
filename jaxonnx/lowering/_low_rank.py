"""Weights with a low-rank change, which rows are multiplied by without a gradient of the whole.

The gradients of the factors need two small products with the rows each, where that of the whole
weight needs one large product; devices that share the rows sum only the small results. The forward
pass merges the change into the weight where there are many rows, which is cheaper than products
with each of them.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxonnx.lowering._packed import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The matrix w + a b."""

    w: Any
    a: Any
    b: Any

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
        return LowRank(self.w.T, self.b.T, self.a.T)

    def change(self, x: Any) -> Any:
        """Return what the change adds to the product with x."""
        return ((x @ self.a) @ self.b).astype(x.dtype)

    def merge(self) -> Any:
        w = self.w.merge() if isinstance(self.w, Packed) else self.w
        return w + (self.a @ self.b).astype(w.dtype)

    def __rmatmul__(self, x: Any) -> Any:
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

    def change(self) -> Any:
        """Return the change in the axes of the tensor, if these are the matrix's own."""
        return unfold_change(self.a, self.b, self.place, self.shape)


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
