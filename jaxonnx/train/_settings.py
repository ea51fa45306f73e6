"""The settings of a run, checked before anything is compiled."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxonnx.errors import TrainingError

NAN_POLICIES = ("stop", "skip", "rollback")


def check(
    *,
    epochs: Any,
    seed: Any,
    optimizer: Any,
    accumulate: Any,
    ema: Any,
    precision: Any,
    nan: Any,
    patience: Any,
    monitor: Any,
    checkpoint_dir: Any,
    checkpoint_every: Any,
    resume: Any,
    progress: Any,
) -> None:
    """Refuses what no run can have.

    Raises:
      TrainingError: a sentence that says what was expected and what came.
    """
    _integer("epochs", epochs, 1)
    _integer("seed", seed, 0)
    _integer("accumulate", accumulate, 1)
    if nan not in NAN_POLICIES:
        raise TrainingError(f"nan must be one of {', '.join(NAN_POLICIES)}, and is {nan!r}")
    if ema is not None and not (isinstance(ema, float) and 0 < ema < 1):
        raise TrainingError(
            "ema must be the share of itself that the average keeps at each update, a number "
            f"between 0 and 1 like 0.999, and is {ema!r}"
        )
    if precision not in (None, "bf16"):
        raise TrainingError(
            f"precision must be 'bf16' (or None, for that of the file), and is {precision!r}"
        )
    if patience is not None:
        _integer("patience", patience, 1)
    if optimizer is not None and not callable(getattr(optimizer, "update", None)):
        raise TrainingError(
            "optimizer must be an optax transformation, like optax.adam(1e-3), and is "
            f"{_told(optimizer)}"
        )
    _flag("resume", resume)
    if progress is not None:
        _flag("progress", progress)
    if checkpoint_dir is not None and not isinstance(checkpoint_dir, str | os.PathLike):
        raise TrainingError(f"checkpoint_dir must be the path of a folder, not {checkpoint_dir!r}")
    if checkpoint_every is not None:
        _integer("checkpoint_every", checkpoint_every, 1)
        if checkpoint_dir is None and nan != "rollback":
            raise TrainingError(
                f"checkpoint_every={checkpoint_every} needs a checkpoint_dir, or nan='rollback'"
            )
    if monitor is not None and patience is None and checkpoint_dir is None:
        raise TrainingError(
            f"monitor={monitor!r} chooses the best epoch for patience= or checkpoint_dir=, and "
            "neither is given"
        )
    if resume and checkpoint_dir is None:
        raise TrainingError("resume=True needs the checkpoint_dir of the run to continue")


def hooks(on_log: Any) -> tuple[Callable[[int, dict[str, Any]], None], ...]:
    """`on_log` as functions: none, one or several."""
    if on_log is None:
        return ()
    given = tuple(on_log) if isinstance(on_log, list | tuple) else (on_log,)
    for hook in given:
        if not callable(hook):
            raise TrainingError(
                "on_log must be a function of the step and its metrics, or a list of such, and "
                f"has {_told(hook)}"
            )
    return given


def _integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise TrainingError(f"{name} must be an integer of at least {least}, and is {value!r}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TrainingError(f"{name} must be True or False, and is {value!r}")


def _told(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
