"""Tensors of one example beside values with a batch in Concat: class tokens, constant pads."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from onnx import NodeProto, helper, numpy_helper

from jaxonnx._graph.bind import Node
from jaxonnx._run.scope import Scope


class Row(NamedTuple):
    """A tensor whose axis of length one is to be repeated for each example."""

    name: str
    like: str
    """A value with the batch."""
    axis: int
    """The axis of the batch in both."""
    rank: int

    def nodes(self, result: str) -> list[NodeProto]:
        """Return the nodes that give `result`, the tensor as often as `like` has examples."""

        def constant(suffix: str, value: np.ndarray) -> NodeProto:
            tensor = numpy_helper.from_array(value)
            return helper.make_node("Constant", [], [f"{result}/{suffix}"], value=tensor)

        shape, batch, one, target = (
            f"{result}/{part}" for part in ("shape", "batch", "one", "target")
        )
        return [
            helper.make_node("Shape", [self.like], [shape]),
            constant("batch", np.arange(self.rank) == self.axis),
            constant("one", np.ones(1, np.int64)),
            helper.make_node("Where", [batch, shape, one], [target]),
            helper.make_node("Expand", [self.name, target], [result]),
        ]


def rows(node: Node, scope: Scope, old: Mapping[str, tuple[int, ...]]) -> dict[int, Row]:
    """Return the inputs of a Concat that lack the batch of the others, by position.

    Args:
      node: the Concat, where every batch has one example in the file.
      scope: its values with more examples.
      old: the shapes of the values with one.
    """
    moved = {
        name: axis
        for name in node.inputs
        for axis, length in enumerate(old[name])
        if length != scope[name].shape[axis]
    }
    own = node.attributes.get("axis", 1)
    if len({*moved.values()}) != 1:
        return {}
    like, axis = next(iter(moved.items()))
    rank = len(old[like])
    found = {}
    for i, name in enumerate(node.inputs):
        value = scope[name]
        fixed = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
        if fixed and axis != own % rank and value.shape[axis] == 1:
            found[i] = Row(name, like, axis, rank)
    return found
