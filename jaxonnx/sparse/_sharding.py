"""Weights on meshes with explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def on_auto_axes(function: Callable, like: Callable[..., Any] | None, *args: Any) -> Any:
    """Call `function(*args)` with the axes of an explicit mesh automatic inside.

    Blocks and bits are reshapes of a weight. XLA propagates its sharding through them; the rules of
    explicit axes do not.

    Args:
      like: maps `args` to arrays with the sharding of the results; None if they are replicated.
    """
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next((s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types), None)
    if mesh is None:
        return function(*args)
    whole = NamedSharding(mesh, PartitionSpec())

    def out(x):
        sharding = jax.typeof(x).sharding
        return sharding if sharding.mesh == mesh else whole

    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return jax.sharding.auto_axes(
        function,
        axes=tuple(name for name, kind in types if kind == AxisType.Explicit),
        out_sharding=whole if like is None else jax.tree.map(out, like(*args)),
    )(*args)
