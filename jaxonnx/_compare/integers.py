"""Compare the integers of a quantized file with those of onnxruntime, node by node."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper

from jaxonnx._compare.arrays import Difference, compare_arrays, largest
from jaxonnx._compare.sessions import Session
from jaxonnx._graph.bind import bind
from jaxonnx._io.read import read
from jaxonnx._run.program import Program
from jaxonnx.registry import lookup

TIES = 5e-3
"""The share of integers that may differ, by one: ties, which another order of a sum decides."""

_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")


class Integers(NamedTuple):
    """A comparison of integers from the same integers before them."""

    unequal: int
    count: int
    gap: int
    """The largest difference."""
    first: str
    """The first operator whose integers differ by more than one, or ""."""
    outputs: Difference
    """Of the outputs from the same integers."""

    @property
    def ok(self) -> bool:
        """Whether ties explain what differs."""
        return self.gap <= 1 and self.unequal <= TIES * self.count and self.outputs.ok


def find_integers(proto: ModelProto) -> list[str]:
    """Return the names of the integers that operators of the main graph give."""
    return [node.output[0] for node in proto.graph.node if _gives_integers(node)]


def _gives_integers(node: NodeProto) -> bool:
    op = lookup(node.domain, node.op_type, sys.maxsize)
    return node.op_type in _ROUNDS or (op is not None and op.result is not None)


def compare_integers(
    proto: ModelProto, feeds: Mapping[str, Any], tolerance: float | None = None
) -> Integers:
    """Compare the integers that each operator gives from onnxruntime's integers before it.

    Rounding of a tie would otherwise change what the operators behind it read.

    Args:
      tolerance: of the outputs, as in `compare_arrays`.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    names, count = find_integers(result), len(graph.output)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    theirs = Session(result.SerializeToString()).run(feeds)
    integers = {f"{name}/given": x for name, x in zip(names, theirs[count:], strict=True)}
    for name, x in integers.items():
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, x.shape))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in names:
                node.input[i] = f"{name}/given"
    for value in graph.output[count:]:  # their types, now that they are outputs
        kind = helper.np_dtype_to_tensor_dtype(integers[f"{value.name}/given"].dtype)
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, None))
    plain, tensors = read(result)
    program = Program(bind(plain, plain.graph, tensors.keys()), tensors)
    ours: Sequence[Any] = program({}, {}, None, {**feeds, **integers})
    gaps = {
        name: np.abs(np.asarray(a).astype(np.int64) - b.astype(np.int64)).reshape(-1)
        for name, a, b in zip(names, ours[count:], theirs[count:], strict=True)
    }
    makers = {node.output[0]: node for node in proto.graph.node if node.output}
    wrong = (makers[name] for name, gap in gaps.items() if gap.max(initial=0) > 1)
    first = next((f"{node.op_type} '{node.name or node.output[0]}'" for node in wrong), "")
    gap = np.concatenate([*gaps.values()])
    pairs = zip(ours[:count], theirs[:count], strict=True)
    outputs = largest([compare_arrays(a, b, tolerance) for a, b in pairs])
    unequal = int(np.count_nonzero(gap))
    return Integers(unequal, gap.size, int(gap.max(initial=0)), first, outputs)
