"""Fold BatchNormalization, in inference, into the convolution before it.

With f = scale / sqrt(var + epsilon), a weight w * f and a bias (bias - mean) * f + b give what the
convolution and the normalization give one after the other, up to rounding. Weights of calls are
copies anyway (`prepare_calls`), so that this costs no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.roles import graph_tensors
from jaxonnx.lowering import is_in_memory

_BIAS = 2
"""The position of `b` among the inputs of both operators."""


class Pair(NamedTuple):
    """A convolution whose result only a BatchNormalization reads."""

    conv: Node
    norm: Node

    @property
    def tensors(self) -> tuple[str, ...]:
        """The weight; scale, b, mean and variance; and the convolution's own bias, if any."""
        return (self.conv.inputs[1], *self.norm.inputs[1:5], *self.conv.inputs[2:])


@dataclass(frozen=True)
class Folds:
    """The pairs of a graph that are folded, and the factors and biases that result."""

    norms: frozenset[int] = frozenset()
    """The indices of the BatchNormalizations."""
    reads: frozenset[str] = frozenset()
    """The tensors that factors and biases are computed from."""
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The factors (channels,) of a weight's output channels, by the name of the weight."""
    biases: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Biases (channels,) of the convolutions, by the name of the b of the BatchNormalization."""


def folds(graph: Graph, tensors: Mapping[str, Any]) -> Folds:
    """Find the pairs of a graph to fold and compute their factors and biases.

    Args:
      graph: the bound graph.
      tensors: the values of its named tensors.
    """
    norms, reads, factors, biases = set(), set(), {}, {}
    for pair in _find_pairs(graph, tensors):
        numbers = _fold_pair(pair, tensors)
        if numbers is not None:
            norms.add(pair.norm.index)
            reads.update(pair.tensors)
            factors[pair.tensors[0]], biases[pair.tensors[2]] = numbers
    return Folds(frozenset(norms), frozenset(reads), factors, biases)


def fold_norms(graph: Graph, norms: Collection[int]) -> Graph:
    """Remove BatchNormalizations whose factors are in the weights of the convolutions before them.

    A convolution takes over the output of its BatchNormalization, and the name of its b for the
    bias.

    Args:
      graph: the bound graph.
      norms: the indices of the nodes.
    """
    before = {node.inputs[0]: node for node in graph.nodes if node.index in norms}
    nodes = []
    for node in graph.nodes:
        norm = before.get(node.outputs[0]) if node.outputs else None
        if norm is not None:
            inputs = (*node.inputs[:_BIAS], norm.inputs[_BIAS])
            node = replace(node, inputs=inputs, reads=inputs, outputs=norm.outputs[:1])
        if node.index not in norms:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _find_pairs(graph: Graph, tensors: Mapping[str, Any]) -> Iterator[Pair]:
    """Yield the pairs of the main graph whose weight and b nothing else reads."""
    times = Counter(read_names(graph))
    stored = tensors.keys() & graph.weights
    convs = {node.outputs[0]: node for node in graph.nodes if node.outputs and _is(node, "Conv")}
    for norm in graph.nodes:
        if not _is(norm, "BatchNormalization") or norm.inputs[0] not in convs:
            continue
        pair = Pair(convs[norm.inputs[0]], norm)
        weight, _, b, *_ = pair.tensors
        single = times[norm.inputs[0]] == times[weight] == times[b] == 1
        statistics = any(times[name] for name in norm.outputs[1:])
        foldable = not statistics and norm.attributes.get("spatial", 1)
        if (
            single
            and foldable
            and pair.conv.inputs[0] != weight
            and stored.issuperset(pair.tensors)
        ):
            yield pair


def _is(node: Node, name: str) -> bool:
    """Check whether a node is an operator of ONNX of this name."""
    return node.op.name == name and not node.op.domain and node.body is None


def read_names(graph: Graph) -> Iterator[str]:
    """Yield each read of a graph, repeatedly: names that outputs and nodes read, and the tensors
    that subgraphs and bodies of functions use."""
    yield from graph.outputs
    for node in graph.nodes:
        yield from node.reads
        for inner in (*node.subgraphs, *([] if node.body is None else [node.body])):
            yield from graph_tensors(inner)


def _fold_pair(pair: Pair, tensors: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the factors of the weight and the bias, both of shape (channels,).

    None if shapes or types do not fit, or folding would lose precision.
    """
    arrays = [tensors[name] for name in pair.tensors]
    (dtype, *others) = {x.dtype for x in arrays}
    if others or dtype not in (np.float32, np.float64) or not all(map(is_in_memory, arrays)):
        return None
    w, *vectors = map(np.asarray, arrays)
    if w.ndim < 3 or any(v.shape != w.shape[:1] for v in vectors):
        return None
    scale, b, mean, var, *bias = (v.astype(np.float64) for v in vectors)
    epsilon = pair.norm.attributes.get("epsilon", 1e-5)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(var + epsilon)
        shift = (sum(bias) - mean) * factor + b
        largest = np.abs(w).max(axis=tuple(range(1, w.ndim)), initial=0) * np.abs(factor)
    # Subnormal products and overflow would lose digits that the two nodes keep. Comparisons are
    # written such that NaN fails them.
    info = np.finfo(dtype)
    low, high = float(info.tiny / info.eps), float(info.max * info.eps)
    sound = epsilon >= 0 and np.all((var >= 0) & (var < np.inf)) and np.all(np.abs(shift) <= high)
    for size in (np.abs(factor), largest):
        sound = sound and np.all((size == 0) | ((low <= size) & (size <= high)))
    return (factor.astype(dtype), shift.astype(dtype)) if sound else None
