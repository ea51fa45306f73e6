"""Why others refuse models that jaxonnx runs. A row matches what one of them says."""

import re
from typing import Any

from onnx import GraphProto, TensorProto

from tests.fuzz.explain import BOTH, REFERENCE, RUNTIME, Limit, Node
from tests.fuzz.explained_refusals import idle

FLAGS = re.compile(
    "align_corners|allowzero|antialias|ceil_mode|center_point_box|count_include_pad|exclude_outside|"
    "exclusive|input_forget|inverse|is_causal|keepdims|largest|layout|linear_before_reset|onesided|"
    "periodic|reverse|saturate|select_last_index|sorted|storage_order|transA|transB|upper"
)


def defaults(node: Node, *_: Any) -> bool:
    """Check whether inputs of a body have values of their own."""
    bodies = (value for value in node.attributes.values() if isinstance(value, GraphProto))
    return any({t.name for t in b.initializer} & {i.name for i in b.input} for b in bodies)


def odd_flag(node: Node, *_: Any) -> bool:
    flags = (value for name, value in node.attributes.items() if FLAGS.fullmatch(name))
    return any(value not in (0, 1) for value in flags)


NO_KERNEL = "an operator, type or version that onnxruntime does not have"
FLAG = "a number that is neither 0 nor 1, where the specification knows these: any other is a yes"
LIMITS = (
    Limit(RUNTIME, ": 9 : NOT_IMPLEMENTED : ", NO_KERNEL),
    Limit(RUNTIME, "is not a registered function/op", NO_KERNEL),
    Limit(RUNTIME, "Numpy_type .* can't be converted|No corresponding Numpy type", NO_KERNEL),
    Limit(RUNTIME, "Batchwise recurrent operations .* are not supported", NO_KERNEL),
    Limit(REFERENCE, "No (registered )?implementation for operator", "the reference has no such"),
    Limit(
        REFERENCE,
        "Issues with types ",
        "the reference's CastLike does not know its new attribute",
        lambda node: node.op == "CastLike" and node.opset >= 25,
    ),
    Limit(
        REFERENCE,
        "need at least one array to concatenate",
        "the reference cannot stack the rows of no iterations, and runs none without a condition",
        lambda node: node.op in ("Loop", "Scan"),
    ),
    Limit(
        RUNTIME,
        "a graph input that is also one of its initializers, which is not supported",
        "onnxruntime has no defaults for inputs of a body",
    ),
    Limit(
        RUNTIME,
        "Got invalid dimensions for input",
        "an input that is declared larger than memory, of which the fuzzer gives a part",
    ),
    Limit(
        REFERENCE,
        r"cannot reshape array of size 0 into shape \(.*newaxis",
        "NumPy infers no -1 for an array without elements, jaxonnx from the other axes",
    ),
    Limit(
        RUNTIME,
        r"Product cannot be 0 in combination with -1|num_indices = 0",
        "onnxruntime has no batch of none there",
    ),
    Limit(
        RUNTIME,
        r"requests feature \d+ but input tensor has 1 features",
        "a vector, which jaxonnx takes for one sample, onnxruntime for samples of one feature",
        lambda node: node.known(0).ndim == 1,
    ),
    Limit(
        RUNTIME,
        "Can broadcast 0 by 0 or 1|shape input must be 1D",
        "onnxruntime has other shapes for what no iteration gave",
        idle,
    ),
    Limit(
        REFERENCE,
        r"index -?\d+ is out of bounds for axis",
        "an index that is known while running only, for which jaxonnx has NaN",
        lambda node: node.op in ("RoiAlign", "MaxRoiPool"),
    ),
    *(
        Limit(
            name,
            "Issues with types .*'NoneType'.*operator 'Concat'|concatbase",
            "a last input of Concat that is left out, which jaxonnx does not count",
        )
        for name in sorted(BOTH)
    ),
    Limit(
        RUNTIME,
        "Pad reflect requires axis length >= 2",
        "an axis of one element, which NumPy reflects by repeating it",
    ),
    Limit(
        RUNTIME,
        "Invalid 'mode' attribute value",
        "an attribute of a branch that is not taken",
        lambda node: node.op == "If",
    ),
    Limit(RUNTIME, "Integer division by zero", "a division by zero, which ONNX leaves open"),
    Limit(
        REFERENCE,
        "cannot convert float NaN to integer",
        "a region that is infinite, of which jaxonnx makes NaN",
        lambda node: node.op == "RoiAlign",
    ),
    Limit(
        REFERENCE,
        "activation_beta must have the same size",
        "parameters of activations that take none",
    ),
    *(
        Limit(
            name,
            "different dtype: <class 'NoneType'>|scan_utils.cc",
            "others pass no value where an input of a body has a default",
            lambda node: node.op == "Scan" and defaults(node),
        )
        for name in sorted(BOTH)
    ),
    *(
        Limit(
            name,
            "operator 'Squeeze_13'|squeeze.h:79",
            "axes that are a scalar",
            lambda node: node.op == "Squeeze",
        )
        for name in sorted(BOTH)
    ),
    *(
        Limit(
            name,
            "negative dimensions are not allowed|Pad should be smaller than kernel",
            "pads of MaxUnpool, which an output shape makes superfluous",
            lambda node: node.op == "MaxUnpool" and len(node.inputs) == 3,
        )
        for name in sorted(BOTH)
    ),
    Limit(
        RUNTIME,
        "Attribute round_mode must be",
        "a mode for float8e8m0, of which nothing is cast",
        lambda node: node.op == "Cast" and node.attributes.get("to") != TensorProto.FLOAT8E8M0,
    ),
    Limit(
        REFERENCE,
        "the expected number of inputs 0 for node 'GroupNormalization'",
        "the reference cannot expand the deprecated GroupNormalization",
    ),
    Limit(
        RUNTIME,
        r"activations_.size\(\) == ",
        "an empty list of activations, taken for none given, as onnxruntime takes it in a GRU",
        lambda node: node.op == "RNN" and node.attributes.get("activations") == [],
    ),
    Limit(
        REFERENCE,
        "list index out of range",
        "an empty list of activations, taken for none given, as onnxruntime takes it in a GRU",
        lambda node: node.op == "RNN" and node.attributes.get("activations") == [],
    ),
    *(
        Limit(
            name,
            "out of bounds",
            "an index that is known while running only, which jaxonnx drops",
            lambda node: node.op == "MaxUnpool",
        )
        for name in sorted(BOTH)
    ),
    Limit(REFERENCE, "index can't contain negative values", "the reference has no negative pads"),
    Limit(REFERENCE, "LRN only applies on 4D tensors", "others have LRN of images alone"),
    Limit(RUNTIME, r"lrn.cc:.*NumDimensions\(\) == 4", "others have LRN of images alone"),
    Limit(
        REFERENCE,
        "cannot identify image file",
        "the specification has an empty image where decoding fails",
    ),
    Limit(
        REFERENCE,
        "x_zero_point is not null but should be zero for float8",
        "a zero point that the reference leaves out",
    ),
    *(Limit(name, "", FLAG, odd_flag) for name in sorted(BOTH)),
)
