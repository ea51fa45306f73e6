"""Views of rounded networks: `Rounding`, and ranges and a beginning that move in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph
from jaxonnx._io import records
from jaxonnx._io.protos import Editor, remove_values
from jaxonnx._rewrite.network import Network, enter, with_file, with_params
from jaxonnx.errors import InputError
from jaxonnx.ops.common import element_dtype
from jaxonnx.ops.contrib.moving_ranges import DOMAIN, limits_of, range_parameters
from jaxonnx.quantization._files import Record, fold, join_pairs, record_of, unfold
from jaxonnx.quantization._qoperators import SAME_NUMBERS, open_operators
from jaxonnx.quantization._scheme import Quantization
from jaxonnx.views import Addition, View

N = TypeVar("N", bound=Network)


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

    def describe(self, count: int) -> str:
        """Return the part of a note that says when `count` ranges move and when rounding begins."""
        end = "the end" if self.freeze is None else f"step {self.freeze:,}"
        moved = f"; {count} ranges follow the data until {end}" if self.decay is not None else ""
        return moved + (f"; rounding begins at step {self.start + 1:,}" if self.start else "")


def make_schedule(
    scheme: Quantization, epochs: int | None, steps_per_epoch: int | None
) -> Schedule | None:
    """Return when ranges follow the data and when rounding begins; None if both are constant.

    Raises:
      InputError: the number of steps is needed and not known, or rounding would never begin.
    """
    moves = scheme.learn == "ranges"
    if not (moves or scheme.start):
        return None
    if scheme.start and epochs is not None and scheme.start >= epochs:
        raise InputError(
            f"start={scheme.start}: the run has {epochs} epochs, so that rounding would never begin"
        )
    freezes = moves and scheme.freeze < 1
    if (freezes and epochs is None) or ((freezes or scheme.start) and steps_per_epoch is None):
        raise InputError(
            "freeze and start need the number of steps of the run: pass arrays, or an "
            "iterable with a length (to step: epochs= and steps_per_epoch=), or freeze=1 and "
            "start=0"
        )
    epoch = steps_per_epoch or 1
    end = round(scheme.freeze * epoch * (epochs or 1)) if freezes else None
    decay = scheme.decay if moves else None
    return Schedule(decay, end, round(scheme.start * epoch), scheme.is_symmetric)


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


@dataclass(frozen=True)
class MovingRanges(View):
    """Training updates ranges and delays rounding, by nodes of our own domain in the graph.

    They are the record of the view in the file of a run, and no deployed file has them.
    """

    def leave(self, network: N, form: str | None) -> tuple[N, list[Addition]]:
        """Return the network with constant scales, those of its ranges."""
        file = Editor(network.proto)
        main, state, unused = file.graph, {**network.state}, set()
        producers = {node.output[0]: node for node in main.node if node.output}
        for i, node in reversed([*enumerate(main.node)]):
            if node.domain != DOMAIN:
                continue
            if node.op_type == "BeginRounding":
                producers[node.input[1]].output[0] = node.output[0]
            elif node.op_type == "MovingRange":
                kind = next(part.i for part in node.attribute if part.name == "to")
                _, *ends, _ = node.input
                # outputs after the last one that is used may be absent
                scale, zero_point = node.output[0], [*node.output, ""][3]
                low, high = (state[name] for name in ends)
                values = range_parameters(low, high, element_dtype(kind), not zero_point)
                for name, value in zip((scale, zero_point), values, strict=True):
                    if name:
                        state[name] = value
                        file.add_tensor(name, value)
                unused.update(ends)
            else:
                unused.add(node.input[0])
            del main.node[i]
        remove_values(main, unused)
        imports = [entry for entry in file.proto.opset_import if entry.domain != DOMAIN]
        del file.proto.opset_import[:]
        file.proto.opset_import.extend(imports)
        others = [v for v in network.program.views if v.stays and v is not self]
        plain = replace(network, state=state, program=network.program.leave(View))
        new = with_file(plain, file.proto)
        # factors of adapters are not in the graph, so `with_file` has dropped them
        return replace(new, params=network.params, program=new.program.enter(*others)), []


def open_quantized(model: N) -> tuple[N, int]:
    """Return a quantized model whose integer weights and biases are parameters in floating point.

    Operators on integers are opened, too. The file is written as before.

    Returns:
      The model, and the number of the parameters.
    """
    joined = join_pairs(model.proto, model.tensors)
    model = model if joined is model.proto else with_file(model, joined)
    proto, added, weights_of_operators = open_operators(model.proto, model.tensors)
    model = with_file(model, proto, added)
    proto, floats, points = unfold(model.proto, model.graph, model.tensors, weights_of_operators)
    model = with_file(model, proto, points, floats)
    weights = {*floats, *(record_of(proto) or Record()).names.values()}
    return (model if model.program.find(Rounding) else enter(model, Rounding())), len(weights)


def recorded_views(proto: ModelProto) -> tuple[View, ...]:
    """Return the views of rounding that a file records."""
    moves = any(entry.domain == DOMAIN for entry in proto.opset_import)
    rounds = records.has(proto, records.QUANTIZATION)
    return (*[Rounding()] * rounds, *[MovingRanges()] * moves)


def move_ranges(model: N, schedule: Schedule) -> tuple[N, int]:
    """Insert the nodes that update ranges and delay rounding in training.

    Scales of activations become results of MovingRange nodes. The ranges of weights stay constant,
    and so does a range whose scale or zero point is shared by values with different numbers. A
    range that a value shares with views of it (see `SAME_NUMBERS`) follows that value.

    The new state is a counter of steps and the ends of the ranges, float32 of shape ().

    Returns:
      The model, and the number of moving ranges.
    """
    # 1. a counter of steps, and a MovingRange in place of each scale of activations
    graph, tensors = model.graph, model.tensors
    file = Editor(model.proto, {*tensors, *graph.inputs})
    main = file.graph
    file.proto.opset_import.add(domain=DOMAIN, version=1)
    count, step = map(file.unused_name, ("steps_taken", "step"))
    file.add_tensor(count, np.zeros((), np.float32))
    nodes, computed = [_make_node("CountSteps", [count], [step])], []
    freeze = {} if schedule.freeze is None else {"freeze": schedule.freeze}
    positive = (record_of(model.proto) or Record()).positive
    ranges = [] if schedule.decay is None else [*_find_ranges(main, graph, tensors, schedule)]
    for value, scale, zero_point, point in ranges:
        ends = [file.unused_name(f"{scale}_{end}") for end in ("low", "high")]
        least, middle, most = limits_of(point.dtype)
        # a symmetric range does not use the lowest code: -127 to 127 of int8
        least = least if zero_point else 2 * middle - most
        for end, limit in zip(ends, (least, most), strict=True):
            initial = np.float32(tensors[scale]).reshape(()) * np.float32(limit - float(point))
            file.add_tensor(end, initial)
        kind = helper.np_dtype_to_tensor_dtype(point.dtype)
        options = {"to": kind, "symmetric": int(not zero_point), "decay": schedule.decay, **freeze}
        options |= {"positive": 1} if value in positive else {}
        outputs = [scale, "", "", zero_point]
        nodes.append(_make_node("MovingRange", [value, *ends, step], outputs, **options))
        computed += filter(None, (scale, zero_point))
    remove_values(main, computed)
    if schedule.start:
        # 2. BeginRounding selects between a value and its rounded copy, and takes over the name
        # that the readers of the rounded one have
        quantizers = {
            node.output[0]: node for node in main.node if node.op_type == "QuantizeLinear"
        }
        for node in main.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in quantizers:
                name = node.output[0]
                node.output[0] = file.unused_name(f"{name}_rounded")
                value = quantizers[node.input[0]].input[0]
                options = {"start": schedule.start} | ({"positive": 1} if value in positive else {})
                inputs = [value, node.output[0], step]
                nodes.append(_make_node("BeginRounding", inputs, [name], **options))
    main.node.extend(nodes)
    model = with_file(model, file.finish(), state=file.added)
    return enter(model, MovingRanges()), len(ranges)


def learn_scales(model: N) -> N:
    """Make the scales of a model trainable: scale = initial scale * exp(parameter).

    With this form an optimizer's step changes every scale by a fraction of its value, whatever its
    magnitude; scales stay positive; and weight decay pulls them towards those of the calibration.
    The parameters are zeros at first.
    """
    tensors = model.tensors
    file, entry = Editor(model.proto, tensors), record_of(model.proto) or Record()
    constants, params, learned = {}, {}, dict(entry.learned)
    # the others are trainable already, or of a moving range
    scales = [name for name in entry.scales if name not in entry.folds and name in tensors]
    remove_values(file.graph, scales)
    for name in scales:
        value = np.asarray(tensors[name])
        parts = (f"{name}_{part}" for part in ("initial", "change", "factor"))
        initial, change, factor = map(file.unused_name, parts)
        constants[initial], params[change] = value, np.zeros_like(value)
        file.add_node("Exp", [change], factor, factor)
        file.add_node("Mul", [initial, factor], name, name)
        learned[name] = initial, change
    entry = replace(entry, folds=(*entry.folds, *scales), learned=learned)
    for name, value in (constants | params).items():
        file.add_tensor(name, value)
    entry.write(file.proto)
    return with_file(model, file.finish(), constants, params)


def select_scales(before: N, after: N) -> N:
    """Return `after` with the scales trained that `before` trains, and no others.

    A selection of parameters to train (`trainable=`) names weights and biases; scales, which the
    quantization adds, follow the scheme instead.

    Args:
      before: the quantized model.
      after: the same with a selection of its parameters.
    """
    entry = record_of(before.proto)
    if entry is None:
        return after
    parts = {name for pair in entry.learned.values() for name in pair}
    chosen = {*after.params} - parts - {*entry.scales} | parts & before.params.keys()
    return with_params(after, lambda name, _: name in chosen)


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
    producers = {name: node for node in main.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in main.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    moves = (*SAME_NUMBERS, "Pad", "QuantizeLinear", "DequantizeLinear")

    def has_numbers_of(name: str, origin: str) -> bool:
        """Check whether a value is computed from `origin` by views, MaxPool and rounding alone."""
        while name != origin and name in producers and producers[name].op_type in moves:
            name = producers[name].input[0]
        return name == origin

    for scale, (first, *others) in groups.items():
        scale_value, zero_point = tensors.get(scale), first.input[2]
        if scale_value is None or scale_value.size != 1 or scale_value.dtype != np.float32:
            continue
        value, point = first.input[0], np.asarray(tensors[zero_point]).reshape(())
        # a symmetric range leaves the zero point alone, so that others may share it
        centred = schedule.symmetric and float(point) == limits_of(point.dtype)[1]
        sharing = {node.input[1] for node in readers[zero_point]}
        if (centred or sharing == {scale}) and all(
            has_numbers_of(node.input[0], value) for node in others
        ):
            yield value, scale, "" if centred else zero_point, point


def _make_node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, f"{outputs[0]}_{op}", domain=DOMAIN, **attributes)
