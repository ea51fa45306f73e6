"""Compare files tensor by tensor."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx import ModelProto

from jaxonnx._compare.integers import find_integers
from jaxonnx._io.formats import read
from jaxonnx._io.protos import all_nodes, tensor_of_constant
from jaxonnx.model import Model

_TRAINING = ("BatchNormalization", "Dropout")
"""Operators that `save` writes in inference form."""


def find_changes(before: str | Path | bytes | ModelProto, after: Any) -> list[str]:
    """Describe the differences between a file and the same file, saved; none, if all bits are kept.

    A tensor of a Constant node may have become an initializer of its name.
    """
    (old, tensors, _), (new, saved, _) = read(before), read(after)
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
