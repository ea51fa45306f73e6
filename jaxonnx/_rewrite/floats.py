"""A network in another floating-point type: float64 for derivatives and samplers, float32 or half.

A narrower type is replaced wherever the file names it: in tensors, declared types and attributes. A
node whose operator lacks the new type (Resize takes its scales in float32) gets Casts around it.

onnxruntime's converter writes float16. It lacks functions, `value_float`, and Casts in bodies: it
knows values by their names alone, and puts each Cast into the main graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto
from onnx.helper import make_attribute, make_node, make_tensor
from onnx.numpy_helper import from_array

from jaxonnx._display import list_some
from jaxonnx._graph.types import infer_types
from jaxonnx._io.protos import (
    Editor,
    all_graphs,
    all_nodes,
    all_tensors,
    local_names,
    onnx_type,
    rename_reads,
    subgraphs,
    tensor_of_constant,
    unused_name,
)
from jaxonnx._io.tensors import to_array
from jaxonnx._rewrite.network import Network, reenter, with_file
from jaxonnx._rewrite.opset import inline
from jaxonnx.errors import InputError, warn
from jaxonnx.views import FixedInputs

N = TypeVar("N", bound=Network)

_SIZES: dict[int, int] = {
    TensorProto.FLOAT16: 2,
    TensorProto.BFLOAT16: 2,
    TensorProto.FLOAT: 4,
    TensorProto.DOUBLE: 8,
}
"""The floating-point types that networks compute in, with their bytes."""
_SINGLE, _DOUBLE, _HALF = "tensor(float)", "tensor(double)", "tensor(float16)"
_HALVES = {_HALF, "tensor(bfloat16)"}
_CAST = 13
"""The opset of a Cast in a file of other operators alone, like those of trees."""
_TYPES = ("dtype", "output_datatype", "softmax_precision", "to")
"""The attributes that name the type of a result."""


def with_dtype(model: N, dtype: str) -> N:
    """Return a network that computes in float32 or float64, wherever it does in a narrower type.

    The types that are replaced are the narrowest of the weights and those up to `dtype`. A Cast to
    a narrower type than any weight stays, and rounds as the file says.

    Raises:
      InputError: JAX has no float64, as x64 is off; the weights have a wider type; a node reads the
        bits of numbers; or the model has adapters.
    """
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise InputError(
            "float64 needs JAX's 64-bit types: jax.config.update('jax_enable_x64', True), at the "
            "start of the program"
        )
    target, values = onnx_type(dtype), model._file_values
    kinds = {name: onnx_type(x.dtype) for name, x in values.items()}
    weights = {kind for name, kind in kinds.items() if values[name].size > 1 and kind in _SIZES}
    if any(_SIZES[kind] > _SIZES[target] for kind in weights):
        raise InputError(
            f"the file has weights in float64, and is not rounded to {dtype}: load the file that "
            "it was made from, and .replace(params=...) takes weights with .astype('float32')"
        )
    declared = {value.type.tensor_type.elem_type for value in model.proto.graph.input}
    least = min((_SIZES[kind] for kind in weights or _SIZES.keys() & declared), default=4)
    old = {kind for kind, size in _SIZES.items() if least <= size < _SIZES[target]}
    if not old:
        return model
    if model.proto.training_info:
        text = "the training graph of the file is left out: it is not converted"
        warn(text)
    # 1. the file
    file = Editor(model.proto)
    del file.proto.training_info[:]
    for body in (file.graph, *file.proto.functions):
        _replace_type(body, target, old)
    single: set[str] = set()
    if target == TensorProto.DOUBLE:
        single = _cast_to_single(file, infer_types(model.program.base, values), kinds)
    for tensor in _named_tensors(file.graph, single):
        _set_type(tensor, TensorProto.FLOAT)
    # 2. the tensors, and the values of inputs
    widened = {name for name, kind in kinds.items() if kind in old or kind == target} - single

    def convert(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: x.astype(dtype if name in widened else np.float32)
            if name in widened or (name in single and kinds[name] in old)
            else x
            for name, x in tensors.items()
        }

    constants = convert(model.program.constants)
    new = with_file(model, file.proto, constants, convert(model.params), convert(model.state))
    views = tuple(_convert_values(view, dtype, old) for view in new.program.views)
    return reenter(replace(new, program=replace(new.program, views=views)), model)


def _convert_values(view: Any, dtype: str, old: Collection[int]) -> Any:
    """Return a view whose values of inputs are in the new type."""
    if not isinstance(view, FixedInputs):
        return view
    values = {
        name: replace(x, array=x.array.astype(dtype)) if onnx_type(x.array.dtype) in old else x
        for name, x in view.values.items()
    }
    return replace(view, values=values)


def _replace_type(body: GraphProto | FunctionProto, target: int, old: Collection[int]) -> None:
    """Replace floating-point types in a graph or the body of a function, in place.

    Raises:
      InputError: a node reads the bits of numbers.
    """
    for tensor in all_tensors(body):
        if tensor.data_type in old:
            _set_type(tensor, target)
    inner = (g for node in body.node for graph in subgraphs(node) for g in all_graphs(graph))
    for graph in (body, *inner):
        named = isinstance(graph, GraphProto)
        for value in (*graph.value_info, *((*graph.input, *graph.output) if named else ())):
            _replace_declared(value.type, target, old)
    for node in all_nodes(body):
        if node.op_type == "BitCast":
            raise InputError(
                f"BitCast '{node.name or node.output[0]}' reads the bits of numbers, which have no "
                "meaning in another type"
            )
        attributes = {attribute.name: attribute for attribute in node.attribute}
        for name in _TYPES:
            attribute = attributes.get(name)
            if attribute is None and _default_type(node, name) in old:
                node.attribute.append(make_attribute(name, target))
            elif attribute is not None and attribute.i in old:
                attribute.i = target
        if node.op_type == "ConstantOfShape" and not attributes and TensorProto.FLOAT in old:
            node.attribute.append(make_attribute("value", make_tensor("", target, [1], [0])))


def _replace_declared(kind: TypeProto, target: int, old: Collection[int]) -> None:
    """Replace the element type of a declared type, in place."""
    match kind.WhichOneof("value"):
        case "tensor_type" if kind.tensor_type.elem_type in old:
            kind.tensor_type.elem_type = target
        case "sparse_tensor_type" if kind.sparse_tensor_type.elem_type in old:
            kind.sparse_tensor_type.elem_type = target
        case "sequence_type":
            _replace_declared(kind.sequence_type.elem_type, target, old)
        case "optional_type":
            _replace_declared(kind.optional_type.elem_type, target, old)
        case "map_type":
            _replace_declared(kind.map_type.value_type, target, old)


def _default_type(node: NodeProto, name: str) -> int:
    """Return the default of an attribute that names a type; 0 without a default."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return 0
    attribute = onnx.defs.get_schema(node.op_type).attributes.get(name)
    return 0 if attribute is None else attribute.default_value.i


