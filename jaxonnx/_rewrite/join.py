"""Two networks in one file: the nodes of one, and those of another that reads its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from onnx import ModelProto

from jaxonnx._display import list_some
from jaxonnx._graph.values import Value, list_values
from jaxonnx._io.protos import (
    all_nodes,
    declare,
    rename_values,
    tensor_of_constant,
    unused_name,
    value_names,
)
from jaxonnx._io.save import to_onnx
from jaxonnx._rewrite.network import Network, with_file
from jaxonnx.errors import InputError

N = TypeVar("N", bound=Network)


def join(model: N, following: Network, consumed: Sequence[str], outputs: Sequence[str] | None) -> N:
    """Return a network that passes its outputs to another one.

    Tensors, nodes and values of the second network keep their names, with a number behind those
    that the first one has, too. Parameters, state and constants of both stay what they are.

    Args:
      model: the first network.
      following: the second one, without views.
      consumed: the outputs of the first that the second takes, in its order; others follow its own.
      outputs: other names for the outputs of the second.

    Raises:
      InputError: the outputs do not fit the inputs; the opsets or functions differ; the second has
        views, or a name is taken.
    """
    # 1. check that they fit
    declared = {value.name: value for value in model.outputs}
    _check_values([declared[name] for name in consumed], following.inputs)
    if views := [type(view).__name__ for view in following.program.views]:
        raise InputError(
            f"the second network has views ({list_some(views, '')}), which no file has: call such "
            "methods on the result, and merge adapters before"
        )
    imports = [{e.domain: e.version for e in net.proto.opset_import} for net in (model, following)]
    for domain in imports[0].keys() & imports[1].keys():
        versions = [opsets[domain] for opsets in imports]
        if versions[0] != versions[1]:
            way = (
                f"jaxonnx.convert(model, opset={max(versions)})" if domain == "" else "export both"
            )
            raise InputError(
                f"the networks have opsets {versions[0]} and {versions[1]} of "
                f"{domain or 'ai.onnx'}: {way} gives both the same"
            )
    # 2. give the second network names that the first one does not have
    values = following._file_values
    second = to_onnx(following.proto, values, following.params, following.state)
    _move_constants(second, values)
    used = value_names(model.proto.graph)
    starts = [value.name for value in following.inputs]
    names = dict(zip(starts, consumed, strict=True))
    results = [value.name for value in second.graph.output]
    if outputs is not None:
        if len(outputs) != len(results) or used & {*outputs} or len({*outputs}) < len(outputs):
            raise InputError(
                f"outputs= must be {len(results)} names that no value has, got {[*outputs]}"
            )
        used.update(outputs)
        names |= zip(results, outputs, strict=True)
    for name in sorted(value_names(second.graph) - names.keys()):
        names[name] = unused_name(name, used)
    nodes = {node.name for node in all_nodes(model.proto.graph)}
    rename_values(
        second.graph,
        lambda name: names.get(name, name),
        lambda name: unused_name(name, nodes) if name else "",
    )
    sizes = {
        b: a
        for name, value in zip(consumed, following.inputs, strict=True)
        for a, b in zip(declared[name].shape or (), value.shape or (), strict=False)
        if a is not None and isinstance(b, str)
    }
    for value in (*second.graph.output, *second.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            size = sizes.get(dim.dim_param)
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size
    # 3. write one file
    result = ModelProto()
    result.CopyFrom(model.proto)
    del result.training_info[:]
    others = [value for value in result.graph.output if value.name not in consumed]
    result.graph.value_info.extend(v for v in result.graph.output if v.name in consumed)
    del result.graph.output[:]
    result.graph.output.extend([*second.graph.output, *others])
    for field in ("node", "value_info", "sparse_initializer", "quantization_annotation"):
        getattr(result.graph, field).extend(getattr(second.graph, field))
    groups: list[dict[str, Any]] = [
        {names.get(name, name): x for name, x in group.items()}
        for group in (following.program.constants, following.params, following.state)
    ]
    tensors = {name: x for group in groups for name, x in group.items()}
    result.graph.initializer.extend(
        declare(t.name, np.asarray(tensors[t.name])) if t.name in tensors else t
        for t in second.graph.initializer
    )
    _add_functions(result, second)
    result.opset_import.extend(e for e in second.opset_import if e.domain not in imports[0])
    result.ir_version = max(result.ir_version, second.ir_version)
    return with_file(model, result, *groups)


def _check_values(outputs: Sequence[Value], inputs: Sequence[Value]) -> None:
    """Raise an InputError unless outputs can be passed as these inputs."""

    def fits(output: Value, value: Value) -> bool:
        sizes = output.shape, value.shape
        if output.dtype != value.dtype or None in sizes:
            return output.dtype == value.dtype
        pairs = [*zip(output.shape or (), value.shape or (), strict=False)]
        alike = all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)
        return len(output.shape or ()) == len(value.shape or ()) and alike

    if len(outputs) != len(inputs) or not all(map(fits, outputs, inputs)):
        raise InputError(
            f"the outputs {list_values(outputs)} do not fit the inputs {list_values(inputs)} of "
            "the second network: with_outputs and with_inputs choose others"
        )


def _move_constants(proto: ModelProto, values: Mapping[str, Any]) -> None:
    """Make initializers of the named tensors in Constant nodes of the main graph, in place."""
    nodes = []
    for node in proto.graph.node:
        tensor = tensor_of_constant(node)
        if tensor is None or node.output[0] not in values:
            nodes.append(node)
        else:
            proto.graph.initializer.append(tensor)
            proto.graph.initializer[-1].name = node.output[0]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _add_functions(result: ModelProto, second: ModelProto) -> None:
    """Add the functions of the second file, in place.

    Raises:
      InputError: both files have a function of one name, and they differ.
    """
    functions = {(f.domain, f.name, f.overload): f for f in result.functions}
    for function in second.functions:
        key = function.domain, function.name, function.overload
        if key not in functions:
            result.functions.append(function)
        elif functions[key] != function:
            raise InputError(
                f"both networks have a function '{function.domain}.{function.name}', and they "
                "differ: jaxonnx.convert(model, opset=...) writes one without functions"
            )
