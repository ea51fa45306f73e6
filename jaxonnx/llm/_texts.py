"""Texts as data: which rows have them, how long they are, and how wide batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxonnx._data.batches import Source
from jaxonnx._data.datasets import RowStream
from jaxonnx._data.images import preparation
from jaxonnx._data.inputs_and_targets import KEY
from jaxonnx._data.kinds import Data, Reading, Row, RowData, Rows, read_arrays, register_data
from jaxonnx._data.padding import CLOSE
from jaxonnx._data.ragged import Padding, masks_and_positions, segment_input
from jaxonnx._rewrite.network import Network, enter
from jaxonnx.errors import TrainingError
from jaxonnx.llm._folders import list_modules
from jaxonnx.llm._images import ImageReader
from jaxonnx.llm._shapes import (
    COMPARED,
    LABELS,
    SCORED,
    SHAPES,
    Shape,
    check_shape,
    find_shape,
    has_messages,
    unknown_shape,
)
from jaxonnx.llm._text_examples import Reader, TextSettings, read_weight
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.llm._tokens_and_logits import DECODER_TOKENS, token_input, vocabulary
from jaxonnx.views import PackedRows, find_packing

LENGTH = 1024
"""The default limit of tokens in an example."""
_SEVERAL = "multi_label_classification"
"""The `problem_type` of transformers' networks whose classes exclude none of the others."""
_NO_CLASSES = (
    "the model computes an embedding of each text, as modules.json says, and has no classes: a "
    "label is an integer that a function (outputs, targets) compares with those of other rows; "
    "pairs of texts have none, with loss='in_batch_negatives'; model.then(nnx.Linear(...)) adds "
    "outputs for classes"
)
"""Why a model of sentence-transformers takes neither names nor fractions as labels."""
_STEP = 8
"""Widths of batches are multiples of this."""
_GAIN = 0.9
"""A second width is used if it leaves at most this fraction of the padded tokens: it costs a second
compilation."""


