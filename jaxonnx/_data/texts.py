"""Read texts as tokens and labels: which data has them, how long they are, and how wide batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._data.files import Row
from jaxonnx._data.images.messages import ImageReader
from jaxonnx._data.labeled_texts import LabelReader, scores_texts
from jaxonnx._data.language_models import context_length, token_input, vocabulary
from jaxonnx._data.ragged import DECODER_TOKENS, Padding
from jaxonnx._data.rows import SCORED, Rows, open_rows, unknown_shape
from jaxonnx._data.text_examples import Reader, TextSettings
from jaxonnx._data.tokenizer import Tokenizer
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import TrainingError
from jaxonnx.views import PackedRows

LENGTH = 1024
"""The default limit of tokens in an example."""
_STEP = 8
"""Widths of batches are multiples of this."""
_GAIN = 0.9
"""A second width is used if it leaves at most this fraction of the padded tokens: it costs a second
compilation."""


class ReadTexts(NamedTuple):
    """Data and validation, whose texts are tokens.

    Attributes:
      data, validation: dicts of columns, or rows of a stream.
      padding: with widths, where these are chosen.
      notes: for the history; of a stream as far as it has been read.
      long: the number of texts that were "cut", "split" or skipped ("skip"), likewise.
    """

    data: Any
    validation: Any
    padding: Padding
    notes: Sequence[str]
    long: Mapping[str, int]


def read_texts(
    data: Any, validation: Any, model: Network, preprocess: Any, padding: Padding
) -> ReadTexts:
    """Convert the texts of data and validation to tokens and labels.

    Args:
      data, validation: as `train` takes them, or `Rows`; what has no texts is returned as it is.
      model: a model with a folder.
      preprocess: the settings; see `TextSettings`.
      padding: without widths, one or two are chosen: that of the longest example, and a narrower
        one if it saves a tenth of the padded tokens.

    Raises:
      TrainingError: a text that cannot be an example; the message has its line.
    """
    read = {"data": open_rows(data, "data"), "validation": open_rows(validation, "validation")}
    texts = {n: rows for n, rows in read.items() if isinstance(rows, Rows) and rows.find_shape()}
    if not texts:
        return ReadTexts(read["data"], read["validation"], padding, [], {})
    if model.folder is None:
        raise TrainingError(
            "the data has texts, and the model was not loaded from a folder with a tokenizer: "
            "jaxonnx.load('folder/'), or pass tokens; a column that is not an input must be left "
            "out"
        )
    settings = TextSettings.of(preprocess)
    tokenizer = Tokenizer(model.folder)
    reader = _label_reader(texts, model, tokenizer, settings)
    reader = reader or _token_reader(texts, model, tokenizer, settings, padding)
    for name, rows in texts.items():
        if rows.is_stream:
            read[name] = replace(rows, convert=partial(_convert_part, reader, rows, name))
            continue
        skipped = reader.long["skip"]
        read[name] = reader.read(rows, rows(), name)
        if not read[name] and reader.long["skip"] > skipped:
            raise TrainingError(
                f"preprocess={{'long': 'skip'}} leaves no example of {name}: pass a larger "
                f"'max_length' than {reader.limit} tokens, or 'cut'"
            )
        if not read[name]:
            raise TrainingError(
                "the loss counts no token of any example: preprocess={'loss': 'all'} counts all, "
                "and a larger preprocess={'max_length': ...} cuts or splits fewer texts"
            )
    if reader.lengths and padding.buckets is None:
        padding = replace(padding, buckets=_widths(np.array(reader.lengths), reader.limit))
    return ReadTexts(read["data"], read["validation"], padding, reader.notes, reader.long)


def _label_reader(
    texts: Mapping[str, Rows], model: Network, tokenizer: Tokenizer, settings: TextSettings
) -> LabelReader | None:
    """Return a reader of texts with labels, if the model scores texts and the rows have such."""
    if not scores_texts(model) or not all(r.find_shape(scores=True) for r in texts.values()):
        return None
    tokens = token_input(model)
    return LabelReader(tokenizer, model, settings, _limit(model, settings), tokens)


def _token_reader(
    texts: Mapping[str, Rows],
    model: Network,
    tokenizer: Tokenizer,
    settings: TextSettings,
    padding: Padding,
) -> Reader:
    """Return a reader of texts whose labels are tokens."""
    assert model.folder is not None
    for name, rows in texts.items():
        if rows.find_shape() in SCORED:
            raise unknown_shape(name, rows.rename(rows.first))
    images = ImageReader.of(model, tokenizer)
    if images is not None and settings.pack:
        raise TrainingError(
            "preprocess={'pack': True} joins texts to rows, and a vision-language model has the "
            "images of a row apart: leave it out"
        )
    return Reader(
        tokenizer,
        settings,
        _limit(model, settings),
        vocabulary(model),
        padding.needs.ignored if isinstance(padding.needs.ignored, int) else -100,
        token_input(model),
        pairs=_takes_pairs(model, settings),
        group=padding.needs.group,
        images=images,
        packing=model.program.find(PackedRows) if settings.pack else None,
    )


def _convert_part(
    reader: Reader | LabelReader, data: Rows, name: str, rows: Iterable[Row], padding: Padding
) -> tuple[dict[str, list[Any]], Padding]:
    """Convert some rows of a stream to columns; choose widths of batches by the first ones."""
    columns = reader.read(data, rows, name)
    if padding.buckets is None and columns:
        widths = _widths(np.array(reader.lengths), reader.limit)
        padding = replace(padding, buckets=(*dict.fromkeys((*widths, reader.limit)),))
    reader.lengths.clear()
    return columns, padding


def _takes_pairs(model: Network, settings: TextSettings) -> bool:
    """Check whether the model is an encoder-decoder, and whether the settings fit it."""
    if DECODER_TOKENS not in [value.name for value in model.inputs]:
        return False
    if token_input(model) == DECODER_TOKENS:
        raise TrainingError(
            "the data has texts, and the encoder does not read tokens: pass its inputs and the "
            "tokens of each text as 'labels'"
        )
    for name, value in (("long", "split"), ("loss", "all")):
        if getattr(settings, name) == value:
            raise TrainingError(
                f"preprocess={{{name!r}: {value!r}}} is for decoders alone: an encoder reads whole "
                "prompts, and labels are completions"
            )
    return True


def _limit(model: Network, settings: TextSettings) -> int:
    """Return the most tokens of an example: `max_length`, or the model's own limit up to `LENGTH`.

    Raises:
      TrainingError: `max_length` is more than the model has positions for.
    """
    assert model.folder is not None
    table = context_length(model.folder)
    tokens = token_input(model)
    most_of_tokenizer = model.folder.read_json("tokenizer_config.json").get("model_max_length")
    fixed = [v.shape[1] for v in model.inputs if v.name == tokens and len(v.shape or ()) > 1]  # type: ignore[index]
    most = min([n for n in (table, *fixed) if isinstance(n, int)], default=None)
    wanted = settings.max_length
    if wanted is None:  # RoBERTa's tables have positions that it does not use
        numbers = (LENGTH, most, most_of_tokenizer)
        return min(n for n in numbers if isinstance(n, int))
    if most is not None and wanted > most:
        raise TrainingError(
            f"preprocess: max_length is {wanted}, and the model has positions for {most} tokens"
        )
    return wanted


def _widths(lengths: np.ndarray, limit: int) -> tuple[int, ...]:
    """Return one or two widths of batches that need the fewest padded tokens.

    Args:
      lengths: of all examples.
      limit: the greatest width.
    """
    needed = np.minimum(-(-lengths // _STEP) * _STEP, limit)
    widths, counts = np.unique(needed, return_counts=True)
    widest, below = int(widths[-1]), counts.cumsum()
    # the padded tokens with each candidate as the narrower width
    tokens = below * widths + (len(lengths) - below) * widest
    best = int(tokens.argmin())
    if tokens[best] > _GAIN * len(lengths) * widest:
        return (widest,)
    return (int(widths[best]), widest)
