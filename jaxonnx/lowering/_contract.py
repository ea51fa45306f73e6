"""Trilinear forms whose three contractions are chosen by hand, per platform.

A convolution, say, is a form T(x, w, y): its forward pass and its two gradients are the three ways
to leave one of the arguments out. Automatic differentiation can only transpose a formulation, and
the transpose of a fast formulation is often a slow one: XLA:CPU turns the transpose of a shifted
read into a scatter-like pad. Here every contraction is written on its own; they are each other's
derivatives, so that forward mode, reverse mode and every higher order work.

`product` multiplies matrices in half precision into float32: what follows is rounded once, with
them. Its gradients round the cotangent, which comes from rounded numbers, and multiply in half
precision as those of a plain product do: no accelerator leaves its units for half precision.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxonnx._arrays import allow_promotion, lower_fun
from jaxonnx.lowering._compile import keep_apart


class Form(Protocol):
    """A hashable description of T(a, b, c), linear in its floating point arguments."""

    @property
    def batch(self) -> tuple[int, ...]:
        """The numbers of the arguments whose axis 0 runs over independent examples."""
        ...

    def plain(self, out: int, u: Any, v: Any) -> Any:
        """Contract T with all its arguments but one: the derivative of T by argument `out`.

        Args:
          out: the number of the argument that is left out, and whose shape the result has.
          u, v: the other two arguments, in order.
        """
        ...


class Rule(NamedTuple):
    """The contractions of a form on one platform: functions of (form, out, u, v)."""

    contract: Callable[[Any, int, Any, Any], Any]
    mapped: Callable[[Any, int, Any, Any], Any]
    """`contract` for use under a vmap over an axis that is not a batch of examples."""
    split: Callable[[Any, int, Any, Any], Any] | None = None
    """`contract` for programs that XLA partitions over devices; None if it is the same."""


RULES: dict[type, Mapping[str, Rule]] = {}
"""The rules of each type of form by platform; without one, `Form.plain` is used."""


def on_platforms(form: type, rules: Mapping[str, Rule]) -> None:
    """Register the rules of a type of form by platform ("cpu", "cuda", "rocm", "tpu")."""
    RULES[form] = rules
    for platform in rules:
        mlir.register_lowering(contract_p, partial(_lower, platform), platform=platform)


def on_platform(
    platform: str, form: Any, mapped: bool = False, split: bool = False
) -> Callable[[int, Any, Any], Any]:
    """Return the contraction of a form on one platform, a function of (out, u, v).

    Args:
      platform: "cpu", "cuda", "rocm", "tpu", or "" for any other.
      form: the form.
      mapped: whether it is under a vmap over an axis that is not a batch of examples.
      split: whether XLA partitions the program over several devices.
    """
    if isinstance(form, BatchedForm):
        inner = on_platform(platform, form.form, form.slots != form.form.batch, split)
        return partial(form.over, inner)
    rule = RULES.get(type(form), {}).get(platform)
    if rule is None:
        return form.plain
    if split and rule.split is not None and not mapped:
        return partial(rule.split, form)
    return partial(rule.mapped if mapped else rule.contract, form)


def contract(form: Form, out: int, u, v):
    """Contract `form` with all its arguments but number `out`; see `Form.plain`."""
    return contract_p.bind(jnp.asarray(u), jnp.asarray(v), form=form, out=out)


contract_p = Primitive("contract")
# the primitive in terms of JAX's own, for readers of a jaxpr (sparse.verify)
contract_p.plain = lambda u, v, *, form, out: form.plain(out, u, v)  # type: ignore[attr-defined]


class _NamedPrimitive(Primitive):
    """A primitive of `named_primitive`, which `jax.experimental.jet` has no rule for."""

    plain: Callable

    def bind(self, *args: Any, **params: Any) -> Any:
        if any(type(x).__name__ == "JetTracer" for x in args):
            return self.plain(*args, **params)
        return super().bind(*args, **params)


def named_primitive(
    name: str, function: Callable, static: str | tuple[()] = (), several: bool = False
) -> Primitive:
    """Return a primitive that stands for a function of arrays in a jaxpr.

    Readers of a jaxpr, such as the export to ONNX, see it as one equation with a name; XLA gets the
    function's own operations. It has no derivative.

    Args:
      name: of the primitive.
      function: of arrays and one static parameter; it is also the primitive's `plain` attribute.
      static: the name of the static parameter, or ().
      several: whether the function returns a tuple of results.
    """
    primitive, function = _NamedPrimitive(name), allow_promotion(function)

    def batch(arguments, axes, /, **params):
        results = jax.vmap(partial(function, **params), axes)(*arguments)
        return results, (0,) * len(results) if several else 0

    def infer(*avals, **params):
        results = jax.make_jaxpr(partial(function, **params))(*avals).out_avals
        return results if several else results[0]

    primitive.plain = function
    primitive.multiple_results = several
    primitive.def_impl(jax.jit(function, static_argnames=static))
    primitive.def_abstract_eval(infer)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower_fun(function, multiple_results=several))
    return primitive


@partial(jax.jit, static_argnames=("form", "out"))
def _apply(u, v, *, form, out):
    return contract_p.bind(u, v, form=form, out=out)


@contract_p.def_impl
def _eager(u, v, *, form, out):
    # under jax.disable_jit, `_apply` would bind the primitive again, without an end
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return form.plain(out, u, v)
    return _apply(u, v, form=form, out=out)


@contract_p.def_abstract_eval
def _abstract(u, v, *, form, out):
    return jax.make_jaxpr(partial(form.plain, out))(u, v).out_avals[0]


def _transpose(slot, cotangent, u, v, *, form, out):
    """Transpose a contraction with respect to u (`slot` 0) or v (`slot` 1).

    The cotangent has the shape of the argument that was left out, and takes its place; the result
    is the contraction that leaves out u or v instead.
    """
    u_slot, v_slot = (i for i in range(3) if i != out)
    missing, other = ((u_slot, (v_slot, v)), (v_slot, (u_slot, u)))[slot]
    (_, first), (_, second) = sorted([other, (out, cotangent)], key=lambda pair: pair[0])
    return contract(form, missing, first, second)


ad.defbilinear(contract_p, partial(_transpose, 0), partial(_transpose, 1))


@dataclass(frozen=True)
class BatchedForm:
    """A form under vmap: the arguments with the numbers `slots` have one more leading axis."""

    form: Form
    slots: tuple[int, ...]

    @property
    def batch(self):
        return self.slots if self.slots == self.form.batch else ()

    def over(self, function: Callable, out: int, u, v):
        """Contract over the leading axis by `function(out, u, v)` for the inner form.

        If exactly the batch arguments have the axis, it is merged into the batch. Otherwise
        `function` is mapped, and the result summed if it does not have the axis itself.
        """
        if self.slots == self.form.batch:
            return self._merge_batches(function, out, u, v)
        axes = tuple(0 if i in self.slots else None for i in range(3) if i != out)
        result = jax.vmap(partial(function, out), axes)(u, v)
        return result if out in self.slots else result.sum(0)

    def _merge_batches(self, function: Callable, out: int, u, v):
        """Contract one larger batch instead of a batch of batches."""
        others = [i for i in range(3) if i != out]
        lead = next(a.shape[:2] for i, a in zip(others, (u, v), strict=True) if i in self.slots)
        u, v = (
            a.reshape(-1, *a.shape[2:]) if i in self.slots else a
            for i, a in zip(others, (u, v), strict=True)
        )
        result = function(out, u, v)
        return result.reshape(*lead, *result.shape[1:]) if out in self.slots else result

    def plain(self, out, u, v):
        return self.over(self.form.plain, out, u, v)


def _batch(arguments, axes, *, form, out):
    others = [i for i in range(3) if i != out]
    slots = [i for i, axis in zip(others, axes, strict=True) if axis is not None]
    arguments = [
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arguments, axes, strict=True)
    ]
    return contract(BatchedForm(form, tuple(sorted([*slots, out]))), out, *arguments), 0


batching.primitive_batchers[contract_p] = _batch


def is_split(context: Any) -> bool:
    """Check whether XLA partitions the program that is being lowered over several devices."""
    axes = context.module_context.axis_context  # without a number of devices under a shard_map
    return getattr(axes, "num_devices", 1) > 1


def _lower(platform: str, context, u, v, *, form, out):
    function = partial(on_platform(platform, form, split=is_split(context)), out)
    return lower_fun(function, multiple_results=False)(context, u, v)


mlir.register_lowering(contract_p, partial(_lower, ""))


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
        return keep_apart(a @ b)
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
        return keep_apart(x @ w)
    y = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], w.shape[1])
