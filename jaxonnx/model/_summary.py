"""The table of `model.summary()`: the layers, and their names in the file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onnx import NodeProto, ValueInfoProto
from rich.console import Group
from rich.text import Text

from jaxonnx._few_bits import Storage
from jaxonnx._graph.bind import Node
from jaxonnx._graph.exporter_hints import is_folded
from jaxonnx._graph.uses import uses, weights
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io.protos import modules
from jaxonnx._rewrite.network import Network
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx._text import WIDTH, Rendered
from jaxonnx.model._show import format_name, operator_name, traced_nodes
from jaxonnx.views import Dropout

_HEADS = ("layer", "operator", "output", "parameters", "trained")


class Layer(NamedTuple):
    """A node of the graph that computes with the model's inputs."""

    name: str
    """The PyTorch module that it comes from, if its exporter tells, or the node's own name."""
    operator: str
    shape: tuple[int | str | None, ...] | None
    """The shape of its first output: names or None for dynamic dimensions; None if unknown."""
    parameters: int
    """The count of numbers in its weights, at the first layer that has them."""
    trained: int
    """The count of numbers in its weights or adapters that are trained."""
    notes: str


class Origin(NamedTuple):
    """The names of a layer in the file; `with_trainable` accepts any of them."""

    module: str
    """The innermost module, or scope, that its exporter recorded; empty if none."""
    node: str
    """The name of its node, or of the node's first output."""
    tensors: tuple[str, ...]
    """Its weights and running statistics."""


@dataclass(frozen=True)
class Summary(Rendered):
    """A table of layers, for terminals (`print`) and notebooks, and the names of their weights."""

    layers: tuple[Layer, ...]
    trained: int
    """The number of elements of all parameters."""
    frozen: int
    """The number of elements of the state."""
    size: int
    """Bytes of both."""
    origins: tuple[Origin, ...]
    """The names of each layer in the file."""
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Outputs and inputs of each weight that is a matrix: a rank of LoRA is below both."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """`Model.aliases`: names for weights that the file numbers."""

    def __rich__(self) -> Group:
        size, unit = (self.size / 2**20, "MiB") if self.size > 2**20 else (self.size / 2**10, "KiB")
        total = f"{self.trained:,} parameters trained, {self.frozen:,} frozen, {size:.1f} {unit}"
        return Group(*self._lines(), Text(f"\n{total}"))

    def _lines(self) -> Iterator[Text]:
        """Yield each layer in a line, and below it what else the file calls it, in full."""
        rows = [_HEADS, *map(_format_row, self.layers)]
        wide = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
        # a name that is longer than its column has a line of its own, so that it can be copied
        wide[0] = min(wide[0], max(WIDTH - sum(wide[1:]) - 2 * len(wide[1:]), 4))
        details = [(), *map(self._details, self.layers, self.origins)]
        for (name, kind, shape, count, trained), more_lines in zip(rows, details, strict=True):
            if len(name) > wide[0]:
                yield Text(name)
                name = ""
            cells = [name.ljust(wide[0]), kind.ljust(wide[1]), shape.ljust(wide[2])]
            line = "  ".join([*cells, count.rjust(wide[3]), trained])
            yield Text(line.rstrip(), "" if more_lines != () else "bold")
            yield from (Text(f"    {text}", "dim") for text in more_lines)

    def _details(self, layer: Layer, origin: Origin) -> Iterator[str]:
        """Yield notes, module, node and tensors of a layer, beside each other if they fit."""
        if layer.notes:
            yield layer.notes
        if not origin.tensors:
            return
        tensors = [format_name(name, self.aliases) for name in origin.tensors]
        kinds = {"module": origin.module, "node": origin.node, "tensor": ", ".join(tensors)}
        parts = [f"{kind} {name}" for kind, name in kinds.items() if name and name != layer.name]
        if len("  ".join(parts)) + 4 <= WIDTH:
            yield "  ".join(parts)
        elif len(parts[-1]) + 4 <= WIDTH:
            yield from parts
        else:
            yield from [*parts[:-1], *(f"tensor {name}" for name in tensors)]


def _format_row(layer: Layer) -> tuple[str, ...]:
    """Return the cells of a layer's row."""
    count = trained = ""
    if layer.parameters:
        count = f"{layer.parameters:,}"
        trained = f"{layer.trained:,}" if layer.trained else "no"
        trained = "yes" if layer.trained == layer.parameters else trained
    shape = "?" if layer.shape is None else _format_shape(layer.shape)
    return layer.name, layer.operator, shape, count, trained


