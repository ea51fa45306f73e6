"""A graph cut at other outputs: features of an inner layer, a backbone for a new head."""

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.select import resolve
from jaxonnx._io.protos import subgraphs
from jaxonnx._require import require
from jaxonnx._run.shapes import declared_types, evaluate_shapes, infer_types, type_of


def cut(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], outputs: str | Iterable[str]
) -> ModelProto:
    """Cut a model at values of its main graph; return the smaller file.

    Nodes, initializers, inputs, value types and functions that the new outputs do not need are
    dropped, and so is training_info, which belongs to the whole graph. The types of the outputs are
    those of the file, else those that ONNX's shape inference finds, else those of an evaluation on
    shapes, which takes longer.

    Args:
      proto: the file.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      outputs: names of values, inputs included, or of nodes (then: the node's first output), or of
        modules as PyTorch's exporters record them (then: what the last node of the module gives).

    Raises:
      InputError: a name is unknown; the message has similar ones.
    """
    listed = [outputs] if isinstance(outputs, str) or not isinstance(outputs, Iterable) else outputs
    listed = [*listed]
    named = all(isinstance(name, str) for name in listed)
    require("outputs", outputs, named, "names of values of the graph")
    # `resolve` knows results of nodes only; an output may be an initializer or an input
    ends = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    names = [name if name in ends else resolve(proto.graph, name) for name in listed]
    fits = names and len({*names}) == len(names)
    require("outputs", listed, fits, "different values of the graph")
    # 1. the values from which the outputs are computed, themselves included
    needed = ancestors(graph.nodes, names)
    for node in reversed(proto.graph.node):
        # the bound graph lacks nodes that give named tensors, and those of fused groups
        if not needed.isdisjoint(node.output):
            needed.update(filter(None, node.input))
    # 2. drop the old outputs, and all that is not needed
    result = ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    main = result.graph
    _filter(main.node, lambda node: not needed.isdisjoint(node.output))
    for entries in (main.input, main.initializer, main.value_info):
        _filter(entries, lambda entry: entry.name in needed)
    _filter(main.sparse_initializer, lambda sparse: sparse.values.name in needed)
    _filter(main.quantization_annotation, lambda entry: entry.tensor_name in needed)
    # the declared type of an output that stays a value moves to value_info
    typed = {value.name for value in (*main.input, *main.value_info)}
    main.value_info.extend(
        value for value in main.output if value.name in needed and value.name not in typed
    )
    del main.output[:]
    # keys of the functions that nodes call, directly or in subgraphs and functions
    functions = {_key(function, function.name): function for function in result.functions}
    called: set[tuple[str, str, str]] = set()
    waiting = [*result.graph.node]
    while waiting:
        node = waiting.pop()
        waiting += [inner for graph in subgraphs(node) for inner in graph.node]
        key = _key(node, node.op_type)
        if key in functions and key not in called:
            called.add(key)
            waiting += functions[key].node
    _filter(result.functions, lambda function: _key(function, function.name) in called)
    # 3. declare the new outputs
    declared, kinds = declared_types(result), infer_types(result, tensors, names)
    vague = []  # a type is unknown, or has a dimension that inference names unk__0, unk__1, ...
    for name in names:
        kind = kinds.get(name)
        dims = () if kind is None else kind.tensor_type.shape.dim
        unknown = kind is None or any(dim.dim_param.startswith("unk__") for dim in dims)
        if unknown and name not in declared:
            vague.append(name)
    if vague:
        shapes = evaluate_shapes(result, bind(result, result.graph, tensors.keys()), tensors)
        values = shapes.values if shapes else {}
        kinds |= {name: type_of(values[name]) for name in vague if name in values}
    _filter(result.graph.value_info, lambda value: value.name not in names)
    result.graph.output.extend(ValueInfoProto(name=name) for name in names)
    for value in result.graph.output:
        if value.name in kinds:
            value.type.CopyFrom(kinds[value.name])
    return result


def _key(item: NodeProto | FunctionProto, name: str) -> tuple[str, str, str]:
    """Return domain, name and overload, which identify a function; "ai.onnx" is the domain ""."""
    return "" if item.domain == "ai.onnx" else item.domain, name, item.overload


def _filter(repeated: Any, keep: Any) -> None:
    """Keep the items of a repeated protobuf field for which `keep(item)` holds, in place."""
    filtered = [item for item in repeated if keep(item)]
    if len(filtered) < len(repeated):
        del repeated[:]
        repeated.extend(filtered)
