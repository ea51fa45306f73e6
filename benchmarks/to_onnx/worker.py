"""Exports the cases of families for `benchmarks.to_onnx`, in a process of its own.

    python -m benchmarks.to_onnx.worker <jaxonnx | jax2onnx> <family> [<from case>]

Prints a line of JSON when it begins a case and one with its result. A case that JAX itself does not
compute, or whose result is not finite, does not count.
"""

import contextlib
import io
import json
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.errors
import jax
import numpy as np
import onnxruntime

from benchmarks.to_onnx.cases import cases, pure

TOLERANCE = 1e-5
"""Of each number, and of the largest one in its array."""

UNDEFINED = (
    *(TypeError, ValueError, NotImplementedError, AttributeError, AssertionError),
    flax.errors.FlaxError,
)
"""What JAX and Flax raise for a function that has no gradient, or does not map."""


def exported(exporter: str, function: Any, arrays: tuple) -> Any:
    """Return the model, and the names of its inputs."""
    names = [f"x{i}" for i in range(len(arrays))]
    if exporter == "jaxonnx":
        from jaxonnx import to_onnx

        return to_onnx(function, *arrays, inputs=names, check=False)
    from jax2onnx import to_onnx

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return to_onnx(function, structs, input_names=names)


def wanted(function: Any, arrays: tuple) -> list[np.ndarray] | None:
    """Return what JAX computes, None if it does not."""
    try:
        results = [np.asarray(a) for a in jax.tree.leaves(jax.jit(pure(function))(*arrays))]
    except UNDEFINED:
        return None
    return results if results and all(a.dtype.kind != "c" for a in results) else None


def difference(results: list, expected: list) -> str:
    """Return how results differ from what they should be, "" if they agree."""
    if [np.shape(a) for a in results] != [b.shape for b in expected]:
        return "other shapes"
    for a, b in zip(results, expected, strict=True):
        wide = np.asarray(a).astype(np.float64), b.astype(np.float64)
        largest = max(1, np.nanmax(np.abs(wide[1]), initial=0, where=np.isfinite(wide[1])))
        if not np.allclose(*wide, TOLERANCE, TOLERANCE * largest, equal_nan=True):
            return f"differs by {np.nanmax(np.abs(np.subtract(*wide))):.1e}"
    return ""


def outcome(exporter: str, function: Any, arrays: tuple) -> str | None:
    """Return why a case fails, "" if it does not, None if it does not count."""
    if (expected := wanted(function, arrays)) is None:
        return None
    # whatever an exporter or the runtime raises is its result
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(compared, exporter, function, arrays, expected)
    if (error := future.exception()) is None:
        return future.result()
    line = str(error).strip().splitlines() or traceback.format_exception_only(error)
    return f"{type(error).__name__}: {line[0]}"[:300]


def compared(exporter: str, function: Any, arrays: tuple, expected: list) -> str:
    """Return how the results of the model in onnxruntime differ, "" if they do not."""
    model = exported(exporter, function, arrays)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    needed = {value.name for value in session.get_inputs()}
    feeds = {f"x{i}": np.asarray(a) for i, a in enumerate(arrays) if f"x{i}" in needed}
    return difference([*session.run(None, feeds)], expected)


def main() -> None:
    exporter, family, first = sys.argv[1], sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0
    warnings.simplefilter("ignore")
    answers = sys.stdout
    for i, (kind, name, (function, arrays)) in enumerate(cases(family)):
        if i < first:
            continue
        case = {"index": i, "kind": kind, "name": name}
        print(json.dumps(case), file=answers, flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            reason = outcome(exporter, function, arrays)
        print(json.dumps({**case, "reason": reason}), file=answers, flush=True)


if __name__ == "__main__":
    main()
