"""Find inputs of decoders by their role: caches that an output continues, rows of a table.

Caches are found by the graph: a value carries the input of the graph that it continues: behind
views, behind Concat and scatters, and at the outputs of operators with a past (`Op.pasts`). An
input is a cache if an output of the graph carries it.

Gather counts negative indices from the end, and what an index beyond the table gives is not defined
(here NaN, or zeros). In the data of a training either is a mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.rules import STARTS
from jaxonnx._graph.values import Value
from jaxonnx.errors import InputError

_CONTINUE = ("Expand", "Gather", "Pad", "ScatterElements", "ScatterND", "Slice", "TensorScatter")
"""Operators, besides views, whose result continues their first input."""

_COUNTS_OF_LOGITS = ("num_logits_to_keep", "logits_to_keep")
"""Inputs of Hugging Face's decoders: the number of places that get logits, 0 for all."""


@dataclass(frozen=True)
class Caches:
    """The inputs of a decoder that hold its state between calls.

    Attributes:
      pairs: from each cache (input) to the output that continues it.
      sizes: for each cache, the symbolic dimensions of that output. A dimension of the cache that
        the output has as well does not grow.
      values: the caches, as the file declares them.
      switches: further inputs that say whether caches are in use, with the values for "not".
      omissible: the caches that may be absent, because only optional inputs read them.
      unread: further inputs that are not read while the switches are off, like an encoder's keys.
      joined: for symbolic dimensions that do not grow: (value, axis) of a value with that
        dimension, which Concat joins to a cache. It tells the size.
    """

    pairs: Mapping[str, str]
    sizes: Mapping[str, set[str]]
    values: tuple[Value, ...]
    switches: Mapping[str, np.ndarray]
    omissible: frozenset[str]
    unread: frozenset[str]
    joined: Mapping[str, tuple[str, int]]

    @property
    def names(self) -> set[str]:
        """The names of all these inputs."""
        return {*self.pairs, *self.switches, *self.unread}

    @property
    def switches_on(self) -> dict[str, np.ndarray]:
        """The values of the switches once the caches have entries."""
        return {n: np.ones_like(x) if x.dtype == bool else x for n, x in self.switches.items()}

    def empty(self, batch: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray | None]:
        """Return the values of these inputs before the first call.

        An axis that grows has length 0; caches of a fixed size are zeros.

        Args:
          batch: the batch size, the first axis of each cache.
          sizes: the sizes of the dimensions in `joined`, by name.

        Raises:
          InputError: the file does not say the size of a cache.
        """
        empty = {value.name: self._empty(value, batch, sizes) for value in self.values}
        return {**empty, **dict.fromkeys(self.unread), **self.switches}

    def empty_of_known_size(self, batch: int) -> dict[str, np.ndarray | None]:
        """Return those values of `empty` that need no `sizes`."""
        plain = [v for v in self.values if self.sizes[v.name].isdisjoint((v.shape or ())[1:])]
        empty = {value.name: self._empty(value, batch, {}) for value in plain}
        return {**empty, **dict.fromkeys(self.unread), **self.switches}

    def _empty(self, value: Value, batch: int, sizes: Mapping[str, int]) -> np.ndarray | None:
        omitted = value.name in self.omissible
        if omitted and (value.dtype is None or value.dtype.itemsize > 1):
            return None  # of codes the operator needs the type
        constant = set() if omitted else self.sizes[value.name]
        shape = [batch, *(sizes.get(str(size), size) for size in (value.shape or ())[1:])]
        for axis, size in enumerate(shape):
            if not isinstance(size, int):
                if not omitted and (size in constant or size is None):
                    raise InputError(
                        f"input {value} is a cache, and the file does not say its size along axis "
                        f"{axis}: pass it"
                    )
                shape[axis] = 0
        return np.zeros(shape, value.dtype)


