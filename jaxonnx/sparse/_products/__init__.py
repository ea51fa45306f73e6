"""Products with 2:4 weights by kernels that skip zeros, in place of dense ones.

A product is a primitive, which is lowered to cuSPARSELt's for CUDA, to our kernel for CPU, and to a
dense one elsewhere.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxonnx._arrays import lower_fun
from jaxonnx._jaxpr import Program, inner_program, interpret, retrace_params
from jaxonnx._native import is_split
from jaxonnx.errors import SparsityError, warn
from jaxonnx.sparse._layers import by_name, name_of
from jaxonnx.sparse._products import _cpu, _cusparselt

_SAME = {"convert_element_type", "copy", "copy_p", "pcast", "pvary"}
"""Primitives whose result has the pattern of their operand, along both axes."""


def register_products(platform: str | None = None) -> None:
    """Compile the kernels of a platform and register them with JAX, once in a process.

    Args:
      platform: "cpu" is the package's own kernel, compiled at first use and kept in the user's
        cache; "gpu" or "cuda" is cuSPARSELt, in half precision; elsewhere products are
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


def prepare_products(
    weights: Iterable[jax.Array], platform: str | None, *, is_split: bool = False
) -> bool:
    """Register the kernels for products with these weights, or warn why products stay dense.

    Args:
      weights: the weights that may be 2:4.
      platform: as in `register_products`.
      is_split: whether XLA partitions the programs over a mesh.

    Returns:
      Whether products can be sparse.
    """
    reason = _why_dense(weights, platform or jax.default_backend(), is_split)
    if reason:
        warn(f"products stay dense: {reason}")
    return not reason


def _why_dense(weights: Iterable[jax.Array], platform: str, is_split: bool) -> str:
    """Register the kernels; return why products stay dense, or "" if they do not."""
    if is_split:
        return "XLA cannot split their kernels over a mesh; within jax.shard_map it need not"
    if platform not in ("cpu", "gpu", "cuda"):
        return f"there is no kernel for {platform!r}"
    types = {str(w.dtype) for w in weights}
    if platform == "cpu" and not any(map(_cpu.has, types)):
        return f"the kernel for CPU takes float32 and narrower types, not {', '.join(types)}"
    try:
        register_products(platform)
    except SparsityError as missing:
        return str(missing)
    return ""


def sparse_products(function: Callable[..., Any], weights: Collection[str]) -> Callable[..., Any]:
    """Return a function whose products with 2:4 matrices skip zeros.

    On CPU they are those whose sizes are multiples of 4 and that are large enough to gain by it, by
    a kernel that computes half of the multiplications in float32 (bfloat16 and float16 factors are
    widened, which is exact; products of float64 are dense); on NVIDIA's GPUs those in
    half precision (bfloat16, float16) whose sizes are multiples of 16, by cuSPARSELt. They must be
    registered before (`register_products`); all others, and other platforms, stay dense, and so do
    products in loops, in branches and in what is computed again (`remat`).

    Results differ from dense ones by the order of sums, and where x has a NaN or an infinity: it
    reaches the outputs whose weights are not zero there, not all of them.

    Apply it to a gradient, not to the function that is differentiated: then x @ W and dy @ W.T are
    such products. The derivative of one that is differentiated is dense.

    Args:
      function: of parameters (a pytree) and other arguments.
      weights: names of the matrices among the parameters that are 2:4 along each axis that products
        sum over. A product with one that is not raises an error when it runs.
    """

    def run(params, *args):
        params, packed = _take_packed(params)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *args)
        matrices = {name: x for name, x in by_name(params).items() if name in weights}
        sparse = {id(x): _Matrix(x, x, packed=packed.get(name)) for name, x in matrices.items()}
        leaves = jax.tree.leaves((params, *args))
        matrices = interpret(closed, partial(_step, sparse), leaves, enter=_inner_call)
        return jax.tree.unflatten(jax.tree.structure(shape), matrices)

    return run


