"""Products with 2:4 weights on processors: a kernel that leaves out the weights that are zero.

`cpu.cc` is the kernel, which XLA calls through its interface for foreign functions and which uses
XLA's threads. It is compiled at the first use, once for a user.
"""

import ctypes
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.sparse._products._compile import cached_library

TARGET = "jaxonnx_sparse_product_cpu"
VARIANTS = ("avx512", "avx2", "common")
"""The kernels for kinds of vectors; the last is that of every processor."""

LEAST_ROWS = ((1024, 32), (512, 96), (256, 256))
"""Pairs (size, rows): from this size of both sides of a weight on, and from so many rows on, sparse
products are faster than dense ones, as `python -m benchmarks.sparse.products --fit` measures."""

_OPTIONS = ("-O3", "-ffp-contract=fast", "-w", "-pthread")
_is_registered = False


@cache
def register() -> None:
    """Compile the kernel and register it with JAX, once in a process.

    Raises:
      SparsityError: there is no C++ compiler, or it fails.
    """
    global _is_registered
    symbol = _library().JaxonnxSparseProduct
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(symbol), platform="cpu")
    _is_registered = True


def is_registered() -> bool:
    """Return whether programs can call the kernel."""
    return _is_registered


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(cached_library("cpu.cc", _OPTIONS, ["kernel.inc"])))


def variants() -> list[str]:
    """Return the variants of the kernel that this processor has, the one that is used first."""
    bits = _library().JaxonnxSparseVariants()
    return [name for i, name in enumerate(VARIANTS) if bits >> i & 1]


def fits(rows: int, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Return whether the kernel has a product of so many rows with a weight, and is faster."""
    if dtype != jnp.float32 or any(not size or size % 4 for size in shape):
        return False
    return any(rows >= least and min(shape) >= size for size, least in LEAST_ROWS)


def product(
    x: jax.Array, w: jax.Array, axis: int, variant: str | None = None, threads: int = 0
) -> jax.Array:
    """Return x (b, k) times a weight that is 2:4 along `axis`, which is contracted.

    Args:
      x: float32.
      w: float32 (k, n) with `axis` 0, or (n, k) with `axis` 1.
      variant: one of `variants()`, by default the first.
      threads: of XLA's pool, by default all.
    """
    rows, k = x.shape
    # panels are padded to a multiple of 16 rows, and have at least 32 where there are several
    room = (rows + 16 * -(-rows // 32)) * k
    out = jax.ShapeDtypeStruct((rows, w.shape[1 - axis]), jnp.float32)
    panels = jax.ShapeDtypeStruct((room,), jnp.float32)
    number = -1 if variant is None else VARIANTS.index(variant)
    call = jax.ffi.ffi_call(TARGET, (out, panels))
    return call(x, w, axis=np.int64(axis), variant=np.int64(number), threads=np.int64(threads))[0]
