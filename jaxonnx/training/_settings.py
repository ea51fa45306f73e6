"""The settings of a run, checked before anything is compiled."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from jaxonnx._arguments import (
    NAN_POLICIES,
    OPTIMIZERS,
    Hook,
    OptimizerArguments,
    TrainArguments,
    list_arguments,
)
from jaxonnx._data.ragged import Padding
from jaxonnx._data.rows import check_columns
from jaxonnx._require import is_one_of, require, require_choice, require_integer
from jaxonnx.errors import TrainingError
from jaxonnx.lora import Adapters, LoRA
from jaxonnx.quantization import Quantization
from jaxonnx.training._optimizers import is_planned
from jaxonnx.training._precision import PRECISIONS

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
            for name, entry in list_arguments(TrainArguments).items()
        ],
        frozen=True,
        kw_only=True,
    )


_COUNTS = (
    *("epochs", "steps_per_epoch", "max_steps", "accumulate", "patience"),
    *("validate_every", "checkpoint_every", "keep_best"),
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
        if isinstance(self.epochs, int) and self.epochs == 0:
            raise TrainingError(
                "epochs must be an integer of at least 1, got 0; jaxonnx.evaluate(model, data, "
                "loss=, metrics=) or the command jaxonnx evaluate computes metrics without training"
            )
        require_integer("seed", self.seed, 0, 2**63 - 1, TrainingError)
        check_columns(self.columns)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None or name in ("accumulate", "keep_best"):
                require_integer(name, value, error=TrainingError)
        for name in ("remat", "master", "validate_first", "check"):
            _flag(name, getattr(self, name))
        if not is_one_of(self.resume, ("anyway",)):
            _flag("resume", self.resume, " or 'anyway'")
        if self.progress is not None:
            _flag("progress", self.progress)
        self._check_step()
        self._check_checkpoints()
        for hook in self.hooks:
            expected = "a function (step, metrics), or a list of such functions"
            require("on_log", hook, callable(hook), expected, TrainingError)

    def _check_step(self) -> None:
        require_choice("nan", self.nan, NAN_POLICIES, TrainingError)
        decay = self.ema is None or (isinstance(self.ema, float) and 0 < self.ema < 1)
        require("ema", self.ema, decay, "a decay between 0 and 1, like 0.999", TrainingError)
        for name in ("label_smoothing", "neftune"):
            share, most = getattr(self, name), 1 if name == "label_smoothing" else math.inf
            fits = share is None or (isinstance(share, int | float) and 0 <= share < most)
            require(name, share, fits, f"a number of at least 0, below {most}", TrainingError)
        require_choice("precision", self.precision, (*PRECISIONS, None), TrainingError)
        choices = "batch", "frozen", "recompute", None
        require_choice("statistics", self.statistics, choices, TrainingError)
        if self.sharding is not None and self.mesh is None:
            raise TrainingError(
                "sharding says how tensors are split over a mesh, and there is none: pass "
                "mesh='all' for all devices, or a jax.sharding.Mesh"
            )
        self._check_optimizer()
        self._check_inputs()
        fits = self.lora is None or isinstance(self.lora, LoRA | Adapters)
        expected = "a jaxonnx.LoRA, like LoRA(rank=8), or Adapters to continue with"
        require("lora", self.lora, fits, expected, TrainingError)
        if self.lora is not None and self.sparsity is not None:
            raise TrainingError(
                "lora cannot be combined with sparsity: merge the "
                "adapters into the model first, or leave one of the two out"
            )
        if isinstance(self.lora, Adapters) and self.trainable is not None:
            raise TrainingError(
                "trainable cannot be combined with Adapters, which determine what is trained"
            )

    def _check_optimizer(self) -> None:
        named, parts = is_one_of(self.optimizer, (None, *OPTIMIZERS)), ("init", "update")
        made = all(callable(getattr(self.optimizer, part, None)) for part in parts)
        made = made or is_planned(self.optimizer)
        expected = (
            f"a name ({', '.join(OPTIMIZERS)}), an optax transformation, like optax.adam(1e-3) or "
            "jaxonnx.training.optimizer('adamw', 1e-3), or a function of steps (the updates of the "
            "run) to one"
        )
        require("optimizer", self.optimizer, named or made, expected, TrainingError)
        if self.of_optimizer and not named:
            verb = "goes" if len(self.of_optimizer) == 1 else "go"
            raise TrainingError(
                f"{', '.join(self.of_optimizer)} {verb} with an optimizer by name, like "
                "optimizer='adam'; an optax transformation has its own"
            )

    def _check_inputs(self) -> None:
        for name, value in (("fixed", self.fixed), ("batching", self.batching)):
            fits = value is None or isinstance(value, Mapping)
            require(name, value, fits, "a dict by input name", TrainingError)
        whole = all(axis is None for axis in (self.batching or {}).values())
        expected = "None for each input without an axis of examples, like {'edges': None}"
        require("batching", self.batching, whole, expected, TrainingError)
        if self.batching and self.mesh is not None:
            raise TrainingError(
                "batching passes inputs whole, and mesh= splits batches: leave one of the two out"
            )

    def _check_checkpoints(self) -> None:
        folder = self.checkpoint_dir
        fits = folder is None or isinstance(folder, str | os.PathLike)
        require("checkpoint_dir", folder, fits, "the path of a folder", TrainingError)
        if self.checkpoint_dir is not None and "\0" in str(self.checkpoint_dir):
            raise TrainingError(f"checkpoint_dir has a null byte: {str(self.checkpoint_dir)!r}")
        every, monitor = self.checkpoint_every, self.monitor
        if every is not None and self.checkpoint_dir is None and self.nan != "rollback":
            raise TrainingError(
                f"checkpoint_every={every} needs a checkpoint_dir, or nan='rollback'"
            )
        if monitor is not None and self.patience is None and self.checkpoint_dir is None:
            raise TrainingError(
                f"monitor={monitor!r} chooses the best epoch for patience= or checkpoint_dir=, and "
                "neither is given"
            )
        if self.keep_best > 1 and folder is None:
            raise TrainingError(f"keep_best={self.keep_best} needs a checkpoint_dir")
        least = (
            isinstance(self.min_improvement, int | float) and 0 <= self.min_improvement < math.inf
        )
        expected = "a finite number of at least 0"
        require("min_improvement", self.min_improvement, least, expected, TrainingError)
        if self.min_improvement and self.patience is None:
            raise TrainingError("min_improvement goes with patience=, which counts improvements")
        for name in ("validate_every", "validate_first"):
            if getattr(self, name) and self.validation is None:
                raise TrainingError(f"{name} needs validation data: pass validation= as well")
        if self.resume and self.checkpoint_dir is None:
            raise TrainingError("resume=True needs the checkpoint_dir of the run to continue")

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
        several = isinstance(self.on_log, list | tuple)
        hooks: Any = self.on_log if several else () if self.on_log is None else [self.on_log]
        return tuple(hooks)

    @property
    def resumable(self) -> dict[str, Any]:
        """The arguments that a run resumed from a checkpoint must share."""
        arguments = list_arguments(TrainArguments).items()
        same = {name: getattr(self, name) for name, entry in arguments if entry.argument.resume}
        padding = Padding.of(self.pad, self.length_buckets)
        same["pad"] = {name: float(x) for name, x in padding.pad.items()} or None
        scheme = None if self.quantize is None else Quantization.of(self.quantize)
        same["fixed"] = self.fixed and {n: np.asarray(x).tolist() for n, x in self.fixed.items()}
        same["batching"] = sorted(self.batching or ()) or None
        same["quantize"] = scheme and scheme.as_json
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
        arguments = [(n, entry.argument) for n, entry in list_arguments(TrainArguments).items()]
        named = [(n, getattr(self, n), entry.default) for n, entry in arguments if entry.needs_loss]
        return [name for name, value, default in named if value and value != default]


def _flag(name: str, value: Any, more: str = "") -> None:
    fits = isinstance(value, bool | np.bool_)
    require(name, value, fits, f"True or False{more}", TrainingError)
