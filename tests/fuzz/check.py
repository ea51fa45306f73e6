"""What may happen to a file: it is refused with an error of ours, or it runs. Nothing else."""

import contextlib
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  (NumPy learns its types)
import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TypeProto, helper
from onnx.reference import ReferenceEvaluator

import jaxonnx
from jaxonnx._file.protos import all_nodes
from jaxonnx.backend import Rep
from tests.fuzz.mutate import array, parsed

LIMIT = 1 << 28
"""Bytes that a mutated model may ask for in a single value."""
OPTIONS = {"limit": LIMIT} if "limit" in inspect.signature(jaxonnx.load).parameters else {}
RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")
OURS = str(Path(jaxonnx.__file__).parent)
SHOWN = (str, jaxonnx.Model.summary, jaxonnx.Model.to_onnx, jaxonnx.Model.with_any_batch)

REFERENCE, RUNTIME = "reference", "onnxruntime"


class Refusal(NamedTuple):
    """Models that others run and jaxonnx refuses on purpose.

    Attributes:
      operators: that refuse them, as a regular expression; empty where no node is the reason.
      said: how the message goes on, likewise.
      why: others run them.
      by: which of the others.
    """

    operators: str
    said: str
    why: str
    by: frozenset[str] = frozenset({REFERENCE})

    def explains(self, message: str, runs: Iterable[str]) -> bool:
        """Check whether this is why a model is refused with a message that others run."""
        place = rf"node '.*?' \((?:{self.operators}), opset \d+\): " if self.operators else ".*"
        return self.by >= {*runs} and bool(re.match(place + self.said, message))


