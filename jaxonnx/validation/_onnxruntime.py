"""Sessions of onnxruntime, whose refusals are errors of ours."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from jaxonnx.errors import InputError

INSTALL = "onnxruntime is not installed: pip install 'jaxonnx[demo]'"


def has_onnxruntime() -> bool:
    return find_spec("onnxruntime") is not None


class Session:
    """A session of onnxruntime with its default settings, on the processor.

    Args:
      file: the path or the bytes of the file.

    Raises:
      InputError: onnxruntime refuses the file.
    """

    def __init__(self, file: str | os.PathLike[str] | bytes):
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
        file = file if isinstance(file, bytes) else os.fspath(file)
        try:
            self._session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except self._refusals as error:
            raise _refusal(error) from error

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs in file order.

        Raises:
          InputError: onnxruntime refuses the inputs.
        """
        try:
            return [*self._session.run(None, dict(feeds))]
        except self._refusals as error:
            raise _refusal(error) from error


def _refusal(error: Exception) -> InputError:
    return InputError(f"onnxruntime refuses the model: {str(error).splitlines()[0]}")
