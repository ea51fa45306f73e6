"""LoRA: low-rank changes of weights, trained while the weights themselves stay fixed."""

from jaxonnx.lora._adapters import Adapters
from jaxonnx.lora._lora import LoRA

__all__ = ["Adapters", "LoRA"]
