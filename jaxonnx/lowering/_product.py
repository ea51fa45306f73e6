"""Products of half-precision matrices into float32: what follows is rounded once, with them.

The gradients round the cotangent, which comes from rounded numbers, and multiply in half precision
as those of a plain product do: no accelerator leaves its units for half precision.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.lowering._contract import Rule, contract, on_platforms


@dataclass(frozen=True)
class Product:
    """T(a, b, y) = sum((a @ b) * y), in half precision except for one argument in float32."""

    wide: int
    """The number of the argument in float32."""
    batch: tuple[int, ...] = field(default=(), init=False)

    def plain(self, out, u, v):
        half = min(u.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
        return self._in(half, out, u, v).astype(self._dtype(out, u, v))

    def exact(self, out, u, v):
        """Contract in float32, without rounding any argument to half precision first.

        On CPU that costs nothing: it has no units for half precision.
        """
        return self._in(np.dtype(np.float32), out, u, v).astype(self._dtype(out, u, v))

    def _dtype(self, out, u, v):
        """Return the dtype of a contraction."""
        least = min(u.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
        return np.dtype(np.float32) if out == self.wide else least

    def _in(self, dtype, out, u, v):
        """Contract with both factors in `dtype`."""
        u, v = u.astype(dtype), v.astype(dtype)
        factors: Any = ((v, u.mT), (u.mT, v), (u, v))[out]
        return jnp.matmul(*factors, preferred_element_type=self._dtype(out, u, v))


on_platforms(Product, {"cpu": Rule(Product.exact, mapped=Product.exact)})


def is_half(x) -> bool:
    """Check whether an array has a floating point type of 16 bits."""
    return x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating)


def product_rounded(a, b):
    """Multiply a float32 matrix by one in half precision, into half precision."""
    return contract(Product(0), 2, a, b)


def product(a, b):
    """Multiply matrices (with the same leading axes); half precision gives float32."""
    if not (is_half(a) and is_half(b)) or not isinstance(b, np.ndarray | jax.Array):
        return a @ b
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.astype(np.float32) @ b.astype(np.float32)
    return contract(Product(2), 2, a, b)


def merges() -> bool:
    """Check whether leading axes may be merged for one product: not under a mesh.

    There the batch may be sharded, and merging it with an axis before it would gather it.
    """
    return jax.sharding.get_abstract_mesh().empty


def rows(x, w):
    """Multiply rows x (..., K) by a matrix w (K, M); half precision gives float32."""
    if not (merges() or is_half(x)):
        return x @ w
    y = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], w.shape[1])