@register_data
class Texts(RowData):
    """Rows of texts, of pairs of texts, or of chats, which a model's tokenizer makes tokens."""

    takes = ("preprocess",)

    @classmethod
    def accepts_rows(cls, rows: Rows) -> bool:
        return find_shape(rows) is not None

    @classmethod
    def check_rows(cls, rows: Rows, name: str, model: Network) -> None:
        if model.folder is not None:
            check_shape(rows, name, [value.name for value in model.inputs])

    def __init__(self, plain: Data):
        super().__init__(plain)
        self.columns: Mapping[str, Any] | None = None
        """Those of the tokens, once they are read; None of a stream."""
        self._options: dict[str, Any] = {}

    @classmethod
    def prepare(cls, parts: Mapping[str, Texts], reading: Reading) -> None:
        """Convert texts to tokens and labels; those of a stream as it is read.

        Where `padding` has no widths, one or two are chosen: that of the longest example, and a
        narrower one if it saves a tenth of the padded tokens.

        Raises:
          TrainingError: a text that cannot be an example; the message has its line.
        """
        model, rows = reading.model, {name: part.rows for name, part in parts.items()}
        scored = all(part._is_scored(model) for part in parts.values())
        if reading.per_row and not scored:
            return
        vectors = all(value.shape is not None and len(value.shape) < 3 for value in model.outputs)
        if vectors and not scored and model.folder is not None:
            raise _refuse_unscored(model, rows)
        settings = TextSettings.of(reading.preprocess)
        _check_answers(reading.padding.needs.losses, rows, settings.pack)
        if reading.trains and settings.pack:
            model = reading.model = take_packed_rows(model)
        if model.folder is None:
            raise TrainingError(
                "the data has texts, and the model was not loaded from a folder with a tokenizer: "
                "jaxonnx.load('folder/'), or pass tokens; a column that is not an input must be "
                "left out"
            )
        tokenizer, limit = Tokenizer(model.folder), _limit(model, settings)
        if scored:
            needs = reading.padding.needs
            group = needs.group if any(loss.apart for loss in needs.losses) else 1
            shapes = [find_shape(each, scores=True) for each in rows.values()]
            if not reading.labels and not needs.losses and embeds_texts(model):
                group = max(len(shape.columns) for shape in shapes if shape)
            if reading.per_row and group > 1:
                raise TrainingError(
                    "the data has rows of several texts, and the model computes an embedding of "
                    "each text, as modules.json says: pass a row for each, like "
                    '[{"text": "..."}]; of a model that was trained to score pairs, delete '
                    "modules.json"
                )
            whole = group > 1 and all(shape and len(shape.columns) > 1 for shape in shapes)
            if needs.group > 1 and settings.long == "skip" and not whole:
                raise TrainingError(
                    f"the loss compares {needs.group} rows, and preprocess={{'long': 'skip'}} "
                    "leaves out single ones: pass 'cut' or 'refuse'"
                )
            reader = LabelReader(tokenizer, model, settings, limit, token_input(model), group)
        else:
            reader = _make_reader(rows, model, tokenizer, settings, limit, reading.padding)
        for name, part in parts.items():
            part._read_rows(reader, rows[name])
        if reader.lengths and reading.padding.buckets is None:
            widths = _widths(np.array(reader.lengths), reader.limit)
            reading.padding = replace(reading.padding, buckets=widths)
        reading.notes.append(reader.notes)
        reading.long = reader.long

    def hold_out(self, share: float, reading: Reading) -> tuple[Data, Data] | None:
        """Hold out rows; where a model scores texts, these are examples, perhaps in groups."""
        return None if self._is_scored(reading.model) else super().hold_out(share, reading)

    def _is_scored(self, model: Network) -> bool:
        return scores_texts(model) and find_shape(self.rows, scores=True) is not None

    def _read_rows(self, reader: Reader | LabelReader, rows: Rows) -> None:
        """Convert the rows to columns, or those of a stream as they are read."""
        if rows.is_stream:
            self._options["convert"] = partial(_convert_part, reader, rows, self.name)
            self._options["explain"] = partial(_explain_emptiness, reader, self.name)
            return
        skipped = reader.long["skip"]
        self.columns = reader.read(rows, rows(), self.name)
        if not self.columns:
            raise TrainingError(_explain_emptiness(reader, self.name, skipped))

    def read(self, reading: Reading) -> Source:
        if self.columns is None:
            return RowStream(self.rows, reading, self.name, **self._options)
        return read_arrays(self.columns, reading, self.name)

    def convert_samples(self, samples: Any) -> Any:
        """Convert texts to messages of the user, if the data has conversations."""
        if not isinstance(samples, list | tuple) or not has_messages(self.rows):
            return samples
        return [[{"role": "user", "content": x}] if isinstance(x, str) else x for x in samples]

    def choose_loss(self, model: Network) -> tuple[str, str] | None:
        """Return the loss of the next token (`causal_lm`), or that of another kind of model.

        Behind an encoder it is `seq2seq_lm`, and for networks that fill masks `masked_lm`. Networks
        that score texts have one here for several labels of a text, and that of any other network
        for one class.

        Raises:
          TrainingError: the rows judge answers, or have several numbers as labels, which only a
            loss by name uses.
        """
        if model.folder is None:
            return None
        if scores_texts(model):
            row = self.rows.rename(self.rows.first)
            lists = {n: row[n] for n in LABELS if isinstance(row.get(n), list | tuple | np.ndarray)}
            if not lists:
                return None
            named = all(n in self.rows.classes or _are_names(x) for n, x in lists.items())
            problem = model.folder.read_json("config.json").get("problem_type")
            if problem != _SEVERAL and not named:
                raise TrainingError(
                    "pass loss=: a text with a list of numbers has several labels, as "
                    "'sigmoid_binary_cross_entropy' learns them, or shares of classes, as "
                    "'softmax_cross_entropy' does"
                )
            return "sigmoid_binary_cross_entropy", "several labels"
        shape = find_shape(self.rows, True)
        assert shape is not None
        if shape.loss is not None:
            raise TrainingError(
                f"pass loss=: rows with {', '.join(map(repr, shape.columns))} compare answers, as "
                f"the loss {shape.loss!r} does"
            )
        if DECODER_TOKENS in [value.name for value in model.inputs]:
            return "seq2seq_lm", "texts"
        task = model.folder.task
        fills = task == "fill-mask" or (not task and Tokenizer(model.folder).mask_token is not None)
        return "masked_lm" if fills else "causal_lm", "texts"


