"""Why others refuse models that jaxonnx runs. A row matches what one of them says."""

from onnx import GraphProto, TensorProto

from tests.fuzz.explain import BOTH, RUNTIME_ALONE, Limit
from tests.fuzz.sorts import defaults, idle, odd_flag, stacks

NO_KERNEL = "an operator, type or version that onnxruntime does not have"
FLAG = "a number that is neither 0 nor 1, where the specification knows these: any other is a yes"
LIMITS = (
    Limit(": 9 : NOT_IMPLEMENTED : ", NO_KERNEL, RUNTIME_ALONE),
    Limit("is not a registered function/op", NO_KERNEL, RUNTIME_ALONE),
    Limit("Numpy_type .* can't be converted|No corresponding Numpy type", NO_KERNEL, RUNTIME_ALONE),
    Limit("Batchwise recurrent operations .* are not supported", NO_KERNEL, RUNTIME_ALONE),
    Limit("No (registered )?implementation for operator", "the reference has no such"),
    Limit(
        "Issues with types ",
        "the reference's CastLike does not know its new attribute",
        when=lambda node: node.op == "CastLike" and node.opset >= 24,
    ),
    Limit(
        "need at least one array to concatenate",
        "the reference cannot stack the rows of no iterations, and runs none without a condition",
        when=lambda node: node.op in ("Loop", "Scan"),
    ),
    Limit(
        "cannot select an axis to squeeze out",
        "nodes after scan outputs that the reference joins along their first axis",
        when=stacks,
    ),
    Limit(
        r"\[ShapeInferenceError\] Mismatch between number of inferred and declared dimensions",
        "a rank that a body declares, at which jaxonnx and onnx.checker do not look",
        RUNTIME_ALONE,
        lambda node: any(isinstance(value, GraphProto) for value in node.attributes.values()),
    ),
    Limit(
        "with B > 0",
        "others have no batch of none there",
        BOTH,
        lambda node: node.op == "TfIdfVectorizer",
    ),
    Limit(
        r"data.shape=.*, indices=|Invalid Y argument: index is out of range",
        "an index that is known while running only, for which jaxonnx has NaN",
        BOTH,
        lambda node: node.op == "ArrayFeatureExtractor",
    ),
    Limit(
        "must not be specified for 4D inputs",
        "numbers of heads beside tensors of rank 4, which have that many: a check of opset 25",
        BOTH,
        lambda node: node.op == "Attention",
    ),
    Limit(
        "ZeroDivisionError: division by zero",
        "NumPy has no mean of a batch of none",
        when=lambda node: node.op == "GlobalAveragePool",
    ),
    Limit(
        "Only N can be zero|output shape cannot be null or negative",
        "an image without a window: no pixels in jaxonnx, refused by others",
        BOTH,
        lambda node: node.op.endswith("Pool"),
    ),
    Limit(
        "Invalid tensor data type 0",
        "a type that a body leaves out, which jaxonnx does not need",
        RUNTIME_ALONE,
        lambda node: any(isinstance(value, GraphProto) for value in node.attributes.values()),
    ),
    Limit(
        "Pad: invalid mode: .* with zero effective input extent",
        "an axis that negative pads leave nothing of, and to which nothing is added",
        RUNTIME_ALONE,
    ),
    Limit(
        "MemoryError|bad_alloc",
        "parts that the node does not list, which others make nevertheless",
        BOTH,
        lambda node: node.op == "Split" and node.attributes.get("num_outputs", 0) > 1 << 20,
    ),
    Limit(
        "Pad should be smaller than kernel|index -?\\d+ is out of bounds for axis",
        "windows of padding alone, which others do not have",
        BOTH,
        lambda node: (
            node.op == "MaxPool"
            and max(node.attributes.get("pads", [0])) >= min(node.attributes["kernel_shape"])
        ),
    ),
    Limit(
        r"TensorScatter: write_indices\[\d+\] = -\d+ is negative",
        "a place before the first one, which the circular mode takes for one from the end",
        RUNTIME_ALONE,
        lambda node: node.attributes.get("mode") == b"circular",
    ),
    Limit(
        "Attribute saturate is only used for cast to float 8 types",
        "an attribute that the specification has for these types alone, where it does nothing",
        RUNTIME_ALONE,
    ),
    Limit(
        "condition must be a 1-d array",
        "a condition of several axes, which jaxonnx flattens, as onnxruntime does",
    ),
    Limit(
        "output_shape is inconsistent with input|to match the calculated number of sliding blocks",
        "an output_shape beyond the reach of the windows, which jaxonnx fills with zeros",
        BOTH,
        lambda node: node.op == "ConvTranspose" and "output_shape" in node.attributes,
    ),
    Limit(
        "integer modulo by zero",
        "no heads, taken for a number that is not given, as onnxruntime takes it",
        when=lambda node: node.op == "Attention" and node.attributes.get("kv_num_heads") == 0,
    ),
    Limit(
        "operands could not be broadcast|IsScalarOr1ElementVector",
        "a scale or zero point for each row of a, or column of b, which others do not have",
        BOTH,
        lambda node: (
            (node.op == "QLinearMatMul" and max(node.known(1).size, node.known(4).size) > 1)
            or (node.op == "MatMulInteger" and max(node.known(2).size, node.known(3).size) > 1)
        ),
    ),
    Limit(
        "Unsupported stash_type (10|16) for Range",
        "a type of half precision, in which the reference does not compute a Range",
    ),
    Limit(
        r"position_ids value \d+ at index \d+ is out of range",
        "an index that is known while running only, for which jaxonnx has NaN",
        RUNTIME_ALONE,
    ),
    Limit(
        r"position_ids value -\d+ at index \d+ is out of range",
        "a place from the end, which Gather of RotaryEmbedding's function takes",
        RUNTIME_ALONE,
    ),
    Limit(
        "a graph input that is also one of its initializers, which is not supported",
        "onnxruntime has no defaults for inputs of a body",
        RUNTIME_ALONE,
    ),
    Limit(
        "Got invalid dimensions for input",
        "an input that is declared larger than memory, of which the fuzzer gives a part",
        RUNTIME_ALONE,
    ),
    Limit(
        r"cannot reshape array of size 0 into shape \(.*newaxis",
        "NumPy infers no -1 for an array without elements, jaxonnx from the other axes",
    ),
    Limit(
        r"Product cannot be 0 in combination with -1|num_indices = 0|"
        r"Input shape:\{0,[\d,]*\}, requested shape:\{0,[\d,]*-1",
        "onnxruntime has no batch of none there",
        RUNTIME_ALONE,
    ),
    Limit(
        r"requests feature \d+ but input tensor has 1 features",
        "a vector, which jaxonnx takes for one sample, onnxruntime for samples of one feature",
        RUNTIME_ALONE,
        lambda node: node.known(0).ndim == 1,
    ),
    Limit(
        "Can broadcast 0 by 0 or 1|shape input must be 1D",
        "onnxruntime has other shapes for what no iteration gave",
        RUNTIME_ALONE,
        idle,
    ),
    Limit(
        r"index -?\d+ is out of bounds for axis",
        "an index that is known while running only, for which jaxonnx has NaN",
        when=lambda node: node.op in ("RoiAlign", "MaxRoiPool", "RotaryEmbedding"),
    ),
    Limit(
        "Issues with types .*'NoneType'.*operator '(Concat|Einsum|Mean|Sum|Max|Min)'|concatbase|"
        r"Op \(SequenceConstruct\) \[TypeInferenceError\] Input type for input at index \d+ is nul",
        "a last input of any number that is left out, which jaxonnx does not count",
        BOTH,
    ),
    Limit(
        r"the array at index \d+ has 0 dimension",
        "a last input of any number that is left out, which jaxonnx does not count",
        when=lambda node: node.op == "SequenceConstruct",
    ),
    Limit(
        "embedded null character|Failed to construct locale",
        "a locale that is not there, which jaxonnx does not need",
        BOTH,
        lambda node: node.op == "StringNormalizer",
    ),
    Limit(
        "q_sequence_length > 0 was false",
        "onnxruntime has no queries of no elements",
        RUNTIME_ALONE,
        lambda node: node.op == "Attention",
    ),
    Limit(
        "antilias=1 is not supported for mode=.nearest|when anti-aliasing is set",
        "antialias, which means nothing for the nearest element",
        BOTH,
        lambda node: node.op == "Resize" and node.attributes.get("mode", b"nearest") == b"nearest",
    ),
    Limit(
        "Pad reflect requires axis length >= 2",
        "an axis of one element, which NumPy reflects by repeating it",
        RUNTIME_ALONE,
    ),
    Limit(
        "Invalid 'mode' attribute value|Invalid direction value|Unexpected value for direction",
        "an attribute of a branch that is not taken",
        BOTH,
        lambda node: node.op == "If",
    ),
    Limit("Integer division by zero", "a division by zero, which ONNX leaves open", RUNTIME_ALONE),
    Limit(
        "cannot convert float NaN to integer",
        "a region that is infinite, of which jaxonnx makes NaN",
        when=lambda node: node.op == "RoiAlign",
    ),
    Limit("activation_beta must have the same size", "parameters of activations that take none"),
    Limit(
        "different dtype: <class 'NoneType'>|scan_utils.cc",
        "others pass no value where an input of a body has a default",
        BOTH,
        lambda node: node.op == "Scan" and defaults(node),
    ),
    Limit(
        "operator 'Squeeze_13'|squeeze.h:79",
        "axes that are a scalar",
        BOTH,
        lambda node: node.op == "Squeeze",
    ),
    Limit(
        "negative dimensions are not allowed|Pad should be smaller than kernel",
        "pads of MaxUnpool, which an output shape makes superfluous",
        BOTH,
        lambda node: node.op == "MaxUnpool" and len(node.inputs) == 3,
    ),
    Limit(
        "Attribute round_mode must be",
        "a mode for float8e8m0, of which nothing is cast",
        RUNTIME_ALONE,
        lambda node: node.op == "Cast" and node.attributes.get("to") != TensorProto.FLOAT8E8M0,
    ),
    Limit(
        "the expected number of inputs 0 for node 'GroupNormalization'",
        "the reference cannot expand the deprecated GroupNormalization",
    ),
    Limit(
        r"activations_.size\(\) == |list index out of range",
        "an empty list of activations, taken for none given, as onnxruntime takes it in a GRU",
        BOTH,
        lambda node: node.op == "RNN" and node.attributes.get("activations") == [],
    ),
    Limit(
        "out of bounds",
        "an index that is known while running only, which jaxonnx drops",
        BOTH,
        lambda node: node.op == "MaxUnpool",
    ),
    Limit("index can't contain negative values", "the reference has no negative pads"),
    Limit("LRN only applies on 4D tensors", "others have LRN of images alone"),
    Limit(r"lrn.cc:.*NumDimensions\(\) == 4", "others have LRN of images alone", RUNTIME_ALONE),
    Limit(
        "cannot identify image file|image file is truncated",
        "the specification has an empty image where decoding fails",
    ),
    Limit(
        "x_zero_point is not null but should be zero for float8",
        "a zero point that the reference leaves out",
    ),
    Limit("", FLAG, BOTH, odd_flag),
)
