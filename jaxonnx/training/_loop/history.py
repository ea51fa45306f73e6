"""The history of a training run, as plain data."""

from dataclasses import dataclass, field
from typing import Any

from jaxonnx._figures import new_axes
from jaxonnx._text import format_count
from jaxonnx.training._plot import draw

SKIPPED, ROLLED_BACK, NOT_VALIDATED = "skipped", "rolled back", "not finite in validation"
"""Names of events in `History.events`."""


@dataclass(repr=False)
class History:
    """The history of a run; `dataclasses.asdict` gives plain lists and dicts for JSON."""

    losses: list[float] = field(default_factory=list)
    """The loss of every step, before its update."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of every step, if the optimizer's state has one: those of `train.optimizer`
    and of `optax.inject_hyperparams` have. With `accumulate`, that of the last update."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """One dict an epoch, or a validation with `validate_every` and `validate_first`: `epoch` (from
    1; 0 before the first step), `step` (steps so far), `loss` (over all that counts in the batches
    since the last one, of which some have more than others), `seconds`, `rate` (of its
    last step, where there are `rates`); `validation_loss` and `validation_<metric>` where there is
    validation data, with several outputs `validation_<output>_loss` and
    `validation_<output>_<metric>`; with sparsity `phase` (of the step to come), `sparsity`, and of
    the last refresh `flip_rate`, `flip_rate/<weight>` and `kept`, the share of sum |W|."""
    notes: list[str] = field(default_factory=list)
    """What was trained otherwise than the file says: a loss of logits before its last node."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were not finite and did not end the run: `step`, `event` ("skipped" or "rolled
    back"), `why`, and for the latter `to`, the step whose weights were taken again. Steps whose
    batch has nothing that counts are skipped, too, with the loss 0. A validation loss that is not
    finite is one as well ("not finite in validation")."""
    stopped: str | None = None
    """Why the run ended before its last epoch, which weights it gave, where the checkpoint is."""
    early: bool = False
    """Whether the run ended because `patience` ran out."""
    best: int | None = None
    """The `epoch` of the row with the best value of what `monitor` says."""
    best_step: int | None = None
    """The `step` of this row."""
    phase: int | None = None
    """The phase of sparsity in which the run began; the rows have that of the step to come."""

    def plot(self, axes: Any = None) -> Any:
        """Draw losses, metrics, the best epoch and phases of sparsity; return the matplotlib axes.

        Metrics have axes of their own at the right, and so have masks: the share of their bits that
        changed in the epochs of the dynamic phase, and the share of sum |w| that they keep.
        """
        return draw(self, new_axes(axes))

    @property
    def phases(self) -> list[int]:
        """The phase of sparsity in which each epoch began: 1 dense, 2 dynamic, 3 fixed mask."""
        after = [row["phase"] for row in self.epochs if "phase" in row]
        first = after[:1] if self.phase is None else [self.phase]
        return [*first, *after[:-1]] if after else []

    def __str__(self) -> str:
        if not self.epochs:
            return self.stopped or "no epochs"
        seconds = sum(row["seconds"] for row in self.epochs)
        text = (
            f"{format_count(self.epochs[-1]['epoch'], 'epoch')}, "
            f"{format_count(len(self.losses), 'step')}, "
        )
        text += f"{seconds:.1f} s: {', '.join(self._format_metrics())}"
        for event in (SKIPPED, ROLLED_BACK, NOT_VALIDATED):
            if count := sum(1 for e in self.events if e["event"] == event):
                text += f"; {format_count(count, 'time')} {event}"
        return f"{text}; stopped: {self.stopped}" if self.stopped else text

    __repr__ = __str__

    def _format_metrics(self) -> list[str]:
        """Return the numbers of the first and the last epoch, or of the steps of the only one."""
        first = {name: x for row in reversed(self.epochs) for name, x in row.items()}
        last = self.epochs[-1]
        names = [
            name
            for name, value in last.items()
            if isinstance(value, float) and name != "seconds" and not name.startswith("flip_rate/")
        ]
        if len(self.epochs) > 1:
            return [_change(name, first[name], last[name]) for name in names]
        steps = {"loss": self.losses, "rate": self.rates}
        ends = {name: steps.get(name) or [last[name]] for name in names}
        texts = {name: _change(name, values[0], values[-1]) for name, values in ends.items()}
        if len(self.losses) > 1:
            texts["loss"] += " (first and last step)"
        return [*texts.values()]


def _change(name: str, first: float, last: float) -> str:
    """Return both numbers, or one where they are the same."""
    before, after = f"{first:.4g}", f"{last:.4g}"
    return f"{name} {after}" if before == after else f"{name} {before} -> {after}"