def _refuse_unscored(model: Network, data: Mapping[str, Rows]) -> TrainingError:
    """Return the error for rows of language models on a network that scores texts."""
    name, rows = next((n, x) for n, x in data.items() if not find_shape(x, scores=True))
    columns = ", ".join(map(repr, rows.rename(rows.first)))
    return TrainingError(
        f"{name} has rows with {columns}, and the output '{model.outputs[0].name}' has one row for "
        f"each text: rows are like {SCORED[-2].example}. Pass chats as tokens, {{'input_ids': "
        "[model.tokenizer.apply_chat_template(messages), ...], 'labels': [...]}, and pairs of "
        "answers as two texts (or rows of tokens), the chosen one before the other, with a "
        "jaxonnx.losses.GroupLoss of 2 rows"
    )


def _check_answers(losses: Sequence[Any], data: Mapping[str, Rows], packs: bool) -> None:
    """Refuse rows of single texts for a loss that compares answers, and packing for any of groups.

    Args:
      losses: those of a run.
      data: rows by the name of the data.
      packs: whether several texts become one row.
    """
    for each in losses:
        if each.group > 1 and packs:
            raise TrainingError(
                f"preprocess={{'pack': True}} joins texts to rows, and the loss {each.name!r} "
                "compares rows: leave it out"
            )
        for name, rows in data.items() if each.answers is not None else ():
            shape = find_shape(rows, True)
            if shape is not None and each.answers not in shape.columns:
                accepted = next(other for other in SHAPES if each.answers in other.columns)
                raise TrainingError(
                    f"{name} has rows with {', '.join(map(repr, rows.rename(rows.first)))}, and "
                    f"the loss {each.name!r} takes rows like {accepted.example}"
                )


def _make_reader(
    texts: Mapping[str, Rows],
    model: Network,
    tokenizer: Tokenizer,
    settings: TextSettings,
    limit: int,
    padding: Padding,
) -> Reader:
    """Return a reader of texts whose labels are tokens."""
    for name, rows in texts.items():
        if find_shape(rows) in SCORED:
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
        limit,
        vocabulary(model),
        padding.needs.ignored if isinstance(padding.needs.ignored, int) else -100,
        token_input(model),
        pairs=_takes_pairs(model, settings),
        group=padding.needs.group,
        images=images,
        packing=model.program.find(PackedRows) if settings.pack else None,
    )


