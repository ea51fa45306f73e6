"""Rounding as a view: weights in floating point, which the file of the network has as integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from jaxonnx._graph.ancestors import select_part
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import uses
from jaxonnx._io import order, records
from jaxonnx._rewrite.network import Network, enter, with_file
from jaxonnx._run.scope import Context, run
from jaxonnx.ops.contrib.moving_ranges import limits_of
from jaxonnx.quantization._fold_norms import fold_rounded_norms
from jaxonnx.quantization._qoperators import (
    Opened,
    close_operators,
    has_quantized_operators,
    open_operators,
)
from jaxonnx.quantization._record import Bias, Record, declare, record_of, remove_tensor
from jaxonnx.views import Addition, View

N = TypeVar("N", bound=Network)


@dataclass(frozen=True)
class Rounding(View):
    """The file has integers where the network rounds weights; its record says which (`Record`).

    Attributes:
      report: the `Sensitivity` by which types were chosen, if they were.
      clipped: the fraction of the numbers of activations that the calibrated range clips, but 0.
    """

    report: Any = field(default=None, compare=False)
    clipped: Mapping[str, float] = field(default_factory=dict, compare=False)

    def leave(self, network: N, form: str | None) -> tuple[N, list[Addition]]:
        network, _ = super().leave(network, form)
        write = partial(fold, graph=network.graph, values=network._file_values)
        return network, [Addition(frozenset(), write)]


def open_quantized(model: N) -> tuple[N, int]:
    """Return a quantized model whose integer weights and biases are parameters in floating point.

    Operators on integers are opened, too. The file is written as before.

    Returns:
      The model, and the number of the parameters.
    """
    proto, added, weights_of_operators = open_operators(model.proto, model.tensors)
    model = with_file(model, proto, added)
    proto, floats, points = unfold(model.proto, model.graph, model.tensors, weights_of_operators)
    model = with_file(model, proto, points, floats)
    weights = {*floats, *(record_of(proto) or Record()).names.values()}
    return (model if model.program.find(Rounding) else enter(model, Rounding())), len(weights)


def is_quantized(model: Network) -> bool:
    """Check whether a model has weights in integers, or in front of QuantizeLinear in its file.

    The integers are behind DequantizeLinear or in operators on them.
    """
    entry = record_of(model.proto)
    if entry is None or entry.folded:
        weights = {*model.params}
        if any(
            n.op_type == "QuantizeLinear" and n.input[0] in weights for n in model.proto.graph.node
        ):
            return True
    stored = {name for name, x in model.tensors.items() if np.dtype(x.dtype).kind not in "fcb"}
    return has_quantized_operators(model.proto.graph) or any(
        node.op.dequantizes and node.inputs[0] in stored for node in model.graph.nodes
    )


_SMALL_TYPES = ("int2", "uint2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
"""Types that only weights are stored in, so that a tensor of one needs no look at its readers."""


def fold(proto: ModelProto, graph: Graph, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Store quantized weights, scales and biases as initializers, as a deployed file has them.

    The nodes that compute them, and the float tensors that only these read, are removed.

    Args:
      proto: the file, with the data of its tensors; it is changed in place.
      graph: its main graph, bound.
      values: the values of its named tensors.

    Returns:
      `proto`.
    """
    entry = record_of(proto)
    if entry is None or entry.folded:
        return proto
    main, entry = proto.graph, _restrict(entry, proto.graph, values)
    # 1. compute the integers of the weights, in place of the nodes that do
    names = entry.folds
    part = select_part(graph, names)
    folded = dict(zip(names, map(np.asarray, run(part, {}, Context(values))), strict=True))
    computed = {name for node in part.nodes for name in node.outputs}
    candidates = {name for node in part.nodes for name in node.reads}
    for i, node in reversed([*enumerate(main.node)]):
        if computed.intersection(node.output):
            del main.node[i]
    for name, value in folded.items():
        main.initializer.append(numpy_helper.from_array(value, name))
    tensors = {**values, **folded}
    # 2. fold BatchNormalizations that training kept, store biases in int32, drop idle limits
    norms = [node for node in main.node if node.output[0] in entry.norms]
    convs = [node for node in main.node if {*node.output} & {norm.input[0] for norm in norms}]
    candidates.update(name for node in (*norms, *convs) for name in node.input[1:])
    for name, value in fold_rounded_norms(main, entry.norms, tensors).items():
        tensors[name] = value
        remove_tensor(main, name)
        main.initializer.append(numpy_helper.from_array(value, name))
    for bias in entry.biases:
        _store_bias(main, bias, tensors[bias.name], *(tensors[name] for name in bias.scales))
    candidates |= _remove_idle(main, entry.idle, tensors)
    # 3. remove the float tensors that nothing reads any more
    for name in candidates - order.count_readers(main).keys() - folded.keys():
        remove_tensor(main, name)
    records.rename_sparse(
        proto, {entry.names[stored]: stored for stored in entry.folds if stored in entry.names}
    )
    # 4. quantized operators in place of the pairs around them
    close_operators(main, entry.opened)
    order.sort(main)
    replace(entry, norms=(), idle=(), positive=(), folded=True, learned={}).write(proto)
    return proto


