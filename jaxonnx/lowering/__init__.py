"""Formulations that are fast on each platform, equal to the plain ones up to rounding."""

from jaxonnx.lowering._conv import convolution, transposed_convolution
from jaxonnx.lowering._layout import kernels_first
from jaxonnx.lowering._pool import first_max, first_winner, max_pool, window_sum
from jaxonnx.lowering._remat import remat

__all__ = [
    "convolution",
    "first_max",
    "first_winner",
    "kernels_first",
    "max_pool",
    "remat",
    "transposed_convolution",
    "window_sum",
]
