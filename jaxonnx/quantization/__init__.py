"""Rounding: schemes, what they round, the record in the file, and views of rounded networks."""

# for other rooms of the package
from jaxonnx.quantization._attention import restore_attention  # noqa: F401
from jaxonnx.quantization._dequantize import dequantize_weights, describe_integers  # noqa: F401
from jaxonnx.quantization._insert import insert  # noqa: F401
from jaxonnx.quantization._layers import list_layers, plot_ranges  # noqa: F401
from jaxonnx.quantization._moving_ranges import (  # noqa: F401
    MovingRanges,
    Schedule,
    learn_scales,
    move_ranges,
    recorded_views,
    select_scales,
)
from jaxonnx.quantization._open import Rounding, is_quantized, open_quantized  # noqa: F401
from jaxonnx.quantization._record import record_of, stored_types  # noqa: F401
from jaxonnx.quantization._requantize import Loss, dequantize, requantize  # noqa: F401
from jaxonnx.quantization._scheme import Quantization, make_schedule  # noqa: F401
from jaxonnx.quantization._sensitivity import Sensitivity, measure  # noqa: F401
from jaxonnx.quantization._sites import find_weights  # noqa: F401

__all__ = ["Quantization", "Sensitivity"]
