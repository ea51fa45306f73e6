"""The text of `print(model)` and the table of `model.summary()`."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from onnx import ModelProto, NodeProto, TensorProto, TrainingInfoProto, ValueInfoProto, numpy_helper
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.exports import is_folded
from jaxonnx._graph.scopes import modules
from jaxonnx._graph.uses import uses, weights
from jaxonnx._graph.values import Value, declared
from jaxonnx._rewrite.head import Head
from jaxonnx._run.program import Program
from jaxonnx._run.shapes import evaluated, inferred
from jaxonnx.model._decided import small, ties, unsure

if TYPE_CHECKING:
    from jaxonnx._file.packed import Recorded

_ROWS = 60
"""Tensors listed one by one; the rest is counted."""


class Shown(Protocol):
    """The part of a model that is shown."""

    @property
    def proto(self) -> ModelProto: ...
    @property
    def program(self) -> Program: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def heads(self) -> Sequence[Head]: ...
    @property
    def sparsity(self) -> Recorded | None: ...


def overview(model: Shown) -> Group:
    """Return inputs, outputs, operators, tensors and warnings for rich to render."""
    opsets = ", ".join(f"{e.domain or 'ai.onnx'} {e.version}" for e in model.proto.opset_import)
    producer = " ".join(filter(None, [model.proto.producer_name, model.proto.producer_version]))
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "graph", f"{model.proto.graph.name or '(unnamed)'}, {opsets}, by {producer or '?'}"
    )
    inputs = [value for value in model.proto.graph.input if value.name in model.graph.inputs]
    for title, values in (("input", inputs), ("output", model.proto.graph.output)):
        for value in values:
            facts.add_row(title, Text(str(declared(value))))
    operators = Counter(map(operator, _steps(model)))
    listed = ", ".join(f"{name} {count}" for name, count in operators.most_common())
    facts.add_row("operators", listed or "none")
    trained = sum(v.size for v in model.params.values())
    kept = {**model.state, **small(model.program.constants)}
    frozen = sum(v.size for v in kept.values())
    facts.add_row("trained", f"{trained:,} numbers in {len(model.params)} tensors")
    facts.add_row("frozen", f"{frozen:,} numbers in {len(kept)} tensors")
    for text in unsure(model.proto.graph, model.graph, model.tensors, model.params):
        facts.add_row("learned?", Text(text))
    if model.sparsity is not None:
        pattern, layers = model.sparsity
        facts.add_row("sparse", f"{len(layers)} tensors, {pattern}, as the file records")
    for text in ties(model.proto.graph, model.tensors, model.params):
        facts.add_row("tied", Text(text))
    for info in model.proto.training_info:
        facts.add_row("training", Text(_training(info)))
    for head in model.heads:
        facts.add_row("head", Text(head.note))
    for warning in model.warnings:
        facts.add_row(Text("warning", "yellow"), Text(warning))

    table = Table()
    for column in ("tensor", "shape", "type"):
        table.add_column(column)
    table.add_column("trained", justify="center")
    rows = [(n, v, "yes") for n, v in model.params.items()]
    rows += [(n, v, "no") for n, v in kept.items()]
    for name, value, role in rows[:_ROWS]:
        table.add_row(
            Text(name), "x".join(map(str, value.shape)) or "scalar", str(value.dtype), role
        )
    if len(rows) > _ROWS:
        table.add_row(f"... {len(rows) - _ROWS} more", "", "", "")
    return Group(facts, table) if rows else Group(facts)


def _steps(model: Shown) -> Iterator[Node]:
    """Yield the nodes as training sees them."""
    return (step for node in model.graph.nodes for step in model.program.overlay.steps(node))


def operator(node: Node) -> str:
    """Return the name of the operator or function that a node calls."""
    return node.op.name or node.label.split("(")[-1].rstrip(")")


def _training(info: TrainingInfoProto) -> str:
    """Describe the algorithm that the file carries, with its update count."""
    operators = [node.op_type for node in info.algorithm.node if "training" in node.domain]
    bound = {entry.key for entry in info.update_binding}
    counts = [
        f"{tensor.name} = {numpy_helper.to_array(tensor).item()}"
        for tensor in info.algorithm.initializer
        if tensor.name in bound and tensor.data_type == TensorProto.INT64 and not tensor.dims
    ]
    inputs = [value.name for value in info.algorithm.input]
    facts = [f"updates {len(bound)} tensors"] + ([f"takes {', '.join(inputs)}"] if inputs else [])
    return f"by {', '.join(operators) or 'other operators'}; {'; '.join([*facts, *counts])}"


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


class Rendered(ABC):
    """Something that rich renders (`__rich__`), as text in terminals and HTML in notebooks."""

    @abstractmethod
    def __rich__(self) -> Group: ...

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _text(self, html=True)


@dataclass(frozen=True)
class Summary(Rendered):
    """A table of layers, for terminals (`print`) and notebooks."""

    layers: tuple[Layer, ...]
    trained: int
    """Numbers in parameters."""
    frozen: int
    """Numbers in state."""
    size: int
    """Bytes of both."""
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Outputs and inputs of each weight that is a matrix: a rank of LoRA is below both."""

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("layer", overflow="fold")
        table.add_column("operator", no_wrap=True)
        table.add_column("output")
        table.add_column("parameters", justify="right", no_wrap=True)
        table.add_column("trained", justify="right", no_wrap=True)
        table.add_column("notes")
        for layer in self.layers:
            count = trained = ""
            if layer.parameters:
                count = f"{layer.parameters:,}"
                trained = f"{layer.trained:,}" if layer.trained else "no"
                trained = "yes" if layer.trained == layer.parameters else trained
            shape = "?" if layer.shape is None else _shape(layer.shape)
            table.add_row(
                Text(layer.name), Text(layer.operator), Text(shape), count, trained, layer.notes
            )
        size, unit = (self.size / 2**20, "MiB") if self.size > 2**20 else (self.size / 2**10, "KiB")
        total = f"{self.trained:,} numbers trained, {self.frozen:,} frozen, {size:.1f} {unit}"
        return Group(table, Text(total))


