"""Which tensors are parameters and which are running statistics, by where they are used.

`jaxonnx.registry` says what stands at the inputs of an operator; a tensor keeps its role behind
Transpose, Reshape, Cast, Identity and the like, in parts (Slice, Split, Concat, Gather of constant
indices), repeated (Expand), in subgraphs and in functions of the model.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.ancestors import behind
from jaxonnx._graph.bind import Graph
from jaxonnx._graph.buffers import Buffers, is_buffer
from jaxonnx._graph.computed import Computed, computed_values
from jaxonnx._graph.known_constants import describe_constant
from jaxonnx._graph.normalizations import Normalizations, normalizations
from jaxonnx._graph.operands import is_start
from jaxonnx._graph.positions import PRODUCTS, embeddings, is_grid, is_learned
from jaxonnx._graph.uses import Use, uses
from jaxonnx._io.protos import all_graphs

KNOWN_LIMIT = 4096
"""Bytes; a frozen tensor above it is an argument of the compiled function, not a constant in it."""

HOST_ONLY = (object, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)
"""Element types that XLA does not have: such tensors stay in NumPy."""


def split(
    graph: Graph, tensors: Mapping[str, np.ndarray], proto: GraphProto
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Split the tensors of a graph into parameters, state and constants.

    State is running statistics, and frozen tensors that are too large to be constants of a compiled
    function.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.
      proto: the graph as the file has it.
    """
    role_of = roles(graph, tensors, stored_names(proto))
    params, state, constants = {}, {}, {}
    for name in graph_tensors(graph):
        value = tensors[name]
        if role_of.get(name) == "param":
            params[name] = value
        elif name in role_of or (value.nbytes > KNOWN_LIMIT and value.dtype not in HOST_ONLY):
            state[name] = value
        else:
            constants[name] = value
    return params, state, constants


def stored_names(proto: GraphProto) -> set[str]:
    """Return the names of the initializers, and of the results of Identity nodes.

    Some exporters write a tensor that equals an initializer as an Identity of that.
    """
    graphs = [*all_graphs(proto)]
    names = {tensor.name for one in graphs for tensor in one.initializer}
    nodes = (node for one in graphs for node in one.node if node.op_type == "Identity")
    return names | {node.output[0] for node in nodes if node.output}


def graph_tensors(graph: Graph) -> list[str]:
    """Return the named tensors of a graph, its subgraphs and the functions that it calls."""
    names = [*graph.weights, *graph.lifted.values()]
    for node in graph.nodes:
        for g in (*node.subgraphs, *([] if node.body is None else [node.body])):
            names += graph_tensors(g)
    return list(dict.fromkeys(names))


def running_statistics(graph: Graph) -> set[str]:
    """Return the names that are used as running statistics, also in subgraphs and functions."""
    names = set()
    for node in graph.nodes:
        names |= {name for i, name in enumerate(node.inputs) if node.op.role(i) == "state"}
        for g in node.subgraphs:
            names |= running_statistics(g)
        if node.body is not None:
            outer = dict(zip(node.body.inputs, node.inputs, strict=False)) | dict(node.body.lifted)
            names |= {outer[name] for name in running_statistics(node.body) if name in outer}
    return names


def roles(
    graph: Graph, tensors: Mapping[str, Any], initializers: Collection[str]
) -> dict[str, str]:
    """Return the role, "param" or "state", of each tensor that has one.

    Args:
      graph: the bound main graph.
      tensors: its named tensors.
      initializers: the names of those that are initializers; the others sit in Constant nodes.
    """
    return Roles(graph, tensors, initializers).of


