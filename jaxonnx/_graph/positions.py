"""Find learned position embeddings that are added, and are neither sinusoids nor masks."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph
from jaxonnx._graph.uses import Use

_ALIKE = 1e-3
"""The relative difference within which the norms of rows of a sinusoidal table agree."""

LARGE = 1e3
"""Larger magnitudes are those of additive masks (-1e4, -1e9), not of learned tables."""

_KEEPS = ("Add", "Concat", "Dropout", "Mul", "Slice")
"""Operators, besides views, whose result is an embedding if an input is: they scale, add or join.
"""

PRODUCTS = ("Conv", "Gemm", "MatMul")
"""Products with weights, also with quantized ones (`Op.like`)."""


def embeddings(graph: Graph, uses: Sequence[Use]) -> set[str]:
    """Find the values of the main graph that are embeddings of tokens or of image patches.

    These are rows of a table, results of convolutions without overlap, and of products that come
    before any other.

    Args:
      graph: the main graph.
      uses: the uses of its tensors.
    """
    looked_up = {
        use.node.index
        for use in uses
        if use.node.op.name == "Gather" and use.position == 0 and not use.passes
    }
    values: set[str] = set()
    after_products: set[str] = set()
    for node in graph.nodes:
        like, inputs = node.op.like, node.inputs
        kernel, steps = (node.attributes.get(what) for what in ("kernel_shape", "strides"))
        patches = like == "Conv" and kernel == steps and max(kernel or [1]) > 1
        first = like != "Conv" and after_products.isdisjoint(inputs)
        embeds = like in PRODUCTS and (patches or first)
        keeps = (node.op.view or like in _KEEPS) and not values.isdisjoint(inputs)
        if like in PRODUCTS or not after_products.isdisjoint(node.reads):
            after_products.update(node.outputs)
        if embeds or keeps or (not node.op.domain and node.index in looked_up):
            values.update(filter(None, node.outputs))
    return values


def is_learned(use: Use, value: Any, embedded: Collection[str]) -> bool:
    """Check whether a tensor with several different numbers is a learned table of positions.

    It is added to an embedding, has no batch axis, and has a row of features for each position. A
    sinusoidal table is not learned: as sin^2 + cos^2 = 1, its rows have equal norms.

    Args:
      use: the use of the tensor.
      value: its value.
      embedded: the values that are embeddings (`embeddings`).
    """
    node, axes = use.node, use.view.axes
    if node is not use.outer or node.op.name != "Add" or axes is None:
        return False
    lengths = [1 if axis is None else use.view.shape[i] for i, axis in enumerate(axes)]
    if node.inputs[1 - use.position] not in embedded or sum(n != 1 for n in lengths) < 2:
        return False
    if len(lengths) > 2 and lengths[0] != 1:
        return False
    table = np.asarray(value, np.float64)
    if not np.abs(table).max() < LARGE:  # nor NaN
        return False
    own = [axis for axis, n in zip(axes, lengths, strict=True) if axis is not None and n != 1]
    return not any(is_sinusoid(table, axis) for axis in (own[0], own[-1]))


def is_grid(use: Use, value: Any) -> bool:
    """Check whether a tensor with several different numbers is a learned (1, C, 1, F).

    Biases per head, and factors per channel and frequency, have such shapes. Masks and the biases
    of ALiBi have them, too: these are recognized by large or evenly spaced numbers.
    """
    shape = np.shape(value)
    if len(shape) < 4 or shape[0] != 1 or shape[1] == 1 or sum(n != 1 for n in shape) != 2:
        return False
    table = np.asarray(value, np.float64)
    return use.view.axes is not None and not counts(table) and bool(np.abs(table).max() < LARGE)


def counts(table: np.ndarray) -> bool:
    """Check whether the numbers of each channel (axis 1) are evenly spaced."""
    rows = table.reshape(table.shape[1], -1)
    steps = np.diff(rows, axis=1)
    return steps.shape[1] > 1 and bool(np.allclose(steps, steps[:, :1], 1e-3, 1e-6))


def is_sinusoid(table: np.ndarray, axis: int) -> bool:
    """Check whether all rows along an axis have the same norm, except for rows of zeros."""
    lengths = np.linalg.norm(table, axis=axis).reshape(-1)
    lengths = lengths[lengths > 0]
    return bool(np.ptp(lengths) <= _ALIKE * lengths.max())
