"""Quantized networks: where a scheme puts QuantizeLinear, with which scales, and how they train."""

from jaxonnx.quantization._quantize import prepare, quantize, select_scales
from jaxonnx.quantization._scheme import Quantization

__all__ = ["Quantization", "prepare", "quantize", "select_scales"]