BOTH = frozenset({REFERENCE, RUNTIME})
NO_CHECK = "values that the specification does not allow, where the reference does not look"
EXPLAINED = (
    Refusal(
        "", r"imports? opset|.*uses opset \d+", "an operator set that onnx does not know", BOTH
    ),
    Refusal(
        r"Softmax|LogSoftmax|Hardmax|Flatten|Concat|Split|Squeeze|Unsqueeze|Reduce\w+|Arg\w+|TopK|"
        r"Gather\w*|Scatter\w*|OneHot|CumSum|LayerNormalization|LpNormalization|Slice|"
        r"(De)?[Qq]uantizeLinear|DynamicQuantizeLinear|Compress|Unique|Scan|Shape|Pad|Resize|DFT|"
        r"MeanVarianceNormalization|CenterCropPad|SplitToSequence|ConcatFromSequence|"
        r"RMSNormalization|SwiGLU|TensorScatter",
        r"axis -?\d+ is out of range for a tensor of rank",
        "an axis that is not there: the reference takes it modulo the rank, onnxruntime does not "
        "look where a tensor is empty",
        BOTH,
    ),
    Refusal("Reshape", ".*must not hold both 0 and -1", NO_CHECK, BOTH),
    Refusal(
        "Resize|Upsample", r"\d+ scales or sizes are given for", "axes that are not there", BOTH
    ),
    Refusal("Resize|Upsample", "exactly one of scales and sizes", NO_CHECK),
    Refusal("Resize|Upsample", "scales must be positive", NO_CHECK),
    Refusal("Gelu", "approximate must be '", NO_CHECK),
    Refusal("NegativeLogLikelihoodLoss|SoftmaxCrossEntropyLoss", "reduction is '", NO_CHECK),
    Refusal(
        "NegativeLogLikelihoodLoss|SoftmaxCrossEntropyLoss",
        "a label is outside|labels of shape",
        "labels that do not fit, which others read beyond the end of memory, wrap or broadcast",
        BOTH,
    ),
    Refusal("LpNormalization", "p is -?[\\w.]+: only 1 and 2", NO_CHECK, BOTH),
    Refusal(
        "Cast|CastLike|EyeLike|Random.*", r"\d+ is not the number of a tensor element", NO_CHECK
    ),
    Refusal("Constant", "exactly one attribute must hold", "a Constant with two values", BOTH),
    Refusal("Transpose", r"perm \[\] is no permutation", "an empty perm, taken for none", BOTH),
    Refusal(r"Reduce\w+", "axes must be a vector", "axes that are a scalar or a matrix", BOTH),
    Refusal("Split|SplitToSequence", "(sizes|split) .* do(es)? not add up", NO_CHECK),
    Refusal("Split|SplitToSequence", "(split|num_outputs) must be positive", NO_CHECK),
    Refusal("NonMaxSuppression", "iou_threshold must be between 0 and 1", NO_CHECK),
    Refusal("LinearClassifier|LinearRegressor|SVM.*", ".*coefficients", NO_CHECK),
    Refusal("TfIdfVectorizer", ".*(ngram_indexes|exactly one of|max_skip_count)", NO_CHECK),
    Refusal("DepthToSpace|SpaceToDepth", "blocksize must be positive", NO_CHECK),
    Refusal("OneHot", "(depth must be positive|values must hold two)", NO_CHECK),
    Refusal("DFT|STFT", "the length of the transform must be positive", NO_CHECK),
    Refusal(".*Pool|Conv.*|Col2Im", "strides .* and dilations .* must be positive", NO_CHECK),
    Refusal(".*Pool", "X .* must have batch, channel and spatial axes", NO_CHECK),
    Refusal("GridSample", "grid of shape .* does not fit an input", NO_CHECK),
    Refusal("Loop|Scan|If|SequenceMap", "the body '.*' takes \\d+ inputs, and was given", NO_CHECK),
    Refusal(
        "Imputer|LabelEncoder|OneHotEncoder|Scaler", "exactly one of .* must be given", NO_CHECK
    ),
    Refusal("Mod", "fmod is -?\\d+, not 0", NO_CHECK),
    Refusal("Momentum", "mode is '.*'; Momentum knows standard and nesterov", NO_CHECK),
    Refusal("Attention|FlexAttention", "softmax_precision must be", NO_CHECK),
    Refusal("Add|Sub|Mul|Div|Pow|And|Or|Xor|Equal|Greater|Less", ".*needs broadcast=1", NO_CHECK),
    Refusal(
        "GRU|LSTM|RNN", "clip is -?(inf|nan|[\\d.e+-]+), and no", "a clip that is ignored", BOTH
    ),
    Refusal(
        "Attention", "qk_matmul_output_mode must be", "of an output that is not asked for", BOTH
    ),
    Refusal(
        ".*",
        ".*(dtype promotion|does not accept dtype|is [a-z]+\\d*, it (takes|must have))",
        "types that the operator's schema does not have",
    ),
    Refusal(".*", ".*(Incompatible shapes|be broadcast)", "shapes that only NumPy broadcasts"),
)
"""Refusals that are right.

Results that differ, as far as they were looked at: booleans that are neither 0 nor 1 (keepdims,
align_corners: onnxruntime cuts them to 32 bits, the reference compares with 1), an AffineGrid of
size 1 (three results, ours is PyTorch's), negative p of LpPool, numbers below the least normal one
(XLA takes them for zero), NaN in weights (onnxruntime's LSTM cuts it off), shapes of a Loop without
iterations (onnxruntime has zeros), bodies whose inputs have defaults (the reference takes these),
accents, which the reference's StringNormalizer takes off letters, a negative min_gram_length of
TfIdfVectorizer, where the reference counts some twice, infinite places of GridSample (ours is NaN),
an infinite number cast to a whole one (the specification leaves it open), a Momentum whose R is an
integer, and a MelWeightMatrix of a negative sample rate.
"""


class Overtime(BaseException):
    """Raised by a worker's alarm when a case has had its time."""


class Outcome(NamedTuple):
    """How a case ended.

    Attributes:
      kind: "refused", "ran" or "finding"; of those that were compared also "same", "both refuse",
        "explained" (a refusal that is right), "we refuse", "they refuse" or "differ".
      bucket: what cases of one cause have in common.
      detail: for people.
    """

    kind: str
    bucket: str = ""
    detail: str = ""


