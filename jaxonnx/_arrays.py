"""Contexts that functions of arrays run in; arrays on meshes, also with several processes."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding


def allow_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that broadcasts arrays of fewer axes, whatever `jax_numpy_rank_promotion`.

    Operators of ONNX broadcast, and users set the flag to find what their own code does.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **named)

    return call


def make_key(seed: int) -> jax.Array:
    """Return the random key of a seed of 64 bits, of which JAX reads 32 unless x64 is on."""
    key, rest = jax.random.key(int(seed) & 0xFFFFFFFF), int(seed) >> 32 & 0xFFFFFFFF
    return jax.random.fold_in(key, rest) if rest else key


def lower_fun(function: Callable[..., Any], multiple_results: bool = True) -> Callable[..., Any]:
    """Lower a primitive to a function, as `mlir.lower_fun` does, under `allow_promotion`."""
    return mlir.lower_fun(allow_promotion(function), multiple_results)


def on_auto_axes(function: Callable, specs: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` with the axes of an explicit mesh automatic inside.

    With explicit axes every operation must tell the sharding of its result by those of its
    arguments, which an embedding, a reshape of a sharded axis and others cannot. XLA propagates
    shardings through all of them.

    Args:
      specs: `specs(results, *args)` returns the `PartitionSpec` of each result.
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args) if _is_array(x)]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return function(*args)
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = (name for name, kind in types if kind == AxisType.Explicit)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def enter(x):
        is_explicit = _is_array(x) and jax.typeof(x).sharding.mesh == mesh
        return jax.sharding.reshard(x, PartitionSpec()) if is_explicit else x

    def leave(x, spec):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if _is_array(x) else x

    with jax.sharding.use_abstract_mesh(auto):
        results = function(*jax.tree.map(enter, args))
    return jax.tree.map(leave, results, specs(results, *args))


def put_array(x: Any, sharding: Sharding) -> jax.Array:
    """Return an array with a sharding, of which a process may have a part.

    It is whole in each process, and the same; or lies on the devices of all of them already.
    """
    lies_there = isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or lies_there:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def put_copies(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Return an array with a sharding, of copies: the memory of `x` may change, or be a file's.

    Only the parts of this process are read, one after the other.
    """
    places = sharding.addressable_devices_indices_map(x.shape)
    parts = [jax.device_put(np.array(x[at]), device) for device, at in places.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def to_host(x: Any) -> np.ndarray:
    """Return an array in the host's memory; if processes have parts of it, all must ask."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def like(tree: Any) -> Any:
    """Return the `PartitionSpec` of each array in a tree."""
    return jax.tree.map(_spec, tree)


def whole(tree: Any) -> Any:
    """Return a replicating `PartitionSpec` for each array in a tree."""
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def by_size(results: Any, inputs: Any) -> Any:
    """Return for each result the `PartitionSpec` that the sizes of its axes suggest.

    An axis is sharded as the axis of an input with the same size, preferably the one at the same
    place; a first axis also as one of an input that divides it: axes were merged into the batch.
    """
    arrays = [x for x in jax.tree.leaves(inputs) if _is_array(x)]
    sharded = [
        (axis, size, names)
        for x in arrays
        for axis, (size, names) in enumerate(zip(x.shape, _spec(x), strict=True))
        if names is not None
    ]

    def spec(x):
        axes: list[Any] = [None] * np.ndim(x)
        for place, size, names in sharded:
            same = [a for a, n in enumerate(np.shape(x)) if n == size and axes[a] is None]
            if not same and place == 0 and axes and axes[0] is None and np.shape(x)[0] % size == 0:
                same = [0]
            if same and names not in axes:
                axes[place if place in same else same[0]] = names
        return PartitionSpec(*axes)

    return jax.tree.map(spec, results)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _spec(x: Any) -> PartitionSpec:
    return jax.typeof(x).sharding.spec
