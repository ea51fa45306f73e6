"""Tables and curves of an evaluation, with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from jaxonnx._display import format_count, new_axes
from jaxonnx.errors import warn

_WRITTEN = 30
"""Classes up to which the cells of a plotted matrix have their numbers."""
_CURVES = 12
"""Classes up to which a legend has them all."""


def _names(count: int) -> tuple[str, ...]:
    """Return numbers of classes; one column alone is an answer of yes or no."""
    return tuple(map(str, range(count))) if count > 1 else ("yes",)


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table whose first column is aligned left and the others right."""
    cells = [[x if isinstance(x, str) else _number(x) for x in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in cells
    )


def _number(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int | np.integer) else f"{x:.4f}"


class _HasClassNames:
    """A frozen dataclass that has the names of the classes as a field."""

    classes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON holds them."""
        fields = asdict(self)  # type: ignore[call-overload]
        return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, fields)

    def with_names(self, classes: Sequence[str]) -> Self:
        """Return the same with the names of the classes, if these are as many."""
        names: Any = tuple(classes) if len(classes) == len(self.classes) else self.classes
        return replace(self, classes=names)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class ConfusionMatrix(_HasClassNames):
    """How often each class was predicted where each class is true; `print` shows it."""

    counts: np.ndarray
    """int64 (true class, predicted class), of all predictions whose weight is not 0."""
    classes: tuple[str, ...]

    @classmethod
    def of(cls, counts: Any, undecided: Any = 0) -> Self:
        if undecided:
            warn(
                f"the outputs of {format_count(int(undecided), 'prediction')} are NaN, which is no "
                "class: the confusion matrix leaves them out"
            )
        return cls(np.asarray(counts, np.int64), _names(len(counts)))

    def __str__(self) -> str:
        rows = [(name, *row) for name, row in zip(self.classes, self.counts, strict=True)]
        return _rows(("true \\ predicted", *self.classes), rows)

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw the shares of each true class; return the matplotlib axes."""
        axes = new_axes(axes)
        sizes = self.counts.sum(1, keepdims=True)
        shares = self.counts / np.maximum(sizes, 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        if len(self.classes) <= _WRITTEN:
            for (row, column), count in np.ndenumerate(self.counts):
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, count, ha="center", va="center", color=color, fontsize=8)
            axes.set_xticks(range(len(self.classes)), self.classes, rotation=45, ha="right")
            axes.set_yticks(range(len(self.classes)), self.classes)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        return axes


@dataclass(frozen=True, repr=False)
class PerClass(_HasClassNames):
    """Precision, recall and F1 of each class, and how often it occurs; `print` shows it."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray
    """How many predictions have this class as the true one, or what these weigh together."""
    classes: tuple[str, ...]

    @classmethod
    def of(cls, predicted: Any, true: Any, both: Any) -> Self:
        predicted, true, both = (np.asarray(x, np.float64) for x in (predicted, true, both))
        precision, recall = _shares(both, predicted), _shares(both, true)
        f1 = _shares(2 * both, predicted + true)
        support = true if (true % 1).any() else true.astype(np.int64)
        return cls(precision, recall, f1, support, _names(len(true)))

    def __str__(self) -> str:
        columns = self.classes, self.precision, self.recall, self.f1, self.support
        head = ("class", "precision", "recall", "f1", "support")
        return _rows(head, list(zip(*columns, strict=True)))

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw precision, recall and F1 as bars; return the matplotlib axes."""
        axes = new_axes(axes)
        places = np.arange(len(self.classes))
        for i, name in enumerate(("precision", "recall", "f1")):
            axes.bar(places + 0.27 * (i - 1), getattr(self, name), 0.25, label=name)
        axes.set_xticks(places, self.classes, rotation=45, ha="right")
        axes.set_ylim(0, 1)
        axes.legend(loc="lower right")
        return axes


@dataclass(frozen=True)
class Curve:
    """Points of a curve, from the highest threshold to the lowest."""

    x: np.ndarray
    """False positive rates, or recalls."""
    y: np.ndarray
    """True positive rates, or precisions."""
    thresholds: np.ndarray
    """Scores from which on a prediction is yes; infinite for the first point."""
    area: float
    """Under the ROC curve, or the average precision; NaN where yes or no does not occur, or where
    any score is NaN."""


@dataclass(frozen=True, repr=False)
class Curves(_HasClassNames):
    """ROC or precision-recall curves, one for each class against all others."""

    kind: str
    """`"roc"` or `"precision_recall"`."""
    points: tuple[Curve, ...]
    """One for each class; for outputs of yes and no one for each column."""
    classes: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, gathered: tuple[Any, Any, Any]) -> Self:
        """Return the curves of scores, truth and weight of all predictions."""
        scores, true, weight = map(np.asarray, gathered)
        scores, true, weight = scores[weight > 0], true[weight > 0], weight[weight > 0]
        if true.ndim == 1:
            scores = _probabilities(scores.astype(np.float64))
            true = true[:, None] == np.arange(scores.shape[1])
        make = {"roc": _roc, "precision_recall": _precision_recall}[kind]
        columns = zip(scores.T, true.T, strict=True)
        points = tuple(make(*_counts(s, t, weight)) for s, t in columns)
        if np.isnan(scores).any():  # a sort would give it the last rank
            points = tuple(replace(curve, area=np.nan) for curve in points)
        return cls(kind, points, _names(len(points)))

    @property
    def area(self) -> float:
        """The mean over the classes that occur and are not all there is; NaN if a score is NaN."""
        areas = [curve.area for curve in self.points if not np.isnan(curve.area)]
        return float(np.mean(areas)) if areas else float("nan")

    @property
    def by_class(self) -> Mapping[str, Curve]:
        """The curves by the name of their class."""
        return dict(zip(self.classes, self.points, strict=True))

    def __str__(self) -> str:
        head = ("class", "points", "area")
        rows = [(name, len(curve.x), curve.area) for name, curve in self.by_class.items()]
        return _rows(head, rows)

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw the curves; return the matplotlib axes."""
        axes, roc = new_axes(axes), self.kind == "roc"
        for name, curve in self.by_class.items():
            label = f"{name} ({curve.area:.3f})" if len(self.classes) <= _CURVES else None
            if roc:
                axes.plot(curve.x, curve.y, label=label, lw=1)
            else:  # the precision of a threshold holds from the recall before it on
                axes.step(curve.x, curve.y, where="pre", label=label, lw=1)
        if roc:
            axes.plot([0, 1], [0, 1], "--", color="0.6", lw=0.8)
        axes.set_xlabel("false positive rate" if roc else "recall")
        axes.set_ylabel("true positive rate" if roc else "precision")
        axes.set_title(f"mean area {self.area:.4f}", fontsize=10)
        if len(self.classes) <= _CURVES:
            axes.legend(fontsize=8)
        return axes


def _shares(part: np.ndarray, whole: Any) -> np.ndarray:
    """Return a part of the whole; 0 where there is nothing."""
    return part / np.where(whole == 0, 1, whole)


def _probabilities(scores: np.ndarray) -> np.ndarray:
    """Return probabilities of classes, from these themselves, their logarithms or logits."""
    if (scores >= 0).all() and (abs(scores.sum(1) - 1) < 1e-2).all():
        return scores
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _counts(scores: np.ndarray, true: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return thresholds, and how many of yes and of no have at least that score."""
    order = np.argsort(-scores, kind="stable")
    scores, true, weight = scores[order], true[order], weight[order].astype(np.float64)
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    yes, no = (np.cumsum(weight * x)[last] for x in (true, ~true))
    start = np.zeros(1)
    return np.append(np.inf, scores[last]), np.append(start, yes), np.append(start, no)


def _roc(thresholds: np.ndarray, yes: np.ndarray, no: np.ndarray) -> Curve:
    x, y = _shares(no, no[-1]), _shares(yes, yes[-1])
    area = np.trapezoid(y, x) if yes[-1] and no[-1] else np.nan
    return Curve(x, y, thresholds, float(area))


def _precision_recall(thresholds: np.ndarray, yes: np.ndarray, no: np.ndarray) -> Curve:
    recall = _shares(yes, yes[-1])
    precision = np.append(1.0, yes[1:] / (yes + no)[1:])
    area = (np.diff(recall) * precision[1:]).sum() if yes[-1] else np.nan
    return Curve(recall, precision, thresholds, float(area))
