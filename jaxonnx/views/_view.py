"""`View`: a change of a network and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np
from onnx import ModelProto

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.values import Value

Evaluate = Callable[[Mapping[str, Any], jax.Array | None, Mapping[str, Any]], tuple]
"""An evaluation: from tensors, a random key and inputs to outputs and new running statistics."""
Measure = Callable[[str, Mapping[str, Any]], tuple[int, ...]]
"""From a value and those inputs that it depends on to its shape, without computing it."""
N = TypeVar("N")


class Addition(NamedTuple):
    """A view's addition to the file of the network before it."""

    tensors: frozenset[str]
    """The tensors that get other values within the graph; copies of them go on reading these."""
    write: Callable[[ModelProto], ModelProto]
    """Adds it to the file with its values."""
    inputs: Mapping[str, np.ndarray] = {}
    """Values of the inputs that it adds, which have other defaults."""


@dataclass(frozen=True)
class View:
    """A change of a network that is evaluated in its place, while the file stays as it is.

    A program is a file's graph and its views, in order. Each sees the network that the views before
    it give: it enters the graph, supplies the inputs that its callers no longer pass, and wraps the
    evaluation. All hooks default to no change; a view overrides those that it needs.
    """

    stays: ClassVar[bool] = True
    """Whether the view also enters the graph of a file that was changed."""
    adapts: ClassVar[bool] = False
    """Whether the parameters are tensors of the view, from which `read` computes the graph's. The
    file and the choice of parameters cannot be changed beneath such a view (`refuse_change`)."""
    maps: ClassVar[bool] = False
    """Whether `wrap` traces the inputs, so that no node can read their values."""

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        """Return the graph that is evaluated, computed once for each program.

        Args:
          graph: the graph under the views before this one.
          constants: the values of tensors that are neither parameters nor state.
        """
        return graph

    def follow(self, graph: Graph, inputs: Sequence[Value]) -> Sequence[View]:
        """Return the views that stand for this one, which does not stay, in a changed file.

        Args:
          graph: that of the changed file.
          inputs: its inputs.
        """
        return ()

    def train(self, graph: Graph) -> Graph:
        """Return the graph that training evaluates in place of one, or of a part of one."""
        return graph

    def read(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compute the tensors that the graph reads from those that are stored.

        It is pure and differentiable. A matrix may be in another form, like a `LowRank`.
        """
        return tensors

    def drop(self, tensors: Mapping[str, Any], key: jax.Array) -> Mapping[str, Any]:
        """Drop parts of the tensors that `read` computed, in training."""
        return tensors

    def supply(self, inputs: Mapping[str, Any], measure: Measure) -> Mapping[str, Any]:
        """Return the inputs of the network before this view, from those of the one behind it."""
        return inputs

    def wrap(self, evaluate: Evaluate) -> Evaluate:
        """Return the evaluation of the network behind this view, from that of the one before it."""
        return evaluate

    def declare(self, value: Value) -> Value:
        """Return an input or output of the network before this view as the one behind it has it."""
        return value

    def merge(self, network: N, *, requantize: bool) -> N:
        """Return a network (`Network`) whose tensors have the change, without this view.

        Args:
          network: a network whose last view this is.
          requantize: whether weights in few bits may be rounded again.
        """
        return network

    def leave(self, network: N, form: str | None) -> tuple[N, list[Addition]]:
        """Return the network without this view, as it is saved, and its additions to the file.

        Args:
          network: a network whose last view this is.
          form: how the change is written ("merged", "nodes", "inputs"); None: as fits it best.
        """
        without: Any = network
        return replace(without, program=without.program.leave(type(self))), []

    @property
    def targets(self) -> Collection[str]:
        """The tensors that `merge` gives other values to."""
        return ()

    @property
    def supplied_inputs(self) -> Collection[str]:
        """The inputs that are supplied and cannot be passed by name either."""
        return ()


class CallView(View):
    """A view of inputs and outputs: how a network is called, which no file records."""
