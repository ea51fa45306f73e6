"""Post-training quantization, quantization-aware training and sensitivity analysis."""

from jaxonnx.quantization._layers import list_layers, plot_ranges
from jaxonnx.quantization._quantize import prepare, quantize, select_scales
from jaxonnx.quantization._scheme import Quantization
from jaxonnx.quantization._sensitivity import Sensitivity, sensitivity

__all__ = [
    "Quantization",
    "Sensitivity",
    "list_layers",
    "plot_ranges",
    "prepare",
    "quantize",
    "select_scales",
    "sensitivity",
]
