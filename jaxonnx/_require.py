"""Check arguments: "batch must be 'any' or None, got 8"."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxonnx.errors import InputError


def require(
    name: str, value: Any, fits: Any, expected: str, error: type[Exception] = InputError
) -> None:
    """Raise an error unless an argument fits: "`name` must be `expected`, got `value`"."""
    if not fits:
        raise error(f"{name} must be {expected}, got {describe(value)}")


def require_choice(
    name: str, value: Any, choices: Sequence[Any], error: type[Exception] = InputError
) -> None:
    """Raise an error unless an argument is one of some names, numbers or None."""
    *others, last = map(repr, choices)
    expected = f"{', '.join(others)} or {last}" if others else last
    require(name, value, is_one_of(value, choices), expected, error)


def require_integer(
    name: str,
    value: Any,
    least: int = 1,
    most: int | None = None,
    error: type[Exception] = InputError,
) -> None:
    """Raise an error unless an argument is an integer from `least` to `most`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    fits = whole and least <= value and (most is None or value <= most)
    limits = f"{least} to {most}" if whole and most and value > most else f"at least {least}"
    require(name, value, fits, f"an integer of {limits}", error)


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Check whether an argument is one of some choices.

    An array or a dict, which `in` would compare or hash, is not.
    """
    return isinstance(value, str | int | np.generic | None) and value in choices


def describe(value: Any) -> str:
    """Describe an argument: arrays by dtype and shape, large and opaque values by their type."""
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"{value.dtype}{[*value.shape]}"
    text = repr(value)
    return text if len(text) <= 80 and text[0] != "<" else f"a value of type {type(value).__name__}"