class Roles:
    """The roles of the tensors of a graph, and the reasons why others are constants.

    Args:
      graph: the bound main graph.
      tensors: its named tensors.
      initializers: the names of those that are initializers; the others sit in Constant nodes.
      trained: the names of tensors that are parameters in any case.

    Attributes:
      spelled: the spelled-out normalizations.
      used: the uses of the tensors.
      of: "param" or "state", for the tensors that have a role.
      constants: for tensors that stand where weights do and are constants, why they are.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, Any],
        initializers: Collection[str],
        trained: Collection[str] = (),
    ) -> None:
        self.tensors, self.initializers, self.trained = tensors, initializers, trained
        self.spelled = normalizations(graph, tensors)
        computed = computed_values(graph, tensors)
        values = {**tensors, **{name: found.value for name, found in computed.items()}}
        named = {*initializers, *computed}
        read = [*uses(graph, values, computed)]
        self.used = [use for use in read if use.name not in computed]
        fed = behind(graph.nodes, graph.inputs)
        inner = frozenset[str]().union(*(found.sources for found in computed.values()))
        read = [use for use in read if not (use.name in inner and _is_inner(use, fed))]
        found = [*_roles(graph, values, named, self.spelled, read)]
        looked = {use.name for use, role in found if role != "state"} - {*trained}
        known = {name: describe_constant(values[name]) for name in looked}
        known |= dict.fromkeys(trained, "")
        weights = [use for use, role in found if role == "param" and not known[use.name]]
        heavy = [use for use in weights if np.size(values[use.name]) > 1]
        layers = {u.outer.index for u in heavy if u.node.op.role(u.position) in (None, "param")}
        packed = [use for use in read if not jnp.issubdtype(values[use.name].dtype, jnp.floating)]
        layers |= {use.outer.index for use in packed if use.node.op.like in PRODUCTS}
        stored = any(use.name in initializers for use in weights if use.node.op.form(use.position))
        places = Buffers(graph, read, layers, named, stored)
        placed = {use.name for use, _ in found} | self.spelled.statistics
        more = [use for use in read if use.name in named and use.name not in placed]
        more = [use for use in more if layers and _is_operand(use, values[use.name], places)]
        known |= {use.name: describe_constant(values[use.name]) for use in more}
        if more:  # these are layers, too
            own = (use for use in more if not known[use.name])
            layers |= {u.outer.index for u in own if not places.describe(u, "vector", values)}
            places = Buffers(graph, read, layers, named, stored)
        self.of: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        for use, role in [*found, *((use, "param") for use in more)]:
            why = "" if role == "state" else known[use.name]
            own = role == "state" or use.name in trained or use.name in self.spelled.learned
            if not why and not own:
                place = use.node.op.role(use.position)
                place = "vector" if place is None and use in more and not is_start(use) else place
                why = places.describe(use, place, values)
            (self.constants if why else self.of).setdefault(use.name, why or role)
        self._place_sources(computed, stored)
        self.constants = {n: why for n, why in self.constants.items() if n not in self.of}

    def _place_sources(self, computed: Mapping[str, Computed], stored: bool) -> None:
        """Pass the role of each computed value on to the tensors that it is computed from."""
        for name, (_, sources) in computed.items():
            role, why = self.of.pop(name, ""), self.constants.pop(name, "")
            for source in sorted(sources - self.of.keys() - self.constants.keys()):
                if why:
                    self.constants[source] = f"{why} (computed from it)"
                elif role == "param" and self._is_source(source, stored):
                    self.of[source] = "param"

    def _is_source(self, name: str, stored: bool) -> bool:
        """Check whether a tensor that a weight is computed from is learned: no mask, no counter."""
        value = np.asarray(self.tensors[name])
        if name in self.spelled.statistics or (stored and name not in self.initializers):
            return False
        if describe_constant(value) or is_buffer(name):
            return False
        vector = sum(n != 1 for n in value.shape) == 1 and (
            value.size == 2 or len(np.unique(value)) != 2
        )
        return vector or _is_irregular(value)

    @property
    def unplaced(self) -> dict[str, str]:
        """The tensors that look learned but have no role, with the operator that reads each.

        They are floating-point initializers with more than two different numbers that are not an
        arithmetic sequence.
        """
        readers: dict[str, str] = {}
        for use in self.used:
            op = use.node.op
            scale = (op.view and use.position > 0) or use.position in op.scales
            if not (use.passes or scale or op.domain == "ai.onnx.ml"):
                readers.setdefault(use.name, op.name)
        placed = {*self.of, *self.constants, *self.trained, *self.spelled.statistics}
        return {
            name: reader
            for name, reader in readers.items()
            if name in self.initializers
            and name not in placed
            and jnp.issubdtype(self.tensors[name].dtype, jnp.floating)
            and not describe_constant(self.tensors[name])
            and _is_irregular(np.asarray(self.tensors[name]))
        }


def _roles(
    graph: Graph,
    tensors: Mapping[str, Any],
    initializers: Collection[str],
    spelled: Normalizations,
    used: Sequence[Use],
) -> Iterator[tuple[Use, str]]:
    """Yield the uses that give a tensor a role, by operators and shapes alone.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors and of computed values.
      initializers: the names of initializers and computed values.
      spelled: the spelled-out normalizations.
      used: the uses of `tensors`.

    Yields:
      The use and "param" or "state".
    """
    embedded = embeddings(graph, used)

    def is_vector(use: Use) -> bool:
        value = tensors[use.name]
        if value.size == 1:
            # An epsilon is a Constant and a factor of sqrt(d) is multiplied; a bias is neither.
            return value.ndim > 0 and use.node.op.name == "Add" and use.name in initializers
        if sum(d != 1 for d in value.shape) != 1:
            return False
        if use.node.op.name == "Sub":  # 1 - mask, with a vector of ones
            return len(np.unique(value)) > 1
        # a slice of a sequence 0, 1, 2, ... is a list of positions; a slice of zeros may be a bias
        return not (use.view.part and _evenly_spaced(value))

    def is_table(use: Use) -> bool:
        value = np.asarray(tensors[use.name])
        irregular = use.name in initializers and _is_irregular(value)
        return irregular and (is_learned(use, value, embedded) or is_grid(use, value))

    for use in used:
        role = use.node.op.role(use.position)
        kind = tensors[use.name].dtype
        if not jnp.issubdtype(kind, jnp.floating) or kind.itemsize == 1:  # quantized
            continue
        if use.name in spelled.learned and role in (None, "vector"):
            several = sum(d != 1 for d in tensors[use.name].shape)
            role = "param" if several <= spelled.learned[use.name] else None
        elif role == "vector":
            role = "param" if is_vector(use) and use.name not in spelled.statistics else None
            role = "param" if role is None and is_table(use) else role
        elif role == "param" and use.view.expanded and use.node.op.form(use.position):
            # rotary frequencies (1, F, 1) times positions (1, 1, T): an outer product, no sum
            role = "param" if use.summed else None
        elif role is None and use.name in initializers:
            value = tensors[use.name]
            learned = _is_token(use, value) or _is_normalized(use, value)
            role = "param" if learned else None
        if role is not None:
            yield use, role


def _is_inner(use: Use, fed: Set[str]) -> bool:
    """Check whether a vector meets only other tensors, so that their result tells its role."""
    return use.node.op.role(use.position) in (None, "vector") and fed.isdisjoint(use.node.reads)


def _is_operand(use: Use, value: Any, places: Buffers) -> bool:
    """Check whether a tensor is learned, at an input for which the operator has no weight."""
    value = np.asarray(value)
    floating = jnp.issubdtype(value.dtype, jnp.floating) and value.size > 1
    return floating and _is_irregular(value) and places.is_learned(use, value)


def _is_irregular(value: np.ndarray) -> bool:
    """Check whether a tensor has more than two different numbers that are not evenly spaced."""
    first = value.reshape(-1)[:KNOWN_LIMIT]
    return len(np.unique(first)) > 2 and not _evenly_spaced(first)


def _evenly_spaced(value: np.ndarray) -> bool:
    """Check whether a vector is an arithmetic sequence like 0, 1, 2, ...."""
    steps = np.diff(np.asarray(value).reshape(-1).astype(np.float64))
    return bool(steps.size and steps[0] != 0 and np.allclose(steps, steps[0]))


def _is_token(use: Use, value: np.ndarray) -> bool:
    """Check whether a tensor is a learned token (or a few) that a Concat adds to a sequence.

    The sequence has rank 3 with features along the last axis, and the Concat is along the first or
    second. The token is repeated for each example, unless the batch is one.
    """
    axes = use.view.axes
    if use.passes or (use.node.op.name, use.node.op.domain) != ("Concat", ""):
        return False
    if axes == (0,) and use.view.expanded:  # to a shape that the file computes
        return use.node.attributes.get("axis", 1) == 1 and _is_irregular(np.asarray(value))
    if axes is None or len(axes) != 3 or use.view.part:
        return False
    joined = use.node.attributes.get("axis", 1) % 3
    lengths = [1 if a is None else value.shape[a] for a in axes]
    if joined == 2 or lengths[2] == 1 or lengths[1 - joined] != 1:
        return False
    return use.view.expanded or len(np.unique(value)) > 2


def _is_normalized(use: Use, value: np.ndarray) -> bool:
    """Check whether a tensor is a table whose rows a layer normalizes, as DeBERTa's positions."""
    normalizes = use.node.op.name.endswith("LayerNormalization") and use.position == 0
    return normalizes and np.ndim(value) > 1 and _is_irregular(np.asarray(value))
