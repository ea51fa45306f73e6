"""Calls of a model: inference over a data set, batch by batch, and arguments told from inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxonnx._data.batches import PaddedExamples, Source, prefetch
from jaxonnx._data.kinds import Data, Reading, read
from jaxonnx._data.ragged import PLAIN, Padding
from jaxonnx._display import list_some, track_batches
from jaxonnx._graph.values import Value, check_dtype
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError


def predictions(
    run: Callable[..., Any],
    model: Network,
    examples: Source,
    show: bool | None,
) -> Any:
    """Return the outputs for all examples as NumPy arrays, in a dict if there are several.

    Raises:
      InputError: an output does not have the examples along its first axis.
    """
    values = model.outputs
    names = [value.name for value in values]
    lengths = examples.lengths if isinstance(examples, PaddedExamples) else None
    widths: list[Any] = []

    def start_batches() -> Iterator[tuple[Any, np.ndarray]]:
        for batch in track_batches(examples.batches(0), examples.steps, show):
            outputs = run(*batch.inputs)
            varied = (
                examples.width(batch)
                if isinstance(examples, PaddedExamples)
                else tuple(x.shape[1:] for x in batch.inputs)
            )
            widths.append(varied)
            yield outputs if isinstance(outputs, tuple) else (outputs,), batch.weight > 0

    parts = [
        tuple(_real_rows(*pair, real) for pair in zip(names, outputs, strict=True))
        for outputs, real in prefetch(start_batches())
    ]
    joined = {
        value.name: _join_batches(value, columns, widths, lengths)
        for value, columns in zip(values, zip(*parts, strict=True), strict=True)
    }
    return joined if len(names) > 1 else joined[names[0]]


def read_inputs(
    model: Network,
    data: Data,
    *,
    batch_size: int | None = None,
    preprocess: Any = None,
    padding: Padding = PLAIN,
    per_row: bool = True,
) -> Source:
    """Return the inputs of all examples, in their order.

    Args:
      per_row: whether there must be one example for each row, so that texts are read only by a
        model that scores whole texts.
    """
    reading = Reading(
        model, padding, batch_size, preprocess=preprocess, labels=False, per_row=per_row
    )
    (source,) = read({"data": data}, reading)
    return source


def _real_rows(name: str, output: Any, real: np.ndarray) -> np.ndarray:
    """Return the rows of an output that belong to examples, without those of padding.

    Raises:
      InputError: the output does not have the batch along its first axis.
    """
    if not isinstance(output, jax.Array | np.ndarray) or output.shape[:1] != real.shape:
        problem = f"has shape {output.shape}" if hasattr(output, "shape") else "is not an array"
        raise InputError(
            f"output '{name}' {problem} for a batch of {len(real)}: predict needs outputs "
            "with the examples along the first axis: call the model itself, or choose other "
            "outputs with model.with_outputs"
        )
    rows = np.asarray(output)
    return rows if real.all() else rows[real]


def _join_batches(
    value: Value, parts: Sequence[np.ndarray], widths: Sequence[Any], lengths: np.ndarray | None
) -> np.ndarray | list[np.ndarray]:
    """Join the rows of all batches: an array, or a list of arrays if their lengths differ.

    Args:
      widths: the padded length of each batch, or the shapes of its inputs.
      lengths: those of the examples, without padding.
    """
    if lengths is not None and _is_per_position(value, parts, widths):
        rows = (row for part in parts for row in part)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    if shapes := {part.shape[1:] for part in parts} - {parts[0].shape[1:]}:
        if lengths is None and len({*widths}) > 1:
            return [row for part in parts for row in part]
        raise InputError(
            f"output '{value.name}' has rows of shape {parts[0].shape[1:]} in one batch and of "
            f"{shapes.pop()} in another: call the model itself"
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _is_per_position(value: Value, parts: Sequence[np.ndarray], widths: Sequence[int]) -> bool:
    """Check whether an output has an entry for each position of a padded sequence."""
    if value.shape is not None and (len(value.shape) < 2 or isinstance(value.shape[1], int)):
        return False
    return all(p.ndim > 1 and p.shape[1] == width for p, width in zip(parts, widths, strict=True))


P = ParamSpec("P")
R = TypeVar("R")

_INPUT = " (input)"
"""The suffix of an input's name while an argument of the method has the same name."""


def inputs_first(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a model that takes inputs by name beside arguments of its own.

    The name of an input means the input. An argument of the method goes by its own name where no
    input has it, and with an underscore behind it (`state_=`) always.
    """
    kinds = inspect.Parameter
    argument_names = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY) and name != "self"
    ]

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **named: Any) -> Any:
        input_names = self._input_names
        for name in argument_names if named else ():
            if name in input_names and name in named:
                named[name + _INPUT] = named.pop(name)
            if f"{name}_" in named and f"{name}_" not in input_names:
                if name in named:
                    raise TypeError(f"{method.__name__} got both '{name}' and '{name}_'")
                named[name] = named.pop(f"{name}_")
        return method(self, *args, **named)  # type: ignore[call-arg]

    return call  # type: ignore[return-value]


def unmark_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that were passed by name, by their names in the file."""
    return {name.removesuffix(_INPUT): value for name, value in named.items()}


def check_tensors(
    params: Mapping[str, Any], state: Mapping[str, Any], dtypes: Mapping[str, np.dtype]
) -> None:
    """Raise an InputError unless two dicts have all tensors of a model between them.

    Args:
      params: the parameters; other names and dtypes than the model's are refused.
      state: the state; other dtypes are refused.
      dtypes: the dtypes of the model's tensors, by name.
    """
    for what, tensors in (("params", params), ("state", state)):
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise InputError(f"{what} must be a dict of arrays by tensor name, got {kind}")
    if missing := [f"'{name}'" for name in dtypes if name not in params and name not in state]:
        raise InputError(
            f"params and state lack {list_some(missing, '')}: pass dicts with the names of "
            "model.params and model.state"
        )
    for name, value in params.items():
        if name not in dtypes:
            unknown = list_some([f"'{other}'" for other in params if other not in dtypes], "")
            raise InputError(
                f"params has {unknown}, which the model lacks: pass "
                "{name: params[name] for name in model.params}"
            )
        if getattr(value, "dtype", dtypes[name]) != dtypes[name]:
            check_dtype("params", name, value, dtypes[name])
    for name, value in state.items():
        if name in dtypes and getattr(value, "dtype", dtypes[name]) != dtypes[name]:
            check_dtype("state", name, value, dtypes[name])


def signature(inputs: Sequence[Any]) -> tuple | None:
    """Return the types, shapes and dtypes of arrays, on which the checks of a call depend.

    None if one of the inputs is not an array, or traced.
    """
    key: list[Any] = [jax.config.jax_enable_x64]  # type: ignore[attr-defined]
    for x in inputs:
        if type(x) is not np.ndarray and (not isinstance(x, jax.Array) or isinstance(x, Tracer)):
            return None
        key.append((type(x), x.shape, x.dtype))
    return tuple(key)
