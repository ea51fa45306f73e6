"""Check the values of arguments by their declarations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from jaxonnx._arguments.declare import Argument, Declaration, list_arguments
from jaxonnx._require import describe, read_type
from jaxonnx.errors import TrainingError


def check_values(group: type | str, values: Mapping[str, Any]) -> None:
    """Refuse values of arguments that their declarations exclude, alone or with others.

    Args:
      group: a class of declarations, or its name.
      values: of all its arguments.

    Raises:
      TrainingError: a sentence that says what was expected and what came.
    """
    arguments = list_arguments(group)
    for name, entry in arguments.items():
        _check_value(name, values[name], entry)

    def holds(condition: str) -> bool:
        """Check whether an argument is given, or has a value of a type."""
        name, _, kind = condition.partition(": ")
        if kind:
            return any(allows(values[name]) for _, allows in read_type(kind))
        return is_given(values[name], arguments[name].argument.default)

    for name, (_, argument, _) in arguments.items():
        value, needs = values[name], argument.needs
        if not is_given(value, argument.default):
            continue
        if (needs and not any(map(holds, needs))) or any(map(holds, argument.excludes)):
            raise TrainingError(f"{name} {argument.reason}")


def is_given(value: Any, default: Any) -> bool:
    """Check whether an argument has another value than its default, or none."""
    if isinstance(value, str | int | float | np.generic | None):
        return value not in (None, False, default)
    return not isinstance(value, Mapping | list | tuple) or bool(value)


def _check_value(name: str, value: Any, entry: Declaration) -> None:
    argument, kinds = entry.argument, read_type(entry.type)
    if not kinds or (value is None and "None" in entry.type.split(" | ")):
        return
    fits = any(allows(value) for _, allows in kinds) and _is_within(value, argument)
    if not fits:
        expected = _describe_values(value, entry)
        raise TrainingError(f"{name} must be {expected}, got {describe(value)}{argument.hint}")
    if "PathLike" in entry.type and "\0" in str(value):
        raise TrainingError(f"{name} has a null byte: {str(value)!r}")


def _is_within(value: Any, argument: Argument) -> bool:
    """Check whether a value is in the range of an argument, if it has one."""
    if not argument.has_range or callable(value):
        return True
    number: Any = value
    return (
        isinstance(value, Real)
        and (argument.least is None or number >= argument.least)
        and (argument.above is None or number > argument.above)
        and (argument.most is None or number <= argument.most)
        and (argument.below is None or number < argument.below)
        and (not argument.finite or number < math.inf)
    )


def _describe_values(value: Any, entry: Declaration) -> str:
    """Describe the values of an argument, for an error about another value."""
    argument = entry.argument
    if argument.expected:
        return argument.expected.replace("{choices}", ", ".join(map(str, entry.choices)))
    *others, last = dict.fromkeys(text for text, _ in read_type(entry.type))
    if not argument.has_range:
        return f"{', '.join(others)} or {last}" if others else last
    least, above, most, below = argument.least, argument.above, argument.most, argument.below
    number = "an integer" if entry.type.startswith("int") else "a number"
    if most is not None and isinstance(value, int) and value > most:
        return f"{number} of {least} to {most}"
    if number == "a number" and argument.finite and below is None:
        number = "a finite number"
    limits = f"of at least {least}" if above is None else f"above {above}"
    return f"{number} {limits}" + ("" if below is None else f", below {below}")