def _restrict(entry: Record, graph: GraphProto, values: Mapping[str, np.ndarray]) -> Record:
    """Restrict a record to the tensors that a graph still has, after a selection of outputs.

    A BatchNormalization stays if the result of its convolution is an output, too, and so does its
    B in floating point.
    """
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {value.name for value in graph.output}
    norms = {name: makers[name].input for name in entry.norms if name in makers}
    folded = {name for name, inputs in norms.items() if inputs[0] not in outputs}
    floats = {inputs[2] for name, inputs in norms.items() if name not in folded}
    values_left = makers.keys() | values.keys()
    return replace(
        entry,
        folds=tuple(name for name in entry.folds if name in makers),
        scales=tuple(name for name in entry.scales if name in values_left),
        names={stored: name for stored, name in entry.names.items() if stored in makers},
        biases=tuple(
            b
            for b in entry.biases
            if values_left.issuperset((b.name, *b.scales)) and b.name not in floats
        ),
        norms=tuple(name for name in entry.norms if name in folded),
    )


def _remove_idle(
    graph: GraphProto, results: tuple[str, ...], tensors: Mapping[str, np.ndarray]
) -> set[str]:
    """Remove each Relu and Clip whose limits the QuantizeLinear that alone reads it has, too.

    Args:
      results: of the nodes that may be removed.

    Returns:
      The names that the removed nodes read.
    """
    producers = {node.output[0]: node for node in graph.node if node.output[0] in results}
    times = order.count_readers(graph)
    names: set[str] = set()
    for node in graph.node:
        before = producers.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
        if before is None or times[node.input[0]] > 1 or len(node.input) < 3:
            continue
        scale, point = (tensors.get(name) for name in node.input[1:3])
        limits = _limits_of(before, tensors)
        if scale is None or point is None or scale.size > 1 or limits is None:
            continue
        least, _, most = limits_of(point.dtype)
        with np.errstate(divide="ignore"):
            low, high = np.rint(np.asarray(limits, np.float32) / scale) + point.astype(np.float32)
        if low <= least and most <= high:
            node.input[0] = before.input[0]
            names.update(before.input)
            graph.node.remove(before)
    return names


def _limits_of(node: NodeProto, tensors: Mapping[str, np.ndarray]) -> tuple[Any, Any] | None:
    """Return the least and the greatest number of a Relu or Clip; None if they are computed."""
    limits = (
        {"min": -np.inf, "max": np.inf} if node.op_type == "Clip" else {"min": 0, "max": np.inf}
    )
    limits |= {part.name: helper.get_attribute_value(part) for part in node.attribute}
    stored = {key: name for key, name in zip(limits, node.input[1:], strict=False) if name}
    if any(name not in tensors for name in stored.values()):
        return None
    limits |= {key: tensors[name].item() for key, name in stored.items()}
    return limits["min"], limits["max"]


