"""Formulations that are fast on each platform, equal to the plain ones up to rounding."""

from jaxonnx.lowering._attention_layout import heads_apart
from jaxonnx.lowering._contract import contract_p
from jaxonnx.lowering._conv import Conv, convolution, transposed_convolution
from jaxonnx.lowering._elementwise_proof import indifferent
from jaxonnx.lowering._layout import (
    KernelFirst,
    Turn,
    in_file,
    is_in_memory,
    kernel_first,
    kernels_first,
    order,
    placed_as,
    platform_of,
    store,
    turned,
)
from jaxonnx.lowering._low_rank import Adapted
from jaxonnx.lowering._merged_rows import MergedRows, reshaped
from jaxonnx.lowering._normalized import normalized
from jaxonnx.lowering._pool import Choice, first_max, first_winner, max_pool, window_sum
from jaxonnx.lowering._product import is_half, merges, product, rounded, rows
from jaxonnx.lowering._recurrence import elementwise, recur, state_product, transposed
from jaxonnx.lowering._remat import remat
from jaxonnx.lowering._select_platform import either

__all__ = [
    "Adapted",
    "Choice",
    "Conv",
    "KernelFirst",
    "MergedRows",
    "Turn",
    "contract_p",
    "convolution",
    "either",
    "elementwise",
    "first_max",
    "first_winner",
    "heads_apart",
    "in_file",
    "indifferent",
    "is_half",
    "is_in_memory",
    "kernel_first",
    "kernels_first",
    "max_pool",
    "merges",
    "normalized",
    "order",
    "placed_as",
    "platform_of",
    "product",
    "recur",
    "remat",
    "reshaped",
    "rounded",
    "rows",
    "state_product",
    "store",
    "transposed",
    "transposed_convolution",
    "turned",
    "window_sum",
]