def _explain_emptiness(reader: Reader | LabelReader, name: str, skipped: int = 0) -> str:
    """Return why no row of the data became an example.

    Args:
      name: of the data.
      skipped: the number of texts that the reader had skipped before.
    """
    if reader.long["skip"] > skipped:
        return (
            f"preprocess={{'long': 'skip'}} leaves no example of {name}: pass a larger "
            f"'max_length' than {reader.limit} tokens, or 'cut'"
        )
    return (
        "the loss counts no token of any example: preprocess={'loss': 'all'} counts all, "
        "and a larger preprocess={'max_length': ...} cuts or splits fewer texts"
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
    table = model.folder.context_length
    tokens = token_input(model)
    most_of_tokenizer = model.folder.read_json("tokenizer_config.json").get("model_max_length")
    fixed = [v.shape[1] for v in model.inputs if v.name == tokens and len(v.shape or ()) > 1]  # type: ignore[index]
    most = min([n for n in (table, *fixed) if isinstance(n, int)], default=None)
    limit = settings.max_length
    if limit is None:  # RoBERTa's tables have positions that it does not use
        numbers = (LENGTH, most, most_of_tokenizer)
        return min(n for n in numbers if isinstance(n, int))
    if most is not None and limit > most:
        raise TrainingError(
            f"preprocess: max_length is {limit}, and the model has positions for {most} tokens"
        )
    return limit


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


def take_packed_rows(model: Any) -> Any:
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


def _leak(model: Any, packing: PackedRows) -> float:
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


_SHOWN = 8
"""Names of classes that a message shows."""


def scores_texts(model: Network) -> bool:
    """Check whether a network has one row of outputs for each text, rather than for each token."""
    shape = model.outputs[0].shape if model.outputs else None
    return shape is not None and len(shape) <= 2


def class_names(model: Network) -> tuple[str, ...]:
    """Return the names of a model's classes: of its file, or `id2label` in its folder's config."""
    labels = preparation(model).labels
    return labels or (() if model.folder is None else model.folder.classes)


def _are_names(labels: Any) -> bool:
    """Check whether a list has names of classes; of none of them it is empty."""
    return all(isinstance(label, str) for label in labels)


def embeds_texts(model: Network) -> bool:
    """Check whether a model of sentence-transformers computes embeddings, without a new head."""
    folder = None if model.heads else model.folder
    return folder is not None and any("pooling" in x.lower() for x in list_modules(folder.path))


@dataclass
class LabelReader:
    """Converts rows to tokens, segments and labels; the tokens are those of transformers.

    Attributes:
      tokenizer: of the model's folder.
      model: the model, which has one row of outputs for each text.
      settings: of `preprocess`.
      limit: the most tokens of an example.
      tokens: the input of tokens.
      group: the number of texts that a loss compares, each an example; else 1.
      lengths: the length of each example so far.
      long: the number of texts that were cut and skipped.
      unread: the columns that nothing reads.
      reordered: the data whose classes are in another order than the model's.
      notes: for the history.
    """

    tokenizer: Tokenizer
    model: Network
    settings: TextSettings
    limit: int
    tokens: str
    group: int = 1
    lengths: list[int] = field(default_factory=list)
    long: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    reordered: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        shape = self.model.outputs[0].shape or ()
        self._count = 1 if len(shape) < 2 else shape[1] if isinstance(shape[1], int) else None
        self._column = len(shape) > 1
        names = class_names(self.model)
        self._names = names if self._count in (None, len(names)) else ()
        self._segments = segment_input(self.model.inputs)
        for name, value in (("long", "split"), ("loss", "all"), ("pack", True)):
            if getattr(self.settings, name) == value:
                raise TrainingError(
                    f"preprocess={{{name!r}: {value!r}}} is for language models, and the output "
                    f"'{self.model.outputs[0].name}' has one row for each text: leave it out"
                )

    def read(self, data: Rows, rows: Iterable[Row], name: str) -> dict[str, list[Any]]:
        """Convert rows to columns of tokens, segments, labels and weights, where there are such.

        Args:
          data: the data of the rows.
          rows: all of them, or some.
          name: of the data, for the notes.
        """
        shape = find_shape(data, scores=True)
        assert shape is not None
        first = data.rename(data.first)
        self._check_number(shape, name)
        used = LABELS if self.group == 1 else ()  # texts that are compared have none
        label = next((column for column in used if column in first), None)
        order = self._match_classes(data.classes.get(label or ""), name)
        indices = label in data.classes
        ids, segments, labels, weights = [], [], [], []
        for where, row in rows:
            for encoded in self._encode(where, row, shape):
                ids.append(encoded[0])
                segments.append(encoded[1])
                weights.append(read_weight(where, row))
                if label is not None:
                    what, value = f"{where}: {label}", row.get(label)
                    several = isinstance(value, list | tuple | np.ndarray)
                    if several and (indices or _are_names(value)):
                        labels.append(self._read_labels(what, value, order))
                    else:
                        labels.append(self._read_label(what, value, order))
            columns_read = {*shape.columns, KEY, label}
            unread = (n for n in row if n not in columns_read and row[n] is not None)
            self.unread |= dict.fromkeys(unread)
        self.lengths += map(len, ids)
        columns: dict[str, list[Any]] = {self.tokens: ids}
        if self._segments is not None:
            columns[self._segments] = segments
        if label is not None:
            columns["label"] = labels
            if data.is_stream or {*weights} - {1}:
                columns[KEY] = weights
        self._add_notes()
        return columns if ids else {}

    def _check_number(self, shape: Shape, name: str) -> None:
        """Refuse rows whose number of texts is not that which the loss compares."""
        count, columns = len(shape.columns), ", ".join(map(repr, shape.columns))
        if self.group > 1 and count not in (1, self.group):
            other = f", or leave one out: columns={{{shape.columns[-1]!r}: 'unused'}}"
            raise TrainingError(
                f"{name} has rows with {columns}, and the loss compares {self.group} texts: "
                f"jaxonnx.losses.in_batch_negatives(negatives={count - 2}) compares these"
                + (other if count > self.group else "")
            )
        if self.group == 1 and shape in COMPARED:
            raise TrainingError(
                f"{name} has rows with {columns}, which a loss of groups compares: "
                f"jaxonnx.losses.in_batch_negatives(negatives={count - 2}), or your own as a "
                f"jaxonnx.losses.GroupLoss of group={count}. For other losses a row is one text, "
                '{"text": "..."}, or a pair that is scored together, '
                f"{SCORED[0].example}"
            )

    def _encode(self, where: str, row: Any, shape: Shape) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens and segments, int64[n] both, of a row, or of each of its texts.

        Nothing is returned of a row that is skipped.
        """
        if not shape.fits(row):
            columns = " and ".join(map(repr, shape.columns))
            raise TrainingError(f"{where} must have {columns}, as those before it")
        texts, examples = [row[name] for name in shape.columns], []
        for part in [[text] for text in texts] if self.group > 1 else [texts]:
            ids, segments, is_cut = self.tokenizer.encode_segments(part, self.limit)
            if not len(ids):
                raise TrainingError(f"{where} has no tokens")
            if is_cut:
                how = self.settings.long or "cut"
                if how == "refuse":
                    raise TrainingError(f"{where} has more than {self.limit} tokens")
                self.long[how] += 1
                if how == "skip":
                    return []
            examples.append((ids, segments))
        return examples

    def _match_classes(self, named: Sequence[str] | None, what: str) -> Sequence[int] | None:
        """Return the model's number of each class of the data; None where these say nothing.

        Args:
          named: the names of the classes of the data (of datasets' ClassLabel), in their order.
        """
        if named is None or not self._names:
            return None
        numbers = {name.casefold(): number for number, name in enumerate(self._names)}
        names = [name.casefold() for name in named]
        if numbers.keys() != {*names} or len(names) != len(numbers):
            return None
        order = [numbers[name] for name in names]
        if order == [*range(len(order))]:
            return None
        self.reordered[what] = None
        return order

    def _read_label(self, where: str, value: Any, order: Sequence[int] | None) -> Any:
        """Return a class, or numbers of the shape of the model's outputs.

        Raises:
          TrainingError: it is missing, or neither a class nor such numbers.
        """
        if isinstance(value, str):
            names = [name.casefold() for name in self._names]
            if (name := value.strip().casefold()) in names:
                return self._fit(names.index(name))
            try:
                value = float(value)
            except ValueError:
                has = f"are {_list(self._names)}" if self._names else "have no names"
                raise TrainingError(
                    f"{where} is {value!r}, and {_NO_CLASSES}"
                    if embeds_texts(self.model)
                    else f"{where} {value!r} is no class of the model, whose {self._count or ''} "
                    f"classes {has}: head=[...] gives it new classes by their names"
                ) from None
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise TrainingError(
                f"{where} is {value!r}: a label is the number or name of a class, or numbers for "
                "the outputs; leave out the rows without one"
            )
        if array.ndim:
            if array.shape != (self._count,) and self._count is not None:
                raise TrainingError(
                    f"{where} has {array.shape} numbers, and the model has ({self._count},) "
                    "outputs: pass 0 or 1 for each, or the names of the classes"
                )
            return array.astype(np.float32)
        number = float(array)
        if self._count not in (None, 1):
            if number != int(number):
                raise TrainingError(
                    f"{where} is {number}, and {_NO_CLASSES}"
                    if embeds_texts(self.model)
                    else f"{where} is {number}, and the model has {self._count} classes, 0 ... "
                    f"{self._count - 1}: head=1 gives it one output, for numbers"
                )
            number = int(number)
            return order[number] if order is not None and 0 <= number < len(order) else number
        return self._fit(number)

    def _read_labels(self, where: str, values: Any, order: Sequence[int] | None) -> np.ndarray:
        """Return 1 for each of some classes, by name or number, and 0 for the others; float32."""
        count = self._count or len(self._names)
        numbers = [int(self._read_label(where, value, order)) for value in values]
        if wrong := [n for n in numbers if not 0 <= n < count]:
            raise TrainingError(f"{where} has {wrong[0]}; the model has {count} classes")
        return np.isin(np.arange(count), numbers).astype(np.float32)

    def _fit(self, number: Any) -> Any:
        """Return a class, or a number in the shape of the only output."""
        if self._count != 1:
            return int(number) if number == int(number) else np.float32(number)
        return np.array([number] if self._column else number, np.float32)

    def _add_notes(self) -> None:
        done = [f"{n} {'skipped' if how == 'skip' else how}" for how, n in self.long.items()]
        order = _list(self._names)
        notes = (
            *(
                (True, f"{name}: classes by name, as the model has them in the order {order}")
                for name in self.reordered
            ),
            (
                done,
                f"texts of more than {self.limit} tokens: {' and '.join(done)} "
                "(preprocess={'max_length': ..., 'long': 'cut', 'skip' or 'refuse'})",
            ),
            (self.unread, f"columns that nothing reads: {', '.join(map(repr, self.unread))}"),
        )
        self.notes[:] = [text for applies, text in notes if applies]


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
