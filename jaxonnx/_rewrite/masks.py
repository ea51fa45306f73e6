"""Weights that are multiplied by a pruning mask, as PyTorch exports them before `prune.remove`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jaxonnx._display import list_some
from jaxonnx._graph.bind import Graph
from jaxonnx._io.protos import Editor
from jaxonnx._rewrite.network import Network, drop_unread, with_file
from jaxonnx.errors import InputError

N = TypeVar("N", bound=Network)


def find_masks(graph: Graph, tensors: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Find products of a stored matrix and a stored mask of its shape, which has only 0 and 1.

    Returns:
      By the result of each Mul: the names of the matrix and of the mask.
    """
    masks = {}
    for node in graph.nodes:
        if node.op.name != "Mul" or node.op.domain or not tensors.keys() >= {*node.inputs}:
            continue
        shapes = {tuple(tensors[name].shape) for name in node.inputs}
        if len(shapes) > 1 or len(*shapes) < 2:
            continue
        for weight, mask in (node.inputs, node.inputs[::-1]):
            if np.isin(np.asarray(tensors[mask]), (0, 1)).all():
                masks[node.outputs[0]] = weight, mask
                break
    return masks


def describe_masks(graph: Graph, tensors: Mapping[str, Any]) -> str:
    """Describe the weights that are multiplied by masks; "" without such weights."""
    weights = [f"'{weight}'" for weight, _ in find_masks(graph, tensors).values()]
    if not weights:
        return ""
    subject = f"{list_some(weights, '')} {'are' if weights[1:] else 'is'}"
    return (
        f"{subject} multiplied by pruning masks first: "
        "jaxonnx.convert(model, fold_masks=True) makes weights of the masked numbers"
    )


def fold_masks(model: N) -> N:
    """Replace each product of a weight and a pruning mask by a weight of the masked numbers.

    It is a parameter if the weight is one, and has the name of the product.

    Raises:
      InputError: no weight is multiplied by a mask.
    """
    tensors = model.tensors
    masks = find_masks(model.graph, tensors)
    if not masks:
        raise InputError("fold_masks=True: the file multiplies no weight by a mask of 0 and 1")
    file = Editor(model.proto)
    groups: dict[bool, dict[str, np.ndarray]] = {True: {}, False: {}}
    for result, (weight, mask) in masks.items():
        masked = np.where(np.asarray(tensors[mask]) == 0, 0, np.asarray(tensors[weight]))
        groups[weight in model.params][result] = masked.astype(tensors[weight].dtype)
    for i, node in reversed([*enumerate(file.graph.node)]):
        if node.output and node.output[0] in masks:
            del file.graph.node[i]
    for name, value in (groups[True] | groups[False]).items():
        file.add_tensor(name, value)
    return drop_unread(with_file(model, file.proto, groups[False], groups[True]))
