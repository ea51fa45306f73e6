"""Products with 2:4 weights on the sparse tensor cores of NVIDIA's GPUs, by cuSPARSELt.

The library is called through XLA's interface for foreign functions. What calls it, `products.cc`,
is compiled when it is asked for, with the headers of NVIDIA's wheels and no compiler of CUDA.
"""

import ctypes
import importlib.util
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, primitives

from jaxonnx._jaxpr import Program, inner_program, interpret, retrace_params
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import by_name

TARGET = "jaxonnx_sparse_product"
TILE = 16
"""What the sizes of a product are multiples of."""

_HALF = ("bfloat16", "float16")
_HEADERS = ("cusparseLt.h", "library_types.h", "crt/host_config.h")
_SOURCE = Path(__file__).with_name("products.cc")
_SAME = (primitives.transpose_p, primitives.convert_element_type_p, primitives.copy_p)
"""Primitives whose result has the pattern of their operand, along both axes."""


@cache
def register_products() -> None:
    """Compile the call of cuSPARSELt and register it with JAX, once in a process.

    Raises:
      SparsityError: the wheels of the extra `sparse-cuda` or a C++ compiler are not there.
    """
    include, library = _wheels()
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC"]
    command += [f"-I{folder}" for folder in (jax.ffi.include_dir(), *include)]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "products.so")
        command += [str(_SOURCE), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SparsityError(
                f"products by cuSPARSELt are compiled by {command[0]}, which is not there: install "
                "a C++ compiler, or name one in the environment variable CXX"
            ) from None
        except subprocess.CalledProcessError as failure:
            errors = [line for line in failure.stderr.splitlines() if "error" in line]
            told = errors[0] if errors else f"exit status {failure.returncode}"
            raise SparsityError(f"{_SOURCE.name} does not compile: {told}") from None
        symbol = ctypes.CDLL(str(made)).JaxonnxSparseProduct
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(symbol), platform="CUDA")


def _wheels() -> tuple[list[Path], Path]:
    """Return the folders of headers in NVIDIA's wheels, and cuSPARSELt itself."""
    spec = importlib.util.find_spec("nvidia")
    roots = [*map(Path, spec.submodule_search_locations or ())] if spec else []
    found = [[*root.glob(f"*/include/{name}")] for name in _HEADERS for root in roots]
    library = [file for root in roots for file in root.glob("*/lib/libcusparseLt.so*")]
    headers = [files[0] for files in found if files]
    if len(headers) < len(_HEADERS) or not library:
        raise SparsityError(
            "products by cuSPARSELt need NVIDIA's wheels: pip install 'jaxonnx[sparse-cuda]'"
        )
    depths = (name.count("/") for name in _HEADERS)
    folders = [file.parents[depth] for file, depth in zip(headers, depths, strict=True)]
    return [*dict.fromkeys(folders)], library[0]


def linear(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Return x @ w.T (b, m) for x (b, k) and a weight (m, k), 2:4 along k.

    On CUDA this is cuSPARSELt's product, rounded to the factors' type; elsewhere a dense one.
    """

    def sparse(x, w):
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), w.dtype)
        return jax.ffi.ffi_call(TARGET, out)(x, w).astype(dtype)

    def dense(x, w):
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    return jax.lax.platform_dependent(x, w, cuda=sparse, default=dense)


def sparse_products(function: Callable[..., Any], weights: Collection[str]) -> Callable[..., Any]:
    """Return a function whose products with 2:4 matrices use the sparse cores of NVIDIA's GPUs.

    They are the products in half precision (bfloat16, float16) whose sizes are multiples of 16, for
    which cuSPARSELt must be registered (`register_products`); on other platforms they stay dense.
    Apply it to a gradient, not to what is differentiated: then x @ W and dy @ W.T are such
    products. Those in loops, in branches and in what is computed again (`remat`) stay dense.

    Args:
      function: of parameters (a pytree) and other arguments.
      weights: names of the matrices among the parameters that are 2:4 along both axes.
    """

    def run(params, *args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *args)
        sparse = {id(x): x for name, x in by_name(params).items() if name in weights}
        leaves = jax.tree.leaves((params, *args))
        found = interpret(closed, partial(_step, sparse), leaves, enter=_inner_call)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def _inner_call(equation: JaxprEqn) -> Program | None:
    """Return what a call runs, where nothing is lost if it runs here."""
    plain = equation.primitive.name in ("jit", "pjit") or "call_jaxpr" in equation.params
    return inner_program(equation) if plain else None


def _step(sparse: dict[int, Any], equation: JaxprEqn, inputs: list) -> list:
    """Evaluate an equation; `sparse` has the 2:4 matrices by identity, which keeps them alive."""
    if equation.primitive is primitives.dot_general_p:
        for place, w in enumerate(inputs):
            if id(w) in sparse and _fits(equation, place):
                return [_product(equation, place, inputs)]
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **retrace_params(equation.params, _plain))
    results = results if equation.primitive.multiple_results else [results]
    if equation.primitive in _SAME and id(inputs[0]) in sparse:
        sparse[id(results[0])] = results[0]
    return results


def _plain(program: Program, *args: Any) -> list:
    return interpret(program, partial(_step, {}), args, enter=_inner_call)


def _fits(equation: JaxprEqn, place: int) -> bool:
    """Return whether cuSPARSELt has this product, whose 2:4 matrix is the operand at `place`."""
    contracted, batch = equation.params["dimension_numbers"]
    avals: list[Any] = [variable.aval for variable in equation.invars]
    w, x = avals[place], avals[1 - place]
    rows = x.size // x.shape[contracted[1 - place][0]] if len(contracted[0]) == 1 else 1
    multiples = all(size and size % TILE == 0 for size in (*w.shape, rows))
    matrix = w.ndim == 2 and not batch[0]
    return matrix and multiples and w.dtype == x.dtype and w.dtype.name in _HALF


def _product(equation: JaxprEqn, place: int, inputs: list) -> jax.Array:
    (axes, _), w, x = equation.params["dimension_numbers"], inputs[place], inputs[1 - place]
    w = w if axes[place][0] == 1 else w.T
    rows = jnp.moveaxis(x, axes[1 - place][0], -1)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    out: Any = equation.outvars[0].aval
    y = linear(flat, w, out.dtype)
    y = y.reshape(*rows.shape[:-1], w.shape[0])
    return y if place else jnp.moveaxis(y, -1, 0)
