"""LoRA: low-rank adapters, trained while the weights stay fixed."""

from jaxonnx.lora._adapters import Adapters
from jaxonnx.lora._lora import LoRA
from jaxonnx.lora._merge import pair
from jaxonnx.lora._view import Adaption, file_tensors, read_weight, writes_apart
