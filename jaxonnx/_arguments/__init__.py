"""The arguments of `train`, `step` and `evaluate`, each declared once.

A declaration has the type, the range, the default and the documentation of an argument, the form of
its flag, and whether a resumed run must have the same value. Signatures, `Settings`, TOML files,
flags and the reference are made from these classes, and values are checked by them. Arguments that
change the plan of a step are declared where they do, in `jaxonnx.training._settings`. All of them
are read from their source: nothing of JAX is imported to show the help of the command line.
"""

from jaxonnx._arguments.arguments import (
    RATE,
    BasicArguments,
    DataArguments,
    Hook,
    LossArguments,
    Optimizer,
    OptimizerArguments,
    RunArguments,
)
from jaxonnx._arguments.declare import (
    Argument,
    Declaration,
    check_names,
    documented,
    list_arguments,
)

OPTIMIZERS = list_arguments(LossArguments)["optimizer"].choices
"""The optimizers that have a name."""
