"""Parts of a graph that are files of their own: their names, and what computes some values."""

from collections.abc import Callable, Iterable, Set

from onnx import GraphProto, ModelProto, NodeProto

from jaxonnx._io.order import reads
from jaxonnx._io.protos import all_graphs, all_nodes
from jaxonnx._io.records import QUANTIZATION, SPARSITY
from jaxonnx.errors import InputError


def refuse_records(proto: ModelProto) -> None:
    """Raise an InputError if a graph that is to be several files has a record of its weights."""
    if records := {SPARSITY, QUANTIZATION} & {entry.key for entry in proto.metadata_props}:
        raise InputError(
            f"the record {min(records)!r} is of all files of a folder: save the model as one file, "
            "with a path that ends in .onnx"
        )


def value_names(main: GraphProto) -> set[str]:
    """Return all names of values in a graph and its subgraphs."""
    names: set[str] = set()
    for graph in all_graphs(main):
        names |= {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        names |= {sparse.values.name for sparse in graph.sparse_initializer}
        names.update(name for node in graph.node for name in (*node.input, *node.output))
    return names - {""}


def rename_values(
    main: GraphProto, new: Callable[[str], str], of_node: Callable[[str], str] = str
) -> None:
    """Give all values and nodes of a graph and its subgraphs other names, in place."""
    for graph in all_graphs(main):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = new(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = new(sparse.values.name)
        for note in graph.quantization_annotation:
            note.tensor_name = new(note.tensor_name)
            for entry in note.quant_parameter_tensor_names:
                entry.value = new(entry.value)
        for node in graph.node:
            node.name = of_node(node.name)
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]


def ancestors(
    nodes: Iterable[NodeProto], names: Set[str], without: Set[str] = frozenset()
) -> set[str]:
    """Return `names` and their ancestors, without following those in `without`."""
    values = {*names}
    for node in reversed([*nodes]):
        if not values.isdisjoint(node.output):
            values |= reads(node) - {*without}
    return values


def extract_part(
    proto: ModelProto, header: ModelProto, names: Set[str], joined: Set[str]
) -> ModelProto:
    """Extract the nodes that compute these values into a model of their own."""
    result, graph = ModelProto(), proto.graph
    result.CopyFrom(header)
    result.ClearField("graph")
    result.graph.name, result.graph.doc_string = header.graph.name, header.graph.doc_string
    result.ir_version = max(header.ir_version, proto.ir_version)
    target = result.graph
    target.node.extend(node for node in graph.node if not names.isdisjoint(node.output))
    inputs = joined | {value.name for value in graph.input}
    target.value_info.extend(v for v in graph.value_info if v.name in names - inputs)
    target.initializer.extend(tensor for tensor in graph.initializer if tensor.name in names)
    sparse = (tensor for tensor in graph.sparse_initializer if tensor.values.name in names)
    target.sparse_initializer.extend(sparse)
    notes = (note for note in graph.quantization_annotation if note.tensor_name in names)
    target.quantization_annotation.extend(notes)
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    imported = {entry.domain for entry in result.opset_import}
    for domain in sorted({node.domain for node in all_nodes(target)} & versions.keys() - imported):
        result.opset_import.add(domain=domain, version=versions[domain])
    return result
