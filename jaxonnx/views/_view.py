"""`View`: a change of a network and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value

Evaluate = Callable[[Mapping[str, Any], jax.Array | None, Mapping[str, Any]], tuple]
"""An evaluation: from tensors, a random key and inputs to outputs and new running statistics."""
Measure = Callable[[str, Mapping[str, Any]], tuple[int, ...]]
"""From a value and those inputs that it depends on to its shape, without computing it."""


@dataclass(frozen=True)
class View:
    """A change of a network that is evaluated in its place, while the file stays as it is.

    A program is a file's graph and its views, in order. Each sees the network that the views before
    it give: it enters the graph, supplies the inputs that its callers no longer pass, and wraps the
    evaluation. All hooks default to no change; a view overrides those that it needs.
    """

    stays: ClassVar[bool] = True
    """Whether the view also enters the graph of a file that was changed."""
    maps: ClassVar[bool] = False
    """Whether `wrap` traces the inputs, so that no node can read their values."""

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        """Return the graph that is evaluated, computed once for each program.

        Args:
          graph: the graph under the views before this one.
          constants: the values of tensors that are neither parameters nor state.
        """
        return graph

    def train(self, graph: Graph) -> Graph:
        """Return the graph that training evaluates in place of one, or of a part of one."""
        return graph

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> Mapping[str, Any]:
        """Return the inputs of the network before this view, from those of the one behind it."""
        return inputs

    def wrap(self, evaluate: Evaluate) -> Evaluate:
        """Return the evaluation of the network behind this view, from that of the one before it."""
        return evaluate

    def declare(self, value: Value) -> Value:
        """Return an input or output of the network before this view as the one behind it has it."""
        return value

    @property
    def closed(self) -> Collection[str]:
        """The inputs that are supplied and cannot be passed by name either."""
        return ()


class CallView(View):
    """A view of inputs and outputs: how a network is called, which no file records."""
