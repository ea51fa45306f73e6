"""Ranges that move in training, and rounding that begins after some steps, in a quantized file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph
from jaxonnx._io import order
from jaxonnx._io.build import unused_name
from jaxonnx._rewrite.qoperators import SAME_NUMBERS
from jaxonnx._rewrite.quantize import declare, remove_tensor
from jaxonnx.ops.contrib.moving_ranges import DOMAIN, limits_of


class Schedule(NamedTuple):
    """When ranges are updated and values are rounded, in training steps."""

    decay: float | None
    """The weight of the old range in the moving average of a step; None if ranges are fixed."""
    freeze: int | None
    """The first step that does not update ranges; None if all do."""
    start: int
    """The first step that rounds values."""
    symmetric: bool
    """Whether ranges that are symmetric about the middle of their integer type stay symmetric."""


class MovingRange(NamedTuple):
    """A range that is updated in training: names of its tensors."""

    scale: str
    """The scale that is computed from the range."""
    zero_point: str
    """The zero point that is computed from the range; empty if it is constant."""
    low: str
    """The lower end of the range, float32 of shape (), which is state."""
    high: str
    """The upper end of the range, likewise."""
    type: int
    """The element type that values are rounded to, as TensorProto.DataType."""


def insert_schedule(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], schedule: Schedule
) -> tuple[ModelProto, dict[str, np.ndarray], int]:
    """Insert the nodes that update ranges and delay rounding in training.

    Scales of activations become results of MovingRange nodes. The ranges of weights stay constant,
    and so does a range whose scale or zero point is shared by values with different numbers. A
    range that a value shares with views of it (see `SAME_NUMBERS`) follows that value.

    Args:
      proto: the file, with QuantizeLinear and DequantizeLinear.
      graph: its main graph, bound.
      tensors: the values of its named tensors.
      schedule: when to update and to round.

    Returns:
      The new file, its new state (a step counter and the ends of the ranges, float32 of shape ())
      by name, and the number of moving ranges.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    main, used = result.graph, {*tensors, *graph.inputs}
    used.update(name for node in main.node for name in node.output)
    result.opset_import.add(domain=DOMAIN, version=1)
    count, step = (unused_name(name, used) for name in ("steps_taken", "step"))
    state = {count: np.zeros((), np.float32)}
    nodes = [_make_node("CountSteps", [count], [step])]
    freeze = {} if schedule.freeze is None else {"freeze": schedule.freeze}
    ranges = [] if schedule.decay is None else [*_find_ranges(main, graph, tensors, schedule)]
    for value, scale, zero_point, point in ranges:
        ends = [unused_name(f"{scale}_{end}", used) for end in ("low", "high")]
        least, middle, most = limits_of(point.dtype)
        # a symmetric range does not use the lowest code: -127 to 127 of int8
        least = least if zero_point else 2 * middle - most
        for end, limit in zip(ends, (least, most), strict=True):
            initial = np.float32(tensors[scale]).reshape(()) * np.float32(limit - float(point))
            state[end] = np.asarray(initial)
        kind = helper.np_dtype_to_tensor_dtype(point.dtype)
        options = {"to": kind, "symmetric": int(not zero_point), "decay": schedule.decay, **freeze}
        outputs = [scale, "", "", zero_point]
        nodes.append(_make_node("MovingRange", [value, *ends, step], outputs, **options))
        for name in filter(None, (scale, zero_point)):
            remove_tensor(main, name)
    if schedule.start:
        # BeginRounding selects between a value and its rounded copy, and takes over the name that
        # the readers of the rounded one have
        quantizers = {
            node.output[0]: node for node in main.node if node.op_type == "QuantizeLinear"
        }
        for node in main.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in quantizers:
                name = node.output[0]
                node.output[0] = unused_name(f"{name}_rounded", used)
                inputs = [quantizers[node.input[0]].input[0], node.output[0], step]
                nodes.append(_make_node("BeginRounding", inputs, [name], start=schedule.start))
    main.node.extend(nodes)
    main.initializer.extend(declare(name, np.asarray(value)) for name, value in state.items())
    order.sort(main)
    return result, state, len(ranges)


def remove_schedule(proto: ModelProto) -> tuple[ModelProto, list[MovingRange]]:
    """Undo `insert_schedule`; return the new file and the ranges that were updated.

    The scales and zero points of these are initializers without data.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    main, moved, unused = result.graph, [], set()
    producers = {node.output[0]: node for node in main.node if node.output}
    for i, node in reversed([*enumerate(main.node)]):
        if node.domain != DOMAIN:
            continue
        if node.op_type == "BeginRounding":
            producers[node.input[1]].output[0] = node.output[0]
        elif node.op_type == "MovingRange":
            kind = next(part.i for part in node.attribute if part.name == "to")
            # outputs after the last one that is used may be absent
            scale, zero_point, (_, low, high, _) = node.output[0], [*node.output, ""][3], node.input
            moved.append(MovingRange(scale, zero_point, low, high, kind))
            main.initializer.add(name=scale, data_type=TensorProto.FLOAT)
            if zero_point:
                main.initializer.add(name=zero_point, data_type=kind)
            unused |= {low, high}
        else:
            unused.add(node.input[0])
        del main.node[i]
    for name in unused:
        remove_tensor(main, name)
    imports = [entry for entry in result.opset_import if entry.domain != DOMAIN]
    del result.opset_import[:]
    result.opset_import.extend(imports)
    return result, moved


def _find_ranges(
    main: GraphProto, graph: Graph, tensors: Mapping[str, Any], schedule: Schedule
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield the ranges of activations that can be updated.

    Each is the name of the value, that of its scale, that of its zero point ("" if it stays
    constant), and the zero point's value of shape ().
    """
    groups: dict[str, list[NodeProto]] = {}
    fed = behind(graph.nodes, graph.inputs)
    for node in main.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in fed and len(node.input) > 2:
            groups.setdefault(node.input[1], []).append(node)
    producers = {node.output[0]: node for node in main.node if node.output}
    for scale, (first, *others) in groups.items():
        scale_value, zero_point = tensors.get(scale), first.input[2]
        if scale_value is None or scale_value.size != 1 or scale_value.dtype != np.float32:
            continue
        value, point = first.input[0], np.asarray(tensors[zero_point]).reshape(())
        # a symmetric range leaves the zero point alone, so that others may share it
        centred = schedule.symmetric and float(point) == limits_of(point.dtype)[1]
        sharing = {node.input[1] for node in main.node if zero_point in node.input}
        if (centred or sharing == {scale}) and all(
            _has_numbers_of(node.input[0], value, producers) for node in others
        ):
            yield value, scale, "" if centred else zero_point, point


def _has_numbers_of(name: str, origin: str, producers: Mapping[str, NodeProto]) -> bool:
    """Check whether a value is computed from `origin` by views, MaxPool and rounding alone."""
    moves = (*SAME_NUMBERS, "QuantizeLinear", "DequantizeLinear")
    while name != origin and name in producers and producers[name].op_type in moves:
        name = producers[name].input[0]
    return name == origin


def _make_node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, f"{outputs[0]}_{op}", domain=DOMAIN, **attributes)
