"""Shapes and types of a graph's values: by evaluation on shapes, or by ONNX's inference."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import onnx
from onnx import ModelProto, TypeProto, helper

from jaxonnx import _limits as limits
from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io import save as saving
from jaxonnx._run import crashing_inference
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import Error, InputError

_SMALL = 4096
"""Bytes up to which shape inference gets the value of a tensor: axes, sizes and the like."""

_SIZES = {True: (3, 7), False: (32, 48)}
"""Two sizes of an open dimension, where it is the first one of an input, and elsewhere. Their
ratios differ, so that a multiple of one is not taken for a multiple of the other."""

_APART = 16
"""What each dimension with a name adds to the second size, so that their ratios differ too, from
that of those without."""


@dataclass(frozen=True)
class Shapes:
    """The values of a graph that are arrays, as an evaluation on shapes sees them.

    Attributes:
      values: dtype and shape by name; open dimensions have a name, a multiple of one, or None.
      known: the values that do not depend on inputs other than by their shapes.
    """

    values: Mapping[str, Value]
    known: frozenset[str]


def evaluate_sizes(
    graph: Graph,
    axes: Mapping[str, tuple[str, int]],
    inputs: Mapping[str, Any],
    context: Context,
) -> dict[str, int]:
    """Return the size of an axis of a value for each name; nothing is computed but shapes.

    Args:
      axes: the value and the axis, by name.
      inputs: what the values depend on; further inputs of the graph may be missing.
    """
    sizes = {}
    for name, (value, axis) in axes.items():
        needed = ancestors(graph.nodes, [value])
        nodes = tuple(node for node in graph.nodes if not needed.isdisjoint(node.outputs))
        part = replace(graph, nodes=nodes, outputs=(value,))
        (kind,) = jax.eval_shape(partial(run, part, inputs, replace(context, updates=None)))
        sizes[name] = kind.shape[axis]
    return sizes


def evaluate_shapes(proto: ModelProto, graph: Graph, tensors: Mapping[str, Any]) -> Shapes | None:
    """Return the shapes of the main graph's values, evaluated on inputs of two sizes.

    Values that depend on nodes whose results have no fixed shape are left out. None if the
    evaluation fails, as for sizes that do not fit.
    """
    unfixed = [name for node in graph.nodes for name in node.outputs if node.op.dynamic]
    dynamic = behind(graph.nodes, unfixed)
    fixed = tuple(node for node in graph.nodes if dynamic.isdisjoint(node.outputs))
    graph = replace(graph, nodes=fixed)
    inputs = [to_value(v) for v in proto.graph.input if v.name in graph.inputs]
    shared: dict[Any, tuple[int, int]] = {}
    for value in inputs:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                shared.setdefault(size or (value.name, axis), _SIZES[axis == 0])
    inner = [n for n, pair in shared.items() if isinstance(n, str) and pair == _SIZES[False]]
    apart = shared | {n: (32, 48 + _APART * i) for i, n in enumerate(inner, 1)}

    def at(sizes: Mapping[Any, tuple[int, int]], which: int) -> tuple[dict[str, Any], set[str]]:
        chosen = {name: pair[which] for name, pair in sizes.items()}
        return evaluated_at(inputs, graph, tensors, chosen)

    try:
        with limits.inspection_limits():
            first, known = at(shared, 0)
            try:
                sizes, (second, _) = apart, at(apart, 1)
            except Error:  # two names that mean one size, as of tokens and their mask
                sizes, (second, _) = shared, at(shared, 1)
    except Error:
        return None
    names = {name: pair for name, pair in sizes.items() if isinstance(name, str)}
    values = {}
    for name, value in first.items():
        pair = value.shape, second[name].shape
        if len(pair[0]) == len(pair[1]):
            shape = tuple(_dimension(a, b, names) for a, b in zip(*pair, strict=True))
            values[name] = Value(name, np.dtype(value.dtype), shape)
    return Shapes(values, frozenset(known))


def evaluated_at(
    inputs: Iterable[Value], graph: Graph, tensors: Mapping[str, Any], sizes: Mapping[Any, int]
) -> tuple[dict[str, Any], set[str]]:
    """Return shapes and dtypes of all values for these sizes of open dimensions, and the known.

    Raises:
      Error: a node fails, or an input has no shape.
    """
    arguments = {}
    for value in inputs:
        if value.dtype is None or value.dtype == object or value.shape is None:
            raise InputError(f"input {value} has no shape")
        shape = [
            d if isinstance(d, int) else sizes[d or (value.name, axis)]
            for axis, d in enumerate(value.shape)
        ]
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        limits.check_size(shape, dtype)
        arguments[value.name] = jax.ShapeDtypeStruct(shape, dtype)
    names = tuple(name for node in graph.nodes for name in node.outputs if name)
    known: dict[str, np.ndarray] = {}

    def arrays(arguments):
        context = Context(tensors, jax.random.key(0), False)
        outputs = run(replace(graph, outputs=names), arguments, context)
        shaped = {n: x for n, x in zip(names, outputs, strict=True) if hasattr(x, "shape")}
        known.update((n, x) for n, x in shaped.items() if isinstance(x, np.ndarray))
        return {n: x for n, x in shaped.items() if n not in known}  # of which JAX has the type

    with limits.inspection_limits():
        traced = jax.eval_shape(arrays, arguments)
    return traced | {n: x for n, x in known.items() if x.dtype != object}, {*known}


def _dimension(a: int, b: int, names: Mapping[str, tuple[int, int]]) -> int | str | None:
    """Return the name of a dimension that is `a` in one evaluation and `b` in the other."""
    if a == b:
        return a
    for name, (first, second) in names.items():
        if a * second == b * first and a % first == 0:
            return name if a == first else f"{a // first}*{name}"
    return None


def infer_types(
    proto: ModelProto, tensors: Mapping[str, Any], names: Collection[str]
) -> dict[str, TypeProto]:
    """Return the types of values from the file or ONNX's shape inference, where one knows."""
    types = declared_types(proto)
    if not {*names} <= types.keys():
        small = {n: np.asarray(v) for n, v in tensors.items() if v.nbytes <= _SMALL}
        filled = saving.to_onnx(proto, small, (), ())
        crashing_inference.rename_crashing_nodes(filled)
        # with data_prop it would keep lists of numbers that are as long as the file says
        with suppress(onnx.shape_inference.InferenceError, MemoryError, ValueError, RuntimeError):
            types = declared_types(onnx.shape_inference.infer_shapes(filled)) | types
    return {name: types[name] for name in names if name in types}


def declared_types(proto: ModelProto) -> dict[str, TypeProto]:
    """Return the types in a file that ONNX's checker takes: tensors with a type and a rank."""
    graph = proto.graph
    return {
        value.name: value.type
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type and value.type.tensor_type.HasField("shape")
    }


def type_of(value: Value) -> TypeProto:
    """Convert a value to ONNX's type, where a multiple of a dimension has no name."""
    assert value.dtype is not None
    shape = None
    if value.shape is not None:
        shape = [None if isinstance(d, str) and "*" in d else d for d in value.shape]
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), shape)
