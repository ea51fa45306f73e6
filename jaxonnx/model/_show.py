"""The text of `print(model)` with its warnings, and the table of `model.summary()`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TrainingInfoProto, ValueInfoProto
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxonnx._display import WIDTH, Printable, format_count, list_some
from jaxonnx._graph import exporter_hints
from jaxonnx._graph.bind import Node
from jaxonnx._graph.exporter_hints import is_folded
from jaxonnx._graph.roles import Roles
from jaxonnx._graph.types import find_without_gradient
from jaxonnx._graph.uses import uses, weights
from jaxonnx._graph.values import Value, to_value
from jaxonnx._io import protos, records
from jaxonnx._io.protos import modules
from jaxonnx._io.save import training_nodes
from jaxonnx._io.tensors import to_array
from jaxonnx._io.ties import sources, tied_names
from jaxonnx._rewrite.network import Network
from jaxonnx._run.shapes import evaluate_shapes, infer_types
from jaxonnx._weights import Storage
from jaxonnx.quantization import describe_integers
from jaxonnx.views import Dropout

_ROWS = 60
"""Tensors listed one by one; the rest is counted."""


def overview(model: Network, warnings: Sequence[str]) -> Group:
    """Return inputs, outputs, operators, tensors and warnings for rich to render."""
    opsets = ", ".join(f"{e.domain or 'ai.onnx'} {e.version}" for e in model.proto.opset_import)
    producer_fields = model.proto.producer_name, model.proto.producer_version
    producer = " ".join(filter(None, map(protos.text, producer_fields)))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    graph_name = protos.text(model.proto.graph.name) or "(unnamed)"
    by = f", by {producer}" if producer else ""
    facts.add_row("graph", Text(f"{graph_name}, {opsets}{by}"))
    for title, values in (("input", model.inputs), ("output", model.outputs)):
        for value in values:
            facts.add_row(title, Text(str(value)))
    operators = Counter(map(operator_name, traced_nodes(model)))
    operator_counts = ", ".join(f"{name} {count}" for name, count in operators.most_common())
    facts.add_row("operators", Text(operator_counts or "none"))
    trained = sum(v.size for v in model.params.values())
    fixed = {**model.state, **float_arrays(model.program.constants)}
    frozen = sum(v.size for v in fixed.values())
    for title, size, tensors in (
        ("trained", format_count(trained, "parameter"), model.params),
        ("frozen", format_count(frozen, "value"), fixed),
    ):
        amount = f"{size} in {format_count(len(tensors), 'tensor')}"
        facts.add_row(title, amount if tensors else "none")
    for title, text in describe_constants(model._places.roles):
        facts.add_row(title, Text(text))
    if model.sparsity is not None:
        count = format_count(len(model.sparsity.layers), "tensor")
        by = f" by {model.sparsity.method}" if model.sparsity.method else ""
        facts.add_row("sparse", f"{count}, {model.sparsity}{by}, recorded in the file")
    for text in (
        *describe_ties(model.proto.graph, model.tensors, model.params),
        *describe_complements(model.tensors, model.params),
    ):
        facts.add_row("tied", Text(text))
    for info in model.proto.training_info:
        facts.add_row("training", Text(_training(info)))
    for head in model.heads:
        facts.add_row("head", Text(head.note))
    for warning in warnings:
        facts.add_row(Text("warning", "yellow"), Text(warning))

    table = Table()
    table.add_column("tensor", overflow="fold")
    for column in ("shape", "type"):
        table.add_column(column, no_wrap=True)
    table.add_column("trained", justify="center", no_wrap=True)
    stored = {n: w.storage for n, w in weights(model.graph, model.tensors).items() if w.storage}
    rows = [(n, v, "yes") for n, v in model.params.items()]
    rows += [(n, v, "no") for n, v in fixed.items()]
    for name, value, role in rows[:_ROWS]:
        storage = stored.get(name)
        shape, kind = (value if storage is None else storage).shape, storage or value.dtype
        table.add_row(
            Text(format_name(name, model.aliases)),
            "x".join(map(str, shape)) or "scalar",
            str(kind),
            role,
        )
    if len(rows) > _ROWS:
        note = f"... {len(rows) - _ROWS} more; model.tensors and jaxonnx info --layers list all"
        return Group(facts, table, Text(note))
    return Group(facts, table) if rows else Group(facts)


def format_name(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name of a tensor, behind its alias if it has one."""
    return f"{aliases[name]} ({name})" if name in aliases else name


def traced_nodes(model: Network) -> Iterator[Node]:
    """Yield the nodes of the graph, with Dropout and other training changes applied."""
    return iter(model.program.train(model.graph).nodes)


def operator_name(node: Node) -> str:
    """Return the name of the operator or function that a node calls."""
    return node.op.name or node.label.split("(")[-1].rstrip(")")


def _training(info: TrainingInfoProto) -> str:
    """Describe the algorithm that the file carries, with its update count."""
    operators = [node.op_type for node in info.algorithm.node if "training" in node.domain]
    bound = {entry.key for entry in info.update_binding}
    counts = [
        f"{tensor.name} = {to_array(tensor).item()}"
        for tensor in info.algorithm.initializer
        if tensor.name in bound and tensor.data_type == TensorProto.INT64 and not tensor.dims
    ]
    inputs = [value.name for value in info.algorithm.input]
    facts = [f"updates {format_count(len(bound), 'tensor')}"]
    facts += [f"takes {', '.join(inputs)}"] if inputs else []
    return f"by {', '.join(operators) or 'other operators'}; {'; '.join([*facts, *counts])}"


