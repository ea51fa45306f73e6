"""Integers of two bits, whose programs XLA compiles for CPU alone: elsewhere it may abort."""

from functools import partial
from typing import Any, NoReturn

import jax
import ml_dtypes
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxonnx.errors import UnsupportedError
from jaxonnx.lowering import platform_of

TYPES = {np.dtype(ml_dtypes.int2): "INT2", np.dtype(ml_dtypes.uint2): "UINT2"}


def on_cpu(x: Any, node: str, tensor: str) -> Any:
    """Return a value unchanged; refuse arrays of two-bit integers on devices other than the CPU.

    A traced array gets an identity primitive whose lowering for another platform raises.

    Args:
      x: any value.
      node, tensor: the label of the node and the name of the value, for the error.

    Raises:
      UnsupportedError: at once if the array is on another device, else at lowering.
    """
    if getattr(x, "dtype", None) not in TYPES or isinstance(x, np.ndarray | np.generic):
        return x
    return jax.tree.map(lambda leaf: _bind(leaf, node, tensor), x)  # also the integers of a LowRank


def _bind(x: Any, node: str, tensor: str) -> Any:
    return _on_cpu_p.bind(x, node=node, tensor=tensor) if x.dtype in TYPES else x


def _refuse(dtype: Any, node: str, tensor: str, platform: str) -> NoReturn:
    name = TYPES[np.dtype(dtype)]
    raise UnsupportedError(
        f"{node}: tensor '{tensor}' is {name}, and XLA aborts on integers of two bits when it "
        f"compiles for {platform.upper()}: run the model on the CPU (with "
        'jax.default_device(jax.devices("cpu")[0])), or cast the '
        f"tensor to {name.replace('2', '8')} in the file"
    )


_on_cpu_p = Primitive("on_cpu")
_on_cpu_p.plain = lambda x, **_: x  # type: ignore[attr-defined]  # for readers of a jaxpr
_on_cpu_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_on_cpu_p, lambda context, x, **_: [x])


@_on_cpu_p.def_impl
def _(x, *, node, tensor):
    if (platform := platform_of(x)) != "cpu":
        _refuse(x.dtype, node, tensor, platform)
    return x


def _batch(arguments, axes, **params):
    return _on_cpu_p.bind(*arguments, **params), axes[0]


def _lower(platform: str, context, _, *, node, tensor):
    _refuse(context.avals_in[0].dtype, node, tensor, platform)


batching.primitive_batchers[_on_cpu_p] = _batch
for _platform in ("tpu", "cuda", "rocm"):
    mlir.register_lowering(_on_cpu_p, partial(_lower, _platform), platform=_platform)
