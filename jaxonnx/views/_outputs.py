"""Other outputs than the file's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx.views._view import CallView


@dataclass(frozen=True)
class Outputs(CallView):
    """The outputs are these values: some of the network's own, or inner ones."""

    names: tuple[str, ...]
    stays: ClassVar[bool] = False

    @classmethod
    def among(cls, graph: Graph, names: Collection[str]) -> Outputs:
        """Keep the outputs of a graph that have one of these names."""
        return cls(tuple(dict.fromkeys(name for name in graph.outputs if name in names)))

    @classmethod
    def beside(cls, graph: Graph, values: Collection[str]) -> Outputs:
        """Add inner values behind the outputs of a graph."""
        return cls((*graph.outputs, *values))

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        types = dict(zip(graph.outputs, graph.output_types, strict=True))
        return replace(graph, outputs=self.names, output_types=tuple(map(types.get, self.names)))
