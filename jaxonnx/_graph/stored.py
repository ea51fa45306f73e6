"""Find the scales and zero points of matrices that are stored in few bits."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, Weight, uses, weights
from jaxonnx.errors import ModelError

SCALES: Mapping[tuple[str, int], tuple[int, int]] = {
    ("DequantizeLinear", 0): (1, 2),
    ("DynamicQuantizeMatMul", 1): (2, 3),
    ("GatherBlockQuantized", 0): (2, 3),
    ("MatMulBnb4", 1): (2, -1),
    ("MatMulIntegerToFloat", 1): (3, 5),
    ("MatMulNBits", 1): (2, 3),
    ("QMoE", 2): (3, 11),
    ("QMoE", 5): (6, 12),
    ("QMoE", 8): (9, 13),
}
"""The positions of scales and zero points, by operator and position of the weight; -1: absent."""


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix: one weight that is stored in several tensors."""

    shape: tuple[int, ...]
    """The shape of the matrix."""
    dtype: np.dtype
    """The dtype of the codes."""
    nbytes: int
    """The bytes of all its tensors."""
    units: tuple[int, ...]
    """For each axis of the matrix, the number of equal parts that its codes can be divided into."""
    axes: Mapping[str, tuple[int | None, ...]]
    """For each tensor (codes, scales, zero points), the axes of the matrix that its own axes run
    along; None for an axis that is not divided with the matrix."""


def stored_matrices(
    graph: Graph, tensors: Mapping[str, Any], apart: Collection[str] = ()
) -> dict[str, StoredMatrix]:
    """Return the quantized matrices of a graph, by the names of their codes.

    Scales and zero points that several matrices share, and those among `apart`, are not part of
    one.
    """
    found = {n: w for n, w in weights(graph, tensors).items() if w.storage and w.matrix}
    read: dict[str, list[Use]] = {}
    for use in uses(graph, tensors):
        if use.is_direct:
            read.setdefault(use.name, []).append(use)
    result = {}
    for name, weight in found.items():
        own = {use.node.index for use in read[name]}
        first = read[name][0]
        places = SCALES.get((first.node.op.name, first.position), ())
        beside = [first.node.inputs[i] for i in places if 0 <= i < len(first.node.inputs)]
        members = [
            n
            for n in beside
            if n in tensors and n not in apart and own.issuperset(u.node.index for u in read[n])
        ]
        axes = {n: _follow_axes(tensors[n].shape, weight, first) for n in (name, *members)}
        lengths = dict(zip(axes[name], tensors[name].shape, strict=True))
        units = tuple(math.gcd(size, lengths.get(i, 1)) for i, size in enumerate(weight.shape))
        size = sum(tensors[n].nbytes for n in axes)
        result[name] = StoredMatrix(weight.shape, tensors[name].dtype, size, units, axes)
    return result


def _follow_axes(shape: tuple[int, ...], weight: Weight, use: Use) -> tuple[int | None, ...]:
    """Return `StoredMatrix.axes` of one of the tensors that store a matrix."""
    rank, form = len(weight.shape), use.node.op.form(use.position)
    if len(shape) == 1 and (form is None or form.storage is None):  # scales along one axis
        default = 1 if use.node.op.name == "DequantizeLinear" else -1
        return (use.node.attributes.get("axis", default) % rank,)
    return tuple(i if i < rank else None for i in range(len(shape)))


def check_stored(graph: Graph, tensors: Mapping[str, Any], names: Collection[str]) -> None:
    """Check the tensors that dequantize weights.

    Raises:
      ModelError: floating-point scales or zero points are not finite, or a group index is out of
        range.
    """
    for use in uses(graph, tensors):
        if use.name not in names or not use.is_direct:
            continue
        node = use.node
        for position, name in enumerate(node.inputs):
            value = tensors.get(name)
            if value is None or name == use.name:
                continue
            value = np.asarray(value)
            if jnp.issubdtype(value.dtype, jnp.floating) and not np.isfinite(value).all():
                raise ModelError(f"{node.label}: '{name}' has numbers that are not finite")
            if node.op.name == "MatMulNBits" and position == 4 and value.size:
                count = -(-node.attributes["K"] // node.attributes["block_size"])
                if value.min() < 0 or value.max() >= count:
                    worst = max(int(value.max()), -int(value.min()))
                    raise ModelError(
                        f"{node.label}: '{name}' has group {worst}, and there are {count} groups"
                    )


_PACKED = ("GatherBlockQuantized", "MatMulNBits", "QMoE")
"""Operators whose zero points are packed into bytes as their weights are."""


def check_zero_points(graph: Graph, tensors: Mapping[str, Any]) -> None:
    """Raise a ModelError if zero points are not packed as their operator reads them.

    In packed form none can be out of the range of its bits; numbers that are not packed, or of
    another type, would be read as others. Zero points in floating point, which MatMulNBits takes as
    well, may be any number, as in onnxruntime.
    """
    for node in graph.nodes:
        for inner in node.subgraphs:
            check_zero_points(inner, tensors)
        if node.op.name not in _PACKED:
            continue
        for (name, position), places in SCALES.items():
            codes, scale, zero = (
                tensors.get(node.inputs[i]) if i < len(node.inputs) else None
                for i in (position, *places)
            )
            if name == node.op.name and not (codes is None or scale is None or zero is None):
                _check_packing(node, node.inputs[places[1]], position, codes, scale, zero)


def _check_packing(node: Node, name: str, position: int, codes: Any, scale: Any, zero: Any) -> None:
    """Compare type and size of zero points with those of the codes and scales."""
    form, shape = node.op.form(position), scale.shape
    storage = form and form.storage and form.storage(codes.shape, codes.dtype, node.attributes)
    free = node.op.name == "MatMulNBits"
    if free:
        shape = node.attributes["N"], -(-node.attributes["K"] // node.attributes["block_size"])
    told, packed = f"{node.label}: zero points '{name}' are {zero.dtype} {[*zero.shape]}", ""
    if zero.dtype != codes.dtype and not (free and jnp.issubdtype(zero.dtype, jnp.floating)):
        more = " or in floating point" if free else ""
        raise ModelError(f"{told}; they must be {codes.dtype} as the weights{more}")
    if storage and zero.dtype == np.uint8:
        bits = int(storage.type.removeprefix("int"))
        shape = *shape[:-1], -(-shape[-1] * bits // 8)
        packed = f", packed in {bits} bits along rows"
    if zero.size != np.prod(shape):
        raise ModelError(f"{told}; their shape must be {[*shape]}{packed}")
