"""Weights with a low-rank change, which rows are multiplied by without a gradient of the whole.

One device merges the change into the weight: that is quickest, and the gradient of the whole weight
exists for a moment. Devices that share the rows would send each other this gradient, to sum it,
before the factors of the change take theirs. Here the sums over rows are those of the factors.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero


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

    def merge(self) -> Any:
        return self.w + self.a @ self.b

    def __rmatmul__(self, x: Any) -> Any:
        return _product(x, self.w, self.a, self.b)


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
