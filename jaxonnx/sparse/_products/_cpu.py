"""Products with 2:4 weights on processors: a kernel that leaves out the weights that are zero.

`cpu.cc` is the kernel, which XLA calls through its interface for foreign functions and which uses
XLA's threads. It is compiled at the first use, once for a user.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._native import CompilerError, load_library
from jaxonnx.errors import SparsityError

TARGET = "jaxonnx_sparse_product_cpu"
PACKED_TARGET = "jaxonnx_packed_product_cpu"
VARIANTS = ("avx512", "avx2", "common")
"""The kernel for each instruction set; the last one is for every processor."""

LEAST_ROWS = ((2048, 32), (1024, 48), (512, 96), (256, 256))
"""Pairs (size, rows): from this size of both sides of a weight on, and from so many rows on, sparse
products are faster than dense ones, as `python -m benchmarks.sparse.products --fit` measures."""

FEW_ROWS, FEW_SIZE = 8, 2048
"""Up to so many rows, on weights whose sides are at least so long, products with weights that were
packed before are faster: they read half of the memory."""
_TILE = 16

_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of weights and x; the narrower ones are widened to float32, which is exact."""

_FOLDER = Path(__file__).parent
_is_registered = False


@cache
def register() -> None:
    """Compile the kernel and register it with JAX, once in a process.

    Raises:
      SparsityError: there is no C++ compiler, or it fails, or what it made cannot be loaded.
    """
    global _is_registered
    library = _library()
    for name, symbol in (
        (TARGET, library.JaxonnxSparseProduct),
        (PACKED_TARGET, library.JaxonnxPackedProduct),
    ):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="cpu")
    _is_registered = True


def is_registered() -> bool:
    """Check whether `register` has run, so that programs can call the kernel."""
    return _is_registered


@cache
def _library() -> ctypes.CDLL:
    try:
        return load_library(_FOLDER / "cpu.cc", [_FOLDER / "kernel.inc"])
    except CompilerError as missing:
        raise SparsityError(f"sparse products: {missing}") from None


def variants() -> list[str]:
    """Return the variants of the kernel that this processor can run; the first one is used."""
    bits = _library().JaxonnxSparseVariants()
    return [name for i, name in enumerate(VARIANTS) if bits >> i & 1]


def has(dtype: Any) -> bool:
    """Check whether the kernel has products of a type."""
    return jnp.dtype(dtype).name in _DTYPES


def fits(rows: int, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Check whether the kernel has a product of `rows` rows with a weight, and is faster."""
    if not has(dtype) or any(not size or size % 4 for size in shape):
        return False
    return any(rows >= least and min(shape) >= size for size, least in LEAST_ROWS)


def fits_packed(rows: int, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Check whether the kernel for few rows, with a weight packed beforehand, is faster."""
    even = not any(size % 4 for size in shape)
    return dtype == jnp.float32 and even and rows <= FEW_ROWS and min(shape) >= FEW_SIZE


def product(
    x: jax.Array, w: jax.Array, axis: int, variant: str | None = None, threads: int = 0
) -> jax.Array:
    """Return x (b, k) times a weight that is 2:4 along `axis`, which is contracted.

    Args:
      x: float32, bfloat16 or float16.
      w: of the same type, (k, n) with `axis` 0, or (n, k) with `axis` 1.
      variant: one of `variants()`, by default the first.
      threads: of XLA's pool, by default all.

    Returns:
      float32 (b, n).
    """
    x, w = (a.astype(jnp.float32) for a in (x, w))
    rows, k = x.shape
    # scratch memory: the kernel copies x into panels padded to a multiple of 16 rows, of at least
    # 32 where there are several
    room = (rows + 16 * -(-rows // 32)) * k
    out = jax.ShapeDtypeStruct((rows, w.shape[1 - axis]), jnp.float32)
    panels = jax.ShapeDtypeStruct((room,), jnp.float32)
    number = -1 if variant is None else VARIANTS.index(variant)
    call = jax.ffi.ffi_call(TARGET, (out, panels))
    return call(x, w, axis=np.int64(axis), variant=np.int64(number), threads=np.int64(threads))[0]


def pack(w: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Pack a weight that is 2:4 along `axis` for `packed_product`.

    Returns:
      The weights that are kept, float32[tiles of 16 outputs, groups, 2, 16], and their places in
      the groups, two bits each, uint32[tiles, ceil(groups / 8), 16].

    Raises:
      SparsityError: a group has more than two nonzeros.
    """
    w = jnp.asarray(w)
    values, places, most = _pack(w if axis == 0 else w.T)
    if most > 2:
        raise SparsityError(f"the weight is not 2:4 along axis {axis}: a group has {most} nonzeros")
    return values, places


@jax.jit
def _pack(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pack a weight (inputs, outputs): see `pack`. The last result is the most that a group keeps.

    A word of places has those of 8 groups: the first weight's in 2 bits, then the second's. A group
    with one nonzero has it twice, the second time with the value 0.
    """
    inputs, outputs = w.shape
    w = jnp.pad(w, ((0, 0), (0, -outputs % _TILE))).reshape(inputs // 4, 4, -1)
    nonzero = w != 0
    first, last = jnp.argmax(nonzero, 1), 3 - jnp.argmax(nonzero[:, ::-1], 1)
    count = nonzero.sum(1)
    ends = jnp.stack([first, jnp.where(count > 1, last, first)], 1)
    values = jnp.take_along_axis(w, ends, 1)
    values = values.at[:, 1].multiply(count > 1).reshape(inputs // 4, 2, -1, _TILE)
    pairs = (ends[:, 0] | ends[:, 1] << 2).astype(jnp.uint32)
    pairs = jnp.pad(pairs, ((0, -len(pairs) % 8), (0, 0))).reshape(-1, 8, pairs.shape[1])
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)[:, None]
    words = (pairs << shifts).sum(1, dtype=jnp.uint32).reshape(pairs.shape[0], -1, _TILE)
    return values.transpose(2, 0, 1, 3), words.swapaxes(0, 1), count.max()


def packed_product(
    x: jax.Array,
    values: jax.Array,
    places: jax.Array,
    outputs: int,
    variant: str | None = None,
    threads: int = 0,
) -> jax.Array:
    """Return x (b, k) times a weight in the form of `pack`, as float32 (b, outputs)."""
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    number = np.int64(-1 if variant is None else VARIANTS.index(variant))
    call = jax.ffi.ffi_call(PACKED_TARGET, out)
    return call(x, values, places, variant=number, threads=np.int64(threads))
