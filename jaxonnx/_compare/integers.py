"""Compare the integers of a quantized file with those of onnxruntime, node by node."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from onnx import ModelProto, helper

from jaxonnx._compare.arrays import Difference, compare_arrays, largest
from jaxonnx._compare.sessions import Session
from jaxonnx._graph.bind import bind
from jaxonnx._io.formats import read
from jaxonnx._run.program import Program
from jaxonnx.registry import lookup

TIES = 5e-3
"""The share of integers that may differ, by one: ties, which another order of a sum decides."""

ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")
"""The operators that round to integers."""


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
    names = []
    for node in proto.graph.node:
        op = lookup(node.domain, node.op_type, sys.maxsize)
        if node.op_type in ROUNDS or (op is not None and op.result is not None):
            names.append(node.output[0])
    return names


def _to_codes(x: np.ndarray) -> np.ndarray:
    """Return integers, and of 8-bit floats their rank among those of the type."""
    if not _is_float(x.dtype):
        return x.astype(np.int64)
    bits = x.view(np.uint8).astype(np.int64)
    return np.where(bits < 128, bits, 128 - bits)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.itemsize == 1 and bool(jnp.issubdtype(dtype, jnp.floating))


def compare_integers(
    proto: ModelProto,
    feeds: Mapping[str, Any],
    tolerance: float | None = None,
    *,
    optimized: bool = True,
) -> Integers:
    """Compare the integers that each operator gives from onnxruntime's integers before it.

    Rounding of a tie would otherwise change what the operators behind it read.

    Args:
      tolerance: of the outputs, as in `compare_arrays`.
      optimized: as in `Session`.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    names, count = find_integers(result), len(graph.output)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    theirs = Session(result.SerializeToString(), optimized=optimized).run(feeds)
    # onnxruntime gives the bits of 8-bit floats
    zeros = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    types = {
        node.output[0]: helper.tensor_dtype_to_np_dtype(zeros[node.input[2]])
        for node in result.graph.node
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[2] in zeros
    }
    types = {name: dtype for name, dtype in types.items() if _is_float(dtype)}
    theirs[count:] = [
        x.view(types.get(name, x.dtype)) for name, x in zip(names, theirs[count:], strict=True)
    ]
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
    plain, tensors, _ = read(result)
    program = Program(bind(plain, plain.graph, tensors.keys()), tensors)
    ours: Sequence[Any] = program({}, {}, None, {**feeds, **integers})
    gaps = {
        name: np.abs(_to_codes(np.asarray(a)) - _to_codes(b)).reshape(-1)
        for name, a, b in zip(names, ours[count:], theirs[count:], strict=True)
    }
    makers = {node.output[0]: node for node in proto.graph.node if node.output}
    wrong = (makers[name] for name, gap in gaps.items() if gap.max(initial=0) > 1)
    first = next((f"{node.op_type} '{node.name or node.output[0]}'" for node in wrong), "")
    gap = np.concatenate([np.zeros(0, np.int64), *gaps.values()])
    pairs = zip(ours[:count], theirs[:count], strict=True)
    outputs = largest([compare_arrays(a, b, tolerance) for a, b in pairs])
    unequal = int(np.count_nonzero(gap))
    return Integers(unequal, gap.size, int(gap.max(initial=0)), first, outputs)
