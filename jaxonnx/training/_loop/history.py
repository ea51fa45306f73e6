"""The history of a training run, as plain data, and its curves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from jaxonnx._display import format_count, new_axes

SKIPPED, ROLLED_BACK, NOT_VALIDATED = "skipped", "rolled back", "not finite in validation"
"""Names of events in `History.events`."""

_FEW = 20
"""Points up to which a curve has markers."""
_TITLES = {1: "dense", 2: "dynamic mask", 3: "fixed mask"}
_SHADES = {1: "0.97", 2: "0.91", 3: "0.94"}
_MASKS = {"flip_rate": "mask bits that changed", "kept": "kept share of |w|"}
"""Numbers of an epoch's last new mask, and their titles."""
_ERRORS = ("mae", "mse")
_APART = 52
"""Points from one axis at the right to the next."""


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
    """Differences from the file, like a loss of the logits before its last node."""
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
        axes = new_axes(axes)
        rows = self.epochs
        steps = [row["step"] for row in rows]
        names = list(dict.fromkeys(n for row in rows for n in row if n.startswith("validation_")))
        losses = [name for name in names if name.endswith("loss")]
        number = iter(range(1, len(names) + len(_MASKS) + 1))

        def curve(axes: Any, name: str) -> None:
            values = [row.get(name, float("nan")) for row in rows]
            if name == "flip_rate":  # a mask that is fixed keeps that of its last change
                pairs = zip(values, self.phases, strict=True)
                values = [value if phase == 2 else float("nan") for value, phase in pairs]
            label = _MASKS.get(name) or name.replace("validation_", "validation ")
            axes.plot(steps, values, f"C{next(number) % 10}", label=label, **_markers(rows))

        each, count = self.losses, len(self.losses)
        axes.plot(
            range(1, count + 1), each, "C0", lw=0.6, alpha=0.5, label="loss", **_markers(each)
        )
        if rows:
            means = [row.get("loss", float("nan")) for row in rows]
            axes.plot(steps, means, "C0", label="loss, mean of an epoch", **_markers(rows))
        for name in losses:
            curve(axes, name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        shade(axes, [0, *steps], self.phases)
        for row in rows:
            if names and row["step"] == self.best_step:
                label = f"best epoch ({rows.index(row) + 1} of {len(rows)})"
                axes.axvline(row["step"], color="0.4", ls=":", lw=1.2, label=label)
        lines = axes.get_lines()
        shares, *others = _scales(rows, [name for name in names if name not in losses])
        groups = [shares, *others] if shares else others
        masks = [name for name in _MASKS if any(name in row for row in rows)]
        for place, group in enumerate([*groups, masks] if masks else groups):
            right = axes.twinx()
            right.spines["right"].set_position(("outward", _APART * place))
            for name in group:
                curve(right, name)
            titles = [name.removeprefix("validation_") for name in group]
            title = f"validation {', '.join(titles)}" if len(group) < 4 else "metrics"
            if group is shares:  # else a run that learns nothing looks like one that does
                right.set_ylim(0, 1)
            right.set_ylabel("mask" if group is masks else title)
            lines += right.get_lines()
        axes.legend(
            handles=lines,
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            borderaxespad=0,
            ncols=min(len(lines), 3),
            fontsize=8,
            frameon=False,
        )
        return axes

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


def shade(axes: Any, edges: Sequence[float], phases: Sequence[int]) -> None:
    """Shade the phases of sparsity and write their names at the top.

    Args:
      edges: where each epoch begins, and where the last one ends.
      phases: of each epoch.
    """
    for phase, group in groupby(range(len(phases)), phases.__getitem__):
        epochs = [*group]
        low, high = edges[epochs[0]], edges[epochs[-1] + 1]
        axes.axvspan(low, high, color=_SHADES[phase], lw=0, zorder=0)
        middle, transform = (low + high) / 2, axes.get_xaxis_transform()
        style = {"ha": "center", "va": "top", "fontsize": 8, "color": "0.4"}
        axes.text(middle, 0.99, _TITLES[phase], transform=transform, **style)


def _markers(points: Sequence[Any]) -> dict[str, Any]:
    return {"marker": "o", "ms": 3} if len(points) <= _FEW else {}


def _scales(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return the metrics of each axis: first all shares, from 0 to 1; then each other alone."""
    errors = [n for n in names if n.removeprefix("validation_").rpartition("_")[2] in _ERRORS]
    shares = [
        n
        for n in names
        if n not in errors
        if all(not (row.get(n, 0) < 0 or row.get(n, 0) > 1) for row in rows)
    ]
    return [shares, *([name] for name in names if name not in shares)]
