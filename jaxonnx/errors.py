"""The errors of the package, and warnings that point to the line of the user's program.

Every error is an `Error`, and a built-in exception where that fits.
"""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


class Error(Exception):
    """Base class of all errors of jaxonnx."""

    node: str | None = None
    """The node that raised it, if one did; the message names it already."""
    index: int | None = None
    """The index of the node of the main graph in which it was raised."""


class ModelError(Error, ValueError):
    """Raised when a file is not a valid ONNX model: corrupt, truncated, cyclic, off its schema."""


class UnsupportedError(Error, NotImplementedError):
    """Raised when a valid model uses an operator or a feature that jaxonnx does not have."""


class NodeError(Error, ValueError):
    """Raised when an operator refuses its inputs or attributes; the message names the node."""


class LimitError(NodeError, MemoryError):
    """Raised when a value would be above the limit of `load`, or memory is not enough."""


class StaticError(Error, TypeError):
    """Raised when a value that shapes the computation is not known while tracing."""

    inputs: tuple[str, ...] = ()
    """The inputs of the main graph that it is computed from, if from nothing else."""
    why: str = ""
    """The reader of the value: the message up to the names of inputs."""


class InputError(Error, TypeError, ValueError):
    """Raised when arguments do not fit the model: number, name, rank, shape or dtype."""


class TrainingError(Error, ValueError):
    """Raised when training cannot start or must not go on: bad data, settings, or a NaN loss."""


class SparsityError(Error, ValueError):
    """Raised when weights, masks or schedules do not fit the sparsity pattern."""


def warn(message: str) -> None:
    """Warn at the line that called the package, however deep in it the warning arises.

    The frames in between may be those of JAX or of a user's function, and the stack of a thread has
    no line of the user's: there it is the line that entered the package.
    """
    frame = entered = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            entered = frame.f_back or frame
        frame = frame.f_back
    place = entered.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        entered.f_code.co_filename,
        entered.f_lineno,
        place.get("__name__", "<unknown>"),
        place.setdefault("__warningregistry__", {}),
    )