def finding(error: BaseException, stage: str) -> Outcome:
    """Return the outcome of an exception that is not ours: its bucket is where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(OURS)]
    place = "outside"
    if ours:
        place = f"{Path(ours[-1].filename).relative_to(OURS)}:{ours[-1].name}"
    text = f"{type(error).__name__}: {error}"[:300]
    return Outcome("finding", f"{type(error).__name__} in {place} ({stage})", text)


def model(
    data: bytes, inputs: tuple, mode: str, draw: int, stage: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Load a model, print it, write it, run it, and compare the results with others'.

    Args:
      data: the file.
      inputs: values for its inputs, which are used where they fit.
      mode: "trace" (on shapes), "compile", or "compare" (operator by operator, in 64 bits).
      draw: a seed for inputs, and for what is tried beside running it.
      stage: told what comes next.
    """
    random, now = Random(draw), "load"

    def enter(name: str) -> None:
        nonlocal now
        now = name
        stage(name)

    results, feeds, refused = None, None, ""
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as modes:
            warnings.simplefilter("ignore")
            modes.enter_context(jax.enable_x64(mode == "compare"))
            if mode == "compare":
                modes.enter_context(jax.disable_jit())
            enter("load")
            loaded = jaxonnx.load(data, **OPTIONS)
            enter("print")
            with contextlib.suppress(jaxonnx.Error):
                for show in random.sample(SHOWN, random.choice((0, 0, 1, 2))):
                    show(loaded)
            enter("call")
            infos = {info.name: info for info in loaded.proto.graph.input}
            infos = [infos[value.name] for value in loaded.inputs]
            nasty = mode != "compare" and random.random() < 0.3
            feeds = fed(infos, inputs, random, nasty)
            if feeds is None:
                return Outcome("ran", "inputs that are too large")
            if mode == "trace":
                traced(loaded, feeds, random)
            elif mode == "compile":
                jax.block_until_ready(loaded(**feeds))
            else:
                results = [*Rep(loaded).run(feeds)]
    except jaxonnx.Error as error:
        refused = str(error) or "no message"
    except Overtime as error:
        if mode == "compare":  # loops take Python's time there
            return Outcome("ran", "the comparison takes too long")
        return finding(error, now)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return finding(error, now)
    proto = parsed(data) if mode == "compare" else None
    if proto is not None and feeds is None:  # refused before it was called
        stored = {tensor.name for tensor in proto.graph.initializer}
        infos = [info for info in proto.graph.input if info.name not in stored]
        feeds = fed(infos, inputs, Random(draw), False)
    if proto is None or feeds is None:
        return Outcome("refused" if refused else "ran", detail=refused)
    enter("compare")
    try:
        return compared(proto, feeds, results, refused)
    except Overtime:
        return Outcome("refused" if refused else "ran", "the reference takes too long")


def traced(loaded: jaxonnx.Model, feeds: dict[str, Any], random: Random) -> None:
    """Trace a model, which compiles nothing; some inputs of integers are known meanwhile."""
    hidden = {
        name: value
        for name, value in feeds.items()
        if isinstance(value, np.ndarray)
        and value.dtype != object
        and (value.dtype.kind not in "iub" or random.random() < 0.3)
    }
    known = {name: value for name, value in feeds.items() if name not in hidden}

    def run(hidden: dict[str, Any]) -> None:
        loaded.apply(loaded.params, **known, **hidden)

    jax.eval_shape(run, hidden)


def fed(infos: list, inputs: tuple, random: Random, nasty: bool) -> dict[str, Any] | None:
    """Return inputs by name, None if the file asks for large ones."""
    sizes: dict[str, int] = {}
    own, feeds = random.random() < 0.6, {}
    for i, info in enumerate(infos):
        value = value_of(info.type, random, nasty, sizes)
        if isinstance(value, np.ndarray) and value.size > 1 << 16:
            return None
        known = inputs[i] if own and i < len(inputs) else None
        if known is not None and _alike(known, value):
            value = known
        feeds[info.name] = value
    return feeds


def _alike(known: Any, value: Any) -> bool:
    if isinstance(known, list):
        return isinstance(value, list)
    same = isinstance(known, np.ndarray) and isinstance(value, np.ndarray)
    return same and (known.dtype, known.shape) == (value.dtype, value.shape)


