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
    """A constant tensor of one example, to be repeated along the batch axis."""

    name: str
    """The tensor; the length of its batch axis is one."""
    like: str
    """Another input of the Concat, which has the batch."""
    axis: int
    """The batch axis of both."""
    rank: int
    """The rank of both."""

    def nodes(self, result: str) -> list[NodeProto]:
        """Return nodes that compute `result`: the tensor expanded to the batch size of `like`."""

        def constant(suffix: str, value: np.ndarray) -> NodeProto:
            tensor = numpy_helper.from_array(value)
            return helper.make_node("Constant", [], [f"{result}/{suffix}"], value=tensor)

        shape, batch, ones, target = (
            f"{result}/{part}" for part in ("shape", "batch", "one", "target")
        )
        # the target is the shape of `like` at the batch axis, and 1 (no change) elsewhere
        return [
            helper.make_node("Shape", [self.like], [shape]),
            constant("batch", np.arange(self.rank) == self.axis),
            constant("one", np.ones(1, np.int64)),
            helper.make_node("Where", [batch, shape, ones], [target]),
            helper.make_node("Expand", [self.name, target], [result]),
        ]


def find_rows(node: Node, scope: Scope, old: Mapping[str, tuple[int, ...]]) -> dict[int, Row]:
    """Find the inputs of a Concat that lack the batch of the others, by position.

    Args:
      node: the Concat, of a file whose batch size is one.
      scope: the values for a larger batch.
      old: the shapes of the values for a batch of one.
    """
    moved = {
        name: axis
        for name in node.inputs
        for axis, length in enumerate(old[name])
        if length != scope[name].shape[axis]
    }
    joined = node.attributes.get("axis", 1)
    if len({*moved.values()}) != 1:
        return {}
    like, axis = next(iter(moved.items()))
    rank = len(old[like])
    result = {}
    for i, name in enumerate(node.inputs):
        value = scope[name]
        fixed = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
        if fixed and axis != joined % rank and value.shape[axis] == 1:
            result[i] = Row(name, like, axis, rank)
    return result
