"""Changes of a graph for training only: Dropout, frozen statistics, rematerialization."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.select import resolve
from jaxonnx._require import require
from jaxonnx.errors import InputError
from jaxonnx.registry import lookup
from jaxonnx.views._view import View

_ROUNDED = 0.005
"""The relative error of a root that a file stores: bfloat16 has 8 bits."""


@dataclass(frozen=True)
class Dropout(View):
    """Training drops values of the main graph with these ratios, by name.

    A value is the result of a Dropout, which gets the ratio, or of another node, behind which a
    Dropout is inserted.
    """

    ratios: Mapping[str, float]

    def train(self, graph: Graph) -> Graph:
        nodes = (changed for node in graph.nodes for changed in self._change(node))
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def _change(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that training evaluates in place of one."""
        ratios = [(name, self.ratios[name]) for name in node.outputs if name in self.ratios]
        if ratios and node.op.name == "Dropout":
            return (_with_ratio(node, ratios[0][1]),)
        return (node, *(_insert_dropout(name, ratio) for name, ratio in ratios))


@dataclass(frozen=True)
class EmbeddingNoise(View):
    """Training adds uniform noise to values (N, length, features) of the main graph (NEFTune)."""

    values: Mapping[str, float]
    """By name the factor that a value is multiplied by behind the noise; 1 for none."""
    alpha: float

    def train(self, graph: Graph) -> Graph:
        nodes = (
            part
            for node in graph.nodes
            for part in (node, *map(self._insert, self.values.keys() & {*node.outputs}))
        )
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def _insert(self, name: str) -> Node:
        node = _insert_dropout(name, 0.0)
        function = partial(_add_noise, alpha=self.alpha, factor=self.values[name])
        op = dataclasses.replace(node.op, function=function, pointwise=False)
        return dataclasses.replace(node, label=f"NEFTune behind '{name}'", op=op)


def _add_noise(
    x: jax.Array, *, alpha: float, factor: float, key: Callable, training: bool | None
) -> jax.Array:
    """Return x (N, length, features) with the noise of NEFTune, as in transformers.

    Embeddings that are multiplied by the root of their features (Gemma, BART) get it behind this.
    """
    size = alpha / math.sqrt(x.shape[-2] * x.shape[-1])
    if math.isclose(factor, math.sqrt(x.shape[-1]), rel_tol=_ROUNDED):
        size /= factor
    return x + jax.random.uniform(key(), x.shape, x.dtype, -size, size)


@dataclass(frozen=True)
class FrozenStatistics(View):
    """Training normalizes by the running statistics, and keeps them."""

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        return _change_nodes(graph, _freeze)


@dataclass(frozen=True)
class Remat(View):
    """Training keeps few values of the main graph for the gradient, and computes others again."""

    def train(self, graph: Graph) -> Graph:
        return dataclasses.replace(graph, recomputes=True)


def drop(
    before: Dropout | None, graph: Graph, proto: GraphProto, ratio: float | Mapping[str, float]
) -> Dropout:
    """Choose the values to drop, and their ratios.

    Args:
      before: the present choice.
      graph, proto: the main graph, bound and as a GraphProto.
      ratio: of every Dropout, or ratios by the name of a value, node or module.

    Raises:
      InputError: as `Model.with_dropout`.
    """
    old = {} if before is None else before.ratios
    if isinstance(ratio, Mapping):
        new = {resolve(proto, name): _check_ratio(value) for name, value in ratio.items()}
        for name in new.keys() - graph.producers.keys():
            raise InputError(f"dropout={{'{name}': ...}}: it is a weight, not a value to drop from")
        return Dropout({**old, **new})
    names = [node.outputs[0] for node in graph.nodes if node.op.name == "Dropout" and node.outputs]
    names += [n for node in graph.nodes for n in node.outputs if n in old and n not in names]
    if not names:
        raise InputError(
            f"dropout={ratio}: the graph has no Dropout node, exporters leave it out for "
            "inference; name the values or modules that it stood behind, dropout={'name': 0.1}"
        )
    return Dropout({**old, **dict.fromkeys(names, _check_ratio(ratio))})


def _change_nodes(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    """Change the nodes of a graph, of its subgraphs and of the functions that it calls."""

    def change_one(node: Node) -> Node:
        graphs = {
            name: [_change_nodes(g, change) for g in inner]
            if isinstance(inner, list)
            else _change_nodes(inner, change)
            for name, inner in node.graphs.items()
        }
        body = None if node.body is None else _change_nodes(node.body, change)
        if graphs or body is not None:
            node = dataclasses.replace(node, graphs=graphs, body=body)
        return change(node)

    return dataclasses.replace(graph, nodes=tuple(map(change_one, graph.nodes)))


def _freeze(node: Node) -> Node:
    frozen = node.op.normalizes
    return (
        dataclasses.replace(node, op=dataclasses.replace(node.op, frozen=True)) if frozen else node
    )


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
