"""Products with 2:4 weights by kernels that leave out what is zero, in place of dense ones.

A product is a primitive, which is lowered to cuSPARSELt's for CUDA, to our kernel for CPU, and to a
dense one elsewhere.
"""

import math
import warnings
from collections.abc import Callable, Collection
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxonnx._jaxpr import Program, inner_program, interpret, retrace_params
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import by_name
from jaxonnx.sparse._products import _cpu, _cusparselt
from jaxonnx.sparse._search import is_split

_SAME = {"convert_element_type", "copy", "copy_p", "pcast", "pvary"}
"""Primitives whose result has the pattern of their operand, along both axes."""


def register_products(platform: str | None = None) -> None:
    """Make sparse products ready, once in a process: compile what calls them for a platform.

    Args:
      platform: "cpu" is the package's own kernel, in float32, compiled at first use and kept in the
        user's cache; "gpu" or "cuda" is cuSPARSELt, in half precision; elsewhere products are
        dense. By default that of JAX.

    Raises:
      SparsityError: a C++ compiler is missing or fails, or the wheels of the extra `sparse-cuda`
        are not there.
    """
    platform = platform or jax.default_backend()
    if platform == "cpu":
        _cpu.register()
    elif platform in ("gpu", "cuda"):
        _cusparselt.register()


def prepare_products(platform: str | None = None) -> bool:
    """Return whether products are ready, as `register_products` makes them, or warn that not."""
    try:
        register_products(platform)
    except SparsityError as missing:
        warnings.warn(f"products stay dense: {missing}", stacklevel=3)
        return False
    return True


def sparse_products(function: Callable[..., Any], weights: Collection[str]) -> Callable[..., Any]:
    """Return a function whose products with 2:4 matrices leave out what is zero.

    On CPU they are those in float32 whose sizes are multiples of 4 and that are large enough to
    gain by it, by a kernel that computes half of the multiplications; on NVIDIA's GPUs those in
    half precision (bfloat16, float16) whose sizes are multiples of 16, by cuSPARSELt. They must be
    registered before (`register_products`); all others, and other platforms, stay dense, and so do
    products in loops, in branches and in what is computed again (`remat`).

    Results differ from dense ones by the order of sums, and where x has a NaN or an infinity: it
    reaches the outputs whose weights are not zero there, not all of them.

    Apply it to a gradient, rather than to what is differentiated: then x @ W and dy @ W.T are such
    products. The derivative of one that is differentiated is dense.

    Args:
      function: of parameters (a pytree) and other arguments.
      weights: names of the matrices among the parameters that are 2:4 along each axis that products
        sum over. A product with one that is not raises an error when it runs.
    """

    def run(params, *args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *args)
        sparse = {id(x): _Matrix(x, x) for name, x in by_name(params).items() if name in weights}
        leaves = jax.tree.leaves((params, *args))
        found = interpret(closed, partial(_step, sparse), leaves, enter=_inner_call)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


class _Matrix(NamedTuple):
    """A matrix with the pattern; `array` keeps alive what it is found by, the identity."""

    array: Any
    source: Any
    """The matrix that it is, or whose transpose it is."""
    is_transposed: bool = False


def _inner_call(equation: JaxprEqn) -> Program | None:
    """Return what a call runs, where nothing is lost if it runs here."""
    plain = equation.primitive.name in ("jit", "pjit") or "call_jaxpr" in equation.params
    return inner_program(equation) if plain else None


def _step(sparse: dict[int, _Matrix], equation: JaxprEqn, inputs: list) -> list:
    """Evaluate an equation; `sparse` has the 2:4 matrices by identity."""
    primitive = equation.primitive
    if primitive is primitives.dot_general_p:
        for place, w in enumerate(inputs):
            if id(w) in sparse and _fits(equation, place):
                return [_product(equation, place, inputs[1 - place], sparse[id(w)])]
    with equation.ctx.manager:
        results = primitive.bind(*inputs, **retrace_params(equation.params, _plain))
    results = results if primitive.multiple_results else [results]
    if inputs and (matrix := sparse.get(id(inputs[0]))) is not None:
        if primitive is primitives.transpose_p and matrix.array.ndim == 2:
            flips = equation.params["permutation"] == (1, 0)
            made = matrix._replace(array=results[0], is_transposed=matrix.is_transposed != flips)
            sparse[id(results[0])] = made
        elif primitive.name in _SAME or _drops_ones(equation):
            sparse[id(results[0])] = _Matrix(results[0], results[0])
    return results


