"""Hide tokens of batches, which masked language models fill in (`losses.masked_lm`).

They are drawn on the host, by the seed, the epoch and the number of a batch: a resumed run draws
the same, and validation data is always hidden alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxonnx._data.augmented import Augmented
from jaxonnx._data.batches import Batch
from jaxonnx._data.language_models import token_input, vocabulary
from jaxonnx._data.tokenizer import Tokenizer
from jaxonnx.errors import TrainingError
from jaxonnx.losses import Masking
from jaxonnx.model import Model
from jaxonnx.training._losses import find_by_output

_HIDDEN, _CHANGED = 0.8, 0.1
"""The shares of chosen tokens that the mask token replaces, and that another one does."""


def mask_tokens(model: Model, loss: Any, sources: Sequence[Any], seed: int) -> list[Any]:
    """Return sources whose batches have hidden tokens, and their labels, if the loss asks for it.

    Args:
      model: its input of tokens is changed.
      loss: as `train` takes it; only a single loss may hide tokens.
      sources: that of training, that of validation; or None.
      seed: of the run.

    Raises:
      TrainingError: there is no token to hide others by, or words cannot be told apart.
    """
    losses = [*find_by_output(loss).values()]
    if len(losses) != 1 or losses[0].masking is None:
        return [*sources]
    ignored = losses[0].ignore_index
    place = [v.name for v in model.inputs].index(token_input(model, "masked_lm hides tokens"))
    hide = _make_masker(model, losses[0].masking, ignored)

    def change(purpose: int) -> Callable[..., Batch]:
        def mask(key: Any, epoch: Any, number: Any, batch: Batch) -> Batch:
            epoch = 0 if purpose else int(epoch)
            random = np.random.default_rng([seed, purpose, epoch, int(number)])
            tokens, labels = (np.asarray(x) for x in (batch.inputs[place], batch.targets))
            _check_labels(tokens, labels, ignored)
            tokens, labels = hide(random, tokens, labels)
            inputs = (*batch.inputs[:place], tokens, *batch.inputs[place + 1 :])
            return batch._replace(inputs=inputs, targets=labels)

        return mask

    key = jax.random.key(0)
    return [source and Augmented(source, change(i), key) for i, source in enumerate(sources)]


def _make_masker(model: Model, masking: Masking, ignored: int | None) -> Callable[..., Any]:
    """Return a function of (random, tokens, labels) that returns both with hidden tokens."""
    tokenizer = None if model.folder is None else Tokenizer(model.folder)
    mask, special = masking.mask_token, masking.special_tokens
    if tokenizer is not None:
        mask = tokenizer.mask_token if mask is None else mask
        special = tokenizer.special_tokens if special is None else special
    # a tokenizer may have more tokens than the model, or the model rows that are no tokens
    sizes = (vocabulary(model), None if tokenizer is None else tokenizer.size)
    count = min((size for size in sizes if size is not None), default=None)
    if mask is None or count is None:
        raise TrainingError(
            "masked_lm hides tokens by a mask token, and the model has no folder with a tokenizer "
            "that has one: losses.masked_lm(mask_token=..., special_tokens=...), for a model whose "
            "logits have a fixed number of tokens"
        )
    continues = None
    if masking.whole_words:
        continues = None if tokenizer is None else tokenizer.continues
        if continues is None or not continues.any():
            raise TrainingError(
                'masked_lm: whole_words needs a tokenizer whose tokens within words begin with "##"'
            )

    def hide(random: np.random.Generator, tokens: np.ndarray, labels: np.ndarray) -> Any:
        draws = random.random(tokens.shape)
        if continues is not None:  # tokens of a word have the draw of the first one
            starts = np.where(continues[tokens], 0, np.arange(tokens.shape[1]))
            draws = np.take_along_axis(draws, np.maximum.accumulate(starts, axis=1), 1)
        spared = np.isin(tokens, special or ()) | (labels == ignored)
        chosen = (draws < masking.probability) & ~spared
        kinds, others = random.random(tokens.shape), random.integers(0, count, tokens.shape)
        new = np.where(chosen & (kinds < _HIDDEN), mask, tokens)
        changed = chosen & (kinds >= _HIDDEN) & (kinds < _HIDDEN + _CHANGED)
        new = np.where(changed, others, new).astype(tokens.dtype)
        return new, np.where(chosen, labels, ignored).astype(labels.dtype)

    return hide


def _check_labels(tokens: np.ndarray, labels: np.ndarray, ignored: int | None) -> None:
    """Refuse labels that are not the tokens: the user has hidden some."""
    if labels.shape != tokens.shape or ((labels != tokens) & (labels != ignored)).any():
        raise TrainingError(
            "masked_lm hides tokens itself, and the labels are not the tokens: leave them out; for "
            "hidden tokens of your own: losses.cross_entropy(axis=-1, ignore_index=-100)"
        )
