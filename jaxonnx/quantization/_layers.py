"""The rounded tensors of each layer of a quantized network, with their ranges: a table, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxonnx._display import new_axes
from jaxonnx._graph.ancestors import select_part
from jaxonnx._graph.bind import Node
from jaxonnx._io.protos import modules
from jaxonnx._rewrite.network import Network
from jaxonnx._run.scope import Context, run
from jaxonnx.quantization._scheme import NumberType, Parameters, spread_scale


@dataclass(frozen=True)
class RoundedTensor:
    """A tensor that a layer reads through QuantizeLinear and DequantizeLinear.

    Attributes:
      name: of the tensor before rounding.
      type: the numbers that it is rounded to, like "int8".
      scales: how many there are, one for each channel or block.
      scale: the least and the greatest one.
      range: the least and the greatest number that any channel represents without clipping.
      clipped: the fraction of the elements that saturate; None if it was not measured.
    """

    name: str
    type: str
    scales: int
    scale: tuple[float, float]
    range: tuple[float, float]
    clipped: float | None


@dataclass(frozen=True)
class Layer:
    """A node that reads rounded tensors."""

    name: str
    operator: str
    weight: RoundedTensor | None
    """The first rounded weight that it reads."""
    activations: tuple[RoundedTensor, ...]


def list_layers(model: Network, inputs: Sequence[Any] | None = None) -> list[Layer]:
    """Return the layers of a quantized network that read rounded tensors, in the graph's order.

    Args:
      model: a network with QuantizeLinear and DequantizeLinear nodes.
      inputs: a batch, in the order of the model's inputs, on which the saturated elements of
        activations are counted; by default they are not.
    """
    nodes = model.graph.nodes
    producers = model.graph.producers
    quantizers_of = {}
    for node in nodes:
        if not node.op.view:
            sources = [_find_quantizer(name, producers) for name in node.inputs]
            if any(q is not None for q in sources):
                quantizers_of[node.outputs[0]] = [q for q in sources if q is not None]
    quantizers = {q.outputs[0]: q for sources in quantizers_of.values() for q in sources}
    rounded = _measure(model, quantizers, inputs)
    names = {}  # the innermost module of a node, or its own name, or that of its result
    for node in model.proto.graph.node:
        if node.output:
            path = modules(node)
            names[node.output[0]] = path[-1] if path else node.name or node.output[0]
    layers = []
    for output, sources in quantizers_of.items():
        parts = dict.fromkeys(q.outputs[0] for q in sources)
        weights = [n for n in parts if quantizers[n].inputs[0] in model.tensors]
        activations = tuple(rounded[n] for n in parts if n not in weights)
        weight = rounded[weights[0]] if weights else None
        layers.append(Layer(names[output], producers[output].op.name, weight, activations))
    return layers


def _find_quantizer(name: str, producers: Mapping[str, Node]) -> Node | None:
    """Return the QuantizeLinear of the QDQ pair that computes a value, through views of it.

    Args:
      name: the value.
      producers: the node that computes each value.
    """
    node = producers.get(name)
    while node is not None and node.op.view and not node.op.dequantizes:
        if node.op.name == "QuantizeLinear":
            return None
        node = producers.get(node.inputs[0])
    if node is None or not node.op.dequantizes:
        return None
    node = producers.get(node.inputs[0])
    return node if node is not None and node.op.name == "QuantizeLinear" else None


def _measure(
    model: Network, quantizers: Mapping[str, Node], inputs: Sequence[Any] | None
) -> dict[str, RoundedTensor]:
    """Return scale, zero point and type of each QuantizeLinear, by the name of its result.

    Scales may be computed by nodes (learned scales are), so that the part of the graph that
    computes them is evaluated.
    """
    tensors = model.tensors
    scales = [*dict.fromkeys(node.inputs[1] for node in quantizers.values())]
    computed = run(select_part(model.graph, scales), {}, Context(tensors))
    values = dict(zip(scales, map(np.asarray, computed), strict=True))
    limits, result = {}, {}
    for name, node in quantizers.items():
        value, factor, *rest = node.inputs
        point = tensors[rest[0]] if rest else np.zeros((), np.uint8)
        least, most = NumberType(np.dtype(point.dtype), 0).limits
        scale, shift = values[factor], np.asarray(point, np.float32)
        ends = (least - shift) * scale, (most - shift) * scale
        low, high = np.minimum(*ends), np.maximum(*ends)  # scales may be negative
        half = np.abs(scale) / 2  # half a step beyond still rounds to an end
        limits[name] = low - half, high + half
        result[name] = RoundedTensor(
            value,
            point.dtype.name,
            scale.size,
            (float(scale.min()), float(scale.max())),
            (float(low.min()), float(high.max())),
            None,
        )
    for name, share in _measure_clipping(model, quantizers, limits, inputs).items():
        result[name] = replace(result[name], clipped=share)
    return result


def _measure_clipping(
    model: Network, quantizers: Mapping[str, Node], limits: Mapping[str, Any], inputs: Any
) -> dict[str, float]:
    """Return the fraction of each tensor's elements outside of its limits, by QuantizeLinear.

    Args:
      model: the network.
      quantizers: the QuantizeLinear nodes by the name of their result.
      limits: the ends of their ranges, one number or one for each channel or block.
      inputs: a batch; None to leave activations out.
    """
    tensors = {**model.tensors}
    if inputs is not None:
        fed = dict(zip((value.name for value in model.inputs), inputs, strict=True))
        available = tensors.keys() | fed.keys()
        computed = [*{q.inputs[0] for q in quantizers.values()} - available]
        program = model.program.with_values(computed)
        evaluate = program.jit(program.evaluate)
        outputs = evaluate(model.params, model.state, fed)
        tensors |= fed | dict(zip(computed, outputs[len(model.graph.outputs) :], strict=True))
    shares = {}
    for name, node in quantizers.items():
        if node.inputs[0] in tensors:
            x = np.asarray(tensors[node.inputs[0]])
            block = node.attributes.get("block_size", 0)
            axis = int(node.attributes.get("axis", 1)) % max(x.ndim, 1)
            low, high = (
                spread_scale(Parameters(z, z, axis if z.ndim else None, block), x)
                for z in limits[name]
            )
            shares[name] = float(np.mean((x < low) | (x > high)))
    return shares


def plot_ranges(layers: Sequence[Layer], axes: Any = None) -> Any:
    """Draw the ranges of weights and activations of each layer; return the matplotlib axes."""
    axes = new_axes(axes)
    parts = [("weights", [(i, x.weight) for i, x in enumerate(layers) if x.weight])]
    activations = [(i, x) for i, layer in enumerate(layers) for x in layer.activations]
    for k, (label, rounded) in enumerate([*parts, ("activations", activations)]):
        places = [i + 0.4 * k for i, _ in rounded]
        starts = [x.range[0] for _, x in rounded]
        widths = [x.range[1] - x.range[0] for _, x in rounded]
        axes.barh(places, widths, 0.4, starts, label=label)
    axes.set_yticks(np.arange(len(layers)) + 0.2, [layer.name for layer in layers])
    axes.invert_yaxis()
    smallest = min(
        (abs(e) for p in (*parts[0][1], *activations) for e in p[1].range if e), default=1.0
    )
    axes.set_xscale("symlog", linthresh=smallest)
    axes.set(xlabel="numbers that are not clipped")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.legend()
    return axes
