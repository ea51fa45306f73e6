"""Products of a few rows with a matrix in 4 bits on CPU, by a kernel in C++, `few_bits.cc`.

XLA converts such a matrix to floats before the product, which takes far longer than the product of
one row: a token that is generated. The kernel is compiled at the first use; without a compiler the
plain form of `Packed` runs.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._native import CompilerError, load_library

FEW = 8
"""The most rows of x. The kernel converts the matrix for each, XLA for all of them once."""
LEAST = 1 << 18
"""The fewest weights of a matrix. What runs a small network once need not wait for a compiler."""
_SOURCE = Path(__file__).with_name("few_bits.cc")
_TARGET = "jaxonnx_few_bits_cpu"
_CODES = 32
"""The fewest codes of a block: a vector of low ones, and one of high ones."""


@cache
def _is_ready() -> bool:
    """Compile the kernel and register it with JAX; return whether that is possible."""
    try:
        library = load_library(_SOURCE, [_SOURCE.with_suffix(".inc")])
    except CompilerError:
        return False
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.JaxonnxFewBits), platform="cpu")
    return True


def is_faster(x: Any, unpack: Any, size: tuple[int, int]) -> bool:
    """Check whether the kernel multiplies x by the transpose of a matrix of this size faster.

    It compiles the kernel if so.
    """
    block = getattr(unpack, "block", 0)
    few = x.dtype == np.float32 and 0 < math.prod(x.shape[:-1]) <= FEW
    return few and block > 0 and block % _CODES == 0 and math.prod(size) >= LEAST and _is_ready()


def multiply(x: Any, unpack: Any, codes: Any, scale: Any, *zeros: Any, variant=-1, threads=0):
    """Multiply x [..., columns] by the transpose of a matrix.

    Args:
      x: float32.
      unpack: has the `block` of a scale, the `middle` code, and `read_zeros`.
      codes, scale, zeros: the groups of a `Packed`.
      variant, threads: as for the kernel of recurrences.
    """
    rows, blocks = scale.shape
    flat = x.reshape(-1, x.shape[-1])
    flat = jnp.pad(flat, ((0, 0), (0, blocks * unpack.block - x.shape[-1])))
    halves = flat.reshape(len(flat), -1, 2).swapaxes(1, 2)
    zero = unpack.read_zeros(scale, *zeros) if zeros else jnp.zeros((0, 0), np.float32)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((len(flat), rows), np.float32))
    numbers = {"variant": np.int64(variant), "threads": np.int64(threads)}
    operands = halves, codes.reshape(rows, -1), scale.astype(np.float32), zero
    return call(*operands, middle=np.float32(unpack.middle), **numbers).reshape(*x.shape[:-1], rows)
