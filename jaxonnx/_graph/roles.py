"""Which tensors are parameters and which are running statistics, by where they are used.

`jaxonnx.registry` says what stands at the inputs of an operator; a tensor keeps its role behind
Transpose, Reshape, Cast, Identity and the like, in subgraphs and in functions of the model.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import uses

KNOWN_LIMIT = 4096
"""Bytes; a frozen tensor above it is an argument of the compiled function, not a constant in it."""

_HOST_ONLY = (object, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)
"""Element types that XLA does not have: such tensors stay in NumPy."""


def split(
    graph: Graph, tensors: Mapping[str, np.ndarray], proto: GraphProto
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Split the tensors of a graph into parameters, state and constants.

    Args:
      graph: the bound main graph.
      tensors: its named tensors.
      proto: the graph as the file has it.
    """
    role_of = roles(graph, tensors, {tensor.name for tensor in proto.initializer})
    params, state, constants = {}, {}, {}
    for name in graph_tensors(graph):
        value = tensors[name]
        if role_of.get(name) == "param":
            params[name] = value
        elif name in role_of or (value.nbytes > KNOWN_LIMIT and value.dtype not in _HOST_ONLY):
            state[name] = value
        else:
            constants[name] = value
    return params, state, constants


def graph_tensors(graph: Graph) -> list[str]:
    """Return the named tensors of a graph, its subgraphs and the functions that it calls."""
    names = [*graph.weights, *graph.lifted.values()]
    for node in graph.nodes:
        for inner in (*node.graphs.values(), *([] if node.body is None else [node.body])):
            for g in inner if isinstance(inner, list) else [inner]:
                names += graph_tensors(g)
    return list(dict.fromkeys(names))


def running_statistics(graph: Graph) -> set[str]:
    """Return the names that are used as running statistics, also in subgraphs and functions."""
    names = set()
    for node in graph.nodes:
        names |= {name for i, name in enumerate(node.inputs) if node.op.role(i) == "state"}
        for inner in node.graphs.values():
            for g in inner if isinstance(inner, list) else [inner]:
                names |= running_statistics(g)
        if node.body is not None:
            outer = dict(zip(node.body.inputs, node.inputs, strict=False)) | dict(node.body.lifted)
            names |= {outer[name] for name in running_statistics(node.body) if name in outer}
    return names


def roles(
    graph: Graph, tensors: Mapping[str, np.ndarray], initializers: set[str]
) -> dict[str, str]:
    """Return the role, "param" or "state", of each tensor that has one.

    Args:
      graph: the bound main graph.
      tensors: its named tensors.
      initializers: the names of those that are initializers; the others sit in Constant nodes.
    """
    role_of: dict[str, str] = {}

    def is_vector(name: str, node: Node) -> bool:
        shape = tensors[name].shape
        if tensors[name].size == 1:
            # An epsilon is a Constant and a factor of sqrt(d) is multiplied; a bias is neither.
            return len(shape) > 0 and node.op.name == "Add" and name in initializers
        return sum(d != 1 for d in shape) == 1

    for use in uses(graph, tensors):
        role = use.node.op.role(use.position)
        if role is None or not jnp.issubdtype(tensors[use.name].dtype, jnp.floating):
            continue
        if role != "vector":
            role_of.setdefault(use.name, role)
        elif is_vector(use.name, use.node):
            role_of.setdefault(use.name, "param")
    return role_of