_COMPARED = 2**16
"""The most numbers of a parameter that is compared with others."""


def describe_ties(
    proto: GraphProto, tensors: Mapping[str, Any], params: Collection[str]
) -> Iterator[str]:
    """Describe the parameters that are tied, and those that could be (`load(tied=)`)."""
    tied = {name: of for name, of in tied_names(proto, tensors).items() if of in params}
    for of in dict.fromkeys(tied.values()):
        names = list_some(f"'{name}'" for name, root in tied.items() if root == of)
        yield f"'{of}' and {names} are one weight"
    untied = [f"'{name}'" for name in sources(proto, tensors) if name in params]
    if untied:
        yield (
            f"not {list_some(untied)}: equal to another weight, which the file has in its place, "
            "and trained separately; load(..., tied=) ties them"
        )


def describe_complements(tensors: Mapping[str, Any], params: Collection[str]) -> Iterator[str]:
    """Yield the parameters that are 1 - another, as PyTorch's older exporter computes them."""
    small = [name for name in params if 1 < tensors[name].size <= _COMPARED]
    values = {name: np.asarray(tensors[name]) for name in small}
    names = {value.tobytes(): name for name, value in values.items()}
    for name, value in values.items():
        other = names.get((1 - value).astype(value.dtype).tobytes())
        if other is not None and len(np.unique(value)) > 2:  # no zeros and ones before training
            names.pop(value.tobytes(), None)  # so that the two are told once
            yield (
                f"not '{other}', which is 1 - '{name}': an exporter computed it, and "
                "they are trained separately"
            )


def describe_constants(roles: Roles) -> Iterator[tuple[str, str]]:
    """Yield a heading and a note for tensors that may be learned weights and are not trained."""
    reasons: dict[str, list[str]] = {}
    for name, reason in roles.constants.items():
        reasons.setdefault(reason, []).append(f"'{name}'")
    for reason, names in reasons.items():
        text = f"{list_some(names, '')}: {reason}; trainable=[*model.params, {names[0]}] trains it"
        yield "constant", text
    if without_role := roles.without_role:
        places = ", ".join(f"'{name}' (at {reader})" for name, reader in without_role.items())
        names = ", ".join(map(repr, without_role))
        yield (
            "learned?",
            f"{places}: not trained, because it is not at a weight input of an operator; "
            f"trainable=[*model.params, {names}] trains those that are learned",
        )


def float_arrays(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the floating-point constants of several numbers, which the program knows."""
    return {
        name: value
        for name, value in constants.items()
        if value.size > 1 and jnp.issubdtype(value.dtype, jnp.floating)
    }


def describe_file(model: Network) -> Iterator[str]:
    """Describe the traits of a file that matter before it is run or trained."""
    program = model.program
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        types = {np.dtype(t) for t in (np.int64, np.uint64, np.float64)}
        wide = [value.name for value in model.outputs if value.dtype in types]
        if wide:
            yield (
                f"64-bit outputs ({', '.join(wide)}) are computed and returned in 32 bits; set "
                "jax_enable_x64 for the exact types"
            )
    if program.draws(training=True):
        yield "random operators: pass rng=jax.random.key(...), or they draw the same numbers always"
    active = training_nodes(model.proto.graph)
    if active:
        yield (
            f"exported in training mode: {list_some(active, '')}; apply and save use inference "
            "semantics"
        )
    drops = any(node.op.name == "Dropout" for node in program.train(program.graph).nodes)
    yield from exporter_hints.notes(model.proto.graph, drops)
    yield from describe_integers(program.graph, model.tensors)
    frozen = find_without_gradient(program.graph, () if program.adapts else model.params)
    if frozen:
        named = [f"'{name}'" for name in frozen]
        trained = [f"'{name}'" for name in model.params if name not in frozen]
        yield (
            f"no output has a gradient with respect to {list_some(named)}, as none has behind "
            "operators on integers: training leaves them as they are, and trains "
            f"{list_some(trained) or 'nothing'}"
        )
    if records.has(model.proto, records.SPARSITY):
        from jaxonnx._io import packed  # only a file with a record imports `jaxonnx.sparse`

        if why := packed.damage(model.proto):
            yield (
                f"{why}: no weight counts as sparse, and files keep the record as it is; "
                "model.with_sparsity(None) drops it, jaxonnx.sparse.record(model) writes a new one"
            )


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
class Summary(Printable):
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
        """Yield each layer in a line, and below it its other names in the file, in full."""
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
    shape = "?"
    if layer.shape is not None:
        shape = ", ".join("?" if d is None else str(d) for d in layer.shape) or "scalar"
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
        tensor_names = [
            *readings.get(node.index, ()),
            *(name for name in node.reads if name in tensors),
        ]
        first = node.outputs[0] if node.outputs else ""
        if not node.op.view and node.index not in views and first not in constants:
            origin, value = origins.get(first), values.get(first)
            weights_of = list(dict.fromkeys(tensor_names))
            path = [] if origin is None else modules(origin)
            learned = tuple(w for w in weights_of if w in model.params or w in model.state)
            called = (origin and origin.name) or first or operator_name(node)
            places.append(Origin(path[-1] if path else "", called, learned))
            names = origin, places[-1]
            layer = _layer(model, tensors, stored, node, names, value, weights_of, counted)
            constant = [f"{w}: {reasons[w]}" for w in weights_of if w in reasons]
            layers.append(layer._replace(notes="; ".join(filter(None, [layer.notes, *constant]))))
            counted.update(tensor_names)
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
