"""Products with 2:4 weights on the sparse tensor cores of NVIDIA's GPUs, by cuSPARSELt.

`cusparselt.cc` calls the library for XLA. It is compiled when it is asked for, with the headers of
NVIDIA's wheels and no compiler of CUDA.
"""

import ctypes
import importlib.util
import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxonnx._native import CompilerError, compile_library
from jaxonnx.errors import SparsityError

TARGET = "jaxonnx_sparse_product"
TILE = 16
"""The sizes of a product must be multiples of this."""

_HALF = ("bfloat16", "float16")
_HEADERS = ("cusparseLt.h", "library_types.h", "crt/host_config.h")


@cache
def register() -> None:
    """Compile the call of cuSPARSELt and register it with JAX, once in a process.

    Raises:
      SparsityError: the wheels of the extra `sparse-cuda` or a C++ compiler are not there.
    """
    include, library = _find_wheels()
    options = [f"-I{folder}" for folder in include]
    options += ["-O1", str(library), f"-Wl,-rpath,{library.parent}"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "products.so")
        try:
            compile_library(Path(__file__).with_name("cusparselt.cc"), options, target)
        except CompilerError as missing:
            raise SparsityError(f"sparse products: {missing}") from None
        symbol = ctypes.CDLL(str(target)).JaxonnxSparseProduct
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(symbol), platform="CUDA")


def _find_wheels() -> tuple[list[Path], Path]:
    """Return the folders of headers in NVIDIA's wheels, and cuSPARSELt itself."""
    spec = importlib.util.find_spec("nvidia")
    roots = [*map(Path, spec.submodule_search_locations or ())] if spec else []
    matches = [[*root.glob(f"*/include/{name}")] for name in _HEADERS for root in roots]
    library = [file for root in roots for file in root.glob("*/lib/libcusparseLt.so*")]
    headers = [files[0] for files in matches if files]
    if len(headers) < len(_HEADERS) or not library:
        raise SparsityError(
            "products by cuSPARSELt need NVIDIA's wheels: pip install 'jaxonnx[sparse-cuda]'"
        )
    depths = (name.count("/") for name in _HEADERS)
    folders = [file.parents[depth] for file, depth in zip(headers, depths, strict=True)]
    return [*dict.fromkeys(folders)], library[0]


def fits(rows: int, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Check whether cuSPARSELt has a product of `rows` rows with a weight of a shape and dtype."""
    sizes = (rows, *shape)
    return dtype.name in _HALF and all(size and size % TILE == 0 for size in sizes)


def product(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Return x (b, k) times a weight that is 2:4 along `axis`, rounded to the factors' type."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1 - axis]), w.dtype)
    return jax.ffi.ffi_call(TARGET, out)(x, w if axis == 1 else w.T)
