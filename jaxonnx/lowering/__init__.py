"""Formulations that are fast on each platform, equal to the plain ones up to rounding."""

from jaxonnx.lowering._adapted import Adapted
from jaxonnx.lowering._conv import Conv, convolution, transposed_convolution
from jaxonnx.lowering._either import either
from jaxonnx.lowering._merged import MergedRows, reshaped
from jaxonnx.lowering._normalized import normalized
from jaxonnx.lowering._order import in_file, is_in_memory, kernels_first, placed_as, store
from jaxonnx.lowering._pool import Choice, first_max, first_winner, max_pool, window_sum
from jaxonnx.lowering._product import is_half, merges, product, rounded, rows
from jaxonnx.lowering._remat import remat

__all__ = [
    "Adapted",
    "Choice",
    "Conv",
    "MergedRows",
    "convolution",
    "either",
    "first_max",
    "first_winner",
    "in_file",
    "is_half",
    "is_in_memory",
    "kernels_first",
    "max_pool",
    "merges",
    "normalized",
    "placed_as",
    "product",
    "remat",
    "reshaped",
    "rounded",
    "rows",
    "store",
    "transposed_convolution",
    "window_sum",
]
