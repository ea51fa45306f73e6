"""Losses that compare rows of a batch: pairs and negatives; preferences between answers.

The functions return a `GroupLoss`, those of preferences a `PreferenceLoss`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.batches import Batch
from jaxonnx._data.inputs_and_targets import JUDGEMENT
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import TrainingError
from jaxonnx.losses._loss import (
    Loss,
    load_second,
    register,
    take_inputs,
    totals,
    widen_labels,
)
from jaxonnx.model import Model


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GroupLoss(Loss):
    """A loss of rows that belong together, called with `(outputs, targets)`; one value for each.

    `jaxonnx.train` shuffles, splits and batches data in one piece in whole groups.
    """

    name: str | None
    function: Callable[[Any, Any, Any], jax.Array]
    """`(outputs, targets, weight)`; of an example that fills a batch the weight is 0."""
    group: int = 1
    """The rows of a group, which follow one another."""
    takes_targets: bool = True
    """Whether the loss takes any."""
    apart: bool = False
    """Whether each text of a row of data, such as a pair, is an example of a group."""
    metrics: Sequence[Callable[[Any, Any], jax.Array]] = ()
    """The metrics of validation data by default."""
    takes = "no targets"

    def __call__(self, outputs: Any, targets: Any = None, weight: Any = None) -> jax.Array:
        return self.function(outputs, targets, weight)

    def totals(self, outputs: Any, targets: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return totals(self(outputs, targets, weight), weight)


def in_batch_negatives(*, scale: float = 20.0, negatives: int = 0) -> GroupLoss:
    """Return the loss of embeddings whose pairs are to be near, with all others of the batch far.

    Rows of the outputs (N, features) come in groups: an anchor, what belongs to it (a question and
    its answer, two sentences of one meaning), and `negatives` that do not. Each row of a group has
    its loss: the cross entropy of the right one among the second and further rows of all groups,
    by `scale` times the cosine of their angles to the anchor. There are no targets. Henderson et
    al., "Efficient Natural Language Response Suggestion for Smart Reply", 2017 (arXiv:1705.00652);
    Sentence Transformers calls it MultipleNegativesRankingLoss, others InfoNCE.

    >>> loss = in_batch_negatives(scale=1.0)
    >>> print(f"{loss(jnp.array([[1.0, 0], [1, 0], [0, 1], [0, 1]]))[0]:.4f}")  # log(1 + 1 / e)
    0.3133

    With `accumulate=` a batch is compared in its parts.

    Args:
      scale: above 0, the inverse of the temperature.
      negatives: rows behind each pair that do not belong to it.

    Raises:
      TrainingError: an argument is out of its range; or outputs are not whole groups of vectors.
    """
    check_arguments(in_batch_negatives, locals(), TrainingError)
    if not scale > 0 or isinstance(negatives, bool) or not negatives >= 0:
        raise TrainingError(
            "in_batch_negatives: scale is above 0 and negatives at least 0; they are "
            f"{scale!r}, {negatives!r}"
        )
    rows = 2 + negatives

    def loss(outputs: Any, targets: Any, weight: Any) -> jax.Array:
        shape = getattr(outputs, "shape", ())
        if len(shape) != 2 or shape[0] % rows:
            raise TrainingError(
                f"in_batch_negatives takes one output (N, features) with rows in groups of {rows}; "
                + (f"it is {shape}" if shape else _describe_outputs(outputs))
            )
        x = outputs.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.maximum((x * x).sum(1, keepdims=True), 1e-24))
        groups = x.reshape(-1, rows, shape[1])
        others = groups[:, 1:].reshape(-1, shape[1])
        scores, positives = scale * groups[:, 0] @ others.T, jnp.arange(len(groups)) * (rows - 1)
        if weight is not None:  # what fills the batch is no negative of the others
            filled = weight.reshape(-1, rows)[:, 1:].reshape(-1) <= 0
            of_own = jnp.arange(len(others)) // (rows - 1) == jnp.arange(len(groups))[:, None]
            scores = jnp.where(filled & ~of_own, -jnp.inf, scores)
        right = jnp.take_along_axis(jax.nn.log_softmax(scores), positives[:, None], 1)[:, 0]
        return jnp.repeat(-right, rows)

    return GroupLoss(
        name="in_batch_negatives", function=loss, group=rows, takes_targets=False, apart=True
    )


def contrastive() -> GroupLoss:
    """Return the loss of scores (N, N) of which those on the diagonal belong together.

    It is the mean of the cross entropies along rows and columns, as CLIP has it for its output
    "logits_per_image" or "logits_per_text": `loss={"logits_per_image": "contrastive"}`. There are
    no targets. Radford et al., "Learning Transferable Visual Models From Natural Language
    Supervision", 2021 (arXiv:2103.00020).

    >>> print([f"{x:.4f}" for x in contrastive()(jnp.eye(2))])  # log(1 + 1 / e)
    ['0.3133', '0.3133']

    Raises:
      TrainingError: the scores are not square.
    """

    def loss(outputs: Any, targets: Any, weight: Any) -> jax.Array:
        shape = getattr(outputs, "shape", ())
        if len(shape) != 2 or shape[0] != shape[1]:
            raise TrainingError(
                "contrastive takes one output (N, N), scores of each example with each; "
                + (f"it is {shape}" if shape else _describe_outputs(outputs))
            )
        scores = outputs.astype(jnp.float32)
        if weight is not None:  # what fills the batch is compared with itself alone
            filled = weight <= 0
            apart = (filled | filled[:, None]) & ~jnp.eye(len(weight), dtype=bool)
            scores = jnp.where(apart, -jnp.inf, scores)
        columns, rows = (jnp.diag(jax.nn.log_softmax(scores, axis)) for axis in (0, 1))
        return -(columns + rows) / 2

    return GroupLoss(name="contrastive", function=loss, takes_targets=False)


def _describe_outputs(outputs: Any) -> str:
    """Return the remedy for several outputs, as a part of an error."""
    return f"there are {len(outputs)} outputs: name one, loss={{'output': ...}}"


register("contrastive", contrastive(), also_called="clip")
register(
    "in_batch_negatives",
    in_batch_negatives(),
    also_called="infonce multiplenegativesranking mnr",
)


_REFERENCES = (
    "where nothing is trained, the argument reference=MODEL of the loss computes the latter by the "
    "model that it compares with"
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PreferenceLoss(GroupLoss):
    """A loss of pairs of rows: an answer, and the one that it is compared with, as tokens."""

    group: int = 2
    ignore_index: int | None = -100
    """The label of tokens that do not count."""
    takes_reference: bool = False
    """Whether it takes log-likelihoods by another model, as `train` adds them."""
    reference: Any = None
    """That model; by default the one before the training."""
    takes = "pairs of answers, chosen and rejected"
    answers: ClassVar[str | None] = "chosen"
    of_tokens = next_token = True

    @property
    def compares_with_start(self) -> bool:  # type: ignore[override]
        return self.takes_reference and self.reference is None

    def caption(self, targets: Any) -> Sequence[str]:
        return ["chosen", "rejected"]

    def second(self, model: Model) -> Callable[[Batch], Any] | None:
        """Return a function that adds the log-likelihoods of rows by the model to their labels."""
        if not self.takes_reference:
            return None
        ignored = -100 if self.ignore_index is None else self.ignore_index
        other, what = model, f"{self.name}: the reference"
        if self.reference is not None:
            other = load_second(self, self.reference, model, what)

        @jax.jit
        def compute(params, state, inputs, labels):
            logits = other.apply(params, *inputs, state=state)
            return log_likelihoods(logits, labels, ignored)

        def add(batch: Batch) -> Any:
            targets = batch.targets
            targets = targets if isinstance(targets, Mapping) else {"labels": targets}
            if "reference" in targets:  # the user computed them
                return targets
            inputs = take_inputs(batch.inputs, model, other, what)
            reference = compute(other.params, other.state, inputs, targets["labels"])
            return {**targets, "reference": reference}

        return add


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class JudgedLoss(PreferenceLoss):
    """A loss of answers with a judgement each, and behind each one the answer to another prompt."""

    takes = "answers with a judgement each"
    answers = JUDGEMENT
    stride = 2

    def caption(self, targets: Any) -> Sequence[str]:
        return ["desirable" if x > 0 else "undesirable" for x in np.asarray(targets[JUDGEMENT])]


def dpo(*, beta: float = 0.1, reference: Any = None, ignore_index: int = -100) -> PreferenceLoss:
    """Return the loss of direct preference optimization, of pairs of answers to one prompt.

    The rows of a batch come in pairs: each answer that was chosen, and behind it the one that was
    rejected. Targets are labels (N, length), the tokens with those of prompt and padding ignored.
    Both rows of a pair have its loss, -log sigmoid(beta * (r_chosen - r_rejected)) with r the
    log-likelihood less that by the model before the training. `train` evaluates that model on each
    batch, without adapters. Otherwise, targets are a dict of "labels" and "reference" (N,), these
    `log_likelihoods`. `train` keeps the pairs of data in one piece together; an iterable of
    batches has whole ones. Rafailov et al., "Direct Preference Optimization", 2023
    (arXiv:2305.18290).

    Metrics of validation data are "accuracy", the share of pairs with r_chosen > r_rejected, and
    "margin", the mean of beta * (r_chosen - r_rejected).

    >>> labels, reference = jnp.array([[0, 1], [0, 0]]), jnp.full(2, -jnp.log(2))
    >>> loss = dpo(beta=0.1)
    >>> print(loss(jnp.zeros((2, 2, 2)), {"labels": labels, "reference": reference}).round(4))
    [0.6931 0.6931]

    Args:
      beta: above 0; the smaller, the further the model may go from the reference.
      reference: the model that r compares with, a Model or anything that `jaxonnx.load` accepts; by
        default the one before the training. `evaluate` needs it.

    Raises:
      TrainingError: `beta` is not; or a batch has an odd number of rows, or other targets.
    """
    check_arguments(dpo, locals(), TrainingError)
    require("dpo: beta", beta, beta > 0, "above 0", TrainingError)

    def margin(outputs: jax.Array, targets: Any) -> jax.Array:
        if not isinstance(targets, dict) or targets.keys() != {"labels", "reference"}:
            raise TrainingError(
                f"dpo takes targets in a dict of 'labels' and 'reference'; {_REFERENCES}"
            )
        scores = log_likelihoods(outputs, targets["labels"], ignore_index)
        chosen, rejected = _split_pairs("dpo", scores - targets["reference"])
        return jnp.repeat(beta * (chosen - rejected), 2)

    def accuracy(outputs: jax.Array, targets: Any) -> jax.Array:
        return margin(outputs, targets) > 0

    def loss(outputs: jax.Array, targets: Any, weight: Any) -> jax.Array:
        return -jax.nn.log_sigmoid(margin(outputs, targets))

    return PreferenceLoss(
        name="dpo",
        function=loss,
        metrics=(accuracy, margin),
        ignore_index=ignore_index,
        takes_reference=True,
        reference=reference,
    )


def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference: Any = None,
    ignore_index: int = -100,
) -> PreferenceLoss:
    """Return the loss of Kahneman-Tversky optimization, of answers with a judgement each.

    The rows of a batch come in pairs: each prompt with its answer, and behind it the same prompt
    with the answer to another one. Targets are a dict of "labels" (N, length) as for `dpo`, "label"
    (N,), which is 1 for a desirable answer and 0 for others, and "reference", which `train` adds.
    With r as for `dpo` and z the mean of r over the mismatched rows of the batch, at least 0 and
    without a gradient, both rows of a pair have the loss w (1 - sigmoid(beta * (r - z))) for a
    desirable answer, and w (1 - sigmoid(beta * (z - r))) for others. `train` makes the pairs of
    rows with "prompt", "completion" and "label", each with the completion of the row before.
    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024
    (arXiv:2402.01306).

    >>> labels, even = jnp.array([[0, 1], [0, 0]]), jnp.full(2, -jnp.log(2))
    >>> targets = {"labels": labels, "label": jnp.ones(2), "reference": even}
    >>> print(kto()(jnp.zeros((2, 2, 2)), targets).round(4))
    [0.5 0.5]

    Args:
      beta: above 0; the smaller, the further the model may go from the reference.
      desirable_weight, undesirable_weight: w, at least 0.
      reference: the model that r compares with, a Model or anything that `jaxonnx.load` accepts; by
        default the one before the training. `evaluate` needs it.

    Raises:
      TrainingError: an argument is out of its range; or a batch has an odd number of rows, or other
        targets.
    """
    check_arguments(kto, locals(), TrainingError)
    require("kto: beta", beta, beta > 0, "above 0", TrainingError)
    weights = desirable_weight, undesirable_weight
    require("kto: the weights", weights, min(weights) >= 0, "at least 0", TrainingError)

    def loss(outputs: jax.Array, targets: Any, weight: Any) -> jax.Array:
        if not isinstance(targets, dict) or targets.keys() != {"labels", "label", "reference"}:
            raise TrainingError(
                "kto takes rows with 'prompt', 'completion' and 'label' (true or false), or targets"
                f" in a dict of 'labels', 'label' and 'reference'; {_REFERENCES}"
            )
        scores = log_likelihoods(outputs, targets["labels"], ignore_index) - targets["reference"]
        answers, mismatched = _split_pairs("kto", scores)
        counts = jnp.ones(len(answers)) if weight is None else (weight[::2] > 0).astype(jnp.float32)
        divergence = (mismatched * counts).sum() / jnp.maximum(counts.sum(), 1)
        above = answers - jax.lax.stop_gradient(jnp.maximum(divergence, 0))
        desirable = targets["label"][::2] > 0
        values = jax.nn.sigmoid(beta * jnp.where(desirable, above, -above))
        return jnp.repeat(jnp.where(desirable, *weights) * (1 - values), 2)

    return JudgedLoss(
        name="kto",
        function=loss,
        ignore_index=ignore_index,
        takes_reference=True,
        reference=reference,
    )


def orpo(*, beta: float = 0.1, ignore_index: int = -100) -> PreferenceLoss:
    """Return the loss of odds ratio preference optimization, which needs no reference.

    Rows and labels are those of `dpo`. With P the geometric mean of the probabilities of an
    answer's tokens, the loss of a pair is -log P_chosen - beta * log sigmoid(log odds_chosen -
    log odds_rejected), where odds = P / (1 - P). Hong, Lee and Thorne, "ORPO: Monolithic Preference
    Optimization without Reference Model", 2024 (arXiv:2403.07691). TRL takes the first term over
    the tokens of all answers in a batch, and of the prompt; here, as in the paper, it is of each
    answer.

    >>> labels = jnp.array([[0, 1], [0, 0]])
    >>> print(orpo(beta=0.1)(jnp.zeros((2, 2, 2)), labels).round(4))  # log 2 + 0.1 * log 2
    [0.7625 0.7625]

    Metrics of validation data are "accuracy", the share of pairs with P_chosen > P_rejected, and
    "margin", the mean of beta * (log P_chosen - log P_rejected).

    Args:
      beta: above 0, the weight of the second term.

    Raises:
      TrainingError: `beta` is not; or a batch has an odd number of rows.
    """
    check_arguments(orpo, locals(), TrainingError)
    require("orpo: beta", beta, beta > 0, "above 0", TrainingError)

    def means(outputs: jax.Array, labels: Any) -> tuple[jax.Array, jax.Array]:
        counts = (widen_labels(labels[:, 1:]) != ignore_index).sum(1)
        scores = log_likelihoods(outputs, labels, ignore_index) / jnp.maximum(counts, 1)
        return _split_pairs("orpo", scores)

    def margin(outputs: jax.Array, labels: Any) -> jax.Array:
        chosen, rejected = means(outputs, labels)
        return jnp.repeat(beta * (chosen - rejected), 2)

    def accuracy(outputs: jax.Array, labels: Any) -> jax.Array:
        return margin(outputs, labels) > 0

    def loss(outputs: jax.Array, labels: Any, weight: Any) -> jax.Array:
        chosen, rejected = means(outputs, labels)
        odds = (x - jnp.log(-jnp.expm1(jnp.minimum(x, -1e-7))) for x in (chosen, rejected))
        first, second = odds
        return jnp.repeat(-chosen - beta * jax.nn.log_sigmoid(first - second), 2)

    metrics = accuracy, margin
    return PreferenceLoss(name="orpo", function=loss, metrics=metrics, ignore_index=ignore_index)


def _split_pairs(name: str, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the values of answers chosen and of answers rejected."""
    if len(values) % 2:
        raise TrainingError(f"{name} takes pairs of rows, and a batch has {len(values)} rows")
    return values[::2], values[1::2]


def log_likelihoods(logits: jax.Array, labels: jax.Array, ignore_index: int = -100) -> jax.Array:
    """Return the log-likelihood of each row of tokens (N, length) by logits (N, length, tokens).

    Labels are the tokens themselves, as in `causal_lm`; those of `ignore_index` (a prompt, padding)
    do not count. It is what `dpo` takes of the model before its training, as the reference.

    >>> print(log_likelihoods(jnp.zeros((1, 3, 2)), jnp.array([[-100, 0, 1]])).round(4))  # -2 log 2
    [-1.3863]
    """
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    labels = widen_labels(labels[:, 1:])
    counts = labels != ignore_index
    chosen = jnp.take_along_axis(scores, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
    return jnp.where(counts, chosen, 0).sum(1)


register("dpo", dpo())
register("kto", kto())
register("orpo", orpo())
