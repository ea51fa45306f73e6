"""What nodes do in training: statistics that are kept, Dropout where an exporter left none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from onnx import GraphProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.scopes import resolve
from jaxonnx.errors import InputError
from jaxonnx.registry import lookup

_RATIO_INPUT = 12
"""The opset from which on the ratio of Dropout is an input, not an attribute."""

UNDROPPED = "/undropped"
"""What the name of a value ends with before a Dropout that is put there, which has the name."""


def with_statistics(graph: Graph, frozen: bool) -> Graph:
    """The graph with running statistics kept and used in training, or renewed."""

    def change(node: Node) -> Node:
        return dataclasses.replace(node, inference=frozen) if node.op.state else node

    return _mapped(graph, change)


def with_dropout(graph: Graph, proto: GraphProto, ratio: float | Mapping[str, float]) -> Graph:
    """The graph with these ratios of Dropout in training.

    Raises:
      InputError: as `Model.with_dropout`.
    """
    if not isinstance(ratio, Mapping):
        outputs = [node.outputs[0] for node in graph.nodes if node.op.name == "Dropout"]
        if not outputs:
            raise InputError(
                f"dropout={ratio}: the graph has no Dropout node, exporters leave it out for "
                "inference; name the values or modules that it stood behind, dropout={'name': 0.1}"
            )
        return _dropped(graph, dict.fromkeys(outputs, _checked(ratio)))
    ratios = {resolve(proto, name): _checked(value) for name, value in ratio.items()}
    computed = {name for node in graph.nodes for name in node.outputs}
    for name in ratios.keys() - computed:
        raise InputError(f"dropout={{'{name}': ...}}: it is a weight, not a value to drop from")
    return _dropped(graph, ratios)


def _checked(ratio: float) -> np.ndarray:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise InputError(f"a ratio of Dropout is a number in [0, 1), and was {ratio!r}")
    return np.array(ratio, np.float32)


def _dropped(graph: Graph, ratios: Mapping[str, np.ndarray]) -> Graph:
    """The graph with Dropout of these ratios giving, or behind, the named values."""
    initializers = dict(graph.initializers)
    index = max((node.index for node in graph.nodes), default=0)
    nodes = []
    for node in graph.nodes:
        mine = [name for name in node.outputs if name in ratios]
        if not mine:
            nodes.append(node)
        elif node.op.name == "Dropout":
            nodes.append(_with_ratio(node, f"{mine[0]}/ratio"))
            initializers[f"{mine[0]}/ratio"] = ratios[mine[0]]
        else:
            outputs = tuple(n + UNDROPPED if n in mine else n for n in node.outputs)
            nodes.append(dataclasses.replace(node, outputs=outputs))
            for name in mine:
                index += 1
                initializers[f"{name}/ratio"] = ratios[name]
                nodes.append(_dropout(name, index))
    return dataclasses.replace(graph, nodes=tuple(nodes), initializers=initializers)


def _dropout(name: str, index: int) -> Node:
    op = lookup("", "Dropout", _RATIO_INPUT)
    assert op is not None
    inputs = (name + UNDROPPED, f"{name}/ratio")
    return Node(f"Dropout behind '{name}'", op, inputs, (name,), {}, {}, inputs, index)


def _with_ratio(node: Node, ratio: str) -> Node:
    """The Dropout node with another ratio, which newer and older operators take alike."""
    op = lookup("", "Dropout", _RATIO_INPUT)
    assert op is not None
    inputs = (node.inputs[0], ratio)
    kept = {name: value for name, value in node.attributes.items() if name == "seed"}
    return dataclasses.replace(node, op=op, inputs=inputs, reads=inputs, attributes=kept)


def _mapped(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    """The graph with every node changed, also in subgraphs and functions."""

    def one(node: Node) -> Node:
        graphs = {
            name: [_mapped(g, change) for g in inner]
            if isinstance(inner, list)
            else _mapped(inner, change)
            for name, inner in node.graphs.items()
        }
        body = None if node.body is None else _mapped(node.body, change)
        return change(dataclasses.replace(node, graphs=graphs, body=body))

    return dataclasses.replace(graph, nodes=tuple(map(one, graph.nodes)))