@partial(
    jax.tree_util.register_dataclass, data_fields=["w", "values", "places"], meta_fields=["axis"]
)
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix among the parameters of `sparse_products`, packed along an axis beforehand."""

    w: jax.Array
    values: jax.Array
    places: jax.Array
    axis: int


def pack_matrix(w: Any, axis: int) -> Any:
    """Pack a 2:4 matrix for products of few rows; return it as it is where that is not faster.

    Args:
      w: the matrix.
      axis: the axis that the products contract.
    """
    on_cpu = isinstance(w, jax.Array) and all(d.platform == "cpu" for d in w.devices())
    if on_cpu and w.ndim == 2 and _cpu.fits_packed(1, w.shape, w.dtype):
        return PackedMatrix(w, *_cpu.pack(w, axis), axis)
    return w


def _take_packed(params: Any) -> tuple[Any, dict[str, PackedMatrix]]:
    """Replace each `PackedMatrix` by its matrix; return these parameters and the packed ones by
    name.
    """

    def is_packed(x):
        return isinstance(x, PackedMatrix)

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    packed = {name_of(path): x for path, x in leaves if is_packed(x)}
    plain = jax.tree.map(lambda x: x.w if is_packed(x) else x, params, is_leaf=is_packed)
    return plain, packed


class _Matrix(NamedTuple):
    """A value of the interpreted program that is a 2:4 matrix, or the transpose of one.

    Matrices are looked up by the `id` of their array; the entry keeps the array alive, so that no
    other array gets its id.
    """

    array: Any
    source: Any
    """The matrix itself, or the matrix whose transpose `array` is."""
    is_transposed: bool = False
    packed: PackedMatrix | None = None


def _inner_call(equation: JaxprEqn) -> Program | None:
    """Return the program of a call that can be evaluated in place; None for any other equation.

    A `remat`, a loop or a branch would lose its meaning.
    """
    plain = equation.primitive.name in ("jit", "pjit") or "call_jaxpr" in equation.params
    return inner_program(equation) if plain else None


def _step(sparse: dict[int, _Matrix], equation: JaxprEqn, inputs: list) -> list:
    """Evaluate an equation, with sparse products in place of dense ones.

    Args:
      sparse: the 2:4 matrices by the `id` of their array. Results that are such matrices are added.
      inputs: the operands.
    """
    primitive = equation.primitive
    if primitive is primitives.dot_general_p:
        for place, w in enumerate(inputs):
            if id(w) in sparse and (results := _product(equation, place, inputs, sparse[id(w)])):
                return results
    if hasattr(primitive, "plain") and any(id(x) in sparse for x in inputs):
        program: Any = inner_program(equation)
        if any(e.primitive is primitives.dot_general_p for e in program.eqns):
            return interpret(program, partial(_step, sparse), inputs, enter=_inner_call)
    with equation.ctx.manager:
        results = primitive.bind(*inputs, **retrace_params(equation.params, _plain))
    results = results if primitive.multiple_results else [results]
    if inputs and (matrix := sparse.get(id(inputs[0]))) is not None:
        if primitive is primitives.transpose_p and matrix.array.ndim == 2:
            flips = equation.params["permutation"] == (1, 0)
            sparse[id(results[0])] = matrix._replace(
                array=results[0], is_transposed=matrix.is_transposed != flips
            )
        elif primitive.name in _SAME or _drops_ones(equation):
            sparse[id(results[0])] = _Matrix(results[0], results[0])
    return results


def _drops_ones(equation: JaxprEqn) -> bool:
    """Check whether an equation reshapes a pointwise kernel (out, in, 1, 1) to a matrix."""
    if equation.primitive not in (primitives.reshape_p, primitives.squeeze_p):
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    return [n for n in before.shape if n != 1] == [*after.shape] and len(after.shape) == 2


def _plain(program: Program, *args: Any) -> list:
    return interpret(program, partial(_step, {}), args, enter=_inner_call)


def _product(equation: JaxprEqn, place: int, inputs: list, w: _Matrix) -> list[jax.Array]:
    """Return the result of a `dot_general` as a sparse product; [] if there is no kernel for it.

    Args:
      equation: the `dot_general`.
      place: which operand is the 2:4 matrix, 0 or 1.
      inputs: both operands.
      w: the matrix.
    """
    (axes, batch), x = equation.params["dimension_numbers"], inputs[1 - place]
    matrix = inputs[place]
    if len(axes[0]) != 1 or batch[0] or matrix.ndim != 2 or matrix.dtype != x.dtype or not x.size:
        return []
    count = x.size // x.shape[axes[1 - place][0]]
    about = (count, matrix.shape, matrix.dtype)
    axis = axes[place][0] ^ w.is_transposed  # the contracted axis of `w.source`
    is_packed = w.packed is not None and w.packed.axis == axis and _cpu.fits_packed(*about)
    on_cpu = _cpu.is_registered() and (is_packed or _cpu.fits(*about))
    if not on_cpu and not _cusparselt.fits(*about):
        return []
    rows = jnp.moveaxis(x, axes[1 - place][0], -1)
    flat = rows.reshape(count, rows.shape[-1])
    out: Any = equation.outvars[0].aval
    packed = (w.packed.values, w.packed.places) if is_packed and w.packed else ()
    y = sparse_product_p.bind(flat, w.source, *packed, axis=axis, dtype=out.dtype)
    y = y.reshape(*rows.shape[:-1], y.shape[1])
    # dot_general puts the free axes of the left operand first
    return [y if place else jnp.moveaxis(y, -1, 0)]


def _dense(x: jax.Array, w: jax.Array, *packed: jax.Array, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=dtype)


sparse_product_p = Primitive("sparse_product")
"""x (b, k) times a matrix that is 2:4 along `axis`, which is contracted; the result is (b, n).
Further operands are the results of `_cpu.pack` of the matrix along that axis."""
sparse_product_p.plain = _dense  # type: ignore[attr-defined]  # for readers of a jaxpr
sparse_product_p.def_impl(jax.jit(sparse_product_p.bind, static_argnames=("axis", "dtype")))


@sparse_product_p.def_abstract_eval
def _(x, w, *packed, axis, dtype):
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    y = jax.eval_shape(partial(_dense, axis=axis, dtype=dtype), *like)
    return x.update(shape=y.shape, dtype=y.dtype, weak_type=False)


def _jvp(primals, tangents, *, axis, dtype):
    """Differentiate the dense product: the tangent of a weight does not have its zeros."""
    plain = partial(_dense, axis=axis, dtype=dtype)
    parts = [
        plain(*(t if i == j else p for j, p in enumerate(primals)))
        for i, t in enumerate(tangents[:2])
        if type(t) is not ad.Zero
    ]
    y = sparse_product_p.bind(*primals, axis=axis, dtype=dtype)
    return y, reduce(ad.add_tangents, parts)


def _batch(arguments, at, *, axis, dtype):
    (x, w), packed = arguments[:2], arguments[2:]
    run = partial(sparse_product_p.bind, axis=axis, dtype=dtype)
    if at[1] is None:  # a batch of x only: more rows of one product
        x = jnp.moveaxis(x, at[0], 0)
        y = run(x.reshape(-1, x.shape[-1]), w, *packed)
        return y.reshape(*x.shape[:-1], -1), 0
    w = jnp.moveaxis(w, at[1], 0)
    if at[0] is None:
        return jax.lax.map(lambda w: run(x, w), w), 0
    return jax.lax.map(lambda both: run(*both), (jnp.moveaxis(x, at[0], 0), w)), 0


def _lower_dense(context, *args, **params):
    return lower_fun(partial(_dense, **params), multiple_results=False)(context, *args)


def _lower_on(kernel, context, x, w, *packed, axis, dtype):
    """Lower to the product of a kernel module where it has one of this size, else to the dense one.

    Args:
      kernel: `_cpu` or `_cusparselt`.
    """
    rows, matrix = context.avals_in[:2]
    about = (rows.shape[0], matrix.shape, matrix.dtype)

    def sparse(x, w, *packed):
        if packed and _cpu.fits_packed(*about):
            values, places = packed
            return _cpu.packed_product(x, values, places, w.shape[1 - axis])
        return kernel.product(x, w, axis).astype(dtype)

    if not is_split(context) and ((packed and kernel is _cpu) or kernel.fits(*about)):
        return lower_fun(sparse, multiple_results=False)(context, x, w, *packed)
    return _lower_dense(context, x, w, *packed, axis=axis, dtype=dtype)


ad.primitive_jvps[sparse_product_p] = _jvp
batching.primitive_batchers[sparse_product_p] = _batch
mlir.register_lowering(sparse_product_p, _lower_dense)
mlir.register_lowering(sparse_product_p, partial(_lower_on, _cpu), platform="cpu")
mlir.register_lowering(sparse_product_p, partial(_lower_on, _cusparselt), platform="cuda")
