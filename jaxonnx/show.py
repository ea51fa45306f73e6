"""What `print(model)` shows."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from onnx import TensorProto, TrainingInfoProto, numpy_helper
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from jaxonnx.model import Model

_ROWS = 60
"""Tensors listed one by one; the rest is counted."""


def summary(model: Model) -> Group:
    """Inputs, outputs, operators, tensors and warnings, as something that rich renders."""
    opsets = ", ".join(f"{e.domain or 'ai.onnx'} {e.version}" for e in model.proto.opset_import)
    producer = " ".join(filter(None, [model.proto.producer_name, model.proto.producer_version]))
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "graph", f"{model.proto.graph.name or '(unnamed)'}, {opsets}, by {producer or '?'}"
    )
    for title, values in (("input", model.inputs), ("output", model.outputs)):
        for value in values:
            facts.add_row(title, Text(str(value)))
    operators = Counter(
        node.op.name or node.label.split("(")[-1].rstrip(")") for node in model.graph.nodes
    )
    listed = ", ".join(f"{name} {count}" for name, count in operators.most_common())
    facts.add_row("operators", listed or "none")
    trained = sum(v.size for v in model.params.values())
    frozen = sum(v.size for v in model.state.values())
    facts.add_row("trained", f"{trained:,} numbers in {len(model.params)} tensors")
    facts.add_row("frozen", f"{frozen:,} numbers in {len(model.state)} tensors")
    if model.sparsity is not None:
        pattern, layers = model.sparsity
        facts.add_row("sparse", f"{len(layers)} tensors, {pattern}, as the file records")
    for info in model.proto.training_info:
        facts.add_row("training", Text(_training(info)))
    for warning in model.warnings:
        facts.add_row(Text("warning", "yellow"), Text(warning))

    table = Table()
    for column in ("tensor", "shape", "type"):
        table.add_column(column)
    table.add_column("trained", justify="center")
    rows = [(n, v, "yes") for n, v in model.params.items()]
    rows += [(n, v, "no") for n, v in model.state.items()]
    for name, value, role in rows[:_ROWS]:
        table.add_row(
            Text(name), "x".join(map(str, value.shape)) or "scalar", str(value.dtype), role
        )
    if len(rows) > _ROWS:
        table.add_row(f"... {len(rows) - _ROWS} more", "", "", "")
    return Group(facts, table) if rows else Group(facts)


def _training(info: TrainingInfoProto) -> str:
    """The algorithm that the file carries, with its update count."""
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


def text(model: Model, html: bool = False) -> str:
    """The summary as plain text, or as HTML for a notebook."""
    console = Console(file=io.StringIO(), record=html, width=100, force_jupyter=False)
    console.print(summary(model))
    if html:
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
