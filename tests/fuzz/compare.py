"""What others make of a model: onnx.reference and onnxruntime, and where their results differ."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from jaxonnx._io.protos import all_nodes
from tests.fuzz.explain import REFERENCE, RUNTIME, Compared, why
from tests.fuzz.explained_limits import LIMITS
from tests.fuzz.explained_refusals import REFUSALS
from tests.fuzz.explained_results import DIFFERENCES
from tests.fuzz.outcome import Outcome

ROWS = (*REFUSALS, *LIMITS, *DIFFERENCES)
RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")
TYPES = (
    "Type Error",
    "element type mismatch",
    "inconsistent type",
    "should all be tensors",
    "should share the same dtype",
)
"""What onnxruntime says where types are wrong, at which onnx.checker does not look."""


def compared(
    proto: ModelProto, feeds: Mapping[str, Any], results: list | None, refused: str
) -> Outcome:
    """Compare with onnx.reference and onnxruntime, if onnx.checker accepts the model.

    Args:
      proto: the model.
      feeds: its inputs.
      results: of jaxonnx, None if it refuses the model.
      refused: what it says then.
    """
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
    theirs, errors = runs(proto, feeds)
    if any(text in error for text in TYPES for error in errors.values()):
        return fallback
    if results is None and not theirs:
        return Outcome("both refuse", named)
    wrong = {name: [*differences(results, other)] for name, other in theirs.items()}
    if not all(wrong.values()):
        return Outcome("same")
    ran, said = ", ".join(theirs), "; ".join(f"{name}: {text}" for name, text in errors.items())
    if results is None:
        kind, bucket, detail = "we refuse", f"{named} ({ran} run)", f"{refused[:300]}; {said}"
    elif not theirs:
        kind, bucket, detail = "they refuse", named, said
    else:
        pairs = ((name, *described(*different[0])) for name, different in wrong.items())
        kind, bucket = "differ", f"{named} ({ran})"
        detail = "; ".join(f"{name}: {a} and {b}" for name, a, b in pairs)
    reason = why(Compared(proto, feeds, refused, errors, wrong), ROWS)
    return Outcome("explained", reason, detail) if reason else Outcome(kind, bucket, detail)


def runs(proto: ModelProto, feeds: Mapping[str, Any]) -> tuple[dict[str, list], dict[str, str]]:
    """Return the results of each runtime that runs a model, and what the others say."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

    def reference() -> list:
        return [*ReferenceEvaluator(proto).run(None, dict(feeds))]

    def runtime() -> list:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return [*session.run(None, dict(feeds))]

    results, errors = {}, {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name, run in ((REFERENCE, reference), (RUNTIME, runtime)):
            try:
                results[name] = run()
            except Exception as error:  # noqa: BLE001 - its exceptions have no common class
                errors[name] = f"{type(error).__name__}: {error}"
    return results, errors


def differences(ours: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays, or values that are none, which differ between two results."""
    if isinstance(theirs, list) and not isinstance(ours, np.ndarray):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            yield ours, theirs
            return
        for a, b in zip(ours, theirs, strict=True):
            yield from differences(a, b)
    elif isinstance(theirs, dict) and isinstance(ours, dict) and [*ours] == [*theirs]:
        for key, value in theirs.items():  # of Python's numbers
            yield from differences(ours[key], np.asarray(value, np.asarray(ours[key]).dtype))
    elif ours is None or theirs is None or isinstance(theirs, dict):
        if repr(ours) != repr(theirs):
            yield ours, theirs
    else:
        a, b = np.asarray(ours), np.asarray(theirs)
        if a.dtype.itemsize == 1 and a.dtype.kind == "V" and b.dtype == np.uint8:
            b = b.view(a.dtype)  # onnxruntime gives the bits of what NumPy has no type for
        if unequal(a, b).any():
            yield a, b


def unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where two arrays differ; all of them, where types or shapes do."""
    if a.dtype.kind in "OUS" and b.dtype.kind in "OUS":
        return np.array(a.tolist() != b.tolist())
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return np.array(True)
    if a.dtype.kind in "biu":
        return a != b
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    coarse = 1e-3 if a.dtype.itemsize >= 4 else 0.05
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
        scale = min(np.abs(y[np.isfinite(y)]).max(initial=0), 1)
        return ~np.isclose(x, y, coarse, coarse * scale, equal_nan=True)


def described(a: Any, b: Any) -> tuple[str, str]:
    """Return two values that differ for people."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return f"{a!r}"[:200], f"{b!r}"[:200]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}"
    if a.dtype.kind in "OUS":
        return f"{a.tolist()}"[:200], f"{b.tolist()}"[:200]
    wrong = unequal(a, b)
    return f"{a[wrong][:4]}", f"{b[wrong][:4]}, {wrong.sum()} of {wrong.size}"