def summary(model: Shown) -> Summary:
    """Return the layers of a model: nodes other than views, constants and shape arithmetic."""
    tensors, graph = model.tensors, model.graph
    shapes = evaluated(model.proto, graph, tensors)
    values, known = (shapes.values, shapes.known) if shapes else _inferred(model)
    origins = {name: node for node in model.proto.graph.node for name in node.output}
    used: dict[int, list[str]] = {}
    views: set[int] = set()
    for use in uses(graph, tensors):
        if use.passes and use.node is use.outer and use.node.body is None:
            views.add(use.node.index)
        used.setdefault(use.outer.index, []).append(use.name)
    layers: list[Layer] = []
    counted: set[str] = set()
    for node in _steps(model):
        # what a subgraph gives out as it is has no use within it
        read = [*used.get(node.index, ()), *(name for name in node.reads if name in tensors)]
        first = node.outputs[0] if node.outputs else ""
        if not node.op.view and node.index not in views and first not in known:
            origin, value = origins.get(first), values.get(first)
            layers.append(_layer(model, node, origin, value, list(dict.fromkeys(read)), counted))
            counted.update(read)
    trained, frozen = (sum(v.size for v in group.values()) for group in (model.params, model.state))
    size = sum(v.nbytes for v in (*model.params.values(), *model.state.values()))
    matrices = {
        name: weight.matrix.sizes(tensors[name].shape)
        for name, weight in weights(graph, tensors).items()
        if weight.matrix is not None and (name in model.params or name in model.state)
    }
    return Summary(tuple(layers), trained, frozen, size, matrices)


def _inferred(model: Shown) -> tuple[dict[str, Value], frozenset[str]]:
    """Return shapes from the file and ONNX's inference; whole numbers count as known."""
    names = [name for node in model.graph.nodes for name in node.outputs if name]
    kinds = inferred(model.proto, model.tensors, names)
    values = {n: declared(ValueInfoProto(name=n, type=kind)) for n, kind in kinds.items()}
    whole = [n for n, v in values.items() if v.dtype is not None and v.dtype.kind in "iub"]
    return values, frozenset(whole)


def _layer(
    model: Shown,
    node: Node,
    origin: NodeProto | None,
    value: Value | None,
    weights: list[str],
    counted: Collection[str],
) -> Layer:
    tensors = model.tensors
    learned = [w for w in weights if w in model.params or w in model.state]
    adapted = [w for w in learned if f"{w}.lora_A" in model.params]
    new = [w for w in learned if w not in counted]
    trained = [w for w in new if w in model.params]
    trained += [f"{w}.lora_{end}" for w in adapted if w in new for end in "AB"]
    notes = [f"adapters of rank {tensors[f'{w}.lora_A'].shape[-2]}" for w in adapted[:1]]
    if node.op.state:
        notes.append(
            "frozen statistics" if model.program.overlay.frozen else "batch statistics in training"
        )
    if node.op.name == "Dropout":
        where = "in training" if origin and origin.op_type == "Dropout" else "put here for training"
        notes.append(f"{_ratio(model, node):.2g} {where}")
    if origin is not None and is_folded(origin):
        notes.append("BatchNormalization folded?")
    if shared := [w for w in learned if w in counted]:
        notes.append(f"shares {', '.join(shared)}")
    path = [] if origin is None else modules(origin)
    name = path[-1] if path else (origin and origin.name) or node.outputs[0]
    return Layer(
        name=name,
        operator=operator(node),
        shape=None if value is None else value.shape,
        parameters=sum(tensors[w].size for w in new),
        trained=sum(tensors[w].size for w in trained),
        notes="; ".join(notes),
    )


def _ratio(model: Shown, node: Node) -> float:
    """Return the ratio of a Dropout node, NaN if it is computed."""
    changed = model.program.overlay.dropout.get(node.outputs[0])
    if changed is not None:
        return changed
    if len(node.inputs) < 2 or not node.inputs[1]:
        return node.attributes.get("ratio", 0.5)
    known = {**model.graph.initializers, **model.program.constants}
    return float(known.get(node.inputs[1], float("nan")))


def _shape(shape: tuple) -> str:
    return ", ".join("?" if d is None else str(d) for d in shape) or "scalar"


def _text(shown: Any, html: bool = False) -> str:
    """Render with rich as plain text, or as HTML for a notebook."""
    console = Console(file=io.StringIO(), record=html, width=100, force_jupyter=False)
    console.print(shown)
    if html:
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