def _store_bias(graph: GraphProto, bias: Bias, value: np.ndarray, *scales: np.ndarray) -> None:
    """Replace a float bias by an int32 tensor, its scale and a DequantizeLinear of the two.

    A bias that has no room in int32 at this scale stays as it is.

    Args:
      scales: of the activation, shape (), and of the weight, shape () or (outputs,), where a
        ConvTranspose has the outputs of one group.
    """
    scale = np.asarray(scales[0] * scales[1], np.float32)
    if scale.ndim and value.ndim:
        scale = np.tile(scale, max(value.shape[-1] // scale.size, 1))
    # float64: float32 cannot hold every int32
    stored = np.rint(value.astype(np.float64) / scale)
    if np.abs(stored).max(initial=0) > np.iinfo(np.int32).max:
        return
    remove_tensor(graph, bias.name)
    graph.initializer.append(numpy_helper.from_array(stored.astype(np.int32), bias.stored))
    graph.initializer.append(numpy_helper.from_array(scale, bias.scale))
    options: dict[str, Any] = {"axis": stored.ndim - 1} if scale.ndim else {}
    domain = next(n.domain for n in graph.node if n.op_type == "DequantizeLinear")
    options |= {"domain": domain} if domain else {}
    inputs, label = [bias.stored, bias.scale], f"{bias.name}_DequantizeLinear"
    graph.node.append(helper.make_node("DequantizeLinear", inputs, [bias.name], label, **options))


def unfold(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], opened: tuple[Opened, ...] = ()
) -> tuple[ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Undo `fold`: replace integer weights by float tensors in front of a QuantizeLinear.

    Weights are integer tensors that an operator reads as a parameter behind a DequantizeLinear.
    Biases of int32 become float tensors without rounding. `fold` stores all of them as before.

    Args:
      proto: the file, of jaxonnx or of another quantizer.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      opened: the nodes that `open_operators` replaced, for the record.

    Returns:
      The new file, the float tensors by name, and zero points that it adds, which set the type that
      a QuantizeLinear rounds to.
    """
    stored = {
        use.name
        for use in uses(graph, tensors)
        if use.node.op.role(use.position) == "param"
        and np.dtype(tensors[use.name].dtype).kind in "iu"
    } | {n for n, x in tensors.items() if x.dtype.name in _SMALL_TYPES}
    result = ModelProto()
    result.CopyFrom(proto)
    entry = record_of(result) or Record()
    recorded = {bias.stored: bias for bias in entry.biases}
    producers = {node.output[0]: node for node in proto.graph.node if node.output}
    floats: dict[str, np.ndarray] = {}
    points: dict[str, np.ndarray] = {}
    folds, names, biases = [], dict(entry.names), []
    times = order.count_readers(proto.graph)
    values = {n for node in proto.graph.node for n in node.output}
    for node in [*result.graph.node]:
        if node.op_type != "DequantizeLinear" or node.input[0] not in stored:
            continue
        name, output = node.input[0], node.output[0]
        (value,) = run(select_part(graph, [output]), {}, Context(tensors))
        value = np.asarray(value)
        if tensors[name].dtype == np.int32:
            bias = recorded.get(name) or _find_bias(proto, node, producers)
            if bias is None or max(times[part] for part in node.input[:2]) > 1:
                continue  # it stays as it is: something else reads its numbers or its scale
            biases.append(bias)
            remove_tensor(result.graph, name)
            remove_tensor(result.graph, node.input[1])
            result.graph.node.remove(node)
            floats[output] = value
            continue
        if name in folds:  # another node reads the same integers
            continue
        # without onnxruntime's suffix, if that name is free
        short = name.removesuffix("_quantized")
        is_free = short != name and short not in {*tensors, *values}
        weight = names.setdefault(name, short if is_free else f"{name}_float")
        # rounding the dequantized weight with the same parameters gives the integers again
        inverse = NodeProto()
        inverse.CopyFrom(node)
        inverse.op_type, inverse.name = "QuantizeLinear", f"{weight}_QuantizeLinear"
        inverse.input[0], inverse.output[0] = weight, name
        if len(node.input) < 3:  # QuantizeLinear alone would give uint8
            point = f"{weight}_zero_point_of_type"
            inverse.input.append(point)
            points[point] = np.zeros(tensors[node.input[1]].shape, tensors[name].dtype)
        remove_tensor(result.graph, name)
        result.graph.node.append(inverse)
        folds.append(name)
        floats[weight] = value
    # some exporters leave weights in floating point, and so does `fold` then; a scalar is none
    names |= {
        node.output[0]: node.input[0]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and np.ndim(tensors.get(node.input[0], 0))
    }
    for name, value in (floats | points).items():
        result.graph.initializer.append(declare(name, value))
    order.sort(result.graph)
    pairs = [n for n in result.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = entry.scales or [n.input[1] for n in pairs if n.input[1] in tensors]
    positive = tuple(
        node.input[0]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[0] in producers
        if (point := tensors.get(node.input[2])) is not None and point.size == 1
        if int(point.item()) == limits_of(point.dtype)[0]
    )
    entry = Record(
        tuple(folds), tuple(dict.fromkeys(scales)), names, tuple(biases), opened, positive=positive
    )
    records.rename_sparse(result, names)
    entry.write(result)
    return result, floats, points


def _find_bias(
    proto: ModelProto,
    node: NodeProto,
    producers: Mapping[str, NodeProto],
) -> Bias | None:
    """Describe the int32 bias that a DequantizeLinear reads; None if no product with two
    dequantized operands has it as its third input."""
    for reader in proto.graph.node:
        if len(reader.input) > 2 and reader.input[2] == node.output[0]:
            parts = [producers.get(name) for name in reader.input[:2]]
            if all(part is not None and part.op_type == "DequantizeLinear" for part in parts):
                x_scale, w_scale = (part.input[1] for part in parts if part is not None)
                return Bias(node.output[0], node.input[0], node.input[1], (x_scale, w_scale))
    return None
