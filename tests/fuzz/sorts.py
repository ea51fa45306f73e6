"""Of what sort nodes and results are, for the rows of `tests.fuzz.explained_*`."""

import re
from typing import Any

import ml_dtypes
import numpy as np
from onnx import GraphProto

from tests.fuzz.explain import Node

FLAGS = re.compile(
    "align_corners|allowzero|antialias|ceil_mode|center_point_box|count_include_pad|exclude_outside|"
    "exclusive|input_forget|inverse|is_causal|keepdims|largest|layout|linear_before_reset|"
    "noop_with_empty_axes|onesided|"
    "periodic|reverse|saturate|select_last_index|sorted|storage_order|transA|transB|upper"
)


def idle(node: Node) -> bool:
    """Check whether a node is a Loop without iterations."""
    count = node.known(0)
    return node.op == "Loop" and count.size == 1 and count.item() <= 0


def defaults(node: Node, *_: Any) -> bool:
    """Check whether inputs of a body have values of their own."""
    bodies = (value for value in node.attributes.values() if isinstance(value, GraphProto))
    return any({t.name for t in b.initializer} & {i.name for i in b.input} for b in bodies)


def odd_flag(node: Node, *_: Any) -> bool:
    flags = (value for name, value in node.attributes.items() if FLAGS.fullmatch(name))
    return any(value not in (0, 1) for value in flags)


def close(a: Any, b: Any) -> Any:
    """Return where arrays have about the same numbers: nowhere, if their shapes differ."""
    if a.shape != b.shape or "O" in (a.dtype.kind, b.dtype.kind):
        return np.zeros((), bool)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        coarse = 1e-2 if a.dtype.itemsize > 2 else 0.05
        return np.isclose(a.astype(wide), b.astype(wide), coarse, coarse / 10, equal_nan=True)


def matches(a: Any, b: Any) -> bool:
    """Check whether arrays have one type, one shape and about the same numbers."""
    return alike(a, b) and bool(close(a, b).all())


def alike(a: Any, b: Any) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def infinite(x: np.ndarray) -> Any:
    with np.errstate(all="ignore"):
        return ~np.isfinite(x.astype(np.float64)) if x.dtype != object else np.zeros(x.shape, bool)


def joined(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether two arrays have the same numbers in other shapes."""
    if ours.size != theirs.size or ours.dtype != theirs.dtype:
        return False
    if not ours.size and ours.ndim != theirs.ndim + 1:
        return False
    return bool(close(ours.ravel(), theirs.ravel()).all())


def stacks(node: Node) -> bool:
    """Check whether a node is a Loop with scan outputs."""
    carried = max(len(node.inputs) - 2, 0)
    return node.op == "Loop" and len(node.attributes["body"].output) > 1 + carried


def beyond(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether integers differ only where what was cast is beyond their type."""
    x = node.known(0)
    if not alike(ours, theirs) or x.shape != ours.shape or ours.dtype.kind not in "iuV":
        return False
    limits = ml_dtypes.iinfo(ours.dtype)
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
    within = (x >= limits.min) & (x <= limits.max)
    return bool((close(ours, theirs) | ~within).all())


def shifted(node: Node, *_: Any) -> bool:
    """Check whether a number of 8 bits or fewer has a zero point that is not 0."""
    point = node.known(2)
    small = "float" in point.dtype.name and point.itemsize == 1
    return small and bool(point.astype(np.float32).any())


def overflown(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether integers differ only where a ratio was infinite or beyond 32 bits."""
    x, scale = (node.known(i).astype(np.float64) for i in (0, 1))
    axis = node.attributes.get("axis", 1)
    if scale.ndim == 1 and scale.size > 1:
        scale = np.moveaxis(scale.reshape(-1, *(1,) * (x.ndim - 1)), 0, axis)
    elif (block := node.attributes.get("block_size", 0)) > 0 and scale.ndim == x.ndim:
        scale = scale.repeat(block, axis)[tuple(map(slice, x.shape))]
    with np.errstate(all="ignore"):
        try:
            ratio = np.broadcast_to(x / scale, ours.shape)
        except ValueError:
            return False
    return alike(ours, theirs) and bool((close(ours, theirs) | ~(abs(ratio) < 2**31)).all())


def inverted(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether integers differ only where zero has a negative power."""
    x, y = node.known(0), node.known(1)
    if not alike(ours, theirs) or ours.dtype.kind not in "iu" or y.dtype.kind not in "if":
        return False
    try:
        zero = np.broadcast_to((x == 0) & (y < 0), ours.shape)
    except ValueError:
        return False
    return bool(((ours == theirs) | zero).all())


def tiny(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether numbers differ only below the least normal one."""
    if not alike(ours, theirs) or "float" not in ours.dtype.name:
        return False
    least = ml_dtypes.finfo(ours.dtype).tiny
    return bool((close(ours, theirs) | ((abs(ours) < least) & (abs(theirs) < least))).all())


def without_elements(node: Node, ours: Any, theirs: Any) -> bool:
    pads, kernel = node.attributes.get("pads", [0]), node.attributes.get("kernel_shape", [1])
    return max(pads) >= min(kernel) and bool((close(ours, theirs) | np.isnan(theirs)).all())


def subnormal(value: Any) -> bool:
    """Check whether a number or its inverse is below the least normal one."""
    least = float(np.finfo(np.float32).tiny)
    return isinstance(value, float) and (0 < abs(value) < least or 1e37 < abs(value) < np.inf)


def flushed(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether an input is below the least normal number, and jaxonnx has NaN."""
    apart = ~close(ours, theirs)
    if not alike(ours, theirs) or not apart.any() or not np.isnan(ours[apart]).all():
        return False
    floats = (x for x in map(node.known, range(len(node.inputs))) if "float" in x.dtype.name)
    return any(((abs(x) < ml_dtypes.finfo(x.dtype).tiny) & (x != 0)).any() for x in floats)


def hidden(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether an input or cap is infinite, and NaN of others a number or -inf in jaxonnx."""
    apart = ~close(ours, theirs)
    if not alike(ours, theirs) or not np.isnan(theirs[apart]).all():
        return False
    if (infinite(ours[apart]) & ~np.isneginf(ours[apart])).any():
        return False
    cap = np.asarray(node.attributes.get("softcap", 0.0))
    return any(infinite(x).any() for x in (cap, *map(node.known, range(4))))


def huge(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether numbers beside the greatest one differ, and those in range of its rounding."""
    if not alike(ours, theirs) or "float" not in ours.dtype.name:
        return False
    apart, (a, b) = ~close(ours, theirs), (abs(x.astype(np.float64)) for x in (ours, theirs))
    greatest = np.fmax(a, b)[apart]
    finite = np.concatenate([a, b], None)
    near = finite[np.isfinite(finite)].max(initial=0) > 1e36
    return bool(near and not (greatest < 1e30).any())


def one_step(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether numbers differ by one quantum at most."""
    scale = node.known(1)
    if not alike(ours, theirs) or scale.size != 1 or ours.dtype != np.float32:
        return False
    steps = (ours - theirs) / scale.ravel()
    return bool((np.isclose(abs(steps), 1, atol=1e-2) | (abs(steps) < 1e-2)).all())
