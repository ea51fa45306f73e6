"""Make decoders that compute the logits of the last step compute those of all steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx.views._view import CallView


@dataclass(frozen=True)
class AllSteps(CallView):
    """An output has all time steps, without the selection of the last one on the way to it.

    The selection is a Gather of index -1 along axis 1 that keeps the axis, or one that drops it and
    an Unsqueeze behind, as `prune_lm_head` of onnxruntime-genai's builder writes. A graph without
    one stays as it is.
    """

    output: str
    """The output, with axes (batch, steps, ...)."""
    stays: ClassVar[bool] = False

    def enter(self, graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
        tensors, producers = {**graph.initializers, **constants}, graph.producers
        read = ancestors(graph.nodes, [self.output])
        for node in reversed(graph.nodes):
            source = (
                None if read.isdisjoint(node.outputs) else _find_source(node, tensors, producers)
            )
            if source is not None:
                new = {node.outputs[0]: source}
                nodes = tuple(_rename_inputs(n, new) for n in graph.nodes)
                return replace(graph, nodes=nodes)
        return graph


def _find_source(
    node: Node, constants: Mapping[str, np.ndarray], producers: Mapping[str, Node]
) -> str | None:
    """Return the value that a node selects the last step of; None if it does something else."""
    if node.op.name == "Unsqueeze" and len(node.inputs) == 2:
        source, axes = node.inputs
        if _is(constants.get(axes), 1) and source in producers:
            return _find_gathered(producers[source], constants, ())
    return _find_gathered(node, constants, (1,))


def _find_gathered(
    node: Node, constants: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> str | None:
    """Return the data of a Gather of index -1 along axis 1, if the index has this shape."""
    if node.op.name != "Gather" or node.attributes.get("axis") != 1:
        return None
    source, index = node.inputs
    return source if _is(constants.get(index), -1) and np.shape(constants[index]) == shape else None


def _is(value: np.ndarray | None, number: int) -> bool:
    return value is not None and value.size == 1 and value.item() == number


def _rename_inputs(node: Node, new: Mapping[str, str]) -> Node:
    inputs, reads = (tuple(new.get(n, n) for n in names) for names in (node.inputs, node.reads))
    return node if inputs == node.inputs else replace(node, inputs=inputs, reads=reads)
