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
    """When ranges move and values are rounded, in steps of training."""

    decay: float | None
    """The share of a range that a step leaves as it was; None if ranges stay."""
    freeze: int | None
    """The first step that leaves ranges as they are; None if there is none."""
    start: int
    """The first step that rounds."""
    symmetric: bool
    """Ranges around the middle of their type stay so."""


class MovingRange(NamedTuple):
    """A range that is state, and the tensors that it gives."""

    scale: str
    zero_point: str
    """Empty if it is as it was."""
    low: str
    high: str
    type: int
    """The element type that is rounded to."""


def insert_schedule(
    proto: ModelProto, graph: Graph, tensors: Mapping[str, Any], schedule: Schedule
) -> tuple[ModelProto, dict[str, np.ndarray], int]:
    """Return a file whose rounding follows a schedule, its state, and the number of moving ranges.

    A range of several values moves with the first, if the others have the same numbers. One that
    other values have, too, or whose zero point others have, stays as it is, as do those of weights.

    Args:
      graph: its main graph, bound.
      tensors: the named tensors.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    main, used = result.graph, {*tensors, *graph.inputs}
    used.update(name for node in main.node for name in node.output)
    result.opset_import.add(domain=DOMAIN, version=1)
    count, step = (unused_name(name, used) for name in ("steps_taken", "step"))
    state = {count: np.zeros((), np.float32)}
    nodes = [_make("CountSteps", [count], [step])]
    fixed = {} if schedule.freeze is None else {"freeze": schedule.freeze}
    ranges = [] if schedule.decay is None else [*_find_ranges(main, graph, tensors, schedule)]
    for value, scale, zero_point, point in ranges:
        ends = [unused_name(f"{scale}_{end}", used) for end in ("low", "high")]
        least, middle, most = limits_of(point.dtype)
        least = least if zero_point else 2 * middle - most  # as far from the middle as the greatest
        for end, limit in zip(ends, (least, most), strict=True):
            first = np.float32(tensors[scale]).reshape(()) * np.float32(limit - float(point))
            state[end] = np.asarray(first)
        kind = helper.np_dtype_to_tensor_dtype(point.dtype)
        about = {"to": kind, "symmetric": int(not zero_point), "decay": schedule.decay, **fixed}
        outputs = [scale, "", "", zero_point]
        nodes.append(_make("MovingRange", [value, *ends, step], outputs, **about))
        for name in filter(None, (scale, zero_point)):
            remove_tensor(main, name)
    if schedule.start:
        makers = {node.output[0]: node for node in main.node if node.op_type == "QuantizeLinear"}
        for node in main.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in makers:
                name = node.output[0]
                node.output[0] = unused_name(f"{name}_rounded", used)
                inputs = [makers[node.input[0]].input[0], node.output[0], step]
                nodes.append(_make("BeginRounding", inputs, [name], start=schedule.start))
    main.node.extend(nodes)
    main.initializer.extend(declare(name, np.asarray(value)) for name, value in state.items())
    order.sort(main)
    return result, state, len(ranges)


def remove_schedule(proto: ModelProto) -> tuple[ModelProto, list[MovingRange]]:
    """Return a file whose rounding follows no schedule, and the ranges that moved.

    Their scales and zero points are initializers without data.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    main, moved, gone = result.graph, [], set()
    makers = {node.output[0]: node for node in main.node if node.output}
    for i, node in reversed([*enumerate(main.node)]):
        if node.domain != DOMAIN:
            continue
        if node.op_type == "BeginRounding":
            makers[node.input[1]].output[0] = node.output[0]
        elif node.op_type == "MovingRange":
            kind = next(part.i for part in node.attribute if part.name == "to")
            scale, zero_point, (_, low, high, _) = node.output[0], [*node.output, ""][3], node.input
            moved.append(MovingRange(scale, zero_point, low, high, kind))
            main.initializer.add(name=scale, data_type=TensorProto.FLOAT)
            if zero_point:
                main.initializer.add(name=zero_point, data_type=kind)
            gone |= {low, high}
        else:
            gone.add(node.input[0])
        del main.node[i]
    for name in gone:
        remove_tensor(main, name)
    kept = [entry for entry in result.opset_import if entry.domain != DOMAIN]
    del result.opset_import[:]
    result.opset_import.extend(kept)
    return result, moved


def _find_ranges(
    main: GraphProto, graph: Graph, tensors: Mapping[str, Any], schedule: Schedule
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield the ranges that can move: value, scale, zero point if it moves, too, and its value."""
    groups: dict[str, list[NodeProto]] = {}
    fed = behind(graph.nodes, graph.inputs)
    for node in main.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in fed and len(node.input) > 2:
            groups.setdefault(node.input[1], []).append(node)
    makers = {node.output[0]: node for node in main.node if node.output}
    for scale, (first, *others) in groups.items():
        known, zero_point = tensors.get(scale), first.input[2]
        if known is None or known.size != 1 or known.dtype != np.float32:
            continue
        value, point = first.input[0], np.asarray(tensors[zero_point]).reshape(())
        centred = schedule.symmetric and float(point) == limits_of(point.dtype)[1]
        sharing = {node.input[1] for node in main.node if zero_point in node.input}
        if (centred or sharing == {scale}) and all(
            _has_numbers_of(node.input[0], value, makers) for node in others
        ):
            yield value, scale, "" if centred else zero_point, point


def _has_numbers_of(name: str, origin: str, makers: Mapping[str, NodeProto]) -> bool:
    """Check whether a value is made of another one by moving and rounding numbers alone."""
    moves = (*SAME_NUMBERS, "QuantizeLinear", "DequantizeLinear")
    while name != origin and name in makers and makers[name].op_type in moves:
        name = makers[name].input[0]
    return name == origin


def _make(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, f"{outputs[0]}_{op}", domain=DOMAIN, **attributes)
