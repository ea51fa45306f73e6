"""Shapes and types of a graph's values: by evaluation on shapes, or by ONNX's inference."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto, helper

from jaxonnx import _limits as limits
from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io import save as saving
from jaxonnx._io.protos import all_nodes
from jaxonnx._run.scope import Context, run
from jaxonnx.errors import Error, InputError

_SMALL = 4096
"""Bytes up to which shape inference gets the value of a tensor: axes, sizes and the like."""

_SIZES = {True: (3, 7), False: (32, 48)}
"""The sizes of a symbolic dimension in two evaluations: where it is the first one of an input
(True), and elsewhere. The ratios differ, so that a multiple of one kind is not taken for a multiple
of the other."""

_APART = 16
"""The number that each named dimension after the first adds to its second size, so that the ratios
of different names differ."""


@dataclass(frozen=True)
class Shapes:
    """Types and shapes of the arrays in a graph, from an evaluation on shapes.

    Attributes:
      values: dtype and shape by name; a symbolic dimension is its name ("batch"), a multiple of it
        ("2*batch"), or None.
      known: the names of values that depend on nothing but the shapes of inputs.
    """

    values: Mapping[str, Value]
    known: frozenset[str]


def evaluate_shapes(proto: ModelProto, graph: Graph, tensors: Mapping[str, Any]) -> Shapes | None:
    """Find types and shapes of the main graph's values by evaluations on two sizes of its inputs.

    A dimension that differs between the two is symbolic. Values behind nodes whose results have no
    static shape (NonZero, ...) are left out.

    Returns:
      None if an evaluation fails, for example because the sizes do not fit each other.
    """
    unfixed = [name for node in graph.nodes for name in node.outputs if node.op.dynamic]
    dynamic = behind(graph.nodes, unfixed)
    fixed = tuple(node for node in graph.nodes if dynamic.isdisjoint(node.outputs))
    graph = replace(graph, nodes=fixed)
    inputs = [to_value(v) for v in proto.graph.input if v.name in graph.inputs]
    # by name, or by input and axis for a dimension without one; a name has one size everywhere
    shared: dict[Any, tuple[int, int]] = {}
    for value in inputs:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                shared.setdefault(size or (value.name, axis), _SIZES[axis == 0])
    inner = [n for n, pair in shared.items() if isinstance(n, str) and pair == _SIZES[False]]
    apart = shared | {n: (32, 48 + _APART * i) for i, n in enumerate(inner, 1)}

    def evaluate(
        sizes: Mapping[Any, tuple[int, int]], which: int
    ) -> tuple[dict[str, Any], set[str]]:
        chosen = {name: pair[which] for name, pair in sizes.items()}
        return evaluate_at(inputs, graph, tensors, chosen)

    try:
        with limits.inspection_limits():
            first, constant = evaluate(shared, 0)
            try:
                sizes, (second, _) = apart, evaluate(apart, 1)
            except Error:  # two names may mean one size: those of tokens and of their mask
                sizes, (second, _) = shared, evaluate(shared, 1)
    except Error:
        return None
    names = {name: pair for name, pair in sizes.items() if isinstance(name, str)}
    values = {}
    for name, value in first.items():
        pair = value.shape, second[name].shape
        if len(pair[0]) == len(pair[1]):
            shape = tuple(_dimension(a, b, names) for a, b in zip(*pair, strict=True))
            values[name] = Value(name, np.dtype(value.dtype), shape)
    return Shapes(values, frozenset(constant))


def evaluate_at(
    inputs: Iterable[Value], graph: Graph, tensors: Mapping[str, Any], sizes: Mapping[Any, int]
) -> tuple[dict[str, Any], set[str]]:
    """Evaluate a graph on shapes, with these sizes of symbolic dimensions.

    Args:
      inputs: the inputs of the graph.
      graph: the bound graph.
      tensors: the values of its named tensors.
      sizes: by the name of a dimension, or by (input, axis) for one without a name.

    Returns:
      Objects with the shape and dtype of each array, by name; and the names of known values.

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
    constant: dict[str, np.ndarray] = {}

    def arrays(arguments):
        context = Context(tensors, jax.random.key(0), False)
        outputs = run(replace(graph, outputs=names), arguments, context)
        shaped = {n: x for n, x in zip(names, outputs, strict=True) if hasattr(x, "shape")}
        constant.update((n, x) for n, x in shaped.items() if isinstance(x, np.ndarray))
        # known values may have types that JAX lacks (strings) or narrows (64 bits)
        return {n: x for n, x in shaped.items() if n not in constant}

    with limits.inspection_limits():
        traced = jax.eval_shape(arrays, arguments)
    return traced | {n: x for n, x in constant.items() if x.dtype != object}, {*constant}


