"""The text of `print(model)`, and its warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, TrainingInfoProto
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxonnx._graph import exporter_hints
from jaxonnx._graph.bind import Node
from jaxonnx._graph.roles import Roles
from jaxonnx._graph.types import find_without_gradient
from jaxonnx._graph.uses import weights
from jaxonnx._io import protos, records
from jaxonnx._io.save import training_nodes
from jaxonnx._io.tensors import to_array
from jaxonnx._io.ties import sources, tied_names
from jaxonnx._rewrite.network import Network
from jaxonnx._text import format_count, list_some
from jaxonnx.quantization import describe_integers

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
    if unplaced := roles.unplaced:
        places = ", ".join(f"'{name}' (at {reader})" for name, reader in unplaced.items())
        names = ", ".join(map(repr, unplaced))
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
    yield from filter(None, (_gradient_warning(model), _record_warning(model.proto)))


def _gradient_warning(model: Network) -> str:
    """Return a warning of parameters that no gradient reaches; "" if there are none."""
    names = () if model.program.adapts else model.params
    frozen = [f"'{name}'" for name in find_without_gradient(model.graph, names)]
    trained = [f"'{name}'" for name in model.params if f"'{name}'" not in frozen]
    if not frozen:
        return ""
    return (
        f"no output has a gradient with respect to {list_some(frozen)}, as none has behind "
        "operators on integers: training leaves them as they are, and trains "
        f"{list_some(trained) or 'nothing'}"
    )


def _record_warning(proto: ModelProto) -> str:
    """Return a warning that the record of sparse weights is malformed; "" if it is not."""
    if not records.has(proto, records.SPARSITY):
        return ""
    from jaxonnx._io import packed  # only a file with a record imports `jaxonnx.sparse`

    why = packed.damage(proto)
    return why and (
        f"{why}: no weight counts as sparse, and files keep the record as it is; "
        "model.with_sparsity(None) drops it, jaxonnx.sparse.record(model) writes a new one"
    )