def find_caches(graph: Graph, inputs: Sequence[Value]) -> Caches | None:
    """Find the caches among the inputs of a graph.

    Args:
      graph: the bound graph.
      inputs: its inputs, as the file declares them.

    Returns:
      None if there are no caches, or no inputs of rank 2 and more besides them (tokens).
    """
    # 1. inputs of rank 3 and more that an output continues
    kinds = {value.name: value for value in inputs}
    floats = {name for name, value in kinds.items() if len(value.shape or ()) > 2}
    carried = _follow(graph, {name: name for name in floats})
    pairs: dict[str, str] = {}
    for output in graph.outputs:
        name = carried.get(output)
        if name is not None and name != output:
            pairs.setdefault(name, output)
    # 2. the other inputs: switches, those that are not read while these are off, tokens
    others = [value for value in inputs if value.name not in pairs]
    switches = _find_switches(graph, others) if pairs else {}
    # a network that only joins features to an input and returns both looks the same, but has no
    # tokens besides
    others = [v for v in others if v.name not in switches]
    unread = {value.name for value in others} - _live_reads(graph, switches) if switches else set()
    tokens = [v for v in others if v.name not in unread and len(v.shape or ()) > 1]
    if not pairs or not tokens:
        return None
    values = tuple(kinds[name] for name in graph.inputs if name in pairs)
    types = dict(zip(graph.outputs, graph.output_types, strict=True))
    # 3. the named sizes of each cache after a step, and what a Concat joins to it
    sizes = {}
    for name, output in pairs.items():
        kind = types[output]
        dims = () if kind is None else kind.tensor_type.shape.dim
        sizes[name] = {dim.dim_param for dim in dims if dim.dim_param}
    caches = {value.name: value for value in values}
    joined: dict[str, tuple[str, int]] = {}
    for node in graph.nodes:
        names = [name for name in node.inputs if name in caches]
        if node.op.name != "Concat" or len(names) != 1 or len(node.inputs) != 2:
            continue
        (other,) = {*node.inputs} - {*names}
        for axis, size in enumerate(caches[names[0]].shape or ()):
            if axis and isinstance(size, str) and size in sizes[names[0]]:
                joined.setdefault(size, (other, axis))
    # 4. caches that are read only as optional pasts of operators (`Op.pasts`)
    omissible = {*pairs}
    for node in graph.nodes:
        pasts = {node.inputs[i] for i in node.op.pasts if i < len(node.inputs)}
        needed = {n for n, w in zip(node.inputs, node.op.needed, strict=False) if w is not None}
        omissible -= {*node.reads} - (pasts - needed if node.body is None else set())
    idle = frozenset(unread & floats)
    return Caches(pairs, sizes, values, switches, frozenset(omissible), idle, joined)


def find_continued(graph: Graph, inputs: Sequence[Value]) -> Mapping[str, str]:
    """Map the caches among the inputs of a graph to the outputs that continue them."""
    caches = find_caches(graph, inputs)
    return {} if caches is None else caches.pairs


def find_states(graph: Graph, inputs: Sequence[Value]) -> dict[str, str]:
    """Find the inputs that recurrent operators start from and outputs continue, with the outputs.

    Where there is no such operator, they are the inputs that Scan and Loop carry from step to step.

    Args:
      graph: the bound graph.
      inputs: its inputs, as the file declares them.
    """
    carried = {v.name: v.name for v in inputs if len(v.shape or ()) > 1}
    continued = _continue_states(graph, carried)
    return {continued[name]: name for name in graph.outputs if name in continued}


def _continue_states(graph: Graph, carried: dict[str, str]) -> dict[str, str]:
    """Map the values that continue a state of a graph to the inputs that `carried` says it is of.

    A recurrent layer may be in a function or in a branch of an If, as where a network of speech has
    layers for two sampling rates.
    """
    carried = _follow(graph, carried)
    ends: dict[str, str] = {}
    for node in graph.nodes:
        inside = [(part, carried) for part in node.subgraphs if node.op.name == "If"]
        if node.body is not None:
            arguments = zip(node.body.inputs, node.inputs, strict=False)
            inside.append((node.body, {i: carried[n] for i, n in arguments if n in carried}))
        for part, starts in inside:
            inner = _continue_states(part, {**starts})
            pairs = zip(node.outputs, part.outputs, strict=False)
            ends |= {output: inner[end] for output, end in pairs if end in inner}
        for i, position in enumerate(STARTS.get(node.op.name, ())):
            source = node.inputs[position] if position < len(node.inputs) else ""
            if i + 1 < len(node.outputs) and source in carried:
                ends[node.outputs[i + 1]] = carried[source]
    for node in graph.nodes if not ends else ():  # values that a Scan or Loop carries
        sources: Sequence[str] = ()
        if node.op.name == "Scan" and node.version >= 9:
            sources = node.inputs[: len(node.inputs) - node.attributes["num_scan_inputs"]]
        elif node.op.name == "Loop":
            sources = node.inputs[2:]
        pairs = zip(node.outputs, sources, strict=False)
        ends |= {output: carried[source] for output, source in pairs if source in carried}
    return _follow(graph, ends)


def _follow(graph: Graph, carried: dict[str, str]) -> dict[str, str]:
    """Extend `carried`, from values to the inputs that they continue, to the values of a graph."""
    for node in graph.nodes:
        for output, source in _find_continued(node, carried):
            if output and source in carried:
                carried[output] = carried[source]
    return carried


