"""Partition rules: how the tensors of a model are split over the axes of a mesh.

"fsdp" splits the largest axis of every large tensor (ZeRO stage 3, arXiv 1910.02054). "tensor"
splits pairs of matrix products, the first by its outputs and the second by its inputs, so that one
all-reduce follows a pair (Megatron-LM, arXiv 1909.08053). Megatron takes the pairs from the code of
a transformer; here `pairs` finds them in the graph, so that any network with such pairs
works. A tensor that devices cannot divide evenly is not split.

A matrix in few bits is one entry to all rules, by the name of its codes and with the axes of the
matrix. Its scales and zero points are split as its codes are, in whole blocks.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.select import matching, near
from jaxonnx._graph.stored import StoredMatrix, stored_matrices
from jaxonnx._graph.uses import uses, weights
from jaxonnx._mesh import AUTOMATIC
from jaxonnx._require import is_one_of, require
from jaxonnx._rewrite.network import Network
from jaxonnx._weights import Matrix
from jaxonnx.errors import InputError
from jaxonnx.lowering import BATCH_AXIS

Rule = PartitionSpec | Literal["data", "fsdp", "tensor"] | tuple[Any, ...] | None
Sharding = str | Mapping[str, Rule] | Callable[[str, tuple[int, ...]], Rule]

DATA, TENSOR = BATCH_AXIS, "model"
"""The axes of a mesh that batches, and pairs of matrix products, are split over."""

_SMALL = 4096
"""Bytes; "fsdp" splits no tensor below."""


def mesh_of(mesh: Any) -> Mesh:
    """Return a mesh with automatic axes, on which XLA propagates shardings through everything.

    Args:
      mesh: with axes of any type, or "all" for one axis "data" over all devices.

    Raises:
      InputError: it is neither.
    """
    if is_one_of(mesh, ("all",)):
        mesh = jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(AxisType.Auto,))
    expected = (
        "a jax.sharding.Mesh, like jax.make_mesh((4, 2), ('data', 'model')), or 'all' for all "
        "devices on one axis 'data'"
    )
    require("mesh", mesh, isinstance(mesh, Mesh), expected)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def entries(model: Network, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that rules apply to: tensors, and whole quantized matrices, by name."""
    apart = model.params.keys() | (model.tensors.keys() - tensors.keys())
    stored = stored_matrices(model.graph, model.tensors, apart)
    members = {member for name in stored if name in tensors for member in stored[name].axes}
    return {n: stored.get(n, x) for n, x in tensors.items() if n in stored or n not in members}


