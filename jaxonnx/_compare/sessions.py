"""Sessions of onnxruntime, whose refusals are errors of ours."""

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx

from jaxonnx.errors import InputError

INSTALL = "onnxruntime is not installed: pip install 'jaxonnx[demo]'"


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
            raise NoKernel(_describe(error)) from error
        except self._refusals as error:
            raise InputError(_describe(error)) from error

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs in file order.

        Raises:
          InputError: onnxruntime refuses the inputs.
        """
        try:
            return [*self._session.run(None, dict(feeds))]
        except self._refusals as error:
            raise InputError(_describe(error)) from error


def _describe(error: Exception) -> str:
    return f"onnxruntime refuses the model: {str(error).splitlines()[0]}"
