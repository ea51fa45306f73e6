"""Formulations that are fast on each platform, equal to the plain ones up to rounding."""

from jaxonnx.lowering._attention_layout import separate_heads
from jaxonnx.lowering._compile import jit, keep_apart
from jaxonnx.lowering._contract import (
    contract,
    contract_p,
    is_half,
    merges,
    product,
    product_rounded,
    rows,
)
from jaxonnx.lowering._conv import Conv, convolution, transposed_convolution
from jaxonnx.lowering._elementwise_proof import group_updates, is_elementwise
from jaxonnx.lowering._integer import FAST_INT8, integer_convolution, integer_product
from jaxonnx.lowering._low_rank import (
    ChangedRows,
    ChangedWeight,
    LowRank,
    map_changed,
    merge_change,
    norm_factors,
    norms,
    split_change,
    unfold_change,
)
from jaxonnx.lowering._packed import BATCH_AXIS, SMALL, Packed
from jaxonnx.lowering._pool import Choice, first_max, first_winner, max_pool, window_sum
from jaxonnx.lowering._primitives import divide, normalize
from jaxonnx.lowering._recurrence import (
    LOOPS,
    elementwise,
    gru_cell,
    lstm_cell,
    recur,
    state_product,
    transpose_weight,
)
from jaxonnx.lowering._remat import remat
from jaxonnx.lowering._rounded import Dot, RoundedForm, has_units
from jaxonnx.lowering._standardize import standardize
from jaxonnx.lowering._stored_array import (
    ChannelsLast,
    KernelFirst,
    MergedRows,
    RoundedArray,
    StoredArray,
    Transposition,
    is_in_memory,
    kernel_first,
    kernels_first,
    map_rows,
    order,
    placed_as,
    platform_of,
    reshape_rows,
    store,
    to_array,
    to_float32,
    transpose_tree,
    with_gradient_of,
)
