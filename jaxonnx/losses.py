"""Losses as callables `(outputs, targets)`: those that ONNX has operators for, and of tokens.

optax has the losses with classes on the last axis and one target for each example; these have the
classes on axis 1 or the last one, weights of classes, and labels that do not count. `distill` and
`dpo` learn from another model, and from preferences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import TrainingError
from jaxonnx.ops import loss as operators


@dataclass(frozen=True, eq=False)
class ClassLoss:
    """A loss of scores (N, classes, *D), or (N, *D, classes), and integer labels (N, *D).

    Called with `(outputs, targets)` it returns the operator's result: a scalar, or (N, *D) for the
    reduction "none".
    """

    name: str
    operator: Callable[..., jax.Array]
    weight: np.ndarray | None
    ignore_index: int | None
    reduction: str
    axis: int = 1
    """The axis of the classes, 1 or -1."""
    shift: bool = False
    """Whether the scores at each place are those of the label at the next one."""
    forcing: bool = False
    """Whether a decoder reads the labels before each one (teacher forcing)."""

    def __call__(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        outputs, targets = self.align(outputs, targets)
        return self._apply(self.operator, outputs, targets, self.ignore_index, self.reduction)

    def align(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the scores that have labels, and the labels that have scores, place by place."""
        return (outputs[:, :-1], targets[:, 1:]) if self.shift else (outputs, targets)

    def totals(
        self, outputs: jax.Array, targets: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum over the examples, and the divisor of the reduction.

        Half precision, whose sums end at 65504, is summed in float32.
        """
        outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
        ignored = -1 if self.ignore_index is None else self.ignore_index
        if self.shift:  # labels move: scores would be copied, and their gradient padded
            last = jnp.full_like(targets[:, :1], ignored)
            targets = jnp.concatenate([targets[:, 1:], last], axis=1)
        weight = weight.reshape(-1, *(1,) * (targets.ndim - 1))
        targets = jnp.where(weight > 0, targets, ignored)
        losses = self._apply(self.operator, outputs, targets, ignored, "none")
        total = (losses * weight).sum()
        if self.reduction == "sum":
            return total, jnp.ones_like(total)
        if self.weight is None:
            return total, ((targets != ignored) * weight).sum()
        # the weights of the labels that count: each has the negative log-likelihood 1
        count = operators.negative_log_likelihood_loss
        shares = self._apply(count, jnp.full_like(outputs, -1), targets, ignored, "none")
        return total, (shares * weight).sum()

    def _apply(self, operator, outputs, targets, ignored, reduction) -> jax.Array:
        shape = targets.shape
        if self.axis == -1:  # the operators have the classes on axis 1
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        loss = operator(outputs, targets, self.weight, ignore_index=ignored, reduction=reduction)
        return loss.reshape(shape) if reduction == "none" else loss


@dataclass(frozen=True, eq=False)
class GroupLoss:
    """A loss of rows that belong together, called with `(outputs, targets)`; one value for each.

    `jaxonnx.train` shuffles, splits and batches data in one piece in whole groups.
    """

    name: str
    function: Callable[[Any, Any, Any], jax.Array]
    """`(outputs, targets, weight)`; of an example that fills a batch the weight is 0."""
    rows: int = 1
    """The rows of a group, which follow one another."""
    targets: bool = True
    """Whether the loss takes any."""

    def __call__(self, outputs: Any, targets: Any = None, weight: Any = None) -> jax.Array:
        return self.function(outputs, targets, weight)


def cross_entropy(
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    axis: int = 1,
) -> ClassLoss:
    """Return the loss of the operator SoftmaxCrossEntropyLoss, for logits.

    Args:
      weight: one for each class, (classes,); None means 1 for all.
      ignore_index: labels of this value do not count; it need not be a class.
      reduction: "mean" divides by the sum of the weights of the labels that count, over the whole
        batch; "sum" does not divide; "none" keeps the loss of each label.
      axis: of the classes: 1, as in ONNX, or -1, as labels of tokens have it.

    `jaxonnx.train` gives a batch without a label that counts the loss 0, where the operator's mean
    is NaN.

    >>> loss = cross_entropy(weight=[1.0, 3.0], ignore_index=-1)
    >>> print(loss(jnp.zeros((3, 2)), jnp.array([0, 1, -1])).round(4))  # log 2
    0.6931

    Raises:
      TrainingError: an argument is none of these.
    """
    return _loss("cross_entropy", _softmax_cross_entropy, weight, ignore_index, reduction, axis)


def negative_log_likelihood(
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    axis: int = 1,
) -> ClassLoss:
    """Return the loss of the operator NegativeLogLikelihoodLoss, for log-probabilities.

    The arguments are those of `cross_entropy`.
    """
    operator = operators.negative_log_likelihood_loss
    return _loss("negative_log_likelihood", operator, weight, ignore_index, reduction, axis)


def causal_lm(*, ignore_index: int = -100, reduction: str = "mean") -> ClassLoss:
    """Return the loss of language models: cross entropy of each next token.

    Outputs are logits (N, length, tokens), labels (N, length) are the tokens themselves: those at
    each place are scored by the logits at the place before it.

    >>> loss = causal_lm()
    >>> print(loss(jnp.zeros((1, 4, 2)), jnp.array([[1, 0, 1, -100]])).round(4))  # log 2
    0.6931

    Args:
      ignore_index: the label of padding, which does not count.
      reduction: as in `cross_entropy`; "mean" is over all labels of the batch that count.
    """
    loss = _loss("causal_lm", _softmax_cross_entropy, None, ignore_index, reduction, -1)
    return replace(loss, shift=True)


def seq2seq_lm(*, ignore_index: int = -100, reduction: str = "mean") -> ClassLoss:
    """Return the loss of encoder-decoders: cross entropy of each label, which are not shifted.

    Outputs are logits (N, length, tokens) of a decoder that reads the labels (N, length) before
    each one. Where data lacks the input "decoder_input_ids", `train` and `evaluate` make it of the
    labels by `shift_right`, with the numbers of the folder that the model was loaded from.

    >>> loss = seq2seq_lm()
    >>> print(loss(jnp.zeros((1, 3, 2)), jnp.array([[1, 0, -100]])).round(4))  # log 2
    0.6931

    Args:
      ignore_index, reduction: as in `causal_lm`.
    """
    loss = _loss("seq2seq_lm", _softmax_cross_entropy, None, ignore_index, reduction, -1)
    return replace(loss, forcing=True)


def _softmax_cross_entropy(*arrays, **attributes) -> jax.Array:
    return operators.softmax_cross_entropy_loss(*arrays, **attributes)[0]


def _loss(
    name: str, operator: Any, weight: Any, ignore_index: Any, reduction: str, axis: int
) -> ClassLoss:
    if axis not in (1, -1):
        raise TrainingError(f"{name}: axis is 1 or -1, and is {axis!r}")
    if reduction not in ("mean", "sum", "none"):
        raise TrainingError(f"{name}: reduction is {reduction!r}; there are 'mean', 'sum', 'none'")
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise TrainingError(f"{name}: ignore_index must be an integer, and is {ignore_index!r}")
    if weight is not None:
        weight = np.asarray(weight)
        if weight.ndim != 1 or weight.dtype.kind not in "fiu":
            raise TrainingError(
                f"{name}: weight must be one number for each class, (classes,), and is "
                f"{weight.dtype}{list(weight.shape)}"
            )
        weight = weight.astype(np.float32)
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise TrainingError(f"{name}: a weight is negative or not finite: {weight}")
    return ClassLoss(name, operator, weight, ignore_index, reduction, axis)


def distill(
    *, temperature: float = 2.0, soft: float = 1.0, ignore_index: int = -100
) -> Callable[[jax.Array, Any], jax.Array]:
    """Return the loss of a model that learns the outputs of another one.

    It is `temperature ** 2` times the divergence KL(teacher || student) of the softmaxes of logits
    (N, ..., classes) divided by the temperature, one mean for each example. Hinton, Vinyals and
    Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531).

    Targets are the teacher's logits; or a pair of these and labels (N, ...), of which those of
    `ignore_index` mark places that do not count, and the others are learned as well if `soft` is
    below 1. Labels of tokens are those of the next place: `tokens[:, 1:]` with one ignored at the
    end.

    >>> loss = distill(temperature=1.0)
    >>> print(loss(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.25, 0.75]]))).round(4))
    [0.1308]

    Args:
      temperature: above 0.
      soft: the share of the divergence, from 0 to 1; the rest is cross entropy of the labels.

    Raises:
      TrainingError: an argument is out of its range.
    """
    if not temperature > 0 or not 0 <= soft <= 1:
        raise TrainingError(
            f"distill: temperature is above 0 and soft from 0 to 1; they are {temperature}, {soft}"
        )

    def loss(outputs: jax.Array, targets: Any) -> jax.Array:
        teacher, labels = targets if isinstance(targets, tuple | list) else (targets, None)
        student = jax.nn.log_softmax(outputs.astype(jnp.float32) / temperature)
        teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
        values = temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1)
        if labels is None:
            return values.reshape(len(values), -1).mean(1)
        counts = labels != ignore_index
        scores = jax.nn.log_softmax(outputs.astype(jnp.float32))
        taken = jnp.take_along_axis(scores, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
        values = jnp.where(counts, soft * values - (1 - soft) * taken, 0)
        values, counts = (x.reshape(len(x), -1).sum(1) for x in (values, counts))
        return values / jnp.maximum(counts, 1)

    return loss


def shift_right(labels: Any, start: int, padding: int, ignore_index: int = -100) -> np.ndarray:
    """Return what the decoder of an encoder-decoder reads while it learns labels (N, length).

    It is the tokens before each label, from `start` on, as Hugging Face's models make them:
    `decoder_start_token_id` and `pad_token_id` of their configuration. The loss of each label is
    then `seq2seq_lm`, without another shift.

    >>> shift_right([[5, 6, 7], [8, 9, -100]], start=2, padding=1).tolist()
    [[2, 5, 6], [2, 8, 9]]

    Args:
      padding: what stands for labels of `ignore_index`.

    Raises:
      TrainingError: labels are not integers (N, length).
    """
    labels = np.asarray(labels)
    if labels.ndim != 2 or labels.dtype.kind not in "iu":
        raise TrainingError(
            f"shift_right takes integer labels (N, length); they are {labels.dtype}{labels.shape}"
        )
    shifted = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return np.where(shifted == ignore_index, padding, shifted)


def log_likelihoods(logits: jax.Array, labels: jax.Array, ignore_index: int = -100) -> jax.Array:
    """Return the log-likelihood of each row of tokens (N, length) by logits (N, length, tokens).

    Labels are the tokens themselves, as in `causal_lm`; those of `ignore_index` (a prompt, padding)
    do not count. It is what `dpo` takes of the model before its training, as the reference.

    >>> print(log_likelihoods(jnp.zeros((1, 3, 2)), jnp.array([[-100, 0, 1]])).round(4))  # -2 log 2
    [-1.3863]
    """
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    labels = labels[:, 1:]
    counts = labels != ignore_index
    taken = jnp.take_along_axis(scores, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
    return jnp.where(counts, taken, 0).sum(1)


def dpo(*, beta: float = 0.1, ignore_index: int = -100) -> GroupLoss:
    """Return the loss of direct preference optimization, of pairs of answers to one prompt.

    The rows of a batch come in pairs: each answer that was chosen, and behind it the one that was
    rejected. Targets are a dict of "labels" (N, length), the tokens with those of prompt and
    padding ignored, and "reference" (N,), their `log_likelihoods` by the model before the training,
    computed once. Both rows of a pair have its loss, -log sigmoid(beta * (r_chosen - r_rejected))
    with r the log-likelihood less the reference. `train` keeps the pairs of data in one piece
    together; an iterable of batches has whole ones. Rafailov et al., "Direct Preference
    Optimization", 2023 (arXiv:2305.18290).

    >>> labels, reference = jnp.array([[0, 1], [0, 0]]), jnp.full(2, -jnp.log(2))
    >>> loss = dpo(beta=0.1)
    >>> print(loss(jnp.zeros((2, 2, 2)), {"labels": labels, "reference": reference}).round(4))
    [0.6931 0.6931]

    Args:
      beta: above 0; the smaller, the further the model may go from the reference.

    Raises:
      TrainingError: `beta` is not; or a batch has an odd number of rows, or other targets.
    """
    if not beta > 0:
        raise TrainingError(f"dpo: beta is above 0, and is {beta!r}")

    def loss(outputs: jax.Array, targets: Any, weight: Any) -> jax.Array:
        if not isinstance(targets, dict) or targets.keys() != {"labels", "reference"}:
            raise TrainingError("dpo takes targets in a dict of 'labels' and 'reference'")
        if len(outputs) % 2:
            raise TrainingError(f"dpo takes pairs of rows, and a batch has {len(outputs)} rows")
        rewards = log_likelihoods(outputs, targets["labels"], ignore_index) - targets["reference"]
        return jnp.repeat(-jax.nn.log_sigmoid(beta * (rewards[::2] - rewards[1::2])), 2)

    return GroupLoss("dpo", loss, rows=2)


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
                + (f"it is {shape}" if shape else _several(outputs))
            )
        x = outputs.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.maximum((x * x).sum(1, keepdims=True), 1e-24))
        groups = x.reshape(-1, rows, shape[1])
        others = groups[:, 1:].reshape(-1, shape[1])
        scores, own = scale * groups[:, 0] @ others.T, jnp.arange(len(groups)) * (rows - 1)
        if weight is not None:  # what fills the batch is no negative of the others
            filled = weight.reshape(-1, rows)[:, 1:].reshape(-1) <= 0
            of_own = jnp.arange(len(others)) // (rows - 1) == jnp.arange(len(groups))[:, None]
            scores = jnp.where(filled & ~of_own, -jnp.inf, scores)
        right = jnp.take_along_axis(jax.nn.log_softmax(scores), own[:, None], 1)[:, 0]
        return jnp.repeat(-right, rows)

    return GroupLoss("in_batch_negatives", loss, rows, targets=False)


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
                + (f"it is {shape}" if shape else _several(outputs))
            )
        scores = outputs.astype(jnp.float32)
        if weight is not None:  # what fills the batch is compared with itself alone
            filled = weight <= 0
            apart = (filled | filled[:, None]) & ~jnp.eye(len(weight), dtype=bool)
            scores = jnp.where(apart, -jnp.inf, scores)
        columns, rows = (jnp.diag(jax.nn.log_softmax(scores, axis)) for axis in (0, 1))
        return -(columns + rows) / 2

    return GroupLoss("contrastive", loss, targets=False)


def _several(outputs: Any) -> str:
    return f"there are {len(outputs)} outputs: name one, loss={{'output': ...}}"
