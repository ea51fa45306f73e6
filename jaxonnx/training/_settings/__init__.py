"""The settings of a run, checked before anything is compiled."""

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from jaxonnx._arguments import (
    Hook,
    OptimizerArguments,
    list_arguments,
)
from jaxonnx._arguments.check import check_values, is_given
from jaxonnx._data.ragged import Padding
from jaxonnx.quantization import Quantization

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
        check_values("TrainArguments", vars(self))

    def with_length(self, steps: int | None) -> "Settings":
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
    def resumable(self) -> dict[str, Any]:
        """The arguments that a run resumed from a checkpoint must share."""
        arguments = list_arguments("TrainArguments").items()
        same = {name: getattr(self, name) for name, entry in arguments if entry.argument.resume}
        padding = Padding.of(self.pad, self.length_buckets)
        same["pad"] = {name: float(x) for name, x in padding.pad.items()} or None
        scheme = None if self.quantize is None else Quantization.of(self.quantize)
        same["fixed"] = self.fixed and {n: np.asarray(x).tolist() for n, x in self.fixed.items()}
        same["batching"] = sorted(self.batching or ()) or None
        same["quantize"] = scheme and scheme.as_json
        for name in ("class_weights", "dropout"):
            if isinstance(same[name], Mapping):
                same[name] = _comparable(same[name]) or None
        same["length_buckets"] = None if padding.buckets is None else [*padding.buckets]
        return same

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
            if argument.needs_loss and is_given(getattr(self, name), argument.default)
        ]


def _comparable(value: Any) -> Any:
    """Return weights or ratios by name as a checkpoint has them."""
    if isinstance(value, Mapping):
        return {str(name): _comparable(x) for name, x in value.items()}
    return value if isinstance(value, str) else float(value)