def _drops_ones(equation: JaxprEqn) -> bool:
    """Return whether an equation makes a matrix of a pointwise kernel (out, in, 1, 1)."""
    if equation.primitive not in (primitives.reshape_p, primitives.squeeze_p):
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    return [n for n in before.shape if n != 1] == [*after.shape] and len(after.shape) == 2


def _plain(program: Program, *args: Any) -> list:
    return interpret(program, partial(_step, {}), args, enter=_inner_call)


def _fits(equation: JaxprEqn, place: int) -> bool:
    """Return whether there is such a product, whose 2:4 matrix is the operand at `place`."""
    contracted, batch = equation.params["dimension_numbers"]
    avals: list[Any] = [variable.aval for variable in equation.invars]
    w, x = avals[place], avals[1 - place]
    if len(contracted[0]) != 1 or batch[0] or w.ndim != 2 or w.dtype != x.dtype or not x.size:
        return False
    rows = x.size // x.shape[contracted[1 - place][0]]
    on_cpu = _cpu.is_registered() and _cpu.fits(rows, w.shape, w.dtype)
    return on_cpu or _cusparselt.fits(rows, w.shape, w.dtype)


def _product(equation: JaxprEqn, place: int, x: jax.Array, w: _Matrix) -> jax.Array:
    axes, _ = equation.params["dimension_numbers"]
    axis = axes[place][0] ^ w.is_transposed
    rows = jnp.moveaxis(x, axes[1 - place][0], -1)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    out: Any = equation.outvars[0].aval
    y = sparse_product_p.bind(flat, w.source, axis=axis, dtype=out.dtype)
    y = y.reshape(*rows.shape[:-1], y.shape[1])
    return y if place else jnp.moveaxis(y, -1, 0)


def _dense(x: jax.Array, w: jax.Array, *, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=dtype)


sparse_product_p = Primitive("sparse_product")
"""x (b, k) times a matrix that is 2:4 along `axis`, which is contracted."""
sparse_product_p.plain = _dense  # type: ignore[attr-defined]  # for readers of a jaxpr
sparse_product_p.def_impl(
    lambda x, w, *, axis, dtype: jax.jit(partial(sparse_product_p.bind, axis=axis, dtype=dtype))(
        x, w
    )
)


@sparse_product_p.def_abstract_eval
def _(x, w, *, axis, dtype):
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    y = jax.eval_shape(partial(_dense, axis=axis, dtype=dtype), *like)
    return x.update(shape=y.shape, dtype=y.dtype, weak_type=False)


def _jvp(primals, tangents, *, axis, dtype):
    """Differentiate as a dense product: the tangent of a weight is not sparse."""
    plain = partial(_dense, axis=axis, dtype=dtype)
    parts = [
        plain(*(t if i == j else p for j, p in enumerate(primals)))
        for i, t in enumerate(tangents)
        if type(t) is not ad.Zero
    ]
    y = sparse_product_p.bind(*primals, axis=axis, dtype=dtype)
    return y, reduce(ad.add_tangents, parts)


def _batch(arguments, at, *, axis, dtype):
    x, w = arguments
    run = partial(sparse_product_p.bind, axis=axis, dtype=dtype)
    if at[1] is None:  # more rows of the same product
        x = jnp.moveaxis(x, at[0], 0)
        y = run(x.reshape(-1, x.shape[-1]), w)
        return y.reshape(*x.shape[:-1], -1), 0
    w = jnp.moveaxis(w, at[1], 0)
    if at[0] is None:
        return jax.lax.map(lambda w: run(x, w), w), 0
    return jax.lax.map(lambda both: run(*both), (jnp.moveaxis(x, at[0], 0), w)), 0


def _lower_dense(context, x, w, **params):
    return mlir.lower_fun(partial(_dense, **params), multiple_results=False)(context, x, w)


def _lower_on(kernel, context, x, w, *, axis, dtype):
    """Lower to the product of a kernel where it has one, else to the dense one."""
    rows, matrix = context.avals_in
    if is_split(context) or not kernel.fits(rows.shape[0], matrix.shape, matrix.dtype):
        return _lower_dense(context, x, w, axis=axis, dtype=dtype)

    def sparse(x, w):
        return kernel.product(x, w, axis).astype(dtype)

    return mlir.lower_fun(sparse, multiple_results=False)(context, x, w)


ad.primitive_jvps[sparse_product_p] = _jvp
batching.primitive_batchers[sparse_product_p] = _batch
mlir.register_lowering(sparse_product_p, _lower_dense)
mlir.register_lowering(sparse_product_p, partial(_lower_on, _cpu), platform="cpu")
mlir.register_lowering(sparse_product_p, partial(_lower_on, _cusparselt), platform="cuda")