def _set_type(tensor: TensorProto, kind: int) -> None:
    """Give a tensor another type, and convert its numbers where it holds them, in place."""
    if tensor.raw_data or tensor.float_data or tensor.int32_data or tensor.double_data:
        array = to_array(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        tensor.CopyFrom(from_array(array, tensor.name))
    tensor.data_type = kind


def _named_tensors(main: GraphProto, names: Collection[str]) -> Iterator[TensorProto]:
    """Yield the initializers and the tensors of Constant nodes with these names."""
    for graph in all_graphs(main):
        yield from (tensor for tensor in graph.initializer if tensor.name in names)
        for node in graph.node:
            tensor = tensor_of_constant(node)
            if tensor is not None and node.output[0] in names:
                yield tensor


# Operators that have float32 and not float64.


def _cast_to_single(file: Editor, types: Mapping[str, str], kinds: Mapping[str, int]) -> set[str]:
    """Put Casts around what an operator takes and gives in float32 alone, in place.

    Args:
      file: the file.
      types: the types of values, as far as they are known.
      kinds: those of its tensors.

    Returns:
      The tensors that only such operators read, which stay in float32 without a Cast.
    """
    versions = {_domain(e.domain): e.version for e in file.proto.opset_import}
    reads = Counter(name for node in all_nodes(file.graph) for name in node.input)
    reads.update(value.name for graph in all_graphs(file.graph) for value in graph.output)
    alone = Counter(
        node.input[i] for node in all_nodes(file.graph) for i in _single_positions(node, versions)
    )
    single = {name for name, count in alone.items() if name in kinds and count == reads[name]}
    operators: set[str] = set()

    def insert(body: GraphProto | FunctionProto, versions: Mapping[str, int]) -> None:
        nodes: list[NodeProto] = []
        for node in body.node:
            for inner in subgraphs(node):
                insert(inner, versions)
            before = len(nodes)
            for i in _single_positions(node, versions):
                name = node.input[i]
                if name not in single and types.get(name, "") in ("", _SINGLE, *_HALVES):
                    node.input[i] = file.unused_name(f"{name}/float32")
                    nodes.append(make_node("Cast", [name], [node.input[i]], to=TensorProto.FLOAT))
            nodes.append(node)
            for i in _single_positions(node, versions, outputs=True):
                name = node.output[i]
                node.output[i] = file.unused_name(f"{name}/float32")
                nodes.append(make_node("Cast", [node.output[i]], [name], to=TensorProto.DOUBLE))
            if len(nodes) > before + 1 and node.op_type != "Constant":
                operators.add(node.op_type)
        del body.node[:]
        body.node.extend(nodes)

    for whole in (file.proto, *file.proto.functions):
        body = whole if isinstance(whole, FunctionProto) else whole.graph
        insert(body, {_domain(e.domain): e.version for e in whole.opset_import})
        if not {"", "ai.onnx"} & {entry.domain for entry in whole.opset_import}:
            whole.opset_import.add(domain="", version=_CAST)
    if operators:
        text = f"{list_some(sorted(operators), '')}: computed in float32, as ONNX has no other type"
        warn(text)
    return single


def _single_positions(
    node: NodeProto, versions: Mapping[str, int], *, other: str = _DOUBLE, outputs: bool = False
) -> Iterator[int]:
    """Yield the positions of inputs, or of outputs, that have float32 in ONNX and not `other`."""
    names, domain = node.output if outputs else node.input, _domain(node.domain)
    if any(a.name in ("value_float", "value_floats") for a in node.attribute):
        yield from range(len(names))  # of a Constant
    if not onnx.defs.has(node.op_type, versions.get(domain, 1), domain):
        return
    schema = onnx.defs.get_schema(node.op_type, versions.get(domain, 1), domain)
    parameters = schema.outputs if outputs else schema.inputs
    for i, name in enumerate(names):
        types = {*parameters[min(i, len(parameters) - 1)].types}
        of_floats = not outputs or types <= {_SINGLE, *_HALVES}
        if name and _SINGLE in types and other not in types and of_floats:
            yield i


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


# Files for the converter to float16, and what it wrote.


def prepare_to_halve(proto: ModelProto) -> ModelProto:
    """Return a file without functions, in which no two values have the same name.

    Constants of Python's numbers (`value_float`) become tensors.
    """
    proto = inline(proto)
    tensors = {tensor.name for tensor in proto.graph.initializer}  # whose types the tensors say
    values = [value for value in proto.graph.value_info if value.name not in tensors]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(values)
    _separate_names(proto.graph, local_names(proto.graph))
    for node in all_nodes(proto.graph):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                numbers = attribute.f if attribute.name == "value_float" else [*attribute.floats]
                tensor = from_array(np.asarray(numbers, np.float32))
                attribute.CopyFrom(make_attribute("value", tensor))
    return proto


def operators_without_half(proto: ModelProto) -> set[str]:
    """Return the operators of a file that its opset has in float32 and not in float16.

    Before opset 19 these are QuantizeLinear and DequantizeLinear.
    """
    versions = {_domain(entry.domain): entry.version for entry in proto.opset_import}
    return {
        node.op_type
        for node in all_nodes(proto.graph)
        for outputs in (False, True)
        if [*_single_positions(node, versions, other=_HALF, outputs=outputs)]
    }


def constants_of_bodies(graph: GraphProto) -> Iterator[tuple[str, Any]]:
    """Yield the names of tensors within subgraphs, and their arrays."""
    for body in [*all_graphs(graph)][1:]:
        yield from ((tensor.name, to_array(tensor)) for tensor in body.initializer)
        for node in body.node:
            if (tensor := tensor_of_constant(node)) is not None:
                yield node.output[0], to_array(tensor)


def move_casts(graph: GraphProto) -> None:
    """Move each Cast of a value of a subgraph from the main graph to that subgraph, in place."""
    homes = {name: body for body in all_graphs(graph) for name in local_names(body)}
    moved = True
    while moved:  # a Cast may read another's result
        moved = False
        for i, node in reversed([*enumerate(graph.node)]):
            body = homes.get(node.input[0], graph) if node.op_type == "Cast" else graph
            if body is graph:
                continue
            places = [j for j, n in enumerate(body.node) if node.input[0] in n.output]
            body.node.insert(max(places, default=-1) + 1, node)
            homes[node.output[0]], moved = body, True
            del graph.node[i]
            for j, value in reversed([*enumerate(graph.value_info)]):
                if value.name == node.output[0]:
                    del graph.value_info[j]


def _separate_names(graph: GraphProto, used: set[str]) -> None:
    """Number values of subgraphs whose names other graphs have, too, in place."""
    for node in graph.node:
        for body in subgraphs(node):
            pairs = ((name, unused_name(name, used)) for name in sorted(local_names(body)))
            new = {name: other for name, other in pairs if name != other}
            for inner in body.node:
                rename_reads(inner, new)
                inner.output[:] = [new.get(name, name) for name in inner.output]
            for value in (*body.input, *body.output, *body.value_info, *body.initializer):
                value.name = new.get(value.name, value.name)
            for sparse in body.sparse_initializer:
                sparse.values.name = new.get(sparse.values.name, sparse.values.name)
            _separate_names(body, used)
