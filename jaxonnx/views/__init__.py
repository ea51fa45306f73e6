"""Changes of a network and their ways back: `View`, and the views that belong to no feature."""

from jaxonnx.views._calls import (
    BatchAxis,
    FixedInputs,
    Outputs,
    PackedRows,
    Part,
    WholeInputs,
    find_packing,
    fix_inputs,
)
from jaxonnx.views._training import Dropout, EmbeddingNoise, FrozenStatistics, Remat, drop
from jaxonnx.views._view import Addition, CallView, Evaluate, Measure, View
