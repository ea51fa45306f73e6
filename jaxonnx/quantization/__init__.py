"""Rounding: schemes, what they round, the record in the file, and views of rounded networks."""

from jaxonnx.quantization._bound import Bound, insert_within
from jaxonnx.quantization._dequantize import dequantize_weights, describe_integers
from jaxonnx.quantization._insert import insert
from jaxonnx.quantization._layers import list_layers, plot_ranges
from jaxonnx.quantization._moving_ranges import (
    MovingRanges,
    Schedule,
    learn_scales,
    move_ranges,
    recorded_views,
    select_scales,
)
from jaxonnx.quantization._open import Rounding, is_quantized, open_quantized
from jaxonnx.quantization._qoperators import restore_attention
from jaxonnx.quantization._record import record_of, stored_types
from jaxonnx.quantization._requantize import Loss, dequantize, requantize
from jaxonnx.quantization._scheme import Quantization, make_schedule
from jaxonnx.quantization._sensitivity import Sensitivity, measure, output_error
from jaxonnx.quantization._spell_out import spell_out
from jaxonnx.quantization._trials import make_trials
