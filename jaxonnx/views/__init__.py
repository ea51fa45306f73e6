"""Changes of a network and their ways back: `View`, and the views that belong to no feature."""

from jaxonnx.views._all_steps import AllSteps
from jaxonnx.views._caches import EmptyCaches, omit_caches
from jaxonnx.views._inputs import BatchAxis, FixedInputs, WholeInputs, fix_inputs
from jaxonnx.views._outputs import Outputs
from jaxonnx.views._packing import PackedRows, find_packing
from jaxonnx.views._view import CallView, Evaluate, View

__all__ = [
    "AllSteps",
    "BatchAxis",
    "CallView",
    "EmptyCaches",
    "Evaluate",
    "FixedInputs",
    "Outputs",
    "PackedRows",
    "View",
    "WholeInputs",
    "find_packing",
    "fix_inputs",
    "omit_caches",
]
