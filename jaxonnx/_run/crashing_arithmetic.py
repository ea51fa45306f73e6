"""What ONNX's inference would keep of shape arithmetic, which has no bound of its own.

Where it follows numbers, it keeps a list of them for each vector, as long as the file says. So the
length of each vector, and the numbers that may become such lengths, are bounded before.
"""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, numpy_helper

FOLLOWED = 1 << 20
"""Elements of a vector up to which it is let follow numbers."""

_SMALL = 4096
"""Elements of a constant that shape arithmetic may read, and of a vector of unknown length."""

_LARGEST = 2**63

_FIRST = ("Cast", "Gather", "Identity", "Slice", "Squeeze", "Unsqueeze")
"""Operators that give numbers of their first input, whatever places the others name."""


class _Bound(NamedTuple):
    """What a value holds at most.

    Attributes:
      length: elements, where it is a vector.
      number: the largest number that inference knows in it.
    """

    length: int = _SMALL
    number: int = 1

    def __or__(self, other: "_Bound") -> "_Bound":
        return _Bound(max(self.length, other.length), max(self.number, other.number))


def may_follow(functions: Iterable[FunctionProto], graph: GraphProto) -> bool:
    """Check whether ONNX's inference may follow the numbers of shape arithmetic in a graph.

    Args:
      functions: of the model.
      graph: with the shapes that inference finds without following numbers.
    """
    callees = {(f.domain, f.name, f.overload): f for f in functions}
    return _of_graph(graph, {}, {}, callees).length <= FOLLOWED


def _of_graph(
    graph: GraphProto,
    outer: Mapping[str, _Bound],
    shapes: Mapping[str, list[int]],
    functions: Mapping[tuple[str, str, str], FunctionProto],
) -> _Bound:
    """Return the bound of all values of a graph, which sees those of the graph that it is in."""
    declared = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    start = {name: _fitting(shape, _Bound()) for name, shape in declared.items()}
    start |= {tensor.name: _of_tensor(tensor) for tensor in graph.initializer}
    return _all(graph.node, {**outer, **start}, {**shapes, **declared}, functions)


def _all(
    nodes: Iterable[NodeProto],
    bounds: dict[str, _Bound],
    shapes: Mapping[str, list[int]],
    functions: Mapping[tuple[str, str, str], FunctionProto],
) -> _Bound:
    """Return the bound of all values that nodes read and compute, and put each into `bounds`."""
    top = _Bound()
    for node in nodes:
        read = [bounds.get(name, _Bound()) for name in node.input if name]
        top = reduce(or_, read, top)
        function = functions.get((node.domain, node.op_type, node.overload))
        if function is not None and top.length <= FOLLOWED:
            inputs = dict(zip(function.input, read, strict=False))
            bound = _all(function.node, inputs, {}, functions)
        else:
            bound = _result(node, read, shapes.get(node.input[0]) if node.input else None)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                if graph.node:
                    bound |= _of_graph(graph, bounds, shapes, functions)
        for name in node.output:
            bounds[name] = _fitting(shapes.get(name), bound)
            top |= bounds[name]
    return top


def _fitting(shape: list[int] | None, bound: _Bound) -> _Bound:
    """Return the bound of a value whose shape may be known."""
    if shape is not None and len(shape) > 1:
        return _Bound(1)  # of vectors and scalars alone numbers are kept
    return bound._replace(length=shape[0]) if shape and shape[0] else bound


def _result(node: NodeProto, read: list[_Bound], shape: list[int] | None) -> _Bound:
    """Return the bound of what a node computes; `shape` is that of its first input."""
    kind, size = node.op_type, math.prod(d or 1 for d in shape or ())
    length, number = (
        max((b.length for b in read), default=1),
        max((b.number for b in read), default=1),
    )
    if kind == "Constant":
        return reduce(or_, map(_of_constant, node.attribute), _Bound(1))
    if kind == "Shape":  # a size with a name stays a name
        return _Bound(number=max(shape or (), default=1))
    if kind == "Size":
        return _Bound(number=size)
    if kind in _FIRST and read:
        return read[0]
    if kind == "Concat":
        return _Bound(sum(b.length for b in read), number)
    if kind == "Mul":
        return _Bound(length, min(math.prod(b.number for b in read), _LARGEST))
    if kind in ("Add", "Sub"):
        return _Bound(length, min(sum(b.number for b in read), _LARGEST))
    if kind == "Tile":
        return _Bound(length * number, number)
    # a number may become a length: of ConstantOfShape, Expand, Range, Reshape
    return _Bound(max(size if kind == "Reshape" else 1, length, number, _SMALL), number)


def _of_constant(attribute: AttributeProto) -> _Bound:
    if attribute.name == "value":
        return _of_tensor(attribute.t)
    return _Bound(len(attribute.ints), max(map(abs, (attribute.i, *attribute.ints))))


def _of_tensor(tensor: TensorProto) -> _Bound:
    """Return how many numbers a tensor has, and the largest of them if they are whole."""
    size = math.prod(tensor.dims)
    if size <= _SMALL and tensor.data_type in (TensorProto.INT32, TensorProto.INT64):
        try:
            value = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, AttributeError):  # inference does not read it either
            return _Bound(size)
        return _Bound(size, max(map(abs, value.ravel().tolist()), default=1))
    return _Bound(size if len(tensor.dims) == 1 else 1)
