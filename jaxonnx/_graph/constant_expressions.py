"""Find values that are computed from tensors of the file only, like g * v / |v|.

They stand where data meet them as weights would that an exporter had folded, so their places and
numbers tell what the tensors behind them are.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.ancestors import ancestors
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import PARTS, evaluate

_LARGEST = 2**26
"""The most elements of a tensor that anything is computed from."""
_FOLLOWED = ("Gemm", "LpNormalization", "MatMul", "Softmax")
_FOLLOWED += ("BatchNormalization", "InstanceNormalization")
"""Operators that are evaluated, besides pointwise ones, reductions and views."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND", "Expand", "Reshape", "Slice", "Tile")
"""Operators whose results are numbers of their first input; the others are indices and shapes."""


class ConstantExpression(NamedTuple):
    """A value and the floating-point tensors that it is computed from."""

    value: np.ndarray
    parts: frozenset[str]
    norms: frozenset[str]
    """The tensors that its divisors are computed from, such as the vectors of a spectral norm."""


def evaluate_constant_expressions(
    graph: Graph, tensors: Mapping[str, Any]
) -> dict[str, ConstantExpression]:
    """Evaluate the arithmetic of a graph that depends on its tensors alone.

    Results that are plain views of one tensor are left out, and so is everything that is computed
    from one-byte integers, which are packed weights.

    Args:
      graph: the bound main graph.
      tensors: the values of its named tensors.

    Returns:
      The results that nodes with data read, by name.
    """
    constants = {**graph.initializers, **tensors}
    # the floating-point tensors behind each value; None behind packed weights
    sources = {name: _own_sources(name, value) for name, value in constants.items()}
    arithmetic: set[str] = set()
    inner: list[Node] = []
    norms: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        if not _is_computable(node) or not all(name in sources for name in node.reads):
            continue
        read = node.inputs[:1] if node.op.name in _LOOKUPS else node.inputs
        if node.op.name == "BatchNormalization":
            read = node.inputs[:3]  # the others are statistics of the first
        if node.op.name == "Div" and sources[node.inputs[0]]:
            read = node.inputs[:1]  # the divisor of a weight is its norm or a quantization step
        behind: frozenset[str] | None = frozenset()
        for name in filter(None, read):
            read_sources = sources[name]
            behind = None if read_sources is None or behind is None else behind | read_sources
        divided = frozenset[str]().union(*(norms.get(name, ()) for name in node.inputs))
        for name in arithmetic.intersection({*node.inputs} - {*read}):
            divisor = sources[name] or frozenset()
            divided |= divisor if len(divisor) > 1 else frozenset()
        norms.update(dict.fromkeys(node.outputs, divided))
        sources.update(dict.fromkeys(filter(None, node.outputs), behind))
        inner.append(node)
        moved = node.op.view or (not node.op.domain and node.op.name in PARTS)
        if behind and not (moved and arithmetic.isdisjoint(read)):
            arithmetic.update(filter(None, node.outputs))
    inside = {node.index for node in inner}
    outer = {name for node in graph.nodes if node.index not in inside for name in node.reads}
    wanted = arithmetic & outer
    values = _evaluate(inner, wanted, constants)
    return {
        n: ConstantExpression(v, sources[n] or frozenset(), norms.get(n, frozenset()))
        for n, v in values.items()
        if n in wanted
    }


def _own_sources(name: str, value: Any) -> frozenset[str] | None:
    """Return the sources of a tensor: itself, or nothing for scalars and integers.

    None for one-byte types, which are packed weights.
    """
    dtype, size = np.asarray(value).dtype, np.size(value)
    if size > 1 and dtype.kind not in "bO" and dtype.itemsize == 1:
        return None
    return frozenset({name} if size > 1 and jnp.issubdtype(dtype, jnp.floating) else ())


def _is_computable(node: Node) -> bool:
    """Check whether a node may be evaluated on tensors: arithmetic, a view or a part."""
    op = node.op
    followed = op.name in (*_FOLLOWED, *_LOOKUPS, *PARTS) or op.name.startswith("Reduce")
    simple = op.pointwise or op.view or (followed and not op.domain)
    return simple and not op.dynamic and not node.subgraphs and bool(node.reads)


def _is_small(node: Node, inputs: Sequence[Any]) -> bool:
    """Check, before evaluating a node, that its result has at most `_LARGEST` elements."""
    if node.op.name in ("Expand", "Tile"):
        sizes = np.asarray(inputs[1], np.float64)
        return float(np.prod(np.maximum(sizes, 1))) * np.size(inputs[0]) <= _LARGEST
    shapes = [np.shape(value) for value in inputs]
    sizes = [math.prod(shape) for shape in shapes]
    if node.op.name in ("Gemm", "MatMul"):
        # (rows * summed) * (summed * columns) / summed^2 = elements of the result
        place = -2 if node.attributes.get("transA") else -1
        summed = shapes[0][place] if len(shapes[0]) >= -place else 0
        return summed > 0 and sizes[0] * sizes[1] <= _LARGEST * summed**2
    if node.op.name.startswith("Gather"):
        return max(sizes[:2]) ** 2 <= _LARGEST
    if node.op.pointwise:
        longest = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
        return math.prod(max(axis) for axis in longest) <= _LARGEST
    return True


def _evaluate(
    nodes: list[Node], wanted: Collection[str], constants: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Evaluate nodes as far as `wanted` needs them; values that are too large are left out."""
    needed = ancestors(nodes, wanted) if wanted else set()
    if any(np.size(constants[name]) > _LARGEST for name in needed if name in constants):
        return {}
    values: dict[str, np.ndarray] = {}
    for node in nodes:
        if needed.isdisjoint(node.outputs):
            continue
        inputs = [values.get(n, constants.get(n)) if n else None for n in node.inputs]
        if any(value is None and n for n, value in zip(node.inputs, inputs, strict=True)):
            continue
        results = evaluate(node, inputs) if _is_small(node, inputs) else None
        for name, value in zip(node.outputs, results or (), strict=False):
            if np.size(value) <= _LARGEST:
                values[name] = np.asarray(value)
    return values
