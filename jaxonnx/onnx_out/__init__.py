"""JAX functions as ONNX models: the way back, one rule for each primitive of JAX."""

from jaxonnx.onnx_out import rules  # registers them

# for other rooms of the package
from jaxonnx.onnx_out._export import (
    OLDEST,
    OPSET,
    ExportedFunction,
    append,
    merge_identities,
    reads,
    to_onnx,
    write_function,
)
from jaxonnx.onnx_out._nodes import Nodes, Tensor, least_opset
from jaxonnx.onnx_out._rule_table import composed, primitive
from jaxonnx.onnx_out._tensors import known_tensor
from jaxonnx.onnx_out.passes import flatten_vectors, split_into_blocks, split_state

__all__ = ["composed", "primitive", "to_onnx"]
