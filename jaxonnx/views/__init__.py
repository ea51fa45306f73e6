"""Changes of a network and their ways back: `View`, and the views that belong to no feature."""

from jaxonnx.views._all_steps import AllSteps
from jaxonnx.views._caches import EmptyCaches, omit_caches
from jaxonnx.views._inputs import BatchAxis, FixedInputs, WholeInputs, fix_inputs
from jaxonnx.views._outputs import Outputs
from jaxonnx.views._packing import PackedRows, find_packing
from jaxonnx.views._training import Dropout, EmbeddingNoise, FrozenStatistics, Remat, drop
from jaxonnx.views._view import Addition, CallView, Evaluate, View