def summary(model: Network, reasons: Mapping[str, str]) -> Summary:
    """Return the layers of a model: nodes other than views, constants and shape arithmetic.

    Args:
      model: the model.
      reasons: why tensors that stand where weights do are constants, by name.
    """
    tensors, graph = model.tensors, model.graph
    values, constants = _infer_values(model)
    origins = {name: node for node in model.proto.graph.node for name in node.output}
    meanings = weights(graph, tensors)
    stored = {name: weight.storage for name, weight in meanings.items() if weight.storage}
    readings: dict[int, list[str]] = {}
    views: set[int] = set()
    for use in uses(graph, tensors):
        if use.passes and use.node is use.outer and use.node.body is None:
            views.add(use.node.index)
        readings.setdefault(use.outer.index, []).append(use.name)
    layers: list[Layer] = []
    places: list[Origin] = []
    counted: set[str] = set()
    for node in traced_nodes(model):
        # a tensor that a subgraph returns unchanged has no use within it, but is read by the node
        read = [*readings.get(node.index, ()), *(name for name in node.reads if name in tensors)]
        first = node.outputs[0] if node.outputs else ""
        if not node.op.view and node.index not in views and first not in constants:
            origin, value = origins.get(first), values.get(first)
            weights_of = list(dict.fromkeys(read))
            places.append(_origin(model, node, origin, weights_of))
            names = origin, places[-1]
            layer = _layer(model, tensors, stored, node, names, value, weights_of, counted)
            constant = [f"{w}: {reasons[w]}" for w in weights_of if w in reasons]
            layers.append(layer._replace(notes="; ".join(filter(None, [layer.notes, *constant]))))
            counted.update(read)
    trained, frozen = (sum(v.size for v in group.values()) for group in (model.params, model.state))
    size = sum(v.nbytes for v in (*model.params.values(), *model.state.values()))
    matrices = {
        name: weight.matrix.sizes(weight.shape)
        for name, weight in meanings.items()
        if weight.matrix is not None
        and (weight.storage or name in model.params or name in model.state)
    }
    aliases = model.aliases
    return Summary(tuple(layers), trained, frozen, size, tuple(places), matrices, aliases)


def _infer_values(model: Network) -> tuple[dict[str, Value], frozenset[str]]:
    """Return the values of a graph by name, and the names of those known before it runs.

    Where shapes cannot be evaluated they are inferred, and integer values count as known.
    """
    shapes = evaluate_shapes(model.proto, model.graph, model.tensors)
    values, constants = ({}, frozenset()) if shapes is None else (shapes.values, shapes.known)
    names = [n for node in model.graph.nodes for n in node.outputs if n and n not in values]
    kinds = infer_types(model.proto, model.tensors, names) if names else {}
    inferred = {n: to_value(ValueInfoProto(name=n, type=kind)) for n, kind in kinds.items()}
    whole = [n for n, v in inferred.items() if v.dtype is not None and v.dtype.kind in "iub"]
    return {**inferred, **values}, constants.union(whole)


def _layer(
    model: Network,
    tensors: Mapping[str, Any],
    stored: Mapping[str, Storage],
    node: Node,
    names: tuple[NodeProto | None, Origin],
    value: Value | None,
    weights: list[str],
    counted: Collection[str],
) -> Layer:
    source, called = names
    learned = [w for w in weights if w in model.params or w in model.state]
    adapted = [w for w in learned if f"{w}.lora_A" in model.params]
    new = [w for w in learned if w not in counted]
    trained = [w for w in new if w in model.params]
    ends = ("A", "B", "magnitude")
    factors = [f"{w}.lora_{end}" for w in adapted if w in new for end in ends]
    trained += [name for name in factors if name in model.params]
    notes = [f"adapters of rank {tensors[f'{w}.lora_A'].shape[-2]}" for w in adapted[:1]]
    notes += [f"{w}: {form}" for w in learned if (form := stored.get(w))]
    if node.op.normalizes:
        frozen = node.op.frozen
        notes.append("frozen statistics" if frozen else "batch statistics in training")
    if node.op.name == "Dropout":
        where = "in training" if source and source.op_type == "Dropout" else "added for training"
        notes.append(f"{_ratio(model, node):.2g} {where}")
    if source is not None and is_folded(source):
        notes.append("BatchNormalization folded?")
    if shared := [w for w in learned if w in counted]:
        notes.append(f"shares {', '.join(shared)}")
    # the name of a node of TensorFlow begins with its scope and says more
    scope = called.module and not called.node.startswith(f"{called.module}/")
    return Layer(
        name=called.module if scope else called.node,
        operator=operator_name(node),
        shape=None if value is None else value.shape,
        parameters=sum(math.prod(stored.get(w, tensors[w]).shape) for w in new),
        trained=sum(tensors[w].size for w in trained),
        notes="; ".join(notes),
    )


def _origin(
    model: Network, node: Node, origin: NodeProto | None, weights: Collection[str]
) -> Origin:
    path = [] if origin is None else modules(origin)
    learned = tuple(w for w in weights if w in model.params or w in model.state)
    name = (origin and origin.name) or next(iter(node.outputs), operator_name(node))
    return Origin(path[-1] if path else "", name, learned)


def _ratio(model: Network, node: Node) -> float:
    """Return the ratio of a Dropout node, NaN if it is computed."""
    view = model.program.find(Dropout)
    if view is not None and node.outputs[:1] and node.outputs[0] in view.ratios:
        return view.ratios[node.outputs[0]]
    if len(node.inputs) < 2 or not node.inputs[1]:
        return node.attributes.get("ratio", 0.5)
    constants = {**model.graph.initializers, **model.program.constants}
    ratio = constants.get(node.inputs[1])
    if ratio is None or ratio.size != 1 or ratio.dtype == object:
        return float("nan")
    return float(ratio.reshape(()))


def _format_shape(shape: tuple) -> str:
    return ", ".join("?" if d is None else str(d) for d in shape) or "scalar"
