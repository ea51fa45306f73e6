"""Quantization: schemes, their tensors, the record in the file, and views of rounded networks."""

from jaxonnx.quantization._files import (
    dequantize_weights,
    describe_integers,
    is_quantized,
    record_of,
    stored_types,
)
from jaxonnx.quantization._insert import insert
from jaxonnx.quantization._layers import list_layers, plot_ranges
from jaxonnx.quantization._qoperators import restore_attention
from jaxonnx.quantization._requantize import Loss, dequantize, requantize
from jaxonnx.quantization._scheme import Quantization
from jaxonnx.quantization._sensitivity import (
    Bound,
    Sensitivity,
    insert_within,
    make_trials,
    measure,
    output_error,
)
from jaxonnx.quantization._spell_out import spell_out
from jaxonnx.quantization._view import (
    MovingRanges,
    Rounding,
    learn_scales,
    make_schedule,
    move_ranges,
    open_quantized,
    recorded_views,
    select_scales,
)
