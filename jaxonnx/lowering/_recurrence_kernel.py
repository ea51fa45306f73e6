"""The time loop of an LSTM or GRU in float32 on CPU: one call of a kernel, `recurrence.cc`.

Loops are primitives, each with a plain form of JAX's own primitives. The kernel takes the place of
those that are large enough, in programs for one CPU. It is compiled at the first use; without a
compiler, and everywhere else, the plain form runs.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxonnx._arrays import allow_promotion, lower_fun
from jaxonnx._native import CompilerError, is_split, load_library

LEAST = 2**22
"""The fewest multiplications of a loop for the kernel. In smaller ones it gains nothing, and what
runs a small network once need not wait for a compiler."""

FEW = 32
"""The fewest rows of all steps for the kernel: with fewer, packing the weights takes longer."""

_SOURCE = Path(__file__).with_name("recurrence.cc")
_TARGET = "jaxonnx_recurrence_cpu"
_TILE = 16
"""Hidden units of a gate that are packed together."""


@cache
def is_ready() -> bool:
    """Compile the kernel and register it with JAX; return whether that is possible."""
    try:
        library = load_library(_SOURCE, [_SOURCE.with_suffix(".inc")])
    except CompilerError:
        return False
    symbol = jax.ffi.pycapsule(library.JaxonnxRecurrence)
    jax.ffi.register_ffi_target(_TARGET, symbol, platform="cpu")
    return True


def loop_primitive(name: str, plain: Callable, kernel: Callable | None = None) -> Primitive:
    """Return a primitive for a loop over time.

    Its operands are the leaves of a tree, whose structure is the parameter `tree`. All orders of
    derivatives and `vmap` are those of the plain form.

    Args:
      name: of the primitive.
      plain: a function of the tree's elements and the parameters.
      kernel: the same by the kernel, for CPU.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @allow_promotion
    def flat(function, *leaves, tree, **params):
        return jax.tree.leaves(function(*tree.unflatten(leaves), **params))

    def batch(leaves, axes, **params):
        results = jax.vmap(partial(flat, plain, **params), axes)(*leaves)
        return results, [0] * len(results)

    def differentiate(primals, tangents, **params):
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def vary(*moved):
            leaves = [*primals]
            for i, x in zip(moving, moved, strict=True):
                leaves[i] = x
            return flat(plain, *leaves, **params)

        return jax.jvp(vary, [primals[i] for i in moving], [tangents[i] for i in moving])

    def lower(context, *leaves, **params):
        exported = context.module_context.lowering_parameters.for_export
        fast = kernel is not None and not is_split(context) and not exported
        return lower_fun(partial(flat, kernel if fast else plain, **params))(context, *leaves)

    primitive.plain = partial(flat, plain)  # type: ignore[attr-defined]  # for readers of a jaxpr
    compiled: Any = jax.jit(primitive.bind, static_argnames=("tree", "cell", "reverse", "keeps"))

    @primitive.def_impl
    def _(*leaves, **params):
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return flat(plain, *leaves, **params)
        return compiled(*leaves, **params)

    primitive.def_abstract_eval(
        lambda *avals, **params: jax.make_jaxpr(partial(flat, plain, **params))(*avals).out_avals
    )
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower_fun(partial(flat, plain)))
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


def is_faster(x: tuple[int, ...], r: tuple[int, ...]) -> bool:
    """Check, for the shapes of the input and the recurrent weight, whether the kernel is faster.

    It compiles the kernel if so.
    """
    steps, batch, features = x
    if jax.default_backend() != "cpu" or not all(isinstance(n, int) and n for n in (*x, *r)):
        return False
    enough = steps * batch >= FEW and steps * batch * r[0] * (r[1] + features) >= LEAST
    return enough and is_ready()


def forward(
    r, valid, x, w, bias, states, *, cell, reverse, keeps, variant: int = -1, threads: int = 0
):
    """Compute the state after every step, all states after the last, and partial derivatives.

    Args:
      r, valid, x, w, bias, states: see `recur`.
      cell: a `Cell`.
      reverse: see `recur`.
      keeps: whether partial derivatives are computed; they are () otherwise.
      variant: the instructions: 0 for 512 bits, 1 for 256, 2 for those of every processor, -1 for
        the first that there are.
      threads: of XLA's pool, 0 for all.
    """
    units = r.shape[1]
    both = jnp.concatenate([w, r], 1).reshape(-1, units, w.shape[1] + units)
    weights = _tiles(both).transpose(1, 3, 0, 2)
    bias = jnp.zeros((4, units), x.dtype) if bias is None else bias.reshape(4, units)
    every = jax.ShapeDtypeStruct((*x.shape[:2], units), np.float32)
    operands = x, weights, *_ends(states), _tiles(bias).swapaxes(0, 1)
    results = every, *_ends(states), *[every] * (cell.count * keeps)
    return _call(valid, operands, results, len(states), reverse, False, variant, threads)


def back(r, valid, hidden, states, partials, *, cell, reverse, variant: int = -1, threads: int = 0):
    """Compute the cotangents of the gates of all steps, and of the states before the first.

    Args:
      r, valid: see `recur`.
      hidden, states: cotangents of the results of `recur`.
      partials: the partial derivatives of `forward`.
      cell, reverse, variant, threads: as for `forward`.
    """
    weights = _tiles(r, 4 * _TILE).swapaxes(0, 1)
    gates = jax.ShapeDtypeStruct((*hidden.shape[:2], 4 * hidden.shape[2]), np.float32)
    operands = hidden, weights, *_ends(states), *partials
    results = gates, *_ends(states)
    return _call(valid, operands, results, len(states), reverse, True, variant, threads)


def _call(valid, operands, results, count: int, reverse: bool, back: bool, variant, threads):
    valid = jnp.zeros(0, bool) if valid is None else valid
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    numbers = {"variant": np.int64(variant), "threads": np.int64(threads)}
    call = jax.ffi.ffi_call(_TARGET, results)
    first, *others = call(valid, *operands, lstm=count == 2, reverse=reverse, back=back, **numbers)
    return first, tuple(others[:count]), tuple(others[2:])


def _ends(states) -> tuple:
    """Return two states: the second is not used of one."""
    return states[0], states[-1]


def _tiles(x, size: int = _TILE):
    """Split axis 1, the units, into whole tiles: (gates, tiles, size, ...)."""
    padded = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)])
    return padded.reshape(x.shape[0], -1, size, *x.shape[2:])
