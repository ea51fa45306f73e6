"""Every error that jaxonnx raises is an `Error`, and a built-in exception where that fits."""


class Error(Exception):
    """Base class of all errors of jaxonnx."""

    node: str | None = None
    """The node that raised it, if one did; the message names it already."""
    index: int | None = None
    """The index of the node of the main graph in which it was raised."""


class ModelError(Error, ValueError):
    """The file is not a valid ONNX model: corrupt, truncated, cyclic, or against its own schema."""


class UnsupportedError(Error, NotImplementedError):
    """The model is valid, but uses an operator or a feature that jaxonnx does not have."""


class NodeError(Error, ValueError):
    """An operator refused its inputs or attributes; the message names the node."""


class StaticError(Error, TypeError):
    """A value that shapes the computation must be known while tracing, and is not."""

    inputs: tuple[str, ...] = ()
    """The inputs of the main graph that it is computed from, if from nothing else."""


class InputError(Error, TypeError, ValueError):
    """Arguments that do not fit the model: number, name, rank, shape or dtype."""


class TrainingError(Error, ValueError):
    """A training run that cannot start or must not go on: bad data, settings, or a NaN loss."""


class SparsityError(Error, ValueError):
    """Weights, masks or schedules that do not fit the sparsity pattern."""
