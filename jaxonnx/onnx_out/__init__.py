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

# for other rooms of the package
from jaxonnx.onnx_out._blocks import split_into_blocks  # noqa: F401
from jaxonnx.onnx_out._export import OLDEST, OPSET, append, reads, to_onnx, write_model  # noqa: F401
from jaxonnx.onnx_out._nodes import Nodes, Tensor  # noqa: F401
from jaxonnx.onnx_out._state import split_state  # noqa: F401
from jaxonnx.onnx_out._table import composed, primitive
from jaxonnx.onnx_out._tensors import known_tensor  # noqa: F401

__all__ = ["composed", "primitive", "to_onnx"]
