"""JAX functions as ONNX models: the way back, one rule for each primitive of JAX."""

from jaxonnx.onnx_out import (  # noqa: F401  (each registers its rules)
    _complex,
    _control,
    _conv,
    _elementwise,
    _forms,
    _indexing,
    _linalg,
    _products,
    _random,
    _reductions,
    _shapes,
    _special,
    _windows,
)
from jaxonnx.onnx_out._export import to_onnx
from jaxonnx.onnx_out._table import composed, primitive

__all__ = ["composed", "primitive", "to_onnx"]
