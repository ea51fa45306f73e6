"""Find the scales and zero points of matrices that are stored in few bits."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import Use, Weight, direct_uses, uses_by_tensor, weights
from jaxonnx.errors import ModelError


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
    graph: Graph, tensors: Mapping[str, Any], apart: Collection[str]
) -> dict[str, StoredMatrix]:
    """Return the quantized matrices of a graph, by the names of their codes.

    Scales and zero points that several matrices share, and those among `apart`, are not part of
    one.
    """
    uses_of = uses_by_tensor(graph, tensors)
    result = {}
    for name, weight in weights(graph, tensors).items():
        if not (weight.storage and weight.matrix):
            continue
        members = [n for n in find_own_parts(uses_of, name) if n in tensors and n not in apart]
        axes = {n: _follow_axes(tensors[n].shape, weight) for n in (name, *members)}
        lengths = dict(zip(axes[name], tensors[name].shape, strict=True))
        units = tuple(math.gcd(size, lengths.get(i, 1)) for i, size in enumerate(weight.shape))
        size = sum(tensors[n].nbytes for n in axes)
        result[name] = StoredMatrix(weight.shape, tensors[name].dtype, size, units, axes)
    return result


def find_own_parts(uses_of: Mapping[str, Sequence[Use]], name: str) -> list[str]:
    """Return the scales and zero points that only the nodes of a weight read."""

    def find_nodes(name: str) -> set[int]:
        return {use.node.index for use in uses_of.get(name, ())}

    (first, *_), nodes = direct_uses(uses_of[name]) or uses_of[name], find_nodes(name)
    return [part for part in first.parts[:2] if part and find_nodes(part) <= nodes]


def _follow_axes(shape: tuple[int, ...], weight: Weight) -> tuple[int | None, ...]:
    """Return `StoredMatrix.axes` of one of the tensors that store a matrix."""
    assert weight.storage is not None
    if len(shape) == 1 and weight.storage.channels is not None:
        return (weight.storage.channels,)
    rank = len(weight.shape)
    return tuple(i if i < rank else None for i in range(len(shape)))


def check_stored(graph: Graph, tensors: Mapping[str, Any], names: Collection[str]) -> None:
    """Check the tensors that dequantize weights.

    Raises:
      ModelError: floating-point scales or zero points are not finite, or a group index is out of
        range.
    """
    uses_of = uses_by_tensor(graph, tensors)
    for use in (use for name in names for use in uses_of.get(name, ()) if use.is_direct):
        node = use.node
        for name in node.inputs:
            value = tensors.get(name)
            if value is None or name == use.name:
                continue
            value = np.asarray(value)
            if jnp.issubdtype(value.dtype, jnp.floating) and not np.isfinite(value).all():
                raise ModelError(f"{node.label}: '{name}' has numbers that are not finite")
        *_, name = use.parts or ("",)
        if name in tensors and np.size(tensors[name]):
            groups = np.asarray(tensors[name])
            storage = node.op.storage(use.position, tensors[use.name], node.attributes)
            assert storage is not None
            assert storage.axis is not None
            count = -(-storage.shape[storage.axis] // storage.block)
            if groups.min() < 0 or groups.max() >= count:
                worst = max(int(groups.max()), -int(groups.min()))
                raise ModelError(
                    f"{node.label}: '{name}' has group {worst}, and there are {count} groups"
                )


def check_zero_points(graph: Graph, tensors: Mapping[str, Any]) -> None:
    """Raise a ModelError if zero points are not packed as their operator reads them.

    In packed form none can be out of the range of its bits; numbers that are not packed, or of
    another type, would be read as others. Zero points in floating point, where an operator takes
    them as well, may be any number, as in onnxruntime.
    """
    for node in graph.nodes:
        for inner in node.subgraphs:
            check_zero_points(inner, tensors)
        for position, declared in node.op.quantized.items():
            names = [node.inputs[i : i + 1] for i in (position, *node.op.parts[position][:2])]
            codes, scale, zero = (tensors.get(name[0]) if name else None for name in names)
            if not declared.repacked or codes is None or scale is None or zero is None:
                continue
            storage = node.op.storage(position, codes, node.attributes)
            assert storage is not None
            text = f"{node.label}: zero points '{names[2][0]}' are {zero.dtype} {[*zero.shape]}"
            floats, shape = declared.float_zeros, storage.blocks(scale.shape)
            stored = storage.stored_shape(shape) if zero.dtype == codes.dtype else shape
            is_float = floats and jnp.issubdtype(zero.dtype, jnp.floating)
            if zero.dtype != codes.dtype and not is_float:
                more = " or in floating point" if floats else ""
                raise ModelError(f"{text}; they must be {codes.dtype} as the weights{more}")
            if zero.size != math.prod(stored):
                bits = f", packed in {storage.type.removeprefix('int')} bits along rows"
                more = bits if stored != shape else ""
                raise ModelError(f"{text}; their shape must be {[*stored]}{more}")
