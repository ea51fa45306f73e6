"""Tensors that the file has once, and under several names through Identity nodes.

PyTorch's older exporter writes Identity over an initializer for two reasons. Layers share a weight
on purpose (ALBERT): these stay one tensor. Or tensors were equal by coincidence, as scales of ones
or biases of zeros are before training: each becomes a tensor of its own, and so does a running
statistic that equals a bias.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto

from jaxonnx._io.protos import all_nodes
from jaxonnx._io.tensors import same

_FEW = 2
"""Tensors with at most so many different numbers are equal by coincidence."""


def identity_pairs(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the result and the input of every Identity node, in the order of the graph."""
    for node in all_nodes(graph):
        is_identity = node.op_type == "Identity" and node.domain in ("", "ai.onnx")
        if is_identity and node.input and node.output:
            yield node.output[0], node.input[0]


def sources(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors that are results of Identity nodes, with the tensors that these read."""
    return {name: of for name, of in identity_pairs(graph) if name in tensors and of in tensors}


def tied_names(graph: GraphProto, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which nodes read a tensor besides its own, with the tensor's name."""
    roots: dict[str, str] = {}
    for name, of in identity_pairs(graph):
        root = roots.get(of, of)
        if name not in tensors and root in tensors:
            roots[name] = root
    return roots


def update_tied(
    graph: GraphProto, tensors: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors with new values, which what is one tensor on purpose shares."""
    result = {**tensors, **new}
    for name, of in sources(graph, tensors).items():  # a chain follows its first
        if (
            name not in new
            and result[of] is not tensors[of]
            and is_shared(tensors[name], tensors[of])
        ):
            result[name] = result[of]
    return result


def is_shared(value: np.ndarray, other: np.ndarray) -> bool:
    """Check whether two floating-point tensors are equal on purpose."""
    if value is not other and not same(value, other):
        return False
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.itemsize}")
    # most are told by their first numbers; sorting all of a large one takes seconds
    return any(len(np.unique(part)) > _FEW for part in (bits[:64], bits))
