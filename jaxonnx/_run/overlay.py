"""Changes of a graph for training only: Dropout, frozen statistics, remat."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from onnx import GraphProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.scopes import resolve
from jaxonnx._require import require
from jaxonnx.errors import InputError
from jaxonnx.registry import lookup


@dataclass(frozen=True)
class Overlay:
    """Changes of a graph that apply in training only."""

    frozen: bool = False
    """Use running statistics in training, and keep them."""
    dropout: Mapping[str, float] = field(default_factory=dict)
    """Dropout ratios by value of the main graph: it is the result of a Dropout, which gets the
    ratio, or of another node, behind which a Dropout is inserted."""
    remat: bool = False
    """Rematerialize: keep few values for the gradient and compute the others again."""

    @property
    def inside(self) -> Overlay:
        """The overlay of bodies of functions and control flow, which have names of their own."""
        return Overlay(self.frozen)

    def steps(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that training evaluates in place of a node of the main graph."""
        ratios = [(name, self.dropout[name]) for name in node.outputs if name in self.dropout]
        if not ratios:
            return (node,)
        if node.op.name == "Dropout":
            return (_with_ratio(node, ratios[0][1]),)
        return (node, *(_insert_dropout(name, ratio) for name, ratio in ratios))

    def dropout_outputs(self, node: Node) -> list[str]:
        """Return the outputs of a node behind which training inserts a Dropout."""
        is_dropout = node.op.name == "Dropout"
        return [n for n in node.outputs if n in self.dropout and not is_dropout]


def ratios(
    overlay: Overlay, graph: Graph, proto: GraphProto, ratio: float | Mapping[str, float]
) -> dict[str, float]:
    """Return `Overlay.dropout` with ratios changed.

    Args:
      overlay: the present one.
      graph, proto: the main graph, bound and as a GraphProto.
      ratio: of every Dropout, or ratios by the name of a value, node or module.

    Raises:
      InputError: as `Model.with_dropout`.
    """
    if isinstance(ratio, Mapping):
        new = {resolve(proto, name): _check_ratio(value) for name, value in ratio.items()}
        for name in new.keys() - graph.producers.keys():
            raise InputError(f"dropout={{'{name}': ...}}: it is a weight, not a value to drop from")
        return {**overlay.dropout, **new}
    names = [node.outputs[0] for node in graph.nodes if node.op.name == "Dropout" and node.outputs]
    names += [name for node in graph.nodes for name in overlay.dropout_outputs(node)]
    if not names:
        raise InputError(
            f"dropout={ratio}: the graph has no Dropout node, exporters leave it out for "
            "inference; name the values or modules that it stood behind, dropout={'name': 0.1}"
        )
    return {**overlay.dropout, **dict.fromkeys(names, _check_ratio(ratio))}


def _check_ratio(ratio: float) -> float:
    numeric = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    require("a ratio of Dropout", ratio, numeric and 0 <= ratio < 1, "a number in [0, 1)")
    return float(ratio)


def _with_ratio(node: Node, ratio: float) -> Node:
    """Return a Dropout node of any opset with another ratio, as a node of opset 12.

    The ratio is bound to the operator's function, since an input of the node would need a name.
    """
    op = lookup("", "Dropout", 12)
    assert op is not None
    op = dataclasses.replace(op, function=partial(op.function, ratio=np.array(ratio, np.float32)))
    seed = {name: value for name, value in node.attributes.items() if name == "seed"}
    data = node.inputs[:1]
    return dataclasses.replace(node, op=op, inputs=data, reads=data, attributes=seed)


def _insert_dropout(name: str, ratio: float) -> Node:
    """Return a Dropout node that rebinds a value's name to its result.

    The node's index, which its random key is derived from, is a hash of the name, so that other
    nodes keep their keys.
    """
    op = lookup("", "Dropout", 12)
    assert op is not None
    index = zlib.crc32(name.encode())
    node = Node(f"Dropout behind '{name}'", op, (name,), (name,), {}, {}, (name,), index)
    return _with_ratio(node, ratio)
