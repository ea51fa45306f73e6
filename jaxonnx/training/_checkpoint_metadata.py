"""What a checkpoint says of a run beside its arrays."""

from typing import Any, NamedTuple

from jaxonnx.training._history import History


class Position(NamedTuple):
    """Where a run is in its data: the next batch."""

    epoch: int = 0
    batch: int = 0
    first: int = 0
    """The steps before this epoch."""


class About(NamedTuple):
    """What is told of a checkpoint beside its arrays."""

    position: Position
    history: History
    settings: dict[str, Any]
    leaves: list[str]
    fixed: list[str]
    crc: list[int | str]

    @classmethod
    def of(cls, told: dict[str, Any]) -> "About":
        """Return what was told, of this version or an earlier one.

        Raises:
          AttributeError, KeyError, TypeError, ValueError: something is missing or malformed.
        """
        position, history = Position(*told["position"]), History(**told["history"])
        counts = [*position, *(row[name] for row in history.epochs for name in ("epoch", "step"))]
        for event in history.events:
            _ = event["event"], event["why"], event["step"]
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            raise ValueError("its position is not of numbers")
        if not all(isinstance(x, float | int) for x in (*history.losses, *history.rates)):
            raise ValueError("its losses are not numbers")
        settings, leaves, fixed = dict(told["settings"]), [*told["leaves"]], [*told["fixed"]]
        return cls(position, history, settings, leaves, fixed, [*told["crc"]])
