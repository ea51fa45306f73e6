"""Compare files tensor by tensor, and integers with those of onnxruntime."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from jaxonnx._io.protos import all_nodes, tensor_of_constant
from jaxonnx._io.read import read
from jaxonnx.model import Model, load
from jaxonnx.registry import lookup
from jaxonnx.validation._onnxruntime import Session

_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")
_TRAINING = ("BatchNormalization", "Dropout")
"""Operators that `save` writes in inference form."""


def find_changes(before: str | Path | bytes | ModelProto, after: Any) -> list[str]:
    """Describe the differences between a file and the same file, saved; none, if all bits are kept.

    A tensor of a Constant node may have become an initializer of its name.
    """
    (old, tensors), (new, saved) = read(before), read(after)
    changes = []
    for name, array in tensors.items():
        other = saved.get(name)
        if other is None:
            changes.append(f"tensor '{name}' is missing")
        elif (other.dtype, other.shape) != (array.dtype, array.shape):
            changes.append(f"tensor '{name}' has another type or shape")
        elif other.tobytes() != array.tobytes():
            changes.append(f"tensor '{name}' has other bits")
    if other := Counter(_plain_nodes(old)) - Counter(_plain_nodes(new)):
        changes += [f"a node {kind} is missing or changed" for kind, *_ in other]
    return changes


def _plain_nodes(proto: ModelProto) -> Iterator[tuple]:
    for node in all_nodes(proto.graph):
        if tensor_of_constant(node) is None and node.op_type not in ("Identity", *_TRAINING):
            attributes = sorted(
                a.SerializeToString() for a in node.attribute if not a.HasField("g")
            )
            yield node.op_type, node.domain, *node.input, "", *node.output, *attributes


def rounds_activations(model: Model) -> bool:
    """Check whether values between operators are integers that stand for real numbers."""
    return bool(find_integers(model.proto))


def find_integers(proto: ModelProto) -> list[str]:
    """Return the names of the integers that operators of the main graph give."""
    return [node.output[0] for node in proto.graph.node if _gives_integers(node)]


def _gives_integers(node: NodeProto) -> bool:
    op = lookup(node.domain, node.op_type, sys.maxsize)
    return node.op_type in _ROUNDS or (op is not None and op.result is not None)


def compare_integers(model: Model, feeds: Mapping[str, Any]) -> tuple[int, int, int]:
    """Compare the integers that each operator gives from onnxruntime's integers before it.

    Rounding of a tie would otherwise change what the operators behind it read.

    Returns:
      How many differ, of how many, and the largest difference.
    """
    proto = model.to_onnx()
    names, count = find_integers(proto), len(proto.graph.output)
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    theirs = Session(proto.SerializeToString()).run(feeds)[count:]
    integers = {f"{name}/given": x for name, x in zip(names, theirs, strict=True)}
    for name, x in integers.items():
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        proto.graph.input.append(helper.make_tensor_value_info(name, kind, x.shape))
    for node in proto.graph.node:
        for i, name in enumerate(node.input):
            if name in names:
                node.input[i] = f"{name}/given"
    for node in proto.graph.node:
        if _gives_integers(node):  # their types, now that they are outputs
            value = next(v for v in proto.graph.output if v.name == node.output[0])
            x = integers[f"{value.name}/given"]
            kind = helper.np_dtype_to_tensor_dtype(x.dtype)
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, None))
    named: dict[str, Any] = {**feeds, **integers}
    ours = load(proto)(**named)[count:]
    gaps = [
        np.abs(np.asarray(a).astype(np.int64) - b.astype(np.int64)).reshape(-1)
        for a, b in zip(ours, theirs, strict=True)
    ]
    gap = np.concatenate(gaps)
    return int(np.count_nonzero(gap)), gap.size, int(gap.max(initial=0))
