"""Losses of language models: of the next token, of hidden ones, of a decoder behind an encoder.

Each prepares the model: logits of all steps are its only output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxonnx._data.batches import Batch
from jaxonnx._data.ragged import IGNORED, Ragged, token_inputs
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import TrainingError
from jaxonnx.llm import (
    DECODER_TOKENS,
    Tokenizer,
    label_tokens,
    take_logits,
    token_input,
    vocabulary,
)
from jaxonnx.losses._labels import ClassLoss, make_class_loss, softmax_cross_entropy
from jaxonnx.losses._loss import CompleteInput, DeriveTargets, register
from jaxonnx.model import Model

_HIDDEN, _CHANGED = 0.8, 0.1
"""The shares of chosen tokens that the mask token replaces, and that another one does."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CausalLoss(ClassLoss):
    """The loss of `causal_lm`."""

    takes = "tokens, or none: those of the inputs"
    of_tokens = next_token = True


def causal_lm(*, ignore_index: int = -100, reduction: str = "mean") -> ClassLoss:
    """Return the loss of language models: cross entropy of each next token.

    Outputs are logits (N, length, tokens), labels (N, length) are the tokens themselves: those at
    each place are scored by the logits at the place before it.

    >>> loss = causal_lm()
    >>> print(loss(np.zeros((1, 4, 2)), np.array([[1, 0, 1, -100]])).round(4))  # log 2
    0.6931

    Args:
      ignore_index: the label of padding, which does not count.
      reduction: as in `cross_entropy`; "mean" is over all labels of the batch that count.
    """
    return make_class_loss(
        CausalLoss, "causal_lm", softmax_cross_entropy, None, ignore_index, reduction, -1
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MaskedLoss(ClassLoss):
    """The loss of `masked_lm`, whose arguments are its attributes.

    Tokens are drawn on the host, by the seed, the epoch and the number of a batch: a resumed run
    draws the same, and validation data is always hidden alike.
    """

    probability: float
    whole_words: bool
    mask_token: int | None
    special_tokens: tuple[int, ...] | None
    takes = "tokens, or none: those of the inputs"
    of_tokens = True

    def prepare(self, model: Model) -> Model:
        return take_logits(model)

    def derive(self, model: Model) -> DeriveTargets | None:
        return label_tokens(model, self.ignore_index)

    def draw(self, model: Model) -> Callable[[np.random.Generator, Batch], Batch]:
        """Return a function that hides tokens of a batch, and leaves labels of these alone.

        Raises:
          TrainingError: there is no token to hide others by, or words cannot be told apart.
        """
        names = [value.name for value in model.inputs]
        place = names.index(token_input(model, "masked_lm hides tokens"))
        hide = self._make_masker(model)

        def change(random: np.random.Generator, batch: Batch) -> Batch:
            tokens, labels = (np.asarray(x) for x in (batch.inputs[place], batch.targets))
            self._check_tokens(tokens, labels)
            tokens, labels = hide(random, tokens, labels)
            inputs = (*batch.inputs[:place], tokens, *batch.inputs[place + 1 :])
            return batch._replace(inputs=inputs, targets=labels)

        return change

    def _make_masker(self, model: Model) -> Callable[..., Any]:
        """Return a function of (random, tokens, labels) that returns both with hidden tokens."""
        tokenizer = None if model.folder is None else Tokenizer(model.folder)
        mask, special = self.mask_token, self.special_tokens
        if tokenizer is not None:
            mask = tokenizer.mask_token if mask is None else mask
            special = tokenizer.special_tokens if special is None else special
        # a tokenizer may have more tokens than the model, or the model rows that are no tokens
        sizes = (vocabulary(model), None if tokenizer is None else tokenizer.size)
        count = min((size for size in sizes if size is not None), default=None)
        if mask is None or count is None:
            raise TrainingError(
                "masked_lm hides tokens by a mask token, and the model has no folder with a "
                "tokenizer that has one: losses.masked_lm(mask_token=..., special_tokens=...), for "
                "a model whose logits have a fixed number of tokens"
            )
        continues = None
        if self.whole_words:
            continues = None if tokenizer is None else tokenizer.continues
            if continues is None or not continues.any():
                raise TrainingError(
                    "masked_lm: whole_words needs a tokenizer that tells words apart: it marks "
                    'tokens within words ("##s"), or spaces before words ("\u0120one", "\u2581one")'
                )

        def hide(random: np.random.Generator, tokens: np.ndarray, labels: np.ndarray) -> Any:
            draws = random.random(tokens.shape)
            if continues is not None:  # tokens of a word have the draw of the first one
                starts = np.where(continues[tokens], 0, np.arange(tokens.shape[1]))
                draws = np.take_along_axis(draws, np.maximum.accumulate(starts, axis=1), 1)
            spared = np.isin(tokens, special or ()) | (labels == self.ignore_index)
            chosen = (draws < self.probability) & ~spared
            kinds, others = random.random(tokens.shape), random.integers(0, count, tokens.shape)
            new = np.where(chosen & (kinds < _HIDDEN), mask, tokens)
            changed = chosen & (kinds >= _HIDDEN) & (kinds < _HIDDEN + _CHANGED)
            new = np.where(changed, others, new).astype(tokens.dtype)
            # -100 is no number of an unsigned type
            labels = labels.astype(np.promote_types(labels.dtype, np.int32))
            return new, np.where(chosen, labels, self.ignore_index)

        return hide

    def _check_tokens(self, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Refuse labels that are not the tokens: the user has hidden some."""
        counts = labels != self.ignore_index
        if labels.shape != tokens.shape or ((labels != tokens) & counts).any():
            raise TrainingError(
                "masked_lm hides tokens itself, and the labels are not the tokens: leave them out; "
                "for hidden tokens of your own: "
                "losses.cross_entropy(axis=-1, ignore_index=-100)"
            )


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
    >>> print(loss(np.zeros((1, 3, 2)), np.array([[-100, 0, -100]])).round(4))  # log 2
    0.6931

    Args:
      probability: of each token to be chosen.
      whole_words: whether all tokens of a word are chosen together. It needs the tokenizer of a
        folder, which marks tokens within words ("##s" of WordPiece) or the space before a word (of
        byte-level BPE, as in RoBERTa, and of SentencePiece): what follows without a space is of the
        word then, punctuation too.
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
    return make_class_loss(
        *(MaskedLoss, "masked_lm", softmax_cross_entropy, None, ignore_index, reduction, -1),
        probability=probability,
        whole_words=whole_words,
        mask_token=mask_token,
        special_tokens=special,
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ForcedLoss(ClassLoss):
    """The loss of `seq2seq_lm`."""

    takes = "tokens, which are not shifted"
    of_tokens = forcing = True

    def prepare(self, model: Model) -> Model:
        return take_logits(model)

    def complete(self, model: Model) -> Mapping[str, tuple[CompleteInput, Any]]:
        """Make the input of the decoder of the labels, by the numbers of the model's folder.

        Labels that begin with its first token (Whisper's tokenizer writes it) lose it, as in
        transformers' example run_speech_recognition_seq2seq.py: it would be learned behind itself.
        """
        kinds = {value.name: value.dtype for value in model.inputs}
        if DECODER_TOKENS not in kinds or model.folder is None:
            return {}
        kind = kinds[DECODER_TOKENS] or np.int64
        start, fill = model.folder.start_token, model.folder.padding_token or 0
        if start is None:
            return {}
        ignored = IGNORED if self.ignore_index is None else self.ignore_index

        def shift(labels: Any) -> tuple[Any, Any]:
            """Return the decoder's tokens, and the labels without a start token before them."""
            if not isinstance(labels, Ragged):
                tokens = shift_right(labels, start, fill, ignored)
                begins = np.asarray(labels)[:, :1] == start
                if begins.any():
                    rest = np.asarray(labels)[:, 1:].astype(np.int64)
                    rest = np.pad(rest, ((0, 0), (0, 1)), constant_values=ignored)
                    labels = np.where(begins, rest, labels)
                    tokens = shift_right(labels, start, fill, ignored)
                return tokens.astype(kind), labels
            first = labels.starts[:-1][labels.lengths > 0]
            if len(first := first[labels.values[first] == start]):
                counts = labels.lengths - np.isin(labels.starts[:-1], first) * (labels.lengths > 0)
                labels = Ragged(np.delete(labels.values, first), np.cumsum([0, *counts]))
            tokens = shift_right(labels.values[None], start, fill, ignored)[0].astype(kind)
            tokens[labels.starts[:-1][labels.lengths > 0]] = start
            return Ragged(tokens, labels.starts), labels

        return {DECODER_TOKENS: (shift, fill)}


def seq2seq_lm(*, ignore_index: int = -100, reduction: str = "mean") -> ClassLoss:
    """Return the loss of encoder-decoders: cross entropy of each label, which are not shifted.

    Outputs are logits (N, length, tokens) of a decoder that reads the labels (N, length) before
    each one. Where data lacks the input "decoder_input_ids", `train` and `evaluate` make it of the
    labels by `shift_right`, with the numbers of the folder that the model was loaded from. The
    start token of the decoder is no label: where labels begin with it, as Whisper's tokenizer
    writes them, it is left out.

    >>> loss = seq2seq_lm()
    >>> print(loss(np.zeros((1, 3, 2)), np.array([[1, 0, -100]])).round(4))  # log 2
    0.6931

    Args:
      ignore_index, reduction: as in `causal_lm`.
    """
    return make_class_loss(
        ForcedLoss, "seq2seq_lm", softmax_cross_entropy, None, ignore_index, reduction, -1
    )


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


def scores_tokens(model: Model) -> bool:
    """Check whether the first output has a score for each token of the vocabulary at each place."""
    shape = model.outputs[0].shape
    tables = {v.rows for v in model.inputs if v.name in token_inputs(model.inputs)} - {None}
    return shape is not None and len(shape) == 3 and vocabulary(model) in tables


register("causal_lm", causal_lm())
register("masked_lm", masked_lm())
register("seq2seq_lm", seq2seq_lm())