def specs(
    model: Network, mesh: Mesh, sharding: Any, tensors: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """Return the partition spec of each tensor.

    Args:
      sharding: as in `Model.shardings`.
      tensors: anything with shape and dtype, by name.

    Raises:
      InputError: a rule that fits no tensor, or a split that a tensor or the mesh does not have.
    """
    shown = entries(model, tensors)
    result = entry_specs(model, mesh, sharding, shown)
    matrices = {name: x for name, x in shown.items() if isinstance(x, StoredMatrix)}
    for name, matrix in matrices.items():
        spec = result[name]
        for member, axes in matrix.axes.items():  # codes, scales and zero points
            parts = [spec[a] if a is not None and a < len(spec) else None for a in axes]
            sizes = [math.prod(mesh.shape[axis] for axis in axes_of(part)) for part in parts]
            even = [n % size == 0 for n, size in zip(tensors[member].shape, sizes, strict=True)]
            parts = [part if fits else None for part, fits in zip(parts, even, strict=True)]
            while parts and parts[-1] is None:
                parts.pop()
            result[member] = PartitionSpec(*parts)
    return {name: result[name] for name in tensors}


def entry_specs(
    model: Network, mesh: Mesh, sharding: Any, tensors: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """Return the partition spec of each of `entries`, as `specs` says."""
    rules = _rules(model, sharding, tensors)
    result = {}
    for kind in sorted({rule for rule, _ in rules.values() if isinstance(rule, str)}):
        group = {name: x for name, x in tensors.items() if rules[name][0] == kind}
        result |= _automatic(model, mesh, kind, group)
    return {
        name: result[name] if name in result else _check_rule(rule, name, x, mesh, origin)
        for (name, x), (rule, origin) in zip(tensors.items(), rules.values(), strict=True)
    }


def _units(x: Any) -> tuple[int, ...]:
    """Return the largest number of equal parts of each axis."""
    return x.units if isinstance(x, StoredMatrix) else tuple(x.shape)


def _rules(
    model: Network, sharding: Any, tensors: Mapping[str, Any]
) -> dict[str, tuple[Rule, str]]:
    """Return the rule for each tensor, and its name in error messages."""
    if callable(sharding):
        choose: Callable[..., Any] = sharding
        return {name: (choose(name, tuple(x.shape)), "sharding") for name, x in tensors.items()}
    if not isinstance(sharding, Mapping):
        return dict.fromkeys(tensors, (sharding, "sharding"))
    result: dict[str, tuple[Rule, str]] = {}
    for pattern, rule in sharding.items():
        names = matching(pattern, tensors, places=model._places)
        if not names:
            hint = near(pattern, tensors, model._places)
            raise InputError(
                f"the sharding rule {pattern!r} matches no tensor of the model; {hint}"
            )
        # the first rule that matches a tensor applies to it
        result = dict.fromkeys(names, (rule, f"the sharding rule {pattern!r}")) | result
    return {name: result.get(name, (None, "")) for name in tensors}


def _automatic(
    model: Network, mesh: Mesh, kind: str, tensors: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """Return the specs that an automatic rule gives."""
    if kind not in AUTOMATIC:
        close = difflib.get_close_matches(kind, AUTOMATIC, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"sharding must be 'data', 'fsdp', 'tensor', a dict of rules by name, or a function of "
            f"name and shape, got {kind!r}{hint}"
        )
    axis = TENSOR if kind == "tensor" else DATA
    if axis not in mesh.shape:
        raise InputError(
            f"sharding={kind!r} splits over the axis '{axis}' of the mesh, which has "
            f"{describe_mesh(mesh)}: "
            f"jax.make_mesh(..., ('{axis}',)) names one so"
        )
    if kind == "data":
        return dict.fromkeys(tensors, PartitionSpec())
    if kind == "fsdp":
        return {name: _largest(x, mesh) for name, x in tensors.items()}
    # split the pairs of matrix products whose axes the devices divide evenly
    count, result = mesh.shape[TENSOR], dict.fromkeys(tensors, PartitionSpec())
    uneven: list[str] = []
    for pair in pairs(model.graph, model.tensors):
        axes = {name: axis for name, axis in pair.items() if name in tensors}
        indivisible = [name for name, axis in axes.items() if _units(tensors[name])[axis] % count]
        uneven += [
            f"'{n}' {[*tensors[n].shape]} along axis {axes[n]} (of {_units(tensors[n])[axes[n]]})"
            for n in indivisible
        ]
        if not indivisible:
            result |= {name: _split(axis, TENSOR) for name, axis in axes.items()}
    if not any(result.values()):
        why = "no product of matrices leads to another one through activations or attention alone"
        if uneven:
            why = f"{count} devices do not divide {', '.join(uneven)}"
        raise InputError(
            f"sharding='tensor' splits nothing of this model: {why}; sharding='fsdp' splits every "
            "large tensor, and rules by name say what to split"
        )
    return result


def _largest(x: Any, mesh: Mesh) -> PartitionSpec:
    """Split the largest axis that all devices, or else those of "data", divide evenly."""
    size = x.nbytes if isinstance(x, StoredMatrix) else math.prod(x.shape) * x.dtype.itemsize
    if size < _SMALL:
        return PartitionSpec()
    groups: list[tuple[str, ...]] = [mesh.axis_names, (DATA,)]
    for axes in groups:
        count = math.prod(mesh.shape[axis] for axis in axes)
        fits = [axis for axis, units in enumerate(_units(x)) if units % count == 0]
        if fits and count > 1:
            longest = max(fits, key=lambda axis: x.shape[axis])
            return _split(longest, axes[0] if len(axes) == 1 else axes)
    return PartitionSpec()


def _split(axis: int, over: Any) -> PartitionSpec:
    return PartitionSpec(*(None,) * axis, over)


def _check_rule(rule: Any, name: str, x: Any, mesh: Mesh, origin: str) -> PartitionSpec:
    """Convert a rule to a spec; raise an InputError if it does not fit the tensor or the mesh."""
    if rule is None:
        return PartitionSpec()
    expected = "a jax.P, like P(None, 'model'), or one of 'data', 'fsdp' and 'tensor'"
    require(f"{origin} of '{name}'", rule, isinstance(rule, tuple | PartitionSpec), expected)
    parts, shape, units = [axes_of(over) for over in rule], x.shape, _units(x)
    origin = f"{origin} splits '{name}' {[*shape]} by {PartitionSpec(*rule)}"
    used = [axis for part in parts for axis in part]
    for axis in used:
        if axis not in mesh.shape:
            raise InputError(f"{origin}: the mesh has no axis {axis!r}, but {describe_mesh(mesh)}")
        if used.count(axis) > 1:
            raise InputError(f"{origin}: an axis of the mesh splits one axis of a tensor, not two")
    if len(parts) > len(shape):
        raise InputError(f"{origin}, and it has {len(shape)} axes")
    for place, part in enumerate(parts):
        count = math.prod(mesh.shape[axis] for axis in part)
        length = units[place]
        if length % count:
            fits = [f"axis {a} ({n})" for a, n in enumerate(units) if n % count == 0]
            over = [f"'{a}' ({n})" for a, n in mesh.shape.items() if length % n == 0 and n > 1]
            rest = " or ".join([*fits, *(f"axis {place} over {axis}" for axis in over)])
            what = "" if length == shape[place] else f" in {length} blocks"
            rest = f"{rest} would fit" if rest else "no axis does: leave it whole with P()"
            raise InputError(
                f"{origin}: axis {place} of length {shape[place]}{what} does not divide into "
                f"{count} parts; {rest}"
            )
    return PartitionSpec(*rule)


def describe_mesh(mesh: Mesh) -> str:
    """Return the axes of a mesh with their sizes, in words."""
    return ", ".join(f"'{name}' ({size})" for name, size in mesh.shape.items())


def axes_of(over: Any) -> tuple[str, ...]:
    """Return the axes of the mesh that one axis of a tensor is split over."""
    return () if over is None else (*over,) if isinstance(over, tuple | list) else (over,)


_PRODUCTS = ("Einsum", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")
_BETWEEN = (
    *("Attention", "BiasGelu", "DecoderMaskedMultiHeadAttention", "Einsum", "Expand", "FastGelu"),
    *("FusedMatMul", "Gather", "Gelu", "GroupQueryAttention", "MatMul", "MultiHeadAttention"),
    *("QuickGelu", "RotaryEmbedding", "Slice", "Softmax", "Split", "Tile"),
)
"""Operators, besides pointwise ones and views, that may stand between the products of a pair."""

_SIZES = ("Shape", "Size")
"""Operators that read only the shape of their input."""

_Products = frozenset[int]
"""A set of products, by the index of their node."""


@dataclass
class _Weights:
    """The tensors of the main graph that only one node reads."""

    products: dict[int, tuple[str, Matrix]] = field(default_factory=dict)
    """The weight of each product and the meaning of its axes, by the index of the node."""
    vectors: list[tuple[int, str, int]] = field(default_factory=list)
    """(index of the node, name, the only axis that is longer than one)"""


def pairs(graph: Graph, tensors: Mapping[str, Any]) -> list[dict[str, int]]:
    """Find pairs of matrix products for tensor parallelism: split by outputs, then by inputs.

    Between the two products each device keeps its own features, and only the second one adds up
    over all devices (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053). In an attention block
    the first products are those of queries, keys and values; in a perceptron those before the
    activation.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.

    Returns:
      For each pair, the axis to split each of its weights and biases along, by name. For a
      quantized matrix it is an axis of the matrix, not of its tensor.
    """
    # collect the weights and vectors that are used once, whole, by a node of the main graph
    all_uses = [use for use in uses(graph, tensors) if not use.passes]
    count = Counter(use.name for use in all_uses)
    collected = _Weights()
    for use in all_uses:
        if count[use.name] > 1 or use.node is not use.outer or use.view.part:
            continue
        matrix, shape = use.matrix, tensors[use.name].shape
        long = [axis for axis, size in enumerate(shape) if size > 1]
        if matrix is not None:
            plain = not (matrix.lookup or matrix.grouped or matrix.kernel or matrix.batch)
            if plain and use.node.op.like in _PRODUCTS:
                collected.products[use.node.index] = use.name, matrix
        elif len(long) == 1 and math.prod(shape) > 1:
            collected.vectors.append((use.node.index, use.name, long[0]))
    shapes = {name: weight.shape for name, weight in weights(graph, tensors).items()}
    before, lost = _trace_products(graph, collected.products.keys())
    # the products that each product leads to
    leads: dict[int, set[int]] = {}
    for sink in collected.products:
        for source in before[sink]:
            leads.setdefault(source, set()).add(sink)
    result: list[dict[str, int]] = []
    used: set[int] = set()
    for sink, (name, matrix) in collected.products.items():
        sources = before[sink]
        # every use of the sources' results must end in this product
        if not sources or sources & (lost | used) or any(leads[s] != {sink} for s in sources):
            continue
        used |= {sink, *sources}
        first = [collected.products[source] for source in sources]
        split = {name: matrix.input} | {name: matrix.output for name, matrix in first}
        for index, name, axis in collected.vectors:
            # a bias of a source, or a vector that acts on features between sources and sink
            if index in collected.products and index not in sources:
                continue
            beside = {index} if index in sources else before[index]
            matrices = (collected.products[source] for source in beside)
            sizes = {shapes[member][matrix.output] for member, matrix in matrices}
            if beside and beside <= sources and sizes == {tensors[name].shape[axis]}:
                split[name] = axis
        result.append(split)
    return result


def _trace_products(graph: Graph, products: Any) -> tuple[dict[int, _Products], _Products]:
    """Follow the results of products through nodes that may stand between the two of a pair.

    Returns:
      The products whose results reach each node, by its index; and the products whose results also
      reach an output or a node that mixes features.
    """
    empty: _Products = frozenset()
    reached: dict[str, _Products] = {}
    before: dict[int, _Products] = {}
    lost = empty
    for node in graph.nodes:
        arrives = empty.union(*(reached.get(name, empty) for name in node.reads))
        before[node.index] = arrives
        if node.index in products:
            leaves = frozenset({node.index})
        elif node.op.name in _SIZES:
            leaves = empty
        elif (
            (node.op.pointwise or node.op.view or node.op.name in _BETWEEN)
            and node.body is None
            and not node.subgraphs
        ):
            leaves = arrives
        else:
            leaves, lost = empty, lost | arrives
        reached.update(dict.fromkeys(node.outputs, leaves))
    return before, lost.union(*(reached.get(name, empty) for name in graph.outputs))
