"""The settings of a run, checked before anything is compiled, and the plan that they change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import optax

from jaxonnx._arguments import Argument, Declaration, Hook, OptimizerArguments, list_arguments
from jaxonnx._data.batches import Source
from jaxonnx._data.ragged import Padding
from jaxonnx._require import describe, read_type
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.quantization import Quantization
from jaxonnx.training._objective import Objective
from jaxonnx.training._settings.weight_layout import WeightLayout

T = TypeVar("T", bound=type)

if TYPE_CHECKING:

    class _VALUES:
        """The fields of `TrainArguments`, which declares their types."""

        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    _VALUES = make_dataclass(
        "_VALUES",
        [
            (name, entry.type, field(default=entry.argument.default))
            for name, entry in list_arguments("TrainArguments").items()
        ],
        frozen=True,
        kw_only=True,
    )


def _freeze(cls: T) -> T:
    """Make a frozen dataclass, for checkers one with the constructor of its base."""
    return dataclass(frozen=True, kw_only=True)(cls)


@_freeze
class Settings(_VALUES):
    """The values of `TrainArguments`, checked before anything is compiled.

    Raises:
      TrainingError: a sentence that says what was expected and what came.
    """

    def __post_init__(self) -> None:
        values, arguments = vars(self), list_arguments("TrainArguments")
        for name, entry in arguments.items():
            _check_value(name, values[name], entry)

        def holds(condition: str) -> bool:
            """Check whether an argument is given, or has a value of a type."""
            name, _, kind = condition.partition(": ")
            if kind:
                return any(allows(values[name]) for _, allows in read_type(kind))
            return _is_given(values[name], arguments[name].argument.default)

        for name, (_, argument, _) in arguments.items():
            needs = argument.needs
            if not _is_given(values[name], argument.default):
                continue
            if (needs and not any(map(holds, needs))) or any(map(holds, argument.excludes)):
                raise TrainingError(f"{name} {argument.reason}")

    def with_length(self, steps: int | None) -> Settings:
        """Return settings with the epochs of the run, at most; `max_steps` may end it before.

        Args:
          steps: the number of steps in an epoch, if it is known.
        """
        if self.max_steps is None:
            return replace(self, epochs=self.epochs or 1)
        needed = -(-self.max_steps // (steps or 1))
        return replace(self, epochs=min(needed, self.epochs or needed))

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The functions of `on_log`, as a list."""
        if self.on_log is None:
            return ()
        hooks: Any = [self.on_log] if callable(self.on_log) else self.on_log
        return tuple(hooks)

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """The settings of an optimizer by name that have a value."""
        values = {name: getattr(self, name) for name in list_arguments(OptimizerArguments)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def of_losses(self) -> list[str]:
        """The names of arguments with a value that only a loss and an optimizer give a meaning."""
        return [
            name
            for name, (_, argument, _) in list_arguments("TrainArguments").items()
            if argument.needs_loss and _is_given(getattr(self, name), argument.default)
        ]


def _is_given(value: Any, default: Any) -> bool:
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


Gradient = Callable[[Any], Any]


@dataclass
class Plan:
    """The parts of a training step. Each setting of `train` changes some, in the order of `order`.

    `build_step` makes the parts one after another: objective, optimizer and storage are there for
    the settings that act on them.
    """

    model: Model
    """The model that is trained, with the views of settings."""
    settings: Settings
    epochs: int | None
    steps_per_epoch: int | None
    examples: Source | None
    """The data, where it is known."""
    held_out: Source | None
    """Validation data."""
    platform: str | None
    """That of the run; by default that of the model's arrays."""
    notes: list[str] = field(default_factory=list)
    """Notes for the history, on differences between the trained network and the file."""
    goal: Objective = field(init=False)
    """Its model has the parameters of `model`."""
    optimizer: optax.GradientTransformationExtraArgs = field(init=False)
    """Of parameters as they are stored."""
    storage: WeightLayout = field(init=False)
    gradient_wrappers: list[Callable[[Gradient, Any], Gradient]] = field(default_factory=list)
    """Functions of the gradient (a function of the parameters) and of the optimizer's state, which
    return the gradient that a step computes."""
    updates: int | None = None
    """The number of updates of the run, if the optimizer asked for it."""
    phases: list[int] | None = None
    """The epochs of the dense and the dynamic phase of sparsity, if it divides those of the run."""
    last_phase: int = 3
    """The phase of sparsity that the run ends in."""
