"""Plot the curves of a run."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

_FEW = 20
"""Points up to which a curve has markers."""
_TITLES = {1: "dense", 2: "dynamic mask", 3: "fixed mask"}
_SHADES = {1: "0.97", 2: "0.91", 3: "0.94"}
_MASKS = {"flip_rate": "mask bits that changed", "kept": "kept share of |w|"}
"""What an epoch has of its last new mask, and what that is called."""
_ERRORS = ("mae", "mse")
_APART = 52
"""Points from one axis at the right to the next."""


def draw(history: Any, axes: Any) -> Any:
    """Draw losses, phases and the best epoch; metrics and masks on axes at the right."""
    rows = history.epochs
    steps = [row["step"] for row in rows]
    names = list(dict.fromkeys(n for row in rows for n in row if n.startswith("validation_")))
    losses = [name for name in names if name.endswith("loss")]
    number = iter(range(1, len(names) + len(_MASKS) + 1))

    def curve(axes: Any, name: str) -> None:
        values = [row.get(name, float("nan")) for row in rows]
        if name == "flip_rate":  # a mask that is fixed keeps that of its last change
            pairs = zip(values, history.phases, strict=True)
            values = [value if phase == 2 else float("nan") for value, phase in pairs]
        label = _MASKS.get(name) or name.replace("validation_", "validation ")
        axes.plot(steps, values, f"C{next(number) % 10}", label=label, **_markers(rows))

    each, count = history.losses, len(history.losses)
    axes.plot(range(1, count + 1), each, "C0", lw=0.6, alpha=0.5, label="loss", **_markers(each))
    if rows:
        means = [row.get("loss", float("nan")) for row in rows]
        axes.plot(steps, means, "C0", label="loss, mean of an epoch", **_markers(rows))
    for name in losses:
        curve(axes, name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    shade(axes, [0, *steps], history.phases)
    for row in rows:
        if names and row["step"] == history.best_step:
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
