"""Compare outputs with those of onnxruntime, whose refusals are errors of ours.

Numbers are compared to the rounding of sums in another order, integers exactly, node by node.
"""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import onnx
from onnx import ModelProto, helper

from jaxonnx._graph.bind import bind
from jaxonnx._io.formats import read
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError
from jaxonnx.registry import lookup

INSTALL = "onnxruntime is not installed: pip install 'jaxonnx[demo]'"


_TYPES = {
    "tensor(bfloat16)": jnp.bfloat16,
    "tensor(float8e4m3fn)": jnp.float8_e4m3fn,
    "tensor(float8e4m3fnuz)": jnp.float8_e4m3fnuz,
    "tensor(float8e5m2)": jnp.float8_e5m2,
    "tensor(float8e5m2fnuz)": jnp.float8_e5m2fnuz,
}
"""The types by onnxruntime's names that its sessions do not exchange as arrays of NumPy."""


class NoKernel(InputError):
    """Raised when onnxruntime has no kernel on this processor for a node of a valid file."""


def has_onnxruntime() -> bool:
    return find_spec("onnxruntime") is not None


@cache
def saturates() -> bool:
    """Check whether onnxruntime adds two products of uint8 and int8 in 16 bits.

    It does so on x86 processors without VNNI; sums of large weights saturate there.
    """
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 10]> g (uint8[1, 64] x, int8[64, 16] w) =>
        (int32[1, 16] y) { y = MatMulInteger(x, w) }"""
    )
    del proto.graph.input[1:]
    weight = np.full((64, 16), 127, np.int8)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    (y,) = Session(proto.SerializeToString()).run({"x": np.full((1, 64), 255, np.uint8)})
    return bool((y != 64 * 255 * 127).any())


class Session:
    """A session of onnxruntime with its default settings, on the processor.

    Args:
      file: the path or the bytes of the file.
      threads: within an operator; by default one for each core.
      optimized: let onnxruntime rewrite the graph, as it does by default.

    Raises:
      InputError: onnxruntime refuses the file; NoKernel if it is only a kernel that it lacks.
    """

    def __init__(
        self, file: str | os.PathLike[str] | bytes, threads: int = 0, optimized: bool = True
    ):
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-not-found]
            Fail,
            InvalidArgument,
            InvalidGraph,
            NotImplemented,
            RuntimeException,
        )

        refusals = Fail, InvalidArgument, InvalidGraph, NotImplemented, RuntimeException
        self._refusals = (RuntimeError, *refusals)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        file = file if isinstance(file, bytes) else os.fspath(file)
        try:
            self._session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except NotImplemented as error:
            raise NoKernel(_explain(error)) from error
        except self._refusals as error:
            raise InputError(_explain(error)) from error

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs in file order.

        Raises:
          InputError: onnxruntime refuses the inputs.
        """
        session = self._session
        types = [value.type in _TYPES for value in (*session.get_inputs(), *session.get_outputs())]
        try:
            if not any(types):
                return [*session.run(None, dict(feeds))]
            values = {name: _to_value(np.asarray(x)) for name, x in feeds.items()}
            results = session.run_with_ort_values(None, values)
            pairs = zip(results, session.get_outputs(), strict=True)
            return [_to_array(value, _TYPES.get(output.type)) for value, output in pairs]
        except self._refusals as error:
            raise InputError(_explain(error)) from error


def _to_value(x: np.ndarray) -> Any:
    """Return a value of onnxruntime, which has no types of ml_dtypes, that shares an array."""
    from onnxruntime import OrtValue

    if x.dtype not in _TYPES.values():
        return OrtValue.ortvalue_from_numpy(x)
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def _to_array(value: Any, dtype: Any) -> np.ndarray:
    """Return a value of onnxruntime as an array, a copy where its type is one of `_TYPES`."""
    if dtype is None:
        return value.numpy()
    shape = value.shape()
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)


def _explain(error: Exception) -> str:
    return f"onnxruntime refuses the model: {str(error).splitlines()[0]}"


ROUNDING = {2: 2e-2, 4: 1e-4, 8: 1e-4}
"""Tolerances by the bytes of a number, relative to the largest number of an output."""
_HALF = 5e-3
"""The tolerance of float16, which has three more bits than bfloat16."""


class Difference(NamedTuple):
    """The largest difference of two arrays, and how much it may be."""

    size: float
    """Relative to the largest number; infinite if shapes, types or finiteness differ."""
    tolerance: float
    text: str = ""
    """The difference, if it is not a number."""

    @property
    def ok(self) -> bool:
        return self.size <= self.tolerance

    def __str__(self) -> str:
        return self.text or f"{self.size:.1e} of the largest (tolerance {self.tolerance:.0e})"


