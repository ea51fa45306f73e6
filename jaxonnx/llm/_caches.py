"""Views of decoders with caches: empty ones, shared memory, and room before their tokens.

Caches that grow would need a program for each length. With room they have one size, but a decoder
without a mask sees the room, and takes its size for the number of tokens before. So attention gets
a mask here, and the new token the position that it has. The keys stand behind the room: what
depends on the distance of tokens (relative positions, causal masks) is right as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.caches import Caches, find_caches
from jaxonnx._graph.values import Value
from jaxonnx._rewrite.network import Network, enter
from jaxonnx.registry import Op
from jaxonnx.views import CallView, Measure, Outputs, View

N = TypeVar("N", bound=Network)

VISIBLE = "padded caches: which places have tokens"
"""bool[1, 1, 1, places], of the caches and the new token."""
SHIFT = "padded caches: shift of positions"
"""The number of tokens before the new one less that of places."""
_MASKS = {("com.microsoft", "MultiHeadAttention"): 5, ("", "Attention"): 3}
"""The inputs for a mask, of operators that attend."""
_LOOKUPS = ("Gather", "Slice")
_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "Einsum", "MatMulNBits", "MatMulInteger")


@dataclass(frozen=True)
class EmptyCaches(CallView):
    """The caches (past keys and values) are empty, unless callers pass them by name."""

    caches: Caches
    first: str
    """The first input that is no cache, which tells the batch size."""
    stays: ClassVar[bool] = False

    @classmethod
    def of(cls, graph: Graph, caches: Caches) -> EmptyCaches:
        """Find the first other input of a graph with these caches."""
        return cls(caches, next(name for name in graph.inputs if name not in caches.names))

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        names = self.caches.names
        return replace(graph, inputs=tuple(name for name in graph.inputs if name not in names))

    def follow(self, graph: Graph, inputs: Sequence[Value]) -> Sequence[View]:
        caches = find_caches(graph, inputs)
        return () if caches is None else omit_caches(graph, caches)

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
        batch = np.shape(inputs[self.first])[0]
        inputs_known = {**self.caches.empty_of_known_size(batch), **inputs}
        sizes = {
            size: measure(value, inputs_known)[axis]
            for size, (value, axis) in self.caches.joined.items()
        }
        return {**self.caches.empty(batch, sizes), **inputs}


@dataclass(frozen=True)
class SharedCaches(CallView):
    """GroupQueryAttention writes a new step into the memory of its caches.

    What a cache holds behind a sample's steps stays, as in onnxruntime where past and present share
    a buffer; otherwise it is zeroed.
    """

    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        nodes = (replace(n, op=replace(n.op, reuses_inputs=True)) for n in graph.nodes)
        return replace(graph, nodes=tuple(nodes))


def omit_caches(graph: Graph, caches: Caches) -> tuple[View, View]:
    """Return the views of a decoder whose caches are neither inputs nor outputs."""
    outputs = {*graph.outputs} - {*caches.pairs.values()}
    return Outputs.among(graph, outputs), EmptyCaches.of(graph, caches)


def without_cache(model: N) -> N:
    """Return the model of `Model.without_cache`."""
    caches = find_caches(model.graph, model.inputs)
    return model if caches is None else enter(model, *omit_caches(model.graph, caches))


@dataclass(frozen=True)
class PaddedCaches(CallView):
    """A decoder of one new token reads caches with room, `VISIBLE` and `SHIFT`."""

    caches: Caches
    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        padded = _pad(graph, self.caches, constants)
        assert padded is not None  # or `find_padding` finds none
        return padded


def find_padding(graph: Graph, caches: Caches, constants: Collection[str]) -> PaddedCaches | None:
    """Prepare a decoder for caches with room; None if its use of their length is not understood."""
    return None if _pad(graph, caches, constants) is None else PaddedCaches(caches)


def _pad(graph: Graph, caches: Caches, constants: Collection[str]) -> Graph | None:
    branches = _take_branches(graph, caches.switches)
    if branches is None:
        return None
    # values of caches up to the first Softmax, with the products behind them: 0 or 1
    products = dict.fromkeys(caches.pairs, 0)
    for node in branches.nodes:
        level = max((products[name] for name in node.inputs if name in products), default=-1)
        if level < 0 or node.op.name in ("Shape", "Softmax"):
            continue
        if node.op.pasts:  # it attends, and returns the caches
            products |= dict.fromkeys(node.outputs[1:], 0)
        elif node.op.name in _PRODUCTS:
            products |= {name: 1 for name in node.outputs if level == 0}
        else:
            products |= dict.fromkeys(node.outputs, level)
    masked = {n.index: _mask(n) for n in branches.nodes if _is_attention(n, products)}
    positions = _find_positions(branches, products, constants)
    is_clear = all(masked.values()) and 2 * len(masked) == len(caches.pairs)
    if positions is None or not is_clear:
        return None
    changed = masked | {node.index: [_shift(node)] for node in positions}
    nodes = (new for node in branches.nodes for new in changed.get(node.index, [node]))
    return replace(branches, nodes=tuple(nodes))


def _take_branches(graph: Graph, switches: Collection[str]) -> Graph | None:
    """Put the branches with a past in place of the Ifs; None if names are defined twice."""
    nodes: list[Node] = []
    for node in graph.nodes:
        branch = node.graphs.get("then_branch")
        if not isinstance(branch, Graph) or node.inputs[0] not in switches:
            nodes.append(node)
            continue
        tensors = {*branch.weights, *branch.initializers}
        names = {name for inner in branch.nodes for name in inner.outputs} | tensors
        outer = {*graph.inputs, *graph.weights, *graph.initializers, *graph.producers}
        if names & (outer - {*node.outputs}):
            return None
        copies = zip(branch.outputs, node.outputs, strict=True)
        nodes += branch.nodes
        nodes += [_insert(node, "Identity", jnp.asarray, (a,), b) for a, b in copies if a != b]
        graph = replace(
            graph,
            weights=(*graph.weights, *branch.weights),
            initializers={**graph.initializers, **branch.initializers},
        )
    return replace(graph, nodes=tuple(nodes))


def _insert(node: Node, name: str, function: Any, inputs: tuple[str, ...], output: str) -> Node:
    """Return a node beside another one, which computes `output` by a function."""
    op = Op(name, function=function)
    return replace(
        node,
        op=op,
        inputs=inputs,
        reads=inputs,
        outputs=(output,),
        attributes={},
        graphs={},
        body=None,
    )


def _is_attention(node: Node, products: Mapping[str, int]) -> bool:
    """Check whether a node attends over caches, or makes weights of scores."""
    if node.op.name == "Softmax":
        axis = node.attributes.get("axis", -1 if node.version >= 13 else 1)
        return axis not in (0, 1) and products.get(node.inputs[0]) == 1
    return any(products.get(node.inputs[i]) == 0 for i in node.op.pasts if i < len(node.inputs))


def _find_positions(
    graph: Graph, products: Mapping[str, int], constants: Collection[str]
) -> list[Node] | None:
    """Find the nodes that look up the row of a position in a table.

    A position is known while compiling, and depends on the length of the caches. None if a node
    computes with such a number and the data, unless it is a size or a bias of scores.
    """
    data = {*graph.inputs, *graph.weights} - {*constants}
    sizes: set[str] = set()
    results: set[str] = set()  # of lookups
    lookups: list[Node] = []
    for node in graph.nodes:
        reads = {*node.reads}
        if node.op.name in ("Shape", "Size"):
            sizes.update(node.outputs if products.get(node.inputs[0]) == 0 else ())
        elif node.op.name in _LOOKUPS and node.inputs[0] in graph.weights and sizes & reads:
            lookups.append(node)
            results.update(node.outputs)
        elif data.isdisjoint(reads):
            kind = results if results & reads else sizes
            kind.update(node.outputs if (results | sizes) & reads else ())
        else:
            data.update(node.outputs)
            others = reads - {node.inputs[i] for i in node.op.static if i < len(node.inputs)}
            if sizes & others and not any(products.get(name) == 1 for name in node.inputs):
                return None
    return lookups


def _mask(node: Node) -> list[Node]:
    """Hide the room of caches from a node that attends; [] if it has a mask."""
    if node.op.name == "Softmax":
        name = f"{node.inputs[0]} of tokens"
        hide = _insert(node, "Where", _hide, (node.inputs[0], VISIBLE), name)
        return [hide, replace(node, inputs=(name,), reads=(name,))]
    place = _MASKS.get((node.op.domain, node.op.name))
    inputs = [*node.inputs, *[""] * 6][: max(6, len(node.inputs))]
    if place is None or inputs[place]:
        return []
    inputs[place] = VISIBLE
    return [replace(node, inputs=tuple(inputs), reads=(*node.reads, VISIBLE))]


def _hide(scores: Any, visible: Any) -> Any:
    return jnp.where(visible.reshape(-1), scores, jnp.finfo(scores.dtype).min)


def _shift(node: Node) -> Node:
    """Let a lookup of the position of one token read the shifted one."""
    table, *places = node.inputs

    def look_up(table: Any, shift: Any, place: Any, *bounds: Any) -> Any:
        is_first = not node.attributes.get("axis", 0)
        if node.op.name == "Slice":
            is_first = [*map(np.ravel, bounds[:2])] == [place + 1, [0]]
        # of several places, which are relative to those of the keys, each is right
        if is_first and np.shape(place)[-1:] == (1,) and np.ptp(place) == 0:
            return jnp.take(table, place + shift, axis=0)
        return node.op.function(table, place, *bounds, **node.attributes)

    return _insert(node, "Gather", look_up, (table, SHIFT, *places), node.outputs[0])
