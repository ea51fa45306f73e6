"""Why results differ where jaxonnx's are right, or where the specification leaves them open.

A row looks at an attribute, a type or values, so that another fault of the operator is still shown.
"""

from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.explain import BOTH, RUNTIME_ALONE, Difference, Node
from tests.fuzz.explained_limits import FLAG, defaults, odd_flag
from tests.fuzz.explained_refusals import idle


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
    if not ours.size == theirs.size > 0 or ours.dtype != theirs.dtype:
        return False
    return bool(close(ours.ravel(), theirs.ravel()).all())


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
    with np.errstate(all="ignore"):
        try:
            ratio = np.broadcast_to(x / scale, ours.shape)
        except ValueError:
            return False
    return alike(ours, theirs) and bool((close(ours, theirs) | ~(abs(ratio) < 2**31)).all())


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


def hidden(node: Node, ours: Any, theirs: Any) -> bool:
    """Check whether an input is infinite, and others have NaN where jaxonnx has numbers."""
    apart = ~close(ours, theirs)
    told = alike(ours, theirs) and np.isnan(theirs[apart]).all() and not infinite(ours[apart]).any()
    return bool(told) and any(infinite(node.known(i)).any() for i in range(4))


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


DIFFERENCES = (
    Difference(".*", odd_flag, FLAG, BOTH),
    Difference(".*", tiny, "numbers below the least normal one, which XLA takes for zero", BOTH),
    Difference(
        ".*",
        lambda node, *_: any(map(subnormal, node.attributes.values())),
        "an attribute below the least normal number, which XLA takes for zero",
        BOTH,
    ),
    Difference(
        ".*Attention",
        hidden,
        "a mask hides NaN and infinity in jaxonnx, in others it is added to them",
        BOTH,
    ),
    Difference(
        "Attention",
        lambda node, ours, theirs: (
            alike(ours, theirs) and np.isneginf(ours[~close(ours, theirs)]).all()
        ),
        "onnxruntime hides scores by the least number, which shows where they are an output",
        RUNTIME_ALONE,
    ),
    Difference(".*", huge, "numbers next to the greatest one", BOTH),
    Difference(
        "Conv.*",
        lambda node, ours, theirs: infinite(node.known(1)).any() and infinite(ours).any(),
        "an infinite weight, which meets the zeros between pixels",
        BOTH,
    ),
    Difference(
        "DequantizeLinear", one_step, "one step of a number that lies between two of them", BOTH
    ),
    Difference(
        "Loop",
        lambda node, ours, theirs: idle(node) and alike(ours, theirs) and np.isnan(ours).all(),
        "a mean of what no iteration gave, which the specification does not define",
        RUNTIME_ALONE,
    ),
    Difference(
        "FlexAttention",
        lambda node, ours, theirs: node.known(0).dtype.kind in "iu",
        "integers, which the schema of FlexAttention does not have",
    ),
    Difference(
        "FlexAttention",
        lambda node, ours, theirs: (
            alike(ours, theirs) and np.isnan(theirs[~close(ours, theirs)]).all() and not ours.any()
        ),
        "a row of scores that are all -inf: zeros, as Attention has them",
    ),
    Difference(
        "NonMaxSuppression",
        lambda node, *_: len(node.inputs) > 2 and not node.known(2).size,
        "a limit without a number, which onnxruntime reads nevertheless",
        RUNTIME_ALONE,
    ),
    Difference(
        "MaxUnpool",
        lambda node, *_: len(node.inputs) == 3,
        "indices count in the shape that is given in jaxonnx, PyTorch and onnxruntime",
    ),
    Difference(
        "DynamicQuantizeLinear",
        lambda node, *_: infinite(node.known(0)).any(),
        "a range of NaN or infinity",
        BOTH,
    ),
    Difference(
        "MaxPool|GlobalMaxPool",
        lambda node, ours, theirs: np.isnan(ours).any() and not np.isnan(theirs).all(),
        "NaN, which is the greatest number in PyTorch and jaxonnx, and none in others",
        BOTH,
    ),
    Difference(
        "OneHot",
        lambda node, *_: node.known(1).size == 1 and node.known(1).astype(float).item() % 1 != 0,
        "a depth with a fraction, which the specification casts and the reference rounds up",
    ),
    Difference("Loop", joined, "the reference joins scan outputs along their first axis"),
    Difference(
        "Loop",
        lambda node, ours, theirs: not ours.size and not theirs.size,
        "onnxruntime has other shapes for what no iteration gave",
        RUNTIME_ALONE,
    ),
    Difference(
        "Loop|Scan|SequenceMap", defaults, "the reference takes defaults that a body's inputs have"
    ),
    Difference(
        "Adam|Adagrad|Momentum",
        lambda node, ours, theirs: theirs.dtype == np.float64 and close(ours, theirs).all(),
        "the reference computes in float64 and keeps it",
    ),
    Difference(
        "QuantizeLinear|DequantizeLinear", shifted, "a zero point that the reference leaves out"
    ),
    Difference(
        "QuantizeLinear", overflown, "a ratio beyond 32 bits, which the reference wraps around"
    ),
    Difference(
        "Cast|CastLike", beyond, "a number beyond the integers, which ONNX leaves open", BOTH
    ),
    Difference(
        "Attention|FlexAttention",
        lambda node, ours, theirs: node.attributes.get("scale", 1) < 0 and infinite(theirs).all(),
        "others take roots of a negative scale; the specification says they are for precision",
        BOTH,
    ),
    Difference(
        "Celu",
        lambda node, *_: not node.attributes.get("alpha", 1) or infinite(node.attributes["alpha"]),
        "a formula of zero times infinity, also where the result does not need it",
        BOTH,
    ),
    Difference(
        "AveragePool",
        lambda node, *_: node.opset < 7 and any(node.attributes.get("pads", ())),
        "the reference counts padding, which the first version of AveragePool does not",
    ),
    Difference("AveragePool", without_elements, "windows of padding alone: 0, or 0 by 0"),
    Difference(
        ".*Window",
        lambda node, ours, theirs: matches(ours, theirs),
        "rounding next to zero",
        BOTH,
    ),
    Difference(
        "HannWindow|HammingWindow|BlackmanWindow",
        lambda node, ours, theirs: ours.shape == (1,) and np.isnan(theirs).all(),
        "a symmetric window of one sample, 0 by 0 in the formula: SciPy has 1",
        BOTH,
    ),
    Difference(
        "AffineGrid",
        lambda node, *_: 1 in node.known(1)[2:],
        "a grid of one place on an axis: three results, ours is PyTorch's",
        BOTH,
    ),
    Difference(
        "LpPool|GlobalLpPool",
        lambda node, *_: node.attributes.get("p", 2) <= 0,
        "a norm of no positive order",
        BOTH,
    ),
    Difference(
        "LSTM|GRU|RNN",
        lambda node, *_: any(np.isnan(x).any() for x in map(node.known, (0, 1, 2)) if x.size),
        "NaN, which onnxruntime cuts off",
        RUNTIME_ALONE,
    ),
    Difference(
        "StringNormalizer",
        lambda node, *_: any(not x or not x.isascii() for x in node.known(0).ravel().tolist()),
        "the reference takes accents off letters, and empty texts away",
    ),
    Difference(
        "TfIdfVectorizer",
        lambda node, *_: node.attributes["min_gram_length"] < 1,
        "n-grams of no words, which the reference counts twice",
    ),
    Difference(
        "GridSample",
        lambda node, *_: infinite(node.known(1)).any(),
        "a place that is infinite",
        BOTH,
    ),
    Difference(
        "Momentum",
        lambda node, *_: node.known(0).dtype.kind in "iu",
        "a rate of learning that is an integer, which the schema does not have",
    ),
)