def _find_continued(node: Node, carried: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (output, source) where an output of a node continues another value."""
    name = node.op.name
    if node.body is not None:
        arguments = dict(zip(node.body.inputs, node.inputs, strict=False))
        inner = _follow(node.body, {i: i for i, n in arguments.items() if n in carried})
        pairs = zip(node.outputs, node.body.outputs, strict=False)
        yield from ((o, arguments[inner[result]]) for o, result in pairs if result in inner)
    elif name == "If":
        for branch in node.subgraphs:
            inner = _follow(branch, {**carried})
            pairs = zip(node.outputs, branch.outputs, strict=False)
            yield from ((o, inner[result]) for o, result in pairs if result in inner)
    elif node.op.view or name in _CONTINUE:
        yield node.outputs[0], node.inputs[0]
    elif name == "Concat":
        yield from ((node.outputs[0], source) for source in node.inputs if source in carried)
    for i, position in enumerate(node.op.pasts):
        if position < len(node.inputs) and i + 1 < len(node.outputs):
            yield node.outputs[i + 1], node.inputs[position]


def _find_switches(graph: Graph, inputs: Sequence[Value]) -> dict[str, np.ndarray]:
    """Find the inputs that an If branches on, and those that limit the logits, with value 0.

    False takes the branch without a past, and 0 stands for all logits.
    """
    off = {
        value.name: np.zeros([n if isinstance(n, int) else 1 for n in value.shape or ()], kind)
        for value in inputs
        if (kind := value.dtype) is not None
        and (kind == np.bool_ or value.name in _COUNTS_OF_LOGITS)
    }
    behind = _follow(graph, {name: name for name in off})
    conditions = {node.inputs[0] for node in graph.nodes if node.op.name == "If"}
    chosen = {behind[name] for name in conditions if name in behind}
    return {name: off[name] for name in off if name in chosen or name in _COUNTS_OF_LOGITS}


def _live_reads(graph: Graph, switches: Collection[str]) -> set[str]:
    """Return the names that a graph reads while the switches are off (the else branch is taken)."""
    behind = _follow(graph, {name: name for name in switches})
    names: set[str] = {*graph.outputs}
    for node in graph.nodes:
        else_branch = node.graphs.get("else_branch")
        if isinstance(else_branch, Graph) and behind.get(node.inputs[0]) in switches:
            names |= {*node.inputs, *else_branch.outputs}
            names.update(name for inner in else_branch.nodes for name in inner.reads)
        else:
            names |= {*node.reads}
    return names


_LENGTHS = {"GroupQueryAttention": 5, "SparseAttention": 8}
"""The positions of the lengths of texts among the inputs of attention."""


def find_counted(graph: Graph) -> set[str]:
    """Return the inputs whose sums attention takes as the lengths of texts."""
    nodes, carried = graph.nodes, _follow(graph, {name: name for name in graph.inputs})
    places = ((node, _LENGTHS.get(node.op.name, len(node.inputs))) for node in nodes)
    lengths = ancestors(nodes, [name for node, i in places for name in node.inputs[i : i + 1]])
    sums = (node for node in nodes if node.op.name == "ReduceSum" and node.outputs[0] in lengths)
    return {carried[node.inputs[0]] for node in sums if node.inputs[0] in carried}


_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators whose result has the numbers of their first input."""


def count_rows(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of the table that an input has indices of, by input.

    Inputs that are no such indices are left out; of several tables the smallest counts.
    """
    counts: dict[str, int] = {}
    for _, name, rows in find_lookups(graph, {name: name for name in graph.inputs}, tensors):
        counts[name] = min(rows, counts.get(name, rows))
    return counts


def find_lookups(
    graph: Graph, inputs: dict[str, str], tensors: Mapping[str, Any]
) -> Iterator[tuple[Node, str, int]]:
    """Yield the nodes that read rows of a table by an input, subgraphs included.

    Args:
      inputs: from each value that has the numbers of an input to that input; it is extended.

    Yields:
      The node, the input, and the number of rows.
    """
    shapes = {name: np.shape(tensor) for name, tensor in tensors.items()}
    for node in graph.nodes:
        for inner in node.subgraphs:
            yield from find_lookups(inner, {**inputs}, tensors)
        if not node.outputs:  # as damaged files have
            continue
        kind, first = node.op.name, node.inputs[0] if node.inputs else ""
        if kind in _VIEWS and first in inputs and node.body is None:
            inputs[node.outputs[0]] = inputs[first]
        elif node.op.same_axes and first in shapes:
            shapes[node.outputs[0]] = shapes[first]
        elif kind == "Transpose" and len(shapes.get(first, ())) == 2:  # a tied layer of logits
            if [*(node.attributes.get("perm") or (1, 0))] == [0, 1]:
                continue
            shapes[node.outputs[0]] = shapes[first][::-1]
        elif kind == "Reshape" and first in shapes:
            # the codes of an output layer, as the rows of its embedding
            target = tensors.get("".join(node.inputs[1:2]))
            if isinstance(target, np.ndarray) and target.size and target[0] == shapes[first][0]:
                shapes[node.outputs[0]] = (*map(int, target),)
        form = node.op.form(0) if node.op.like == "Gather" else None
        if form is None or node.attributes.get(form.rows, 0) != 0:
            continue
        table, index, *_ = node.inputs
        if index in inputs and shapes.get(table):
            yield node, inputs[index], shapes[table][0]
