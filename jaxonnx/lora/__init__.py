"""LoRA: low-rank adapters, trained while the weights stay fixed."""

from jaxonnx.lora._adapters import Adapters
from jaxonnx.lora._lora import LoRA

# for other rooms of the package
from jaxonnx.lora._merge import find_tied
from jaxonnx.lora._module_names import (
    EXPORTED,
    FAMILIES,
    LIKE_LLAMA,
    Block,
    find_blocks,
    find_family,
    find_matrices,
    torch_axes,
)
from jaxonnx.lora._view import file_tensors, read_weight, writes_apart
