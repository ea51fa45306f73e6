"""The search of templates and the expansion to masks, as primitives with a lowering by platform.

They are `_templates.search` and `_templates.expand`, and on TPU the kernels of `_kernels`. Programs
that XLA splits over several devices have no kernels, which it cannot split.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxonnx._native import is_split
from jaxonnx.sparse import _kernels, _templates
from jaxonnx.sparse._templates import Axes


class BestTemplates(NamedTuple):
    """The best templates of a weight.

    Attributes:
      codes: `uint16`, shaped like the weight with the two axes divided by 4.
      whole: float32 sums of |w| over the two axes, shaped like the other axes.
      kept: the same sums over what the templates keep.
    """

    codes: jax.Array
    whole: jax.Array
    kept: jax.Array


def search(w: jax.Array, axes: Axes) -> BestTemplates:
    """Find the best template for every block, as `_templates.search` does."""
    # an argmax has no derivative
    return BestTemplates(*_search_p.bind(jax.lax.stop_gradient(w), axes=_positive(w, axes)))


def expand(best: BestTemplates, axes: Axes) -> jax.Array:
    """Expand templates to the boolean mask, as `_templates.expand` does."""
    return _expand_p.bind(best.codes, axes=_positive(best.codes, axes))[0]


def _positive(x: jax.Array, axes: Axes) -> Axes:
    return axes[0] % x.ndim, axes[1] % x.ndim


def _primitive(name: str, plain: Callable, on_tpu: Callable) -> Primitive:
    """Return a primitive of one array and static `axes` that is lowered by platform.

    Args:
      name: what jaxprs show.
      plain: a function of the array and the axes that returns a list of arrays.
      on_tpu: a function with the same results, for programs on one TPU.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.plain = plain  # type: ignore[attr-defined]  # for readers of a jaxpr

    @partial(jax.jit, static_argnames="axes")
    def apply(x, *, axes):
        return primitive.bind(x, axes=axes)

    @primitive.def_impl
    def _(x, *, axes):
        # under jax.disable_jit `apply` would bind the primitive again, without an end
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        return plain(x, axes) if disabled else apply(x, axes=axes)

    @primitive.def_abstract_eval
    def _(x, *, axes):
        results = jax.eval_shape(partial(plain, axes=axes), jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [x.update(shape=y.shape, dtype=y.dtype, weak_type=False) for y in results]

    def batch_rule(arguments, at, *, axes):
        x = jnp.moveaxis(arguments[0], at[0], 0)
        results = primitive.bind(x, axes=(axes[0] + 1, axes[1] + 1))
        return results, [0] * len(results)

    def lower_rule(context, x, *, axes):
        function = plain if is_split(context) else on_tpu
        return mlir.lower_fun(partial(function, axes=axes))(context, x)

    batching.primitive_batchers[primitive] = batch_rule
    mlir.register_lowering(primitive, mlir.lower_fun(plain))
    mlir.register_lowering(primitive, lower_rule, platform="tpu")
    return primitive


def _expand_codes(code: jax.Array, axes: Axes) -> list[jax.Array]:
    return [_templates.expand(code, axes)]


_search_p = _primitive("search", _templates.search, _kernels.search)
_expand_p = _primitive("expand", _expand_codes, _kernels.expand)
