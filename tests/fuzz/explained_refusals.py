"""Why jaxonnx refuses models that others run.

A row matches a message, so that another fault of the operator is still shown.
"""

from tests.fuzz.explain import BOTH, RUNTIME_ALONE, Refusal
from tests.fuzz.sorts import idle

NO_CHECK = "values that the specification does not allow, where the reference does not look"
IGNORED = "values that the specification does not allow, which others take for the default"
WINDOWS = r".*Pool|Conv.*|Col2Im|DeformConv|QLinearConv"


REFUSALS = (
    Refusal(
        "", r"imports? opset|.*uses opset \d+", "an operator set that onnx does not know", BOTH
    ),
    Refusal(
        "",
        "",
        "ONNX's shape inference refuses it too, which the reference does not ask",
        other=r"\[(Shape|Type)InferenceError\]",
    ),
    Refusal(
        "",
        "",
        "a body that cannot run, in a Loop without iterations: jaxonnx runs it for its types",
        RUNTIME_ALONE,
        when=idle,
    ),
    Refusal(
        r"Softmax|LogSoftmax|Hardmax|Flatten|Concat|Split|Squeeze|Unsqueeze|Reduce\w+|Arg\w+|TopK|"
        r"Gather\w*|Scatter\w*|OneHot|CumSum|LayerNormalization|LpNormalization|Slice|"
        r"(De)?[Qq]uantizeLinear|DynamicQuantizeLinear|Compress|Unique|Scan|Shape|Pad|Resize|DFT|"
        r"MeanVarianceNormalization|CenterCropPad|SplitToSequence|ConcatFromSequence|"
        r"RMSNormalization|SwiGLU|TensorScatter|CumProd",
        r"axis -?\d+ is out of (range for a tensor of rank|bounds for array of dimension)|"
        r"(Softmax|Hardmax) does not take these inputs with axis=-?\d{10}",
        "an axis that is not there: the reference takes it modulo the rank, onnxruntime cuts it to "
        "32 bits and does not look where a tensor is empty",
        BOTH,
    ),
    Refusal(
        r"Reduce\w+|CenterCropPad|Pad|Resize|Slice",
        r"axes \[.*\] name an axis of rank \d+ twice",
        "an axis that is named twice",
        BOTH,
    ),
    Refusal("Reshape", ".*must not hold both 0 and -1", NO_CHECK, BOTH),
    Refusal("Reshape", "the target .* must hold at most one -1 and nothing below", NO_CHECK),
    Refusal(
        "Resize|Upsample", r"\d+ scales or sizes are given for", "axes that are not there", BOTH
    ),
    Refusal("Resize|Upsample", "exactly one of scales and sizes", NO_CHECK),
    Refusal("Resize|Upsample", "scales and sizes must be positive", NO_CHECK, BOTH),
    Refusal("Gelu", "approximate must be", NO_CHECK),
    Refusal("NegativeLogLikelihoodLoss|SoftmaxCrossEntropyLoss", "reduction must", IGNORED, BOTH),
    Refusal("ScatterND|ScatterElements", "reduction must be", IGNORED, BOTH),
    Refusal(
        "NegativeLogLikelihoodLoss|SoftmaxCrossEntropyLoss",
        "a label is outside|(target|labels) has shape",
        "labels that do not fit, which others read beyond the end of memory, wrap or broadcast",
        BOTH,
    ),
    Refusal(
        "",
        "no implementation of these operators",
        "an operator that the imported opset does not have, which the reference runs nevertheless",
        other=r"No Op registered for .* with domain_version|\(-1\) is not a registered function/op",
    ),
    Refusal(
        "Concat",
        ".*must match exactly, but .* has size 0",
        "an input without elements, of which onnxruntime does not look at the other axes",
        RUNTIME_ALONE,
    ),
    Refusal("GRU|LSTM|RNN", "[wrb] has shape", NO_CHECK),
    Refusal("ReverseSequence", "sequence lengths of shape", NO_CHECK),
    Refusal(
        "DFT",
        "the length of the transform must be positive, got 0",
        "a transform of no samples, of which onnxruntime makes an empty result",
        RUNTIME_ALONE,
    ),
    Refusal(".*", "attribute '.*' is [A-Z]+, it must be", NO_CHECK),
    Refusal(WINDOWS, "auto_pad must be .* got ''", IGNORED, BOTH),
    Refusal(WINDOWS, "a kernel that reaches over", NO_CHECK),
    Refusal("GatherElements|ScatterElements", r"indices of rank \d+ do not fit", NO_CHECK),
    Refusal("Attention", "a mask of shape .* does not fit the scores", NO_CHECK),
    Refusal(
        "RotaryEmbedding",
        "of .* do not rotate in pairs",
        "an odd number of channels, of which onnxruntime leaves the last unset, or too many",
        BOTH,
    ),
    Refusal("LRN", "size must be positive, got -?\\d+", NO_CHECK),
    Refusal("STFT", "frames of .* do not fit", NO_CHECK),
    Refusal("AffineGrid", "theta of shape .* does not fit|(theta|size) has shape", NO_CHECK),
    Refusal("LinearAttention", ".* does not fit a key of|past_state has shape", NO_CHECK),
    Refusal("QLinearMatMul", "[aby]_zero_point has shape", NO_CHECK),
    Refusal("Range", "stash_type must be", IGNORED, BOTH),
    Refusal(
        "Range", "start .* must be finite", "infinite bounds, of which others make nothing", BOTH
    ),
    Refusal("LpNormalization", "p must be 1 or 2, got -?\\d+", NO_CHECK, BOTH),
    Refusal(
        "Cast|CastLike|BitCast|Range|EyeLike|Random.*|Attention|FlexAttention|(Layer|RMS)Normalization|.*Window",
        r"-?\d+ is not the number of a tensor element|dtype=dtype\('O'\)",
        IGNORED,
        BOTH,
    ),
    Refusal("Constant", "exactly one attribute must hold", "a Constant with two values", BOTH),
    Refusal(
        "Transpose",
        r"perm \[.*\] is not a permutation",
        "a perm for other axes: an empty one is taken for none, axes of size 1 are not looked at",
        BOTH,
    ),
    Refusal(
        r"Reduce\w+",
        r"axes (must be a vector|has shape .* must be \(n\))",
        "axes that are a scalar or a matrix",
        BOTH,
    ),
    Refusal("Split|SplitToSequence", "(sizes|split) .* do(es)? not add up", NO_CHECK, BOTH),
    Refusal("Split|SplitToSequence", "(split|num_outputs) must be positive", NO_CHECK),
    Refusal("NonMaxSuppression", "iou_threshold must be between 0 and 1", NO_CHECK),
    Refusal("NonMaxSuppression", "(boxes|scores) has shape|center_point_box", NO_CHECK),
    Refusal("LinearClassifier|LinearRegressor|SVM.*", ".*coefficients", NO_CHECK),
    Refusal("TfIdfVectorizer", ".*(ngram_indexes|max_skip_count|ngram_counts)", NO_CHECK, BOTH),
    Refusal("DepthToSpace|SpaceToDepth", "(blocksize|mode) must be", NO_CHECK),
    Refusal("OneHot", "depth must be|values has shape", NO_CHECK),
    Refusal("DFT", "the last axis of .* for this onesided transform", NO_CHECK),
    Refusal("DFT|STFT", "the length of the transform must be positive", NO_CHECK),
    Refusal(WINDOWS, "(strides|dilations|kernel_shape|block_shape) must be positive", NO_CHECK),
    Refusal(WINDOWS, r"(strides|pads|dilations|kernel_shape) has \d+ entries", NO_CHECK),
    Refusal(WINDOWS, "auto_pad must be", NO_CHECK),
    Refusal(
        WINDOWS, "pads .* and auto_pad .* exclude", "pads that auto_pad makes others ignore", BOTH
    ),
    Refusal(".*Pool", "x has shape", NO_CHECK),
    Refusal(
        "GridSample",
        "grid of shape .* does not fit an input|padding_mode must|mode must be",
        NO_CHECK,
    ),
    Refusal(
        "SequenceMap", "sequences of .* cannot be mapped", "sequences of which others cut one", BOTH
    ),
    Refusal(
        "ConcatFromSequence",
        "all input arrays must have the same shape",
        "arrays of other ranks, which onnxruntime does not look at",
        RUNTIME_ALONE,
    ),
    Refusal(
        "TreeEnsemble.*",
        r"these attributes must have one length|tree -?\d+ has no node",
        NO_CHECK,
    ),
    Refusal("Pad", "mode must be", NO_CHECK),
    Refusal("TopK", "k argument to top_k must be nonnegative", NO_CHECK),
    Refusal("ReverseSequence", "batch_axis .* and time_axis|sequence lengths .* must", NO_CHECK),
    Refusal("Gather.*|Scatter.*", r"index -?\d+ is out of range for an axis", NO_CHECK),
    Refusal("ScatterND|ScatterElements", ".*updates .*must (have|be)", NO_CHECK),
    Refusal("ArrayFeatureExtractor", "indices must be in", NO_CHECK),
    Refusal("Slice", "(starts|ends|axes|steps) has shape|a step of 0", NO_CHECK),
    Refusal("Sequence(At|Insert|Erase)", "position -?\\d+ is out of range", NO_CHECK),
    Refusal("GRU|LSTM|RNN", r"\d+ activations are needed|hidden_size must", NO_CHECK),
    Refusal("Adam|Adagrad|Momentum", "[RT] has shape", NO_CHECK),
    Refusal("GRU|LSTM|RNN", "direction .* needs .* sets of weights|unknown activation", NO_CHECK),
    Refusal(".*CrossEntropyLoss|NegativeLog.*", "Incompatible shapes", NO_CHECK, BOTH),
    Refusal("Adam|Adagrad|Momentum", "tensor \\d+ is .*; they must be alike", NO_CHECK),
    Refusal(
        "DFT|STFT|NonMaxSuppression|MelWeightMatrix|.*Window|TopK|Range|OneHot|Q.*|Trilu",
        "can only convert an array of size 1|cannot reshape array of size \\d+ into shape \\(\\)",
        "several numbers where an operator takes one, of which others read the first",
        BOTH,
    ),
    Refusal(".*Window", "size must be", NO_CHECK, BOTH),
    Refusal(
        "CenterCropPad",
        "pads .* remove more than there is",
        "a negative size, of which onnxruntime makes an empty result",
        BOTH,
    ),
    Refusal(
        "CausalConvWithState",
        "past_state has shape",
        "a state of another batch, which onnxruntime does not look at",
        RUNTIME_ALONE,
    ),
    Refusal("", r".* has unknown attributes", "attributes that the operator does not have"),
    Refusal("", r".* has \d+ outputs; function '.*' has", "outputs that a function does not have"),
    Refusal("Loop|Scan|If|SequenceMap", "the body '.*' takes \\d+ inputs, and was given", NO_CHECK),
    Refusal(
        "Imputer|LabelEncoder|OneHotEncoder|Scaler|TfIdfVectorizer",
        "exactly one of .* must be given",
        "two of several lists, of which others ignore one",
        BOTH,
    ),
    Refusal("Mod", "fmod must be", NO_CHECK),
    Refusal("MelWeightMatrix", "no bank has|the edges", NO_CHECK, BOTH),
    Refusal("QuantizeLinear", "precision must be", NO_CHECK),
    Refusal(
        ".*Attention",
        r"a tensor of shape .* has \d+ heads, not|\d+ query heads are not a multiple|"
        "queries .* and keys .* differ|values .* do not fit",
        "heads that tensors do not have, where others broadcast or do not look",
        BOTH,
    ),
    Refusal("RoiAlign", "mode must be|coordinate_transformation_mode", NO_CHECK),
    Refusal("(Dequantize|Quantize)Linear", "scale has shape", IGNORED, BOTH),
    Refusal("(Dequantize|Quantize)Linear", "scale or zero point", NO_CHECK),
    Refusal("Tile", "repeats has shape", NO_CHECK),
    Refusal(
        "Compress",
        "index .* is out of range",
        "a condition longer than the axis, which is cut",
        BOTH,
    ),
    Refusal("Conv.*|QLinearConv", "x_zero_point has shape", NO_CHECK, BOTH),
    Refusal(
        "Reshape",
        "cannot reshape",
        "rows of a Loop that the reference joins along their first axis",
        when=lambda node: node.op == "Loop",
    ),
    Refusal("RoiAlign", "(output_height|output_width|sampling_ratio) must", NO_CHECK, BOTH),
    Refusal("ConvTranspose", "output_padding .* must be less", NO_CHECK, BOTH),
    Refusal("Conv|DeformConv", "[xw] has shape", NO_CHECK),
    Refusal("GroupNormalization", "x has shape .* with num_groups = -", NO_CHECK),
    Refusal("Conv", "b has shape", NO_CHECK),
    Refusal(
        "",
        ".* reads '.*', which no input, initializer or earlier node defines",
        "a body in a function that reads what its caller has, in whose place onnxruntime puts it",
        RUNTIME_ALONE,
    ),
    Refusal("Loop", "the scan output '.*' is not a tensor", NO_CHECK),
    Refusal(
        "Loop",
        r"\w+\[9223372036854775807\] takes",
        "a count of iterations cast from a number beyond the integers, which ONNX leaves open",
        BOTH,
    ),
    Refusal("MaxUnpool", "indices has shape", NO_CHECK),
    Refusal(
        "",
        ".*zero-length scan is not supported in disable_jit",
        "no steps, which JAX scans within jit alone, without which the fuzzer runs",
        BOTH,
    ),
    Refusal(
        "CenterCropPad",
        r"\d+ sizes are given for",
        "fewer sizes than axes, which others broadcast or take for the first ones",
        BOTH,
    ),
    Refusal("Pad", "pads .* leave nothing of axis", NO_CHECK, BOTH),
    Refusal("Momentum", "mode must be", NO_CHECK),
    Refusal("Attention|FlexAttention", "softmax_precision must be", IGNORED, BOTH),
    Refusal(
        "Add|Sub|Mul|Div|Pow|And|Or|Xor|Equal|Greater|Less",
        ".*(needs broadcast=1|is not part of)",
        NO_CHECK,
    ),
    Refusal("GRU|LSTM|RNN", "clip must", "a clip that is ignored", BOTH),
    Refusal("Attention", "qk_matmul_output_mode must", "of an output that is not asked for", BOTH),
    Refusal(
        ".*",
        ".*(dtype promotion|does not accept dtype|is \\w+, it (takes|must have))",
        "types that the operator's schema does not have",
    ),
    Refusal(".*", ".*(Incompatible shapes|be broadcast)", "shapes that only NumPy broadcasts"),
)
