"""LoRA: low-rank adapters, trained while the weights stay fixed."""

from jaxonnx.lora._adapters import Adapters
from jaxonnx.lora._lora import LoRA

__all__ = ["Adapters", "LoRA"]
