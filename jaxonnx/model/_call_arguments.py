"""Separate the inputs of a model from arguments with the same name, like `state_`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxonnx._graph.values import check_dtype
from jaxonnx._text import list_some
from jaxonnx.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

_INPUT = " (input)"
"""What follows the name of an input while an argument of the method has the same name."""


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
      state: the state.
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
