"""`preview`: the data, the memory and the time of a run, before it begins."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Unpack

import jax
import numpy as np
from onnx import ModelProto
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxonnx._arguments import check_names, documented
from jaxonnx._data.augment import AugmentedSource
from jaxonnx._data.batches import Batch, Examples, PaddedExamples, Source
from jaxonnx._data.ragged import IGNORED, Ragged
from jaxonnx._display import Printable
from jaxonnx._limits import format_bytes
from jaxonnx.losses import Loss
from jaxonnx.model import Model
from jaxonnx.training._loop.memory import FitCheck, explain_memory_errors
from jaxonnx.training._loop.run import BatchChecks
from jaxonnx.training._objective.needs import find_only
from jaxonnx.training._settings import Settings
from jaxonnx.training._settings.mesh import automatic
from jaxonnx.training._settings.order import TrainArguments
from jaxonnx.training._step import Step
from jaxonnx.training._train import prepare_run

_SHOWN = 2
"""Examples that are decoded."""

Parts = tuple[tuple[str, bool], ...]
"""A text in parts, and whether the loss counts the tokens of each."""


@dataclass(frozen=True, repr=False)
class Preview(Printable):
    """The data and the cost of a run; printing it shows a table."""

    rows: int | None
    """The number of examples; None for data that is read as it is needed."""
    steps: int | None
    """The number of steps of the run; None if it is not known."""
    tokens: int | None
    """The number of tokens of all examples, for a loss of tokens."""
    trained_tokens: int | None
    """The number of those that the loss counts."""
    widths: Mapping[int, int]
    """The number of examples by the width that they are padded to."""
    long: Mapping[str, int]
    """The number of long texts that were "cut", "split" or skipped ("skip")."""
    shapes: Mapping[str, str]
    """Type and shape of each input in the widest batch, and of the targets."""
    classes: Mapping[int, int]
    """The number of examples of each class, for targets that are one integer each."""
    loss: float
    """The loss of the widest batch before the first step."""
    memory: int | None
    """The bytes that the program of a step takes, as XLA plans; None where it does not say."""
    compilation: float
    """The seconds that the compilation of the step took."""
    seconds: float
    """The seconds of one step with the widest batch."""
    examples: Sequence[Parts] = ()
    """The first examples, as texts in parts, for a loss of tokens; hidden tokens as they were."""
    captions: Sequence[str] = ()
    """Of each of these, for a loss of preferences: "chosen", "rejected", "desirable"..."""
    draws: bool = False
    """Whether tokens are hidden, others in each epoch."""
    notes: Sequence[str] = field(default=())
    """Notes of the data and the step, as in `history.notes`."""

    def __rich__(self) -> Group:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in self._list_lines():
            table.add_row(name, value)
        captions = [*self.captions, *[""] * len(self.examples)]
        return Group(*map(_mark, self.examples, captions), table, *self.notes)

    def _list_lines(self) -> Iterator[tuple[str, str]]:
        yield "examples", "not known" if self.rows is None else f"{self.rows:,}"
        if self.tokens is not None:
            trained = f"{self.tokens:,}, of which {self.trained_tokens:,} are trained"
            yield "tokens", trained + " in the first epoch" * self.draws
        if self.widths:
            yield "widths", ", ".join(f"{w} ({n:,} examples)" for w, n in self.widths.items())
        if self.long:
            yield "long texts", ", ".join(f"{n:,} {how}" for how, n in self.long.items())
        yield from self.shapes.items()
        if self.classes:
            yield "classes", ", ".join(f"{c}: {n:,}" for c, n in self.classes.items())
        yield "steps", "not known" if self.steps is None else f"{self.steps:,}"
        yield "first loss", f"{self.loss:.6g}"
        yield "memory", "not known" if self.memory is None else format_bytes(self.memory)
        yield "one step", f"{self.seconds:.3g} s, after {self.compilation:.3g} s of compilation"

    def __repr__(self) -> str:
        return str(self)


def _mark(parts: Parts, caption: str) -> Text:
    """Return a text whose parts that count are in brackets, and in colour, behind a caption."""
    text = Text(caption and f"{caption}: ")
    for part, counts in parts:
        text.append(f"⟦{part}⟧" if counts else part, style="bold green" if counts else "")
    return text


@documented(TrainArguments)
def preview(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any,
    **arguments: Unpack[TrainArguments],
) -> Preview:
    """Read the data of a run, and run one step of it, without changing the model.

    Two examples are decoded, with the tokens in brackets that the loss counts; where it hides some,
    these. The step is compiled and run with the widest batch, which takes the most memory. Nothing
    is written.

    >>> import numpy as np, optax
    >>> from jaxonnx import demo
    >>> data = np.zeros((40, 1, 8, 8), np.float32), np.arange(40) % 10
    >>> loss = "softmax_cross_entropy_with_integer_labels"
    >>> result = preview(demo.model(), data, loss=loss, optimizer=optax.sgd(0.1), epochs=2)
    >>> result.rows, result.steps, result.classes[0]
    (40, 4, 4)

    Args:
      model: as in `jaxonnx.train`.
      data: as in `jaxonnx.train`. An iterator loses what is read of it.
      **arguments: those of `jaxonnx.training.TrainArguments`, where each is documented.

    Returns:
      A `Preview`, whose fields are plain data.

    Raises:
      TrainingError: as `jaxonnx.train`, also if a step does not fit into memory.
    """
    check_names("preview", TrainArguments, arguments)
    settings = Settings(**arguments)
    with automatic(settings.mesh), explain_memory_errors(settings):
        run = prepare_run(model, data, settings)
        step, examples, source = run.step, run.data.examples, run.sources[0]
        loss = find_only(settings.loss)
        shown = batch = _find_widest(examples)
        batch = source.apply(batch) if isinstance(source, AugmentedSource) else batch
        BatchChecks(step, batch, source).check_data(source, run.sources[1])
        if isinstance(examples, PaddedExamples):  # in the order of the data
            shown = _take(examples, examples.rows[: _SHOWN * loss.stride])
        if loss.draws:
            shown = source.apply(shown)
        if loss.stride > 1:
            shown = jax.tree.map(lambda x: x[:: loss.stride], shown)
        planned = run.settings.max_steps, examples.steps and examples.steps * run.settings.epochs
        steps = [count for count in planned if count is not None]
        return Preview(
            rows=len(examples.rows) if isinstance(examples, Examples) else None,
            steps=min(steps, default=None),
            **_count_tokens(examples, source, loss),
            long=dict(run.data.reading.long),
            shapes=_describe(step, batch),
            classes=_count_classes(examples),
            **_run_step(step, step.put(batch, examples.in_shares)),
            examples=[*_decode(step, shown, loss)],
            captions=loss.caption(shown.targets)[:_SHOWN],
            draws=loss.draws,
            notes=[*run.notes, *step.notes],
        )


def _find_widest(examples: Source) -> Batch:
    """Return a batch of the greatest width, if that is known, or else the first one."""
    if not isinstance(examples, PaddedExamples):
        return next(examples.batches(0))
    groups = examples.rows.reshape(-1, examples.group)
    widths = examples.columns.widths[groups].max(axis=1)
    widest = groups[np.argsort(-widths, kind="stable")].reshape(-1)
    return _take(examples, np.resize(widest, examples.size))


def _take(examples: PaddedExamples, rows: np.ndarray) -> Batch:
    weights = examples.weights
    weight = np.ones(len(rows), np.float32) if weights is None else weights[rows]
    return Batch(*examples.columns.rows(rows), weight)


def _get_labels(targets: Any) -> Any:
    """Return the labels of tokens among targets; None if there are several or none."""
    if isinstance(targets, Mapping):
        targets = targets.get("labels", targets)
    leaves = jax.tree.leaves(targets, is_leaf=lambda x: isinstance(x, Ragged))
    return leaves[0] if len(leaves) == 1 else None


def _run_step(step: Step, batch: Batch) -> dict[str, Any]:
    """Compile a step, run it twice, and measure the second one."""
    update, state = FitCheck(step.compile(step.update, donate_argnums=0)), step.init()
    times = [time.perf_counter()]
    losses = []
    for _ in range(2):
        state, report = update(state, batch, step.frozen)
        losses.append(float(report[0]))
        times.append(time.perf_counter())
    first, second = np.diff(times)
    compilation = float(max(first - second, 0))
    measured = {"compilation": compilation, "seconds": float(second)}
    return {"loss": losses[0], "memory": update.planned, **measured}


def _count_tokens(examples: Source, source: Source, loss: Loss) -> dict[str, Any]:
    """Count the tokens of all examples, those that count, and examples by their width."""
    widths: Mapping[int, int] = {}
    if isinstance(examples, PaddedExamples):
        numbers, counts = np.unique(examples.columns.widths[examples.rows], return_counts=True)
        widths = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    labels = _get_labels(
        examples.columns.pair[1] if isinstance(examples, PaddedExamples) else examples.targets
    )
    if not loss.of_tokens or np.ndim(labels) != 2 or not isinstance(examples, Examples):
        return {"tokens": None, "trained_tokens": None, "widths": widths}
    labels = labels if isinstance(labels, Ragged) else Ragged.rectangular(np.asarray(labels))
    counted = labels.values != _find_ignored_label(loss)
    if loss.next_token:  # nothing predicts the first one
        counted[labels.starts[:-1][labels.lengths > 0]] = False
    of_rows = np.isin(np.arange(len(labels)), examples.rows[:: loss.stride]).repeat(labels.lengths)
    trained = int((counted & of_rows).sum())
    if loss.draws:
        batches = [_get_labels(batch.targets)[batch.weight > 0] for batch in source.batches(0)]
        trained = sum(int((x != _find_ignored_label(loss)).sum()) for x in batches)
    return {"tokens": int(of_rows.sum()), "trained_tokens": trained, "widths": widths}


def _find_ignored_label(loss: Loss) -> int:
    return IGNORED if loss.ignore_index is None else loss.ignore_index


def _describe(step: Step, batch: Batch) -> dict[str, str]:
    named = dict(zip((v.name for v in step.model.inputs), batch.inputs, strict=True))
    for path, x in jax.tree_util.tree_leaves_with_path(batch.targets):
        named[f"targets{jax.tree_util.keystr(path)}"] = x
    return {name: f"{x.dtype}{[*x.shape]}" for name, x in named.items()}


def _count_classes(examples: Source) -> dict[int, int]:
    labels = examples.targets
    if not (isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"):
        return {}
    labels = labels[examples.rows] if isinstance(examples, Examples) else labels
    return {int(c): n for c, n in sorted(Counter(labels.tolist()).items())}


def _decode(step: Step, batch: Batch, loss: Loss) -> Iterator[Parts]:
    """Yield the texts of the first examples of a batch, in parts that count and others."""
    targets = _get_labels(batch.targets)
    if not loss.of_tokens or np.ndim(targets) != 2:
        return
    named = dict(zip((v.name for v in step.model.inputs), batch.inputs, strict=True))
    tokens, mask = named.get("input_ids"), named.get("attention_mask")
    if tokens is None or np.ndim(tokens) != 2:
        return
    ignored = _find_ignored_label(loss)
    folder = step.model.folder
    has_texts = folder is not None and (folder.path / "tokenizer.json").is_file()
    decode = step.model.tokenizer.decode if has_texts else lambda ids: f"{ids.tolist()}"
    for row in range(min(_SHOWN, len(tokens))):
        ids, labels = np.asarray(tokens[row]), np.asarray(targets[row])
        real = np.ones(len(ids), bool)
        if mask is not None and np.shape(mask) == np.shape(tokens):
            real = np.asarray(mask[row]) > 0
        counts = labels != ignored
        if loss.forcing:
            yield (decode(ids[real]), False), (decode(labels[counts]), True)
            continue
        counts[:1] &= not loss.next_token
        ids, counts = np.where(counts, labels, ids)[real], counts[real]
        edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(ids)]
        pairs = pairwise(edges)
        yield tuple((decode(ids[a:b]), bool(counts[a])) for a, b in pairs if a < b)
