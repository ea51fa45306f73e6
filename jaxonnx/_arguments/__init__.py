"""The arguments of `train`, `step` and `evaluate`, each declared once.

A declaration has the type, the default and the documentation of an argument, the form of its flag,
and whether a resumed run must have the same value. Signatures, `Settings`, TOML files, flags and
the reference are made from these classes. Types are strings and nothing of JAX is imported, because
the command line reads this to show its help.
"""

from jaxonnx._arguments.data import DataArguments
from jaxonnx._arguments.declare import (
    Argument,
    Declared,
    check_names,
    documented,
    list_arguments,
    list_own_arguments,
)
from jaxonnx._arguments.model import (
    RATE,
    LossArguments,
    ModelArguments,
    Optimizer,
    OptimizerArguments,
)
from jaxonnx._arguments.run import Hook, RunArguments
from jaxonnx._arguments.step import StepArguments


class TrainArguments(LossArguments, StepArguments, DataArguments, RunArguments, total=False):
    """All arguments of `train` besides model and data."""


OPTIMIZERS = list_arguments(LossArguments)["optimizer"].choices
"""The optimizers that have a name."""
