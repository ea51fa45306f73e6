"""Convert texts to tokens and labels: plain texts, prompts with completions, and chats."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxonnx._data.inputs_and_targets import KEY
from jaxonnx._data.language_models import context_length, token_input, vocabulary
from jaxonnx._data.packing import pack_texts
from jaxonnx._data.ragged import DECODER_TOKENS, Padding
from jaxonnx._data.sources import is_dataset, read_text
from jaxonnx._data.tokenizer import Chat, Tokenizer
from jaxonnx._network import Network
from jaxonnx._require import require, require_choice, require_integer
from jaxonnx.errors import TrainingError
from jaxonnx.views import PackedRows

TEXTS = (("messages",), ("prompt", "completion"), ("text",))
"""The columns of each kind of text."""
LENGTH = 1024
"""The default limit of tokens in an example."""
_STEP = 8
"""Widths of batches are multiples of this."""
_GAIN = 0.9
"""A second width is used if it leaves at most this fraction of the padded tokens: it costs a second
compilation."""
_Example = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64[n] both."""
_VARIABLES = "tools", "documents"
"""Columns for the chat template."""
_SETTINGS = "max_length", "long", "loss", "pack"


@dataclass(frozen=True)
class TextSettings:
    """The settings for texts in `preprocess`.

    Attributes:
      max_length: the most tokens of an example.
      long: what to do with longer texts: "cut", "split" into several examples, or "refuse" (an
        error); by default plain texts are split and others cut.
      loss: the tokens that the loss counts: "completions" or "all".
      pack: whether to concatenate short texts to rows of at most `max_length` tokens.
    """

    max_length: int | None = None
    long: str | None = None
    loss: str = "completions"
    pack: bool = False

    @classmethod
    def of(cls, preprocess: Any) -> TextSettings:
        """Parse the argument `preprocess` of `train`.

        Raises:
          TrainingError: a setting is unknown or not valid.
        """
        given = {} if preprocess is None else preprocess
        if not isinstance(given, Mapping) or not given.keys() <= {*_SETTINGS}:
            raise TrainingError(
                f"preprocess of texts is a dict of any of {', '.join(_SETTINGS)}; not {given!r}"
            )
        one = cls(**given)
        if one.max_length is not None:
            require_integer("preprocess: max_length", one.max_length, 2, error=TrainingError)
        choices = {
            "long": (None, "cut", "split", "refuse"),
            "loss": ("completions", "all"),
            "pack": (True, False),
        }
        for name, known in choices.items():
            require_choice(f"preprocess: {name}", getattr(one, name), known, TrainingError)
        return one


