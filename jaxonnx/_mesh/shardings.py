"""Shardings of the tensors of a model and of its optimizer's state, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxonnx._display import Printable
from jaxonnx._graph.stored import StoredMatrix
from jaxonnx._mesh.rules import DATA, axes_of, describe_mesh, entries, entry_specs, mesh_of, specs
from jaxonnx._rewrite.network import Network


@dataclass(frozen=True)
class Placement:
    """The shape and the sharding of an array."""

    shape: tuple[int, ...]
    sharding: NamedSharding

    def transpose(self, axes: Sequence[int]) -> Placement:
        """Return the placement of the transposed array."""
        shape, parts = tuple(self.shape[a] for a in axes), self._parts
        return Placement(shape, self._by([parts[a] for a in axes]))

    def of(self, x: Any) -> NamedSharding:
        """Return the sharding of an array that an optimizer keeps for this one.

        It has the same shape, lacks some of the axes (Adafactor's sums over them), or is a mask of
        eight elements in a byte.
        """
        if x.shape == self.shape:
            return self.sharding
        if x.dtype == np.uint8 and x.shape == (-(-math.prod(self.shape) // 8),):
            over = tuple(axis for part in self._parts for axis in axes_of(part))
            count = math.prod(self.sharding.mesh.shape[axis] for axis in over)
            return self._by([over] if over and x.size % count == 0 else [])
        # Match the axes that are left from first to last, by their sizes. Of two axes of one size
        # this may take the wrong one: that costs communication, and the numbers are the same.
        split, rest = [], [*zip(self.shape, self._parts, strict=True)]
        for size in x.shape:
            while rest and rest[0][0] != size:
                rest.pop(0)
            if not rest:
                return self._by([])
            split.append(rest.pop(0)[1])
        return self._by(split)

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The mesh axes of each axis, None where it is not split."""
        spec = self.sharding.spec
        return (*spec, *(None,) * (len(self.shape) - len(spec)))

    def _by(self, parts: Sequence[Any]) -> NamedSharding:
        return NamedSharding(self.sharding.mesh, PartitionSpec(*parts))


def inherit_shardings(tree: Any, params: Mapping[str, Placement], mesh: Mesh) -> Any:
    """Return the sharding of each array of a tree, by the parameter that it belongs to.

    An array belongs to the parameter whose name is the innermost key of a dict on its path; optax
    keeps moments in trees of the parameters' structure. All others are replicated.

    Args:
      tree: the state of an optimizer, arrays or their shapes.
    """

    def sharding(path: tuple, x: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, DictKey) and key.key in params]
        return params[names[-1]].of(x) if names else NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


class ShardedTensor(NamedTuple):
    """A tensor on a mesh, or a matrix in few bits with its scales and zero points."""

    name: str
    shape: tuple[int, ...]
    """Of the matrix."""
    trained: bool
    spec: PartitionSpec
    """The axes of the mesh that each of its axes is split over."""
    size: int
    """Bytes on each device."""


@dataclass(frozen=True, repr=False)
class Shardings(Printable):
    """The shardings of a model and the bytes on each device; it prints as a table."""

    mesh: Mesh
    tensors: tuple[ShardedTensor, ...]
    optimizer: int
    """Bytes of the optimizer's state on each device."""
    whole: int
    """Bytes of tensors and optimizer together on one device alone."""

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """The spec of each tensor by name; of a matrix in few bits, that of its own axes."""
        return {x.name: x.spec for x in self.tensors}

    @property
    def size(self) -> int:
        """Bytes of tensors and optimizer together on each device."""
        return sum(x.size for x in self.tensors) + self.optimizer

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("tensor", overflow="fold")
        for column in ("shape", "trained", "split over"):
            table.add_column(column, no_wrap=True)
        table.add_column("each device", justify="right", no_wrap=True)
        for x in self.tensors:
            shape, trained = "x".join(map(str, x.shape)) or "scalar", "yes" if x.trained else "no"
            axes = ["-" if part is None else "+".join(axes_of(part)) for part in x.spec]
            split = ", ".join(axes) if any(x.spec) else ""
            table.add_row(Text(x.name), shape, trained, Text(split), _bytes(x.size))
        trained = sum(x.size for x in self.tensors if x.trained)
        frozen = self.size - trained - self.optimizer
        sizes = {"trained": trained, "frozen": frozen, "optimizer": self.optimizer}
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in sizes.items())
        each = f"each of {self.mesh.size} devices has {_bytes(self.size)}: {parts}"
        alone = f"one device alone would have {_bytes(self.whole)}"
        return Group(Text(f"mesh: {describe_mesh(self.mesh)}"), table, Text(each), Text(alone))


def _bytes(size: float) -> str:
    """Format a size in bytes."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size} B"
        size /= 1024
    return f"{size:.1f} GiB"


def model_shardings(model: Network, mesh: Any, sharding: Any) -> dict[str, NamedSharding]:
    """Return the sharding of each tensor of a model, by name."""
    mesh = mesh_of(mesh)
    if sharding is None:
        sharding = "fsdp" if DATA in mesh.shape else {}
    split = specs(model, mesh, sharding, {**model.params, **model.state})
    return {name: NamedSharding(mesh, spec) for name, spec in split.items()}


def shardings(
    model: Network, mesh: Any, sharding: Any, optimizer: optax.GradientTransformation | None
) -> Shardings:
    """Return the table of a model, as `Model.shardings` says."""
    tensors = {**model.params, **model.state}
    where = model_shardings(model, mesh, sharding)
    mesh, shown = mesh_of(mesh), entries(model, tensors)
    split = entry_specs(model, mesh, sharding, shown)
    laid = {name: Placement(x.shape, where[name]) for name, x in tensors.items()}
    optimizer = optax.adam(0.0) if optimizer is None else optimizer
    state = jax.eval_shape(optimizer.init, dict(model.params))
    of_state = jax.tree.map(_on_each, state, inherit_shardings(state, laid, mesh))
    rows = []
    for n, x in shown.items():
        members = x.axes if isinstance(x, StoredMatrix) else (n,)
        each = sum(_on_each(tensors[member], where[member]) for member in members)
        rows.append(ShardedTensor(n, x.shape, n in model.params, split[n], each))
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((tensors, state)))
    return Shardings(mesh, tuple(rows), sum(jax.tree.leaves(of_state)), whole)


def _on_each(x: Any, sharding: NamedSharding) -> int:
    """Return the bytes of an array on each device."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
