"""Caches of decoders that are empty in each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.caches import Caches
from jaxonnx.views._outputs import Outputs
from jaxonnx.views._view import CallView, Measure, View


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

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
        batch = np.shape(inputs[self.first])[0]
        inputs_known = {**self.caches.empty_of_known_size(batch), **inputs}
        sizes = {
            size: measure(value, inputs_known)[axis]
            for size, (value, axis) in self.caches.joined.items()
        }
        return {**self.caches.empty(batch, sizes), **inputs}


def omit_caches(graph: Graph, caches: Caches) -> tuple[View, View]:
    """Return the views of a decoder whose caches are neither inputs nor outputs."""
    outputs = {*graph.outputs} - {*caches.pairs.values()}
    return Outputs.among(graph, outputs), EmptyCaches.of(graph, caches)
