"""The templates of a weight and their mask, as primitives that each platform lowers in its way.

They are `_templates.codes` and `_templates.expand`, and on TPU the kernels of `_kernels`. Programs
that XLA splits over several devices have no kernels, which it cannot split.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxonnx.sparse import _kernels, _templates
from jaxonnx.sparse._templates import Axes


def codes(w: jax.Array, axes: Axes) -> jax.Array:
    """Find the code of the best template for every block, as `_templates.codes` does."""
    # an integer has no derivative, whatever it was found from
    return _codes_p.bind(jax.lax.stop_gradient(w), axes=_positive(w, axes))


def expand(code: jax.Array, axes: Axes) -> jax.Array:
    """Expand `codes` to the boolean mask, as `_templates.expand` does."""
    return _expand_p.bind(code, axes=_positive(code, axes))


def _positive(x: jax.Array, axes: Axes) -> Axes:
    return axes[0] % x.ndim, axes[1] % x.ndim


def _primitive(plain: Callable, on_tpu: Callable, factor: float, dtype: Any) -> Primitive:
    """Return a primitive that makes the two axes `factor` times as long."""
    primitive = Primitive(plain.__name__)
    primitive.plain = plain  # type: ignore[attr-defined]  # for readers of a jaxpr

    @partial(jax.jit, static_argnames="axes")
    def apply(x, *, axes):
        return primitive.bind(x, axes=axes)

    @primitive.def_impl
    def _(x, *, axes):
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        return plain(x, axes) if disabled else apply(x, axes=axes)

    @primitive.def_abstract_eval
    def _(x, *, axes):
        shape = [int(n * factor) if i in axes else n for i, n in enumerate(x.shape)]
        return x.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)

    def batched(arguments, at, *, axes):
        x = jnp.moveaxis(arguments[0], at[0], 0)
        return primitive.bind(x, axes=(axes[0] + 1, axes[1] + 1)), 0

    def lowered(context, x, *, axes):
        function = plain if _is_split(context) else on_tpu
        return mlir.lower_fun(partial(function, axes=axes), multiple_results=False)(context, x)

    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    mlir.register_lowering(primitive, lowered, platform="tpu")
    return primitive


def _is_split(context) -> bool:
    """Check whether XLA splits the program over several devices, of which it asks nobody."""
    axes = context.module_context.axis_context
    if (manual := getattr(axes, "manual_axes", None)) is not None:  # under a shard_map
        return manual != frozenset(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) > 1


_codes_p = _primitive(_templates.codes, _kernels.codes, 1 / 4, np.uint16)
_expand_p = _primitive(_templates.expand, _kernels.expand, 4, np.bool_)