def _dimension(a: int, b: int, names: Mapping[str, tuple[int, int]]) -> int | str | None:
    """Return the dimension that is `a` in one evaluation and `b` in the other.

    It is an integer, a name of `names` (their two sizes), a multiple of one ("2*batch"), or None.
    """
    if a == b:
        return a
    for name, (first, second) in names.items():
        if a * second == b * first and a % first == 0:
            return name if a == first else f"{a // first}*{name}"
    return None


def infer_types(
    proto: ModelProto, tensors: Mapping[str, Any], names: Collection[str]
) -> dict[str, TypeProto]:
    """Return the types of values that the file declares or ONNX's shape inference finds.

    Args:
      proto: the file.
      tensors: the values of its named tensors; small ones are given to the inference.
      names: the values.
    """
    types = declared_types(proto)
    if not {*names} <= types.keys():
        small = {n: np.asarray(v) for n, v in tensors.items() if v.nbytes <= _SMALL}
        filled = saving.to_onnx(proto, small, (), ())
        rename_crashing_nodes(filled)
        # no data_prop: it would allocate lists as long as a hostile file says
        with suppress(onnx.shape_inference.InferenceError, MemoryError, ValueError, RuntimeError):
            types = declared_types(onnx.shape_inference.infer_shapes(filled)) | types
    return {name: types[name] for name in names if name in types}


def declared_types(proto: ModelProto) -> dict[str, TypeProto]:
    """Return the types that a file declares, if they are complete: tensors with dtype and rank."""
    graph = proto.graph
    return {
        value.name: value.type
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type and value.type.tensor_type.HasField("shape")
    }


def type_of(value: Value) -> TypeProto:
    """Convert a value to a TypeProto; a multiple of a dimension becomes one without a name."""
    assert value.dtype is not None
    shape = None
    if value.shape is not None:
        shape = [None if isinstance(d, str) and "*" in d else d for d in value.shape]
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), shape)


# Operators whose shape inference in ONNX crashes the process (out-of-bounds reads).

_HIDDEN = "hidden"
"""A domain that ONNX's shape inference does not know, so that it skips the nodes in it."""

_NEVER = {"Einsum", "EyeLike", "GatherND", "LabelEncoder", "RegexFullMatch", "TreeEnsemble"}
"""Operators whose inference reads a type that an input may lack, or axes before the first: indices
of GatherND may have sizes below zero, which inference itself computes. That of Einsum has no end
for an equation with digits."""


def rename_crashing_nodes(proto: ModelProto) -> None:
    """Move nodes that would crash inference to an unknown domain, in place.

    Inference then finds no shapes of their results.
    """
    bodies = (proto.graph, *proto.functions)
    nodes = [n for body in bodies for n in all_nodes(body) if not _is_safe(n)]
    for node in nodes:
        node.domain = _HIDDEN
    for imports in (proto, *proto.functions) if nodes else ():
        imports.opset_import.append(helper.make_opsetid(_HIDDEN, 1))


def _is_safe(node: NodeProto) -> bool:
    """Check that inference of a node reads only outputs that it has and an axis of 32 bits."""
    if node.op_type in _NEVER:
        return False
    if node.op_type == "Split":
        count = _number(node, "num_outputs", len(node.output))
        return count == len(node.output)
    if node.op_type == "LayerNormalization":
        axis = _number(node, "axis", -1)
        return axis is not None and -(2**31) <= axis < 2**31
    return True


def _number(node: NodeProto, name: str, default: int) -> int | None:
    """Return an integer attribute; None if it has another type or refers to one of a function."""
    for attribute in node.attribute:
        if attribute.name == name:
            literal = attribute.type == AttributeProto.INT and not attribute.ref_attr_name
            return attribute.i if literal else None
    return default
