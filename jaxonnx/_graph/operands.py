"""Find learned tensors at inputs that operators do not declare as weights.

Networks have gates, thresholds, positions, centers and starts of a recurrence that meet data in
plain arithmetic. Buffers do so as well, but their numbers repeat, count, or are very large.
"""

from collections.abc import Iterable, Set
from typing import Any

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.positions import LARGE, counts, is_sinusoid
from jaxonnx._graph.uses import Use

_ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Sub", "Where")
STARTS = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
"""The positions of initial states among the inputs of recurrent operators."""
_SAMPLE = 256
"""The most elements of a tensor that `is_varied` compares."""
_VARIED = 0.75
"""The least share of different numbers in a sample of a learned tensor, also in half precision."""
_MOVED = ("Cast", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def is_varied(value: np.ndarray) -> bool:
    """Check on a sample whether most numbers of a tensor differ, as in learned or random ones."""
    flat = value.reshape(-1)
    flat = flat[flat != 0] if flat.size > _SAMPLE else flat
    if not flat.size:
        return False
    some = flat[np.linspace(0, flat.size - 1, min(flat.size, _SAMPLE)).astype(int)]
    return bool(len(np.unique(some)) >= _VARIED * some.size)


def is_start(use: Use) -> bool:
    """Check whether a tensor is the initial state of a recurrent operator."""
    return not use.node.op.domain and use.position in STARTS.get(use.node.op.name, ())


class Operands:
    """Recognizes learned tensors among the operands of plain arithmetic.

    Args:
      graph: the main graph.
      fed: the values that depend on the graph's inputs.
    """

    def __init__(self, graph: Graph, fed: Set[str]):
        self._fed = fed
        self._producers, self._readers = graph.producers, graph.readers
        types = (kind for kind in graph.output_types if kind is not None)
        shapes = (kind.tensor_type.shape.dim for kind in types)
        self._batches = {dims[0].dim_value for dims in shapes if dims}

    def is_learned(self, use: Use, value: np.ndarray) -> bool:
        """Check whether a tensor with several different numbers is learned, by this use of it."""
        node = use.node
        if use.passes or node is not use.outer or node.op.domain:
            return False
        table = value.astype(np.float64)
        if not np.abs(table).max() < LARGE:  # a mask, or NaN
            return False
        others = [name for i, name in enumerate(node.inputs) if i != use.position]
        if is_start(use) and is_varied(value):
            return True
        if node.op.name not in _ARITHMETIC or (node.op.name == "Where" and use.position == 0):
            return False
        if self._fed.isdisjoint(others):
            return False
        long = [axis for axis, n in enumerate(value.shape) if n != 1]
        if len(long) < 2:
            return is_varied(value) and not self._is_rounded(node) and not self._standardizes(use)
        if node.op.name == "Add" and self._biases_scores(node):
            return not _is_distance(table)
        if value.ndim > 2 and value.shape[0] != 1 and value.shape[0] in self._batches:
            return False  # one for each example
        if any(is_sinusoid(table, axis) for axis in (long[0], long[-1])):
            return False
        return is_varied(value) and not (value.ndim > 3 and counts(table))

    def _biases_scores(self, node: Node) -> bool:
        """Check whether a sum reaches a Softmax as attention scores, possibly with a mask added."""
        names = [*node.outputs]
        for name in names:
            for reader in self._readers.get(name, ()):
                if reader.op.name == "Softmax":
                    return True
                if reader.op.name in ("Add", "Cast", "Reshape", "Where"):
                    names += reader.outputs
        return False

    def _is_rounded(self, node: Node) -> bool:
        """Check whether a node is a division whose result is rounded: the divisor is a scale."""
        readers = (r for name in node.outputs for r in self._readers.get(name, ()))
        return node.op.name == "Div" and any(r.op.name in ("Floor", "Round") for r in readers)

    def _standardizes(self, use: Use) -> bool:
        """Check whether a tensor is the mean or the deviation in (x - mean) / deviation."""
        node = use.node
        if use.position != 1 or node.op.name not in ("Sub", "Div"):
            return False
        if node.op.name == "Sub":
            beside = [r for name in node.outputs for r in self._readers.get(name, ())]
        else:
            beside = [self._producers[name] for name in node.inputs[:1] if name in self._producers]
        partner = "Div" if node.op.name == "Sub" else "Sub"
        return any(n.op.name == partner and n.inputs[1] not in self._fed for n in beside)

    def feeds_sin_and_cos(self, node: Node) -> bool:
        """Check whether a product is read by Sin and Cos alone, as random Fourier features are."""
        found: set[str] = set()
        names = [*node.outputs]
        for name in names:
            for reader in self._readers.get(name, ()):
                if reader.op.name in _MOVED and self._fed.isdisjoint({*reader.inputs} - {name}):
                    names += reader.outputs
                else:
                    found.add(reader.op.name)
        return found == {"Sin", "Cos"}


def _is_distance(table: np.ndarray) -> bool:
    """Check whether a bias of attention scores is linear in the distance of query and key (ALiBi).

    The different numbers of each head (..., queries, keys) are evenly spaced then.
    """
    heads: Iterable[Any] = table.reshape(-1, *table.shape[-2:])
    for head in heads:
        steps = np.diff(np.unique(head))
        if steps.size > 1 and not np.allclose(steps, steps[0], 1e-3, 1e-6):
            return False
    return True
