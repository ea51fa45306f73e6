"""Losses of class labels: of images, pixels or tokens.

The functions return a `ClassLoss`. optax has the losses with classes on the last axis and one label
for each example; these have the classes on axis 1 or the last one, weights of classes, and labels
that do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._require import check_arguments, require, require_choice
from jaxonnx.errors import TrainingError
from jaxonnx.ops import loss as operators


@dataclass(frozen=True)
class Masking:
    """Which tokens of a batch are hidden from the model, which learns to fill them in.

    The attributes are the arguments of `masked_lm`.
    """

    probability: float
    whole_words: bool
    mask_token: int | None
    special_tokens: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class ClassLoss:
    """A loss of scores `(N, classes, *D)`, or `(N, *D, classes)`, and integer labels `(N, *D)`.

    Called with `(outputs, targets)` it returns the operator's result: a scalar, or `(N, *D)` for
    the reduction "none".
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
    smoothing: float = 0.0
    """The share of each label that all classes have alike."""
    masking: Masking | None = None
    """How `train` hides tokens, whose labels then are the only ones that count."""

    def __call__(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        if self.smoothing and self.reduction != "none":
            total, count = self.totals(outputs, targets, jnp.ones(len(targets)))
            return total / count if self.reduction == "mean" else total
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
            return total, ((targets != ignored) & (weight > 0)).any().astype(total.dtype)
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
        if self.smoothing and operator is self.operator:
            even = self._even(outputs).astype(loss.dtype)
            loss = loss + self.smoothing * (jnp.where(targets == ignored, 0, even) - loss)
        return loss.reshape(shape) if reduction == "none" else loss

    def _even(self, outputs: jax.Array) -> jax.Array:
        """Return the loss of labels that are all classes alike, for the classes on axis 1."""
        logits = self.operator is _softmax_cross_entropy
        scores = jax.nn.log_softmax(outputs, axis=1) if logits else outputs
        if self.weight is not None:
            scores = scores * self.weight.reshape(-1, *(1,) * (outputs.ndim - 2))
        return -scores.mean(axis=1)


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
    is NaN, and makes no update of it.

    >>> loss = cross_entropy(weight=[1.0, 3.0], ignore_index=-1)
    >>> print(loss(jnp.zeros((3, 2)), jnp.array([0, 1, -1])).round(4))  # log 2
    0.6931

    Raises:
      TrainingError: an argument is none of these.
    """
    return _class_loss(
        "cross_entropy", _softmax_cross_entropy, weight, ignore_index, reduction, axis
    )


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
    return _class_loss("negative_log_likelihood", operator, weight, ignore_index, reduction, axis)


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
    loss = _class_loss("causal_lm", _softmax_cross_entropy, None, ignore_index, reduction, -1)
    return replace(loss, shift=True)


def masked_lm(
    *,
    probability: float = 0.15,
    whole_words: bool = False,
    mask_token: int | None = None,
    special_tokens: Sequence[int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> ClassLoss:
    """Return the loss of masked language models: cross entropy of tokens that were hidden.

    Outputs are logits (N, length, tokens). `train` and `evaluate` choose tokens of each batch at
    random, by their seed: 80 % become the mask token, 10 % another token, and 10 % stay, but only
    these are labels. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for
    Language Understanding", 2018 (arXiv:1810.04805); the draws are those of transformers'
    `DataCollatorForLanguageModeling`. Called with `(outputs, labels)`, it is `cross_entropy`.

    >>> loss = masked_lm()
    >>> print(loss(jnp.zeros((1, 3, 2)), jnp.array([[-100, 0, -100]])).round(4))  # log 2
    0.6931

    Args:
      probability: of each token to be chosen.
      whole_words: whether all tokens of a word are chosen together: those that begin with "##" go
        with the one before. It needs the tokenizer of a folder.
      mask_token, special_tokens: the token that hides others, and those that are never chosen; by
        default those of the tokenizer in the folder that the model was loaded from.
      ignore_index, reduction: as in `causal_lm`.

    Raises:
      TrainingError: an argument is out of its range.
    """
    check_arguments(masked_lm, locals(), TrainingError)
    require(
        "masked_lm: probability", probability, 0 < probability < 1, "between 0 and 1", TrainingError
    )
    special = None if special_tokens is None else (*special_tokens,)
    fits = all(isinstance(token, int | np.integer) for token in special or ())
    require("masked_lm: special_tokens", special_tokens, fits, "token ids", TrainingError)
    loss = _class_loss("masked_lm", _softmax_cross_entropy, None, ignore_index, reduction, -1)
    return replace(loss, masking=Masking(probability, whole_words, mask_token, special))


def seq2seq_lm(*, ignore_index: int = -100, reduction: str = "mean") -> ClassLoss:
    """Return the loss of encoder-decoders: cross entropy of each label, which are not shifted.

    Outputs are logits (N, length, tokens) of a decoder that reads the labels (N, length) before
    each one. Where data lacks the input "decoder_input_ids", `train` and `evaluate` make it of the
    labels by `shift_right`, with the numbers of the folder that the model was loaded from. The
    start token of the decoder is no label: where labels begin with it, as Whisper's tokenizer
    writes them, it is left out.

    >>> loss = seq2seq_lm()
    >>> print(loss(jnp.zeros((1, 3, 2)), jnp.array([[1, 0, -100]])).round(4))  # log 2
    0.6931

    Args:
      ignore_index, reduction: as in `causal_lm`.
    """
    loss = _class_loss("seq2seq_lm", _softmax_cross_entropy, None, ignore_index, reduction, -1)
    return replace(loss, forcing=True)


def shift_right(labels: Any, start: int, padding: int, ignore_index: int = -100) -> np.ndarray:
    """Shift labels (N, length) right: the input of a decoder that learns them.

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
    check_arguments(shift_right, locals(), TrainingError)
    labels = np.asarray(labels)
    if labels.ndim != 2 or labels.dtype.kind not in "iu":
        raise TrainingError(
            f"shift_right takes integer labels (N, length); they are {labels.dtype}{labels.shape}"
        )
    shifted = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return np.where(shifted == ignore_index, padding, shifted)


def _softmax_cross_entropy(*arrays, **attributes) -> jax.Array:
    return operators.softmax_cross_entropy_loss(*arrays, **attributes)[0]


def _class_loss(
    name: str, operator: Any, weight: Any, ignore_index: Any, reduction: str, axis: int
) -> ClassLoss:
    check_arguments(_class_loss, locals(), TrainingError)
    require(f"{name}: axis", axis, axis in (1, -1), "1 or -1", TrainingError)
    whole = ignore_index is None or isinstance(ignore_index, int)
    require(f"{name}: ignore_index", ignore_index, whole, "an integer", TrainingError)
    require_choice(f"{name}: reduction", reduction, ("mean", "sum", "none"), TrainingError)
    if weight is not None:
        weight = np.asarray(weight)
        fits = weight.ndim == 1 and weight.dtype.kind in "fiu"
        expected = "one number for each class, (classes,)"
        require(f"{name}: weight", weight, fits, expected, TrainingError)
        weight = weight.astype(np.float32)
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise TrainingError(f"{name}: a weight is negative or not finite: {weight}")
    return ClassLoss(name, operator, weight, ignore_index, reduction, axis)
