"""The objective of a run: losses and metrics of one output or several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.batches import Batch, ShortBatch
from jaxonnx._require import require
from jaxonnx._rewrite.last_layer import ENDINGS, find_ending, normalizes
from jaxonnx.errors import TrainingError
from jaxonnx.losses import Loss, widen_labels
from jaxonnx.losses import find as find_loss
from jaxonnx.model import Model
from jaxonnx.training._objective import metrics
from jaxonnx.training._objective.metrics import Reader
from jaxonnx.training._objective.needs import find_derivation


@dataclass(frozen=True)
class Term:
    """A loss of one output, or of all outputs at once."""

    loss: Loss
    output: str | None
    """None for all outputs and all targets, as they come."""
    value: int | None
    """Which of the model's values the loss takes, if one."""
    share: float


@dataclass(frozen=True)
class Measure:
    """A metric of one output, or of all outputs at once."""

    metric: metrics.Metric
    given: Any
    reader: Reader
    output: str | None


@dataclass(frozen=True)
class Objective:
    """Weighted losses of outputs, and metrics of outputs.

    Attributes:
      model: computes the outputs of the file, and after them the logits that losses take.
      notes: differences from the file.
    """

    model: Model
    terms: tuple[Term, ...]
    measures: Mapping[str, Measure]
    names: tuple[str, ...]
    notes: tuple[str, ...]

    @cached_property
    def compiled_sums(self) -> Any:
        """`sums`, compiled."""
        return self.model.program.jit(self.sums)

    def derive_targets(self, inputs: Any) -> Any:
        """Return the targets of a batch that has none; None if it must have some."""
        losses = [term.loss for term in self.terms]
        drawn = any(loss.draws for loss in losses)  # of batches that `draw` has changed
        derive = None if drawn else find_derivation(self.model, losses)
        return None if derive is None else derive(inputs, self.model.inputs, "the batch")

    @property
    def denominators(self) -> list[Any]:
        """One for all terms that have it in common: that of `Loss`, or the number of a term."""
        return [*dict.fromkeys(term.loss.denominator or i for i, term in enumerate(self.terms))]

    def means(self, outputs: Any, batch: Batch) -> list[Any]:
        """Return the loss of a batch by denominator, each with the value of the denominator.

        Args:
          outputs: all values that the model computes.
        """
        outputs, weight = _drop_fill(outputs, batch), batch.weight
        targets, pairs = _prepare_targets(batch.targets, weight), dict[Any, Any]()
        for i, term in enumerate(self.terms):
            total, count = term.loss.totals(*self._loss_arguments(term, outputs, targets), weight)
            loss, key = term.share * (total / jnp.where(count > 0, count, 1)), term.loss.denominator
            key = key or i
            pairs[key] = (pairs[key][0] + loss if key in pairs else loss), count
        return [*pairs.values()]

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return the sums of a batch: losses first, then metrics by name."""
        outputs, weight = _drop_fill(outputs, batch), jnp.asarray(batch.weight)
        targets = _prepare_targets(batch.targets, weight)
        sums = {
            f"loss {i}": term.loss.totals(*self._loss_arguments(term, outputs, targets), weight)
            for i, term in enumerate(self.terms)
        }
        for name, measure in self.measures.items():
            sums[name] = measure.metric.sums(
                *self._metric_arguments(measure, outputs, targets), weight
            )
        return jax.tree.map(jnp.asarray, sums)

    def start(self, shapes: Any, batch: Batch) -> dict[str, Any]:
        """Return the sums of no examples, given the shapes of outputs."""
        sums = jax.eval_shape(self.sums, shapes, batch)
        sums = {name: x for name, x in sums.items() if name not in self.prediction_metrics}
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), sums)

    @property
    def prediction_metrics(self) -> set[str]:
        """The metrics that need the predictions of all examples."""
        return {name for name, m in self.measures.items() if m.metric.merge is None}

    def add(self, sums: dict[str, Any], outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return the sums with those of a batch."""
        return self.merge_sums(sums, self.sums(outputs, batch))

    def merge_sums(self, sums: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        """Return the sums of both, with the types of the first."""
        merge: Any = {name: measure.metric.merge for name, measure in self.measures.items()}
        new = {n: jax.tree.map(lambda a, b: b.astype(a.dtype), x, new[n]) for n, x in sums.items()}
        return {n: merge.get(n, metrics.add)(x, new[n]) for n, x in sums.items()}

    def row(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of an epoch from its sums, by their names in the history."""
        return {f"validation_{name}": value for name, value in self.values(sums).items()}

    def values(self, sums: dict[str, Any]) -> dict[str, Any]:
        """Return the values of sums: numbers, and tables."""
        pairs = [[*map(float, sums[f"loss {i}"])] for i in range(len(self.terms))]
        means = [total / count if count > 0 else math.nan for total, count in pairs]
        # as in a step, an output of which nothing counts adds nothing
        parts = [
            term.share * mean
            for term, mean, (_, count) in zip(self.terms, means, pairs, strict=True)
            if count > 0
        ]
        row: dict[str, Any] = {}
        if means:
            row["loss"] = sum(parts) if parts else math.nan
        if len(means) > 1:
            row |= {f"{t.output}_loss": mean for t, mean in zip(self.terms, means, strict=True)}
        for name, measure in self.measures.items():
            value = measure.metric.value(sums[name])
            row[name] = float(value) if measure.metric.number else value
        return row

    def with_metrics(self, chosen: Any) -> Objective:
        """Return the objective with metrics, the argument of `train`.

        Raises:
          TrainingError: names or outputs that there are not.
        """
        terms, names = self.terms, self.names
        losses_of = {term.output: term.loss for term in terms}
        if isinstance(chosen, Mapping):
            listed = [(o, m) for o, ms in _of_outputs("metrics", chosen, names) for m in _list(ms)]
        elif chosen is not None:
            listed = [(None, metric) for metric in _list(chosen)]
        else:
            listed = [(t.output, metric) for t in terms for metric in t.loss.metrics]
        measures: dict[str, Measure] = {}
        for output, argument in listed:
            node = find_ending(self.model.graph, names[0] if output is None else output)
            loss = losses_of.get(output, losses_of.get(None) if len(names) == 1 else None)
            reader = Reader(loss, None if node is None else node.op.name)
            name, metric = metrics.find(argument, reader)
            name = name if output is None else f"{output}_{name}"
            if name in measures or name in ("loss", *(f"{term.output}_loss" for term in terms)):
                raise TrainingError(f"there are two metrics '{name}'")
            measures[name] = Measure(metric, argument, reader, output)
        return replace(self, measures=measures)

    def columns(self, validated: bool) -> list[str]:
        """Return the names of the metrics that `monitor` can have."""
        if not validated:
            return ["loss"]
        several = [term.output for term in self.terms] if len(self.terms) > 1 else []
        names = ["loss", *(f"{output}_loss" for output in several), *self.measures]
        return ["loss", *(f"validation_{name}" for name in names)]

    def check(self, batch: Batch) -> Any:
        """Refuse inputs and targets that do not fit; return the shapes of the results."""
        model, key = self.model, jax.random.key(0)
        shapes, _ = jax.eval_shape(
            lambda *inputs: model.apply_train(model.params, model.state, key, *inputs),
            *batch.inputs,
        )
        for name, measure in self.measures.items():
            if name in self.prediction_metrics or not measure.metric.number:
                raise TrainingError(
                    f"the metric '{name}' is not available during training: pass it to "
                    "jaxonnx.evaluate after the run"
                )
        self.fit(shapes, batch.targets, batch.weight)
        return shapes

    def fit(self, shapes: Any, targets: Any, weight: Any) -> None:
        """Refuse targets that do not fit the outputs, and weights that a loss cannot apply."""
        terms = [term for term in self.terms if term.loss.takes_targets]
        outputs = [part.output for part in (*terms, *self.measures.values()) if part.output]
        for output in outputs if isinstance(targets, Mapping) or len({*outputs}) > 1 else ():
            if not isinstance(targets, Mapping) or output not in targets:
                names = [*targets] if isinstance(targets, Mapping) else "an array"
                raise TrainingError(
                    "losses and metrics by output need targets in a dict by output name, with "
                    f"'{output}'; they are {names}"
                )
        for term in self.terms:
            what = "the loss" if term.output is None else f"the loss of '{term.output}',"
            term.loss.check(*self._loss_arguments(term, shapes, targets), what, weight)
        for name, measure in self.measures.items():
            pair = self._metric_arguments(measure, shapes, targets)
            metrics.check(name, measure.given, measure.reader, *pair, weight)

    def counts_fill(self, shapes: Any, targets: Any, metrics: bool) -> bool:
        """Check whether a loss, or a metric, is a scalar, which includes what fills a short batch.

        Args:
          metrics: whether to look at metrics, and not at losses.
        """
        values = [
            jax.eval_shape(term.loss.__call__, *self._loss_arguments(term, shapes, targets))
            for term in (() if metrics else self.terms)
            if term.loss.denominator == "examples"
        ]
        for measure in self.measures.values() if metrics else ():
            if callable(measure.given):
                pair = self._metric_arguments(measure, shapes, targets)
                values.append(jax.eval_shape(measure.given, *pair))
        return any(not value.shape for value in values)

    def check_labels(self, targets: Any, shapes: Any, what: str, classes: Any = None) -> None:
        """Refuse labels that are not classes, and other classes than those of the outputs."""
        for term in self.terms:
            outputs, labels = self._loss_arguments(term, shapes, targets)
            of = what if term.output is None else f"{what}, '{term.output}',"
            term.loss.check_labels(labels, outputs, of, classes)
        for measure in self.measures.values():
            outputs, labels = self._select_output(measure.output, shapes, targets)
            metrics.check_labels(measure.given, measure.reader, outputs, labels, what)

    def _loss_arguments(self, term: Term, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Select the outputs and targets of a loss."""
        targets = targets if term.loss.takes_targets else None
        if term.value is None:
            return self._select_output(None, outputs, targets)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        return values[term.value], _select_targets(targets, term.output)

    def _metric_arguments(self, measure: Measure, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Select the outputs of a metric, and the targets that it compares with them."""
        outputs, targets = self._select_output(measure.output, outputs, targets)
        loss = measure.reader.loss
        return outputs, targets if loss is None else loss.find_labels(targets)

    def _select_output(self, output: str | None, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs as the file has them, one or all, and their targets."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        if output is not None:
            return values[self.names.index(output)], _select_targets(targets, output)
        count = len(self.names)
        return values[0] if count == 1 else values[:count], targets


def _drop_fill(outputs: Any, batch: Batch) -> Any:
    """Return the outputs of the examples that have targets.

    Raises:
      TrainingError: an output does not have the examples along its first axis.
    """
    if not isinstance(batch, ShortBatch):
        return outputs
    # the inputs may be left out, since they can be strings
    first, count = (*batch.inputs, *jax.tree.leaves(outputs))[0], len(batch.weight)
    size = first.shape[0] if first.shape else 0

    def take(x: Any) -> Any:
        if x.shape[:1] != (size,):
            raise TrainingError(
                f"an output has the shape {x.shape} for a batch of {size} examples, of which "
                f"{count} count, and the loss or a metric is a scalar: pass a batch_size that "
                "divides the number of examples"
            )
        return x[:count]

    return jax.tree.map(take, outputs)


def _prepare_targets(targets: Any, weight: jax.Array) -> Any:
    """Widen narrow labels, and set targets that are not finite to 0 where the weight is 0.

    NaN marks what was not measured. It would come back from the product with the weight of the
    example, and from that of the gradient of the loss with 0.
    """

    def fill(x):
        x = widen_labels(x)
        if x.shape[:1] != weight.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        counts = (weight > 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(counts | jnp.isfinite(x), x, 0)

    return jax.tree.map(fill, targets)


def _select_targets(targets: Any, output: str | None) -> Any:
    """Return the targets of an output, which need not be in a dict if they are all there are."""
    return targets[output] if output is not None and isinstance(targets, Mapping) else targets


def find_objective(model: Model, loss: Any, chosen: Any) -> Objective:
    """Return the objective of `train`'s arguments `loss` and `chosen`; metrics alone, without.

    Raises:
      TrainingError: names, weights or outputs that there are not.
    """
    return find_losses(model, loss).with_metrics(chosen)


def find_losses(model: Model, loss: Any) -> Objective:
    """Return the objective of the argument `loss` of `train`, without metrics.

    Raises:
      TrainingError: names or outputs that there are not.
    """
    names = tuple(value.name for value in model.outputs)
    logits: list[str] = []
    notes: list[str] = []

    def term(output: str | None, argument: Any, share: float) -> Term:
        resolved = find_loss(argument)
        if output is None and len(names) > 1:
            return Term(resolved, None, None, share)
        position = 0 if output is None else names.index(output)
        node = find_ending(model.graph, names[position])
        shape = model.outputs[position].shape
        if (
            node is None
            or ENDINGS[node.op.name] != resolved.logits_of
            or not normalizes(node, resolved.class_axes, shape)
        ):
            return Term(resolved, output, position, share)
        if node.inputs[0] not in logits:
            logits.append(node.inputs[0])
        notes.append(
            f"the loss {resolved.name} takes logits: it is that of '{node.inputs[0]}', which "
            f"{node.op.name} turns into the output '{names[position]}'; the saved model keeps it"
        )
        return Term(resolved, output, len(names) + logits.index(node.inputs[0]), share)

    if isinstance(loss, Mapping):
        terms = tuple(
            term(o, *_with_weight(o, argument)) for o, argument in _of_outputs("loss", loss, names)
        )
    else:
        terms = () if loss is None else (term(None, loss, 1.0),)
    if logits:
        model = replace(model, program=model.program.with_values(logits))
    return Objective(model, terms, {}, names, tuple(notes))


def _of_outputs(what: str, argument: Mapping[str, Any], names: tuple[str, ...]) -> list:
    if not argument or not {*argument} <= {*names}:
        raise TrainingError(
            f"{what} is a dict with the keys {', '.join(map(repr, argument)) or 'none'}; its keys "
            f"must be outputs of the model, which are {', '.join(map(repr, names))}"
        )
    return list(argument.items())


def _with_weight(output: str, argument: Any) -> tuple[Any, float]:
    """Return a loss and its weight, 1 if it has none."""
    if not isinstance(argument, tuple):
        return argument, 1.0
    fits = len(argument) == 2 and isinstance(argument[1], int | float) and np.isfinite(argument[1])
    expected = "a loss or a pair (loss, weight)"
    require(f"the loss of '{output}'", argument, fits, expected, TrainingError)
    return argument[0], float(argument[1])


def _list(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]