@dataclass
class _Reader:
    """Converts texts to tokens and labels, and counts those that are too long.

    Attributes:
      tokenizer: of the model's folder.
      settings: of `preprocess`.
      limit: the most tokens of an example.
      vocabulary: the number of tokens that the model knows, if that is known.
      ignored: the label of tokens that the loss does not count.
      pairs: whether the model is an encoder-decoder: the encoder reads prompts, and the decoder's
        labels are completions.
      lengths: the length of each example so far.
      long: the number of texts that were cut and split.
      turns: the number of messages of the assistant in examples of their own ("other"), and
        without an end token in the template ("open").
      unread: the columns that nothing reads.
      dropped: the number of examples, parts of texts that are split among them, of which the loss
        counts no token: of a decoder the first one never counts.
    """

    tokenizer: Tokenizer
    settings: TextSettings
    limit: int
    vocabulary: int | None
    ignored: int
    pairs: bool
    lengths: list[int] = field(default_factory=list)
    long: dict[str, int] = field(default_factory=lambda: {"cut": 0, "split": 0})
    turns: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    dropped: int = 0

    def read(self, rows: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
        """Return the columns "tokens", "labels", "weight" of texts, as (name for errors, row)."""
        columns: dict[str, list[Any]] = {"tokens": [], "labels": [], KEY: []}
        for where, row in rows:
            weight = self._read_weight(where, row)
            if self.pairs:
                examples = [self._encode_pair(where, row)]
            else:
                encoded = self._encode(where, row)
                examples = [x for pair in encoded for x in self._fit(where, row, *pair)]
            for ids, labels in examples:
                if (labels[not self.pairs :] == self.ignored).all():
                    self.dropped += 1
                    continue
                columns["tokens"].append(ids)
                columns["labels"].append(labels)
                columns[KEY].append(weight)
                self.lengths.append(max(len(ids), len(labels)))
            variables = *_VARIABLES, "chat_template_kwargs"  # of chats, which find those not read
            read = {*_kind(row), KEY, *(variables if _is_chat(row) else ())}
            unread = (name for name in row if name not in read and row[name] is not None)
            self.unread |= dict.fromkeys(unread)
        if not columns["tokens"]:
            raise TrainingError(
                "the loss counts no token of any example: preprocess={'loss': 'all'} counts all, "
                "and a larger preprocess={'max_length': ...} cuts or splits fewer texts"
            )
        return columns

    def _read_weight(self, where: str, row: Mapping[str, Any]) -> float:
        weight = 1 if row.get(KEY) is None else row[KEY]
        fits = isinstance(weight, int | float | np.number) and 0 <= weight < np.inf
        require(f"{where}: weight", weight, fits, "a number of at least 0", TrainingError)
        if self.settings.pack and weight != 1:
            raise TrainingError(
                f"{where} has the weight {weight}, and preprocess={{'pack': True}} joins texts to "
                "rows with one weight: leave out one of the two"
            )
        return float(weight)

    def _encode_pair(self, where: str, row: Mapping[str, Any]) -> _Example:
        """Return the tokens of a prompt, and those of its completion with the end token."""
        if not all(isinstance(row.get(key), str) for key in TEXTS[1]):
            raise TrainingError(
                f"{where}: an encoder and its decoder take texts as 'prompt', which the encoder "
                "reads, and 'completion'"
            )
        parts = []
        for key in TEXTS[1]:
            if not row[key]:
                raise TrainingError(f"{where} has an empty {key}")
            ids, _ = self.tokenizer.encode(row[key])
            ids = self._append_end(row[key], ids) if key == "completion" else ids
            self._check(f"the {key} of {where}", ids, least=1)
            parts.append(ids)
        if max(map(len, parts)) > self.limit:
            self._check_long(where, max(map(len, parts)), "cut")
        prompt, completion = (ids[: self.limit] for ids in parts)
        return prompt, completion

    def _encode(self, where: str, row: Mapping[str, Any]) -> Iterator[_Example]:
        """Yield the tokens and labels of examples, int64[n] both."""
        if _is_chat(row):
            yield from self._encode_chat(where, row)
            return
        *before, last = _kind(row)  # a prompt before its completion, or none
        prompt = "".join(row[key] for key in before)
        if not row[last]:
            raise TrainingError(f"{where} has an empty {last}")
        text = prompt + row[last]
        ids, places = self.tokenizer.encode(text)
        first = np.flatnonzero(places[:, 1] > len(prompt))
        ids = self._append_end(text, ids)
        start = 0 if self.settings.loss == "all" else first[0] if len(first) else len(ids)
        yield ids, np.where(np.arange(len(ids)) < start, self.ignored, ids)

    def _append_end(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Append the end token to the tokens of a text that has none."""
        ends = self.tokenizer.ends
        ended = np.isin(ids[-1:], ends).any() or self.tokenizer.is_ended(text)
        return ids if ended else np.append(ids, ends[:1])

    def _encode_chat(self, where: str, row: Mapping[str, Any]) -> Iterator[_Example]:
        keys = _kind(row)
        messages = [message for key in keys for message in row[key]]
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise TrainingError(f"{where}: messages are objects with a role and its content")
        for number, message in enumerate(messages, 1):
            what, weight = f"{where}: the weight of message {number}", message.get(KEY)
            require(what, weight, weight in (None, 0, 1), "0 or 1", TrainingError)
        counts_all, ends = self.settings.loss == "all", self.tokenizer.ends
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        ignored = [i for i in turns if messages[i].get(KEY) == 0]
        prompt = len(row["prompt"]) if len(keys) > 1 else 0
        learned = [i for i in turns if i >= prompt and i not in ignored]
        if not (counts_all or learned):
            raise TrainingError(
                f"{where} has no message of the assistant, whose tokens would be learned; "
                "preprocess={'loss': 'all'} learns all of them"
            )
        chat = Chat(messages, self._read_variables(where, row), where)
        chats = self.tokenizer.write_chats(chat, ignored if counts_all else learned)
        if counts_all and len(chats) > 1:
            raise TrainingError(
                f"{where}: the chat template writes a message of weight 0 differently when others "
                "follow, so preprocess={'loss': 'all'} cannot leave it out"
            )
        self.turns["other"] += len(chats) - 1
        for chat, text, parts in chats:
            if not (parts or counts_all):
                continue
            ids, places = self.tokenizer.encode(text, special=False)
            inside = np.zeros(len(ids), bool)
            for start, stop in parts:  # a token that reaches into a part counts
                inside |= (places[:, 1] > start) & (places[:, 0] < stop)
            labels = np.where(inside ^ counts_all, ids, self.ignored)
            for start, stop in [(0, len(text))] if counts_all else parts:
                if not ends or self.tokenizer.is_ended(text[start:stop]):
                    continue
                behind = int((places[:, 0] < stop).sum())
                if behind < len(places):  # a runtime ends here, and goes on with the next message
                    labels[behind] = ids[behind] if ids[behind] in ends else ends[0]
                    self.turns["open"] += ids[behind] not in ends
                elif chat.messages[-1]["role"] == "assistant" and labels[-1] != self.ignored:
                    token = self.tokenizer.find_end(chat, text)
                    ids, labels = np.append(ids, token), np.append(labels, token)
                    self.turns["open"] += 1
            yield ids, labels

    def _read_variables(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the chat template that a row has, lists also as JSON text."""
        try:
            variables = dict(row.get("chat_template_kwargs") or {})
            for name in _VARIABLES:
                value = row.get(name)
                variables[name] = json.loads(value) if isinstance(value, str) else value
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"{where}: tools and documents must be lists, and chat_template_kwargs an object "
                f"({error})"
            ) from error
        variables = {name: value for name, value in variables.items() if value is not None}
        self.unread |= dict.fromkeys(n for n in variables if n not in self.tokenizer.variables)
        return variables

    def _check(self, where: str, ids: np.ndarray, least: int = 2) -> None:
        if len(ids) < least:
            way = ": there is no next one to predict" if least > 1 else ""
            raise TrainingError(f"{where} has {len(ids)} tokens{way}")
        if self.vocabulary is not None and ids.max() >= self.vocabulary:
            token = ids[ids >= self.vocabulary][0]
            raise TrainingError(
                f"{where}: the token {self.tokenizer.name(token)} is {token}, and the model has "
                f"{self.vocabulary}: tokenizer.json, with {self.tokenizer.size} tokens, is of "
                "another model"
            )

    def _fit(
        self, where: str, row: Mapping[str, Any], ids: np.ndarray, labels: np.ndarray
    ) -> Iterator[_Example]:
        """Yield the tokens and labels of an example, cut or split to the limit."""
        self._check(where, ids)
        counts = labels != self.ignored
        if len(ids) <= self.limit:
            yield ids, labels
            return
        how = self._check_long(where, len(ids), "split" if _kind(row) == ("text",) else "cut")
        if how == "cut" and not counts[1 : self.limit].any():
            raise TrainingError(
                f"{where} has {np.flatnonzero(counts)[0]} tokens before those of the loss, and the "
                f"limit is {self.limit} tokens: pass a larger preprocess={{'max_length': ...}}"
                " or a shorter prompt"
            )
        last = self.limit if how == "cut" else len(ids) - 1
        for start in range(0, last, self.limit):
            yield ids[start : start + self.limit], labels[start : start + self.limit]

    def _check_long(self, where: str, length: int, usual: str) -> str:
        """Count a text that is too long, and choose "cut" or "split" for it.

        Raises:
          TrainingError: the setting is "refuse".
        """
        how = self.settings.long or usual
        if how == "refuse":
            raise TrainingError(f"{where} has {length} tokens, more than {self.limit}")
        self.long[how] += 1
        return how

    @property
    def notes(self) -> list[str]:
        done = [f"{count} {how}" for how, count in self.long.items() if count]
        notes = (
            (
                done,
                f"texts of more than {self.limit} tokens: {' and '.join(done)} "
                "(preprocess={'max_length': ..., 'long': 'cut', 'split' or 'refuse'})",
            ),
            (
                self.dropped,
                f"examples left out, of which the loss counts no token: {self.dropped}",
            ),
            (self.unread, f"columns that nothing reads: {', '.join(map(repr, self.unread))}"),
            (
                self.turns["other"],
                f"messages of the assistant in examples of their own: {self.turns['other']}, with "
                "those before, as the chat template writes them differently when others follow",
            ),
            (
                self.turns["open"],
                "messages of the assistant without an end token directly behind them in the chat "
                f"template: {self.turns['open']}; it is the label there, or appended to the chat",
            ),
            (
                not self.tokenizer.ends,
                "the end of texts is not learned: the folder names no end token (eos_token in "
                "tokenizer_config.json, eos_token_id in generation_config.json)",
            ),
        )
        return [text for applies, text in notes if applies]


def is_text(data: Any) -> bool:
    """Check whether data is a .jsonl file of texts, or a list or dataset of such rows."""
    return bool(_kind(_peek(data)))


def _kind(row: Any) -> tuple[str, ...]:
    """Return the entry of `TEXTS` that a row has; () if it is not a text."""
    if not isinstance(row, Mapping):
        return ()
    return next(
        (
            keys
            for keys in TEXTS
            if all(isinstance(row.get(k), str | list) for k in keys)
            and (isinstance(row[keys[0]], str) or _are_messages(row[keys[0]]))
        ),
        (),
    )


def _is_chat(row: Mapping[str, Any]) -> bool:
    keys = _kind(row)
    return keys == ("messages",) or not all(isinstance(row[key], str) for key in keys)


def _are_messages(value: Any) -> bool:
    return not value or isinstance(value[0], Mapping)


def _peek(data: Any) -> Any:
    """Return the first row of data that has rows, or None."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            line = next((line for line in file if line.strip()), "")
        try:
            return json.loads(line)
        except ValueError:  # `_rows` reports it, with the line
            return None
    if isinstance(data, list) or is_dataset(data):
        return data[0] if len(data) else None
    return None


def _rows(data: Any, what: str) -> list[tuple[str, Any]]:
    """Return the rows of a dataset or .jsonl file, each with its name for errors.

    Raises:
      TrainingError: the file cannot be read, or its rows do not have the same columns.
    """
    if not isinstance(data, str | os.PathLike):
        named = [(f"example {i} of {what}", data[i]) for i in range(len(data))]
    else:
        named = []
        for number, line in enumerate(read_text(data).split("\n"), 1):
            where = f"line {number} of '{os.fspath(data)}'"
            if line.strip():
                try:
                    named.append((where, json.loads(line)))
                except ValueError as error:
                    raise TrainingError(f"{where} is not JSON ({error})") from error
    keys = _kind(named[0][1])
    for where, row in named:
        if _kind(row) != keys:
            raise TrainingError(
                f"{where} must have {' and '.join(map(repr, keys))}, as those before it"
            )
    return named


def read_texts(
    data: Any, validation: Any, model: Network, preprocess: Any, padding: Padding
) -> tuple[Any, Any, Padding, list[str]]:
    """Convert the texts of data and validation to tokens and labels.

    Args:
      data, validation: as `train` takes them; what has no texts is returned as it is.
      model: a model with a folder.
      preprocess: the settings; see `TextSettings`.
      padding: without widths, one or two are chosen: that of the longest example, and a narrower
        one if it saves a tenth of the padded tokens.

    Returns:
      Data and validation as dicts of columns, the padding with widths, and notes for the history.

    Raises:
      TrainingError: a text that cannot be an example; the message has its line.
    """
    texts = {
        name: given
        for name, given in (("data", data), ("validation", validation))
        if is_text(given)
    }
    if not texts:
        return data, validation, padding, []
    if model.folder is None:
        raise TrainingError(
            "the data has texts, and the model was not loaded from a folder with a tokenizer: "
            "jaxonnx.load('folder/'), or pass tokens; a column that is not an input must be left "
            "out"
        )
    settings = TextSettings.of(preprocess)
    limit, tokens = _limit(model, settings), token_input(model)
    ignored = padding.ignored if isinstance(padding.ignored, int) else -100
    made = Tokenizer(model.folder), settings, limit, vocabulary(model), ignored
    reader = _Reader(*made, pairs=_takes_pairs(model, settings))
    read = {}
    packing, lengths, notes = model.program.find(PackedRows), reader.lengths, []
    for name, given in texts.items():
        columns = reader.read(_rows(given, name))
        ids, labels = columns["tokens"], columns["labels"]
        read[name] = {tokens: ids, "labels": labels}
        if {*columns[KEY]} != {1}:
            read[name][KEY] = columns[KEY]
        if settings.pack and packing is not None:
            rows, labels, numbers = pack_texts(ids, labels, limit, ignored, packing.number)
            read[name] = {tokens: rows, packing.input: numbers, "labels": labels}
            notes.append(f"{name}: {len(ids)} texts in {len(rows)} rows")
    if notes:
        lengths = [len(row) for columns in read.values() for row in columns[tokens]]
    if padding.buckets is None:
        padding = replace(padding, buckets=_widths(np.array(lengths), limit))
    notes = [*reader.notes, *notes]
    return read.get("data", data), read.get("validation", validation), padding, notes


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
    fixed = [v.shape[1] for v in model.inputs if v.name == tokens and len(v.shape or ()) > 1]  # type: ignore[index]
    most = min([n for n in (table, *fixed) if isinstance(n, int)], default=None)
    wanted = settings.max_length
    if wanted is None:
        return LENGTH if most is None else min(LENGTH, most)
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
