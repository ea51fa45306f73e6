"""Tools around `train`, on public names alone: `find_rate`, losses over a rising learning rate."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import optax
from onnx import ModelProto

from jaxonnx._display import new_axes
from jaxonnx._require import check_arguments, require, require_choice, require_integer
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.training import OPTIMIZERS, TrainArguments, train
from jaxonnx.training import optimizer as make_optimizer

_TAKEN = (
    *("learning_rate", "schedule", "warmup", "epochs", "max_steps", "validation", "on_log"),
    *("checkpoint_dir", "patience", "samples", "sparsity", "quantize"),
)
"""Arguments of `train` that do not go with `find_rate`."""
_DECAY = 0.9
"""Of the exponential average of losses."""
_DIVERGED = 4
"""The multiple of the least average loss at which the search ends."""
_FIRST = 10
"""Steps before which it does not."""
_ROWS, _WIDTH = 16, 40


class _Diverged(Exception):
    """Raised by the hook to end the run."""


@dataclass(frozen=True)
class RateCurve:
    """The losses of steps whose learning rate rises; printing it shows the curve.

    Attributes:
      rates, losses: of each step.
    """

    rates: np.ndarray
    losses: np.ndarray

    @property
    def averages(self) -> np.ndarray:
        """The exponential averages of the losses, from the first step on."""
        weights = _DECAY ** np.arange(len(self.losses))
        sums = [np.dot(weights[i::-1], self.losses[: i + 1]) for i in range(len(weights))]
        return np.array(sums) / np.cumsum(weights)

    @property
    def suggestion(self) -> float:
        """The rate at which the average loss falls fastest, over the logarithm of the rate."""
        averages = self.averages
        end = int(averages.argmin()) + 1
        if end < 3:
            return float(self.rates[0])
        return float(self.rates[np.gradient(averages[:end]).argmin()])

    def plot(self, axes: Any = None) -> Any:
        """Draw the losses over the rates, and the suggestion; return the matplotlib axes."""
        axes = new_axes(axes)
        axes.semilogx(self.rates, self.losses, "C0", lw=0.6, alpha=0.5, label="loss")
        axes.semilogx(self.rates, self.averages, "C0", label="average")
        label = f"suggestion: {self.suggestion:.2g}"
        axes.axvline(self.suggestion, color="0.4", ls=":", label=label)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend(frameon=False)
        return axes

    def __str__(self) -> str:
        averages = self.averages
        low, high = averages.min(), min(averages.max(), 2 * averages[0] - averages.min())
        lines = [f"{'rate':>9}  {'loss':>8}"]
        for i in np.unique(np.linspace(0, len(averages) - 1, _ROWS).round().astype(int)):
            share = np.clip((averages[i] - low) / max(high - low, 1e-30), 0, 1)
            bar = "#" * round(1 + (_WIDTH - 1) * share)
            lines.append(f"{self.rates[i]:9.2e}  {averages[i]:8.4g}  {bar}")
        return "\n".join(
            [*lines, f"suggestion: {self.suggestion:.2g}, where the loss falls fastest"]
        )


def find_rate(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any,
    *,
    least: float = 1e-6,
    most: float = 1.0,
    steps: int = 100,
    **arguments: Unpack[TrainArguments],
) -> RateCurve:
    """Measure the loss while the learning rate rises, to choose one for `train`.

    The rate rises by the same factor in each step. The run ends where the loss is not finite, or
    four times the least one. The model is not changed. Smith, "Cyclical Learning Rates for Training
    Neural Networks", 2017 (arXiv:1506.01186).

    >>> from jaxonnx import demo
    >>> x, y = np.ones((32, 1, 8, 8), np.float32), np.arange(32) % 10
    >>> curve = find_rate(demo.model(), (x, y), least=1e-4, most=1e-2, steps=3, batch_size=8)
    >>> print(curve.rates.round(6))
    [0.0001 0.001  0.01  ]

    Args:
      model: as in `train`.
      data: as in `train`.
      least: the rate of the first step.
      most: the rate of the last step.
      steps: the number of steps.
      **arguments: those of `train`; the optimizer is a name, "adam" by default. Not the arguments
        of rates, of the length of the run, validation, checkpoints and logs.

    Raises:
      TrainingError: an argument does not fit; or the loss is not finite at the first steps.
    """
    check_arguments(find_rate, locals(), TrainingError)
    require_integer("steps", steps, 3, error=TrainingError)
    require("most", most, 0 < least < most < np.inf, f"above least={least}, above 0", TrainingError)
    if refused := [name for name in _TAKEN if arguments.get(name) is not None]:
        raise TrainingError(f"find_rate does not take {', '.join(refused)}: pass them to train")
    chosen: dict[str, Any] = dict(arguments)
    name = chosen.pop("optimizer", None) or "adam"
    require_choice("optimizer", name, OPTIMIZERS, TrainingError)
    more = {key: chosen.pop(key) for key in ("clip", "weight_decay") if key in chosen}
    points: list[tuple[float, float]] = []

    def plan(steps):
        rates = optax.exponential_decay(least, max(steps - 1, 1), most / least)
        return make_optimizer(name, rates, **more)

    def watch(step: int, metrics: dict[str, Any]) -> None:
        if "rate" not in metrics or "epoch" in metrics:
            return
        if not np.isfinite(metrics["loss"]):
            raise _Diverged
        points.append((metrics["rate"], metrics["loss"]))
        averages = RateCurve(*np.array(points).T).averages
        if step > _FIRST and averages[-1] > _DIVERGED * averages.min():
            raise _Diverged

    with suppress(_Diverged):
        train(model, data, **chosen, optimizer=plan, max_steps=steps, on_log=watch)
    if len(points) < 3:
        raise TrainingError(
            f"the loss is not finite after {len(points)} steps, from the rate {least} on: pass a "
            "smaller least="
        )
    return RateCurve(*np.array(points).T)
