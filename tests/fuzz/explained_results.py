"""Why results differ where jaxonnx's are right, or where the specification leaves them open.

A row looks at an attribute, a type or values, so that another fault of the operator is still shown.
"""

import numpy as np

from tests.fuzz.explain import BOTH, RUNTIME_ALONE, Difference
from tests.fuzz.explained_limits import FLAG
from tests.fuzz.sorts import (
    alike,
    beyond,
    close,
    defaults,
    flushed,
    hidden,
    huge,
    idle,
    infinite,
    inverted,
    joined,
    matches,
    odd_flag,
    one_step,
    overflown,
    shifted,
    stacks,
    subnormal,
    tiny,
    without_elements,
)

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
        ".*",
        flushed,
        "a number below the least normal one times infinity, which XLA takes for zero times it",
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
        lambda node, ours, theirs: (
            infinite(node.known(1)).any()
            and (infinite(ours).any() or np.isnan(theirs[~close(ours, theirs)]).all())
        ),
        "an infinite weight, which meets the zeros between pixels or beside the image",
        BOTH,
    ),
    Difference(
        "Attention",
        lambda node, *_: (
            node.known(3).ndim > 1
            and node.known(3).shape[-2] == 1
            and bool(node.attributes.get("is_causal"))
        ),
        "a mask for all queries, of which the reference makes one position",
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
    Difference("Pow", inverted, "an infinite number among integers, which ONNX leaves open", BOTH),
    Difference(
        "StringSplit",
        lambda node, *_: node.attributes.get("delimiter") and not node.known(0).all(),
        "an empty text, which has one part between delimiters, and none in onnxruntime",
        RUNTIME_ALONE,
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
    Difference(
        "LpNormalization",
        lambda node, ours, theirs: np.nanmax(np.abs(node.known(0)), initial=0) > 2.0**126,
        "a quotient by a number whose reciprocal is below the least normal one, zero for XLA",
        BOTH,
    ),
    Difference(
        "GridSample",
        lambda node, ours, theirs: np.nanmax(np.abs(node.known(1)), initial=0) > 1e37,
        "a coordinate that overflows, of which jaxonnx makes NaN",
        RUNTIME_ALONE,
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
        "Loop",
        lambda node, *_: stacks(node) and node.used,
        "nodes after scan outputs that the reference joins along their first axis",
    ),
    Difference(
        "Gemm",
        lambda node, *_: (
            node.opset < 7
            and not node.attributes.get("broadcast")
            and node.attributes.get("beta", 1) != 1
        ),
        "the reference leaves beta out of Gemm's first versions",
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
        lambda node, ours, theirs: (
            node.attributes.get("scale", 1) < 0
            and alike(ours, theirs)
            and np.isnan(theirs[~close(ours, theirs)]).all()
        ),
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
        lambda node, ours, theirs: (ours == 1).all() and np.isnan(theirs).all(),
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
        lambda node, *_: (
            "clip" in node.attributes or (node.op != "RNN" and "activations" in node.attributes)
        ),
        "a clip or activations, which the reference leaves out",
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
