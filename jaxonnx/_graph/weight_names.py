"""The names by which weights can be chosen besides their own: of modules, of nodes, of ties."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onnx import GraphProto

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.roles import roles, stored_names
from jaxonnx._graph.scopes import modules
from jaxonnx._graph.uses import uses, weights
from jaxonnx._io.ties import tied_names

Names = Mapping[str, Collection[str]]
"""The tensors that a name stands for."""


@dataclass(frozen=True, eq=False)
class Places:
    """What the weights of a graph are called: by the modules and nodes that read them, and by ties.

    Attributes:
      proto, graph: the main graph, and the same bound.
      tensors: its named tensors.
      params: those that are trained, which count as weights whatever their role.
    """

    proto: GraphProto
    graph: Graph
    tensors: Mapping[str, Any]
    params: Collection[str]

    @cached_property
    def ties(self) -> dict[str, str]:
        """The names that tensors have besides their own, with the tensors' own."""
        return tied_names(self.proto, self.tensors)

    @cached_property
    def modules(self) -> Names:
        """The weights of each module; the names of weights tell modules too (blocks.0.bias)."""
        names: dict[str, dict[str, None]] = {}
        for tensor in self._weights:
            for end in re.finditer(r"(?<=.)[./]", tensor):
                names.setdefault(tensor[: end.start()], {})[tensor] = None
        nodes = {node.output[0]: node for node in self.proto.node if node.output}
        for output, tensors in self._read.items():
            for scope in modules(nodes[output]) if output in nodes else ():
                names.setdefault(scope, {}).update(dict.fromkeys(tensors))
        return names

    @cached_property
    def nodes(self) -> Names:
        """The weights that each node reads; the values that it gives are names of it too."""
        names: dict[str, dict[str, None]] = {}
        for node in self.proto.node:
            read = dict.fromkeys(self._read.get(node.output[0], ()) if node.output else ())
            for name in filter(None, (node.name, *node.output)) if read else ():
                names.setdefault(name, {}).update(read)
        return names

    @cached_property
    def _weights(self) -> dict[str, str]:
        """The tensors that have a role, are trained or matrices in few bits, with what is read."""
        stored = (name for name, w in weights(self.graph, self.tensors).items() if w.storage)
        placed = roles(self.graph, self.tensors, stored_names(self.proto))
        known = {*placed, *self.params, *stored}

        def root(name: str) -> str:  # an adapter of ours is where its weight is
            weight = name.partition(".lora_")[0]
            return weight if weight in self.tensors else name

        return {name: root(name) for name in self.tensors if name in known}

    @cached_property
    def _read(self) -> dict[str, list[str]]:
        """The weights that the nodes of the main graph read, by the first output of the node."""
        read: dict[str, list[str]] = {}
        at: dict[str, list[str]] = {}
        for name, root in self._weights.items():
            at.setdefault(root, []).append(name)
        for use in uses(self.graph, self.tensors):
            if use.name in at and use.outer.outputs:
                read.setdefault(use.outer.outputs[0], []).extend(at[use.name])
        return read