def compare_arrays(ours: Any, theirs: Any, tolerance: float | None = None) -> Difference:
    """Compare two outputs of a network: arrays, or sequences of them.

    Args:
      tolerance: of numbers, relative to the largest one; by default by their type.
    """
    if isinstance(theirs, list | tuple):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            return _differ("sequences of different lengths")
        return largest(
            [compare_arrays(*pair, tolerance) for pair in zip(ours, theirs, strict=True)]
        )
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            return _differ("maps of different keys")
        return largest([compare_arrays(ours[key], x, tolerance) for key, x in theirs.items()])
    if theirs is None or ours is None:
        return Difference(0, 0) if ours is theirs else _differ("only one is absent")
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape:
        return _differ(f"shapes {[*a.shape]} and {[*b.shape]}")
    if b.dtype.kind in "OUS":
        return Difference(0, 0) if a.tolist() == b.tolist() else _differ("different strings")
    if not (_is_real(a) and _is_real(b)):
        unequal = np.count_nonzero(a != b)
        return _differ(f"{unequal} of {a.size} integers differ") if unequal else Difference(0, 0)
    if tolerance is None:
        narrow = min(a.dtype, b.dtype, key=lambda kind: kind.itemsize)
        tolerance = _HALF if narrow == np.float16 else ROUNDING.get(narrow.itemsize, 2e-2)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return _differ("NaN or infinite in one alone")
    scale = np.abs(b[finite]).max(initial=0)
    error = np.abs(a[finite] - b[finite]).max(initial=0)
    return Difference(float(error / max(scale, 1e-2)), tolerance)


def largest(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is the largest in units of its tolerance."""
    return max(
        differences,
        key=lambda d: (not d.ok, d.size / max(d.tolerance, 1e-30)),
        default=Difference(0, 0),
    )


def _differ(text: str) -> Difference:
    return Difference(float("inf"), 0, text)


def _is_real(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


TIES = 5e-3
"""The share of integers that may differ, by one: ties, which another order of a sum decides."""

ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")
"""The operators that round to integers."""


class Integers(NamedTuple):
    """A comparison of integers from the same integers before them."""

    unequal: int
    count: int
    gap: int
    """The largest difference."""
    first: str
    """The first operator whose integers differ by more than one, or ""."""
    outputs: Difference
    """Of the outputs from the same integers."""

    @property
    def ok(self) -> bool:
        """Whether ties explain the differences."""
        return self.gap <= 1 and self.unequal <= TIES * self.count and self.outputs.ok


def find_integers(proto: ModelProto) -> list[str]:
    """Return the names of the integers that operators of the main graph give."""
    names = []
    for node in proto.graph.node:
        op = lookup(node.domain, node.op_type, sys.maxsize)
        if node.op_type in ROUNDS or (op is not None and op.result is not None):
            names.append(node.output[0])
    return names


def _to_codes(x: np.ndarray) -> np.ndarray:
    """Return integers, and of 8-bit floats their rank among those of the type."""
    if not _is_float(x.dtype):
        return x.astype(np.int64)
    bits = x.view(np.uint8).astype(np.int64)
    return np.where(bits < 128, bits, 128 - bits)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.itemsize == 1 and bool(jnp.issubdtype(dtype, jnp.floating))


def compare_integers(
    proto: ModelProto,
    feeds: Mapping[str, Any],
    tolerance: float | None,
    *,
    optimized: bool = True,
) -> Integers:
    """Compare the integers that each operator gives from onnxruntime's integers before it.

    Rounding of a tie would otherwise change what the operators behind it read.

    Args:
      tolerance: of the outputs, as in `compare_arrays`.
      optimized: as in `Session`.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    names, count = find_integers(result), len(graph.output)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    theirs = Session(result.SerializeToString(), optimized=optimized).run(feeds)
    integers = {f"{name}/given": x for name, x in zip(names, theirs[count:], strict=True)}
    for name, x in integers.items():
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, x.shape))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in names:
                node.input[i] = f"{name}/given"
    for value in graph.output[count:]:  # their types, now that they are outputs
        kind = helper.np_dtype_to_tensor_dtype(integers[f"{value.name}/given"].dtype)
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, None))
    plain, tensors, _ = read(result)
    program = Program(bind(plain, plain.graph, tensors.keys()), tensors)
    ours: Sequence[Any] = program({}, {}, None, {**feeds, **integers})
    gaps = {
        name: np.abs(_to_codes(np.asarray(a)) - _to_codes(b)).reshape(-1)
        for name, a, b in zip(names, ours[count:], theirs[count:], strict=True)
    }
    makers = {node.output[0]: node for node in proto.graph.node if node.output}
    wrong = (makers[name] for name, gap in gaps.items() if gap.max(initial=0) > 1)
    first = next((f"{node.op_type} '{node.name or node.output[0]}'" for node in wrong), "")
    gap = np.concatenate([np.zeros(0, np.int64), *gaps.values()])
    pairs = zip(ours[:count], theirs[:count], strict=True)
    outputs = largest([compare_arrays(a, b, tolerance) for a, b in pairs])
    unequal = int(np.count_nonzero(gap))
    return Integers(unequal, gap.size, int(gap.max(initial=0)), first, outputs)
