"""Changes of a network and their ways back: `View`, and the views that belong to no feature."""

from jaxonnx.views._calls import (
    AllSteps,
    BatchAxis,
    EmptyCaches,
    FixedInputs,
    Outputs,
    Part,
    SharedCaches,
    WholeInputs,
    fix_inputs,
    omit_caches,
)
from jaxonnx.views._packing import PackedRows, find_packing
from jaxonnx.views._padded_caches import SHIFT, VISIBLE, PaddedCaches, find_padding
from jaxonnx.views._training import Dropout, EmbeddingNoise, FrozenStatistics, Remat, drop
from jaxonnx.views._view import Addition, CallView, Evaluate, View
