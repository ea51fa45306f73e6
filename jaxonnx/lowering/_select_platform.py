"""Select a tangent by platform, from two that are equal."""

from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, mlir

from jaxonnx.lowering._contract import named_primitive


def select_platform(on_cpu: Any, elsewhere: Any) -> Any:
    """Return `on_cpu` on CPU and `elsewhere` on other platforms; both must be equal.

    It is linear in both arguments, and the one that is not selected gets a zero cotangent.
    """
    return _share_p.bind(on_cpu, cpu=True) + _share_p.bind(elsewhere, cpu=False)


def _on_cpu(x, cpu: bool):
    return x if cpu else jnp.zeros_like(x)


def _elsewhere(x, cpu: bool):
    return _on_cpu(x, not cpu)


_share_p = named_primitive("share", _on_cpu, "cpu")
mlir.register_lowering(_share_p, mlir.lower_fun(_elsewhere, multiple_results=False))
mlir.register_lowering(_share_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
ad.deflinear2(_share_p, lambda cotangent, _, cpu: [_share_p.bind(cotangent, cpu=cpu)])
