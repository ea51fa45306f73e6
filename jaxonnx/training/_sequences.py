"""Prepare decoders for training: whole sequences, no caches, logits as the only output."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from jaxonnx._data.language_models import decoder_numbers, token_input, vocabulary
from jaxonnx._data.padding import CLOSE
from jaxonnx._data.ragged import DECODER_TOKENS, Padding, Ragged, masks_and_positions
from jaxonnx._rewrite.network import enter
from jaxonnx.errors import TrainingError
from jaxonnx.losses import shift_right
from jaxonnx.model import Model, hide_caches
from jaxonnx.training._losses import Loss, find_by_output
from jaxonnx.views import AllSteps, Outputs, PackedRows, find_packing

LOGITS = "logits"
"""The output of language models that exporters and runtimes agree on."""
_FEATURES = "hidden_states", "last_hidden_state"
"""Outputs of networks without a layer of logits."""
_CROSS = re.compile(r"(.*[._/])?(encoder[._/].*|decoder_input_ids)")
"""Inputs of an encoder-decoder, or of its decoder alone."""


def read_whole_sequences(model: Model, loss: Any, data: Any = None) -> Model:
    """Return a decoder without its caches, and for a loss of tokens with its logits only.

    Logits are of all steps where the file gives those of the last one (`prune_lm_head`). Other
    models, and those whose caches are in the data, are returned as they are.

    Raises:
      TrainingError: the loss is one of next tokens, and the decoder that of an encoder; or there
        are no logits.
    """
    crossed = [value.name for value in model.inputs if _CROSS.fullmatch(value.name)]
    if crossed and is_next_token(loss):
        raise TrainingError(
            f"causal_lm shifts labels, and the decoder of an encoder (input {crossed[0]!r}) reads "
            "shifted ones: it would learn the token after next. loss='seq2seq_lm' does not shift "
            "labels; jaxonnx.losses.shift_right(labels, ...) makes the input of them"
        )
    model = hide_caches(model, data)
    names = [value.name for value in model.outputs]
    of_tokens = labels_are_tokens(loss) or is_forcing(loss)
    if of_tokens and {*names} <= {*_FEATURES}:
        raise TrainingError(
            f"the output '{names[0]}' has features, and the loss takes logits, which the file does "
            "not have (the builder's exclude_lm_head): model.then(head) puts a layer behind them"
        )
    if of_tokens and LOGITS in names:
        model = enter(model, Outputs.among(model.graph, {LOGITS}), AllSteps(LOGITS))
    return model


def take_packed_rows(model: Model) -> Model:
    """Return a decoder that takes several texts in a row, none of which sees another.

    Proved by what it gives for a text alone and behind another one.

    Raises:
      TrainingError: the file cannot tell the texts of a row apart.
    """
    way_out = "leave preprocess={'pack': True} out: short texts are then batched by their length"
    packing = find_packing(model.graph, *masks_and_positions(model.inputs))
    if packing is None:
        raise TrainingError(
            "the file cannot tell the texts of a row apart: it has neither GroupQueryAttention, "
            f"nor positions beside a mask of queries and keys; {way_out}"
        )
    changed = enter(model, packing)
    if (distance := _leak(changed, packing)) > CLOSE[model.outputs[0].dtype == np.float32]:
        raise TrainingError(
            "the file cannot tell the texts of a row apart: its logits of one text differ by "
            f"{distance:.1%} behind another one; {way_out}"
        )
    return changed


def _leak(model: Model, packing: PackedRows) -> float:
    """Measure the influence of a text on the logits of the next one, relative to the largest."""
    tokens = token_input(model)
    random, count = np.random.default_rng(0), vocabulary(model) or 2
    first, second = (random.integers(0, count, n) for n in (5, 6))
    rows = [(first, second), (first,), (second,)]
    columns = {
        tokens: [np.concatenate(row) for row in rows],
        packing.input: [packing.number([*map(len, row)]) for row in rows],
    }
    outputs = model.predict(columns, batch_size=3, length_buckets=11, progress=False)
    logits = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs
    pairs = zip(logits, (11, 5, 6), strict=True)  # a file that declares one step gives all, padded
    both, *alone = (np.asarray(x[:n], np.float32) for x, n in pairs)
    return float(np.abs(both - np.concatenate(alone)).max() / np.abs(both).max())


def is_next_token(loss: Any) -> bool:
    """Return whether the only loss is one of next tokens."""
    only = _only(loss)
    return only is not None and only.next_token


def labels_are_tokens(loss: Any) -> bool:
    """Return whether the only loss has the tokens as labels, where data has no others."""
    only = _only(loss)
    return only is not None and only.labels_are_tokens


def is_forcing(loss: Any) -> bool:
    """Return whether the only loss is one of labels that the model reads as well."""
    only = _only(loss)
    return only is not None and only.forcing


def _only(loss: Any) -> Loss | None:
    losses = find_by_output(loss)
    return next(iter(losses.values())) if len(losses) == 1 else None


def shift_labels(padding: Padding, model: Model, loss: Any) -> Padding:
    """Return padding that also makes the missing input of a decoder, by shifting the labels.

    The first token and that of padding are those of the folder that the model was loaded from.
    Labels that begin with it (Whisper's tokenizer writes it) lose it, as in transformers' example
    run_speech_recognition_seq2seq.py: it would be learned behind itself.
    """
    kinds = {value.name: value.dtype for value in model.inputs}
    if not is_forcing(loss) or DECODER_TOKENS not in kinds or model.folder is None:
        return padding
    kind = kinds[DECODER_TOKENS] or np.int64
    start, fill = decoder_numbers(model.folder)
    if start is None:
        return padding

    def shift(labels: Any) -> tuple[Any, Any]:
        """Return the decoder's tokens, and the labels without a start token before them."""
        if not isinstance(labels, Ragged):
            tokens = shift_right(labels, start, fill, padding.ignored)
            begins = np.asarray(labels)[:, :1] == start
            if begins.any():
                rest = np.asarray(labels)[:, 1:].astype(np.int64)
                rest = np.pad(rest, ((0, 0), (0, 1)), constant_values=padding.ignored)
                labels = np.where(begins, rest, labels)
                tokens = shift_right(labels, start, fill, padding.ignored)
            return tokens.astype(kind), labels
        first = labels.starts[:-1][labels.lengths > 0]
        if len(first := first[labels.values[first] == start]):
            counts = labels.lengths - np.isin(labels.starts[:-1], first) * (labels.lengths > 0)
            labels = Ragged(np.delete(labels.values, first), np.cumsum([0, *counts]))
        tokens = shift_right(labels.values[None], start, fill, padding.ignored)[0].astype(kind)
        tokens[labels.starts[:-1][labels.lengths > 0]] = start
        return Ragged(tokens, labels.starts), labels

    return replace(padding, pad={DECODER_TOKENS: fill, **padding.pad}, shift=shift)