def value_of(kind: TypeProto, random: Random, nasty: bool, sizes: dict[str, int]) -> Any:
    """Return a value of a type that a file declares."""
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        inner = kind.sequence_type.elem_type
        return [value_of(inner, random, nasty, sizes) for _ in range(random.randint(1, 3))]
    if which == "optional_type":
        if random.random() < 0.3:
            return None
        return value_of(kind.optional_type.elem_type, random, nasty, sizes)
    if which == "map_type":
        keys = ["a", "b"] if kind.map_type.key_type == onnx.TensorProto.STRING else [0, 1]
        inner = kind.map_type.value_type
        return {key: value_of(inner, random, nasty, sizes) for key in keys}
    tensor = kind.tensor_type
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = np.dtype(np.float32)
    shape = []
    for i, dim in enumerate(tensor.shape.dim):
        name = dim.dim_param or f"{id(tensor)} {i}"
        size = sizes.setdefault(name, random.choice((1, 2, 3, 3, 4, 0)))
        shape.append(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else size)
    if not tensor.HasField("shape"):
        shape = [random.randint(1, 3) for _ in range(random.randint(0, 3))]
    if np.prod(shape, dtype=float) > 1 << 16:
        return np.empty((1 << 16) + 1, np.int8)
    return array(random, tuple(shape), dtype, nasty)


def compared(
    proto: ModelProto, feeds: Mapping[str, Any], results: list | None, refused: str
) -> Outcome:
    """Compare with onnx.reference and onnxruntime, if onnx.checker accepts the model."""
    fallback = Outcome("ran" if results is not None else "refused", refused[:200])
    operators = sorted({node.op_type for node in proto.graph.node})
    named = "+".join(operators[:3]) or "nothing"
    every = {node.op_type for node in all_nodes(proto.graph)}
    every |= {node.op_type for function in proto.functions for node in function.node}
    if any(name.startswith(RANDOM) for name in every):
        return fallback
    try:
        onnx.checker.check_model(proto)
    except Exception:  # noqa: BLE001 - whatever it raises, it does not accept the model
        return fallback
    theirs = dict(runs(proto, feeds))
    if theirs.pop("invalid", None):  # onnx.checker does not look at types
        return fallback
    if not theirs:
        kind = "both refuse" if results is None else "they refuse"
        return Outcome(kind, named)
    if results is None:
        for refusal in EXPLAINED:
            if refusal.explains(refused, theirs):
                return Outcome("explained", refusal.why)
        return Outcome("we refuse", f"{named} ({', '.join(theirs)} run)", refused[:300])
    wrong = {name: _difference(results, other) for name, other in theirs.items()}
    if not all(wrong.values()):
        return Outcome("same")
    text = "; ".join(f"{name}: {what}" for name, what in wrong.items())
    return Outcome("differ", f"{named} ({', '.join(theirs)})", text[:600])


def runs(proto: ModelProto, feeds: Mapping[str, Any]) -> Iterator[tuple[str, list]]:
    """Yield the results of each runtime that runs a model; "invalid" if its types are wrong."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        # they raise whatever they meet
        with contextlib.suppress(Exception):
            yield "reference", [*ReferenceEvaluator(proto).run(None, dict(feeds))]
        try:
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            yield "onnxruntime", [*session.run(None, dict(feeds))]
        except Exception as error:  # noqa: BLE001 - its exceptions have no common class
            if "Type Error" in str(error):
                yield "invalid", [error]


def _difference(ours: Any, theirs: Any) -> str:
    """Return how two results differ, an empty text if they do not."""
    if isinstance(theirs, list) and not isinstance(ours, np.ndarray):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            return f"{ours!r} and {theirs!r}"
        texts = (_difference(a, b) for a, b in zip(ours, theirs, strict=True))
        return next(filter(None, texts), "")
    if ours is None or theirs is None or isinstance(theirs, dict):
        return "" if repr(ours) == repr(theirs) else f"{ours!r} and {theirs!r}"
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.dtype.kind in "OUS" and b.dtype.kind in "OUS":
        return "" if a.tolist() == b.tolist() else f"{a.tolist()} and {b.tolist()}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    if a.dtype.kind in "biu":
        wrong = a != b
    else:
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        coarse = 1e-3 if a.dtype.itemsize >= 4 else 0.05
        with np.errstate(all="ignore"):
            x, y = a.astype(wide), b.astype(wide)
            scale = min(np.abs(y[np.isfinite(y)]).max(initial=0), 1)
            wrong = ~np.isclose(x, y, coarse, coarse * scale, equal_nan=True)
    if not wrong.any():
        return ""
    return f"{a[wrong][:4]} and {b[wrong][:4]}, {wrong.sum()} of {wrong.size}"
