"""JAX functions as ONNX models: the way back, one rule for each primitive of JAX."""

from jaxonnx.onnx_out import rules  # noqa: F401  (registers them)

# for other rooms of the package
from jaxonnx.onnx_out._export import OLDEST, OPSET, append, reads, to_onnx, write_model  # noqa: F401
from jaxonnx.onnx_out._nodes import Nodes, Tensor  # noqa: F401
from jaxonnx.onnx_out._rule_table import composed, primitive
from jaxonnx.onnx_out._tensors import known_tensor  # noqa: F401
from jaxonnx.onnx_out.passes.chains_in_blocks import split_into_blocks  # noqa: F401
from jaxonnx.onnx_out.passes.state_in_blocks import split_state  # noqa: F401

__all__ = ["composed", "primitive", "to_onnx"]
