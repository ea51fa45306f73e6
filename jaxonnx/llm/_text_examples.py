"""Convert rows of texts to tokens and labels: plain texts, prompts with completions, and chats."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxonnx._data.inputs_and_targets import JUDGEMENT, KEY
from jaxonnx._data.kinds import Row, Rows
from jaxonnx._display import format_count
from jaxonnx._require import require, require_choice, require_integer
from jaxonnx.errors import TrainingError
from jaxonnx.llm._chat_templates import Chat
from jaxonnx.llm._images import COLUMNS, ImageReader, RowImages
from jaxonnx.llm._shapes import (
    REASONING,
    VARIABLES,
    Shape,
    Texts,
    add_other_answers,
    find_shape,
    read_judgement,
)
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.llm._vision_language import PIXELS
from jaxonnx.views import PackedRows

_Example = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64[n] both."""
_SHOWN = 5
"""Numbers of messages that a note shows."""
_SETTINGS = "max_length", "long", "loss", "pack"


@dataclass(frozen=True)
class TextSettings:
    """The settings for texts in `preprocess`.

    Attributes:
      max_length: the most tokens of an example.
      long: what to do with longer texts: "cut", "split" into several examples, "skip", or "refuse"
        (an error); by default plain texts are split and others cut.
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
        options = {} if preprocess is None else preprocess
        if not isinstance(options, Mapping) or not options.keys() <= {*_SETTINGS}:
            raise TrainingError(
                f"preprocess of texts is a dict of any of {', '.join(_SETTINGS)}; not {options!r}"
            )
        settings = cls(**options)
        if settings.max_length is not None:
            require_integer("preprocess: max_length", settings.max_length, 2, error=TrainingError)
        choices = {
            "long": (None, "cut", "split", "skip", "refuse"),
            "loss": ("completions", "all"),
            "pack": (True, False),
        }
        for name, accepted in choices.items():
            require_choice(f"preprocess: {name}", getattr(settings, name), accepted, TrainingError)
        return settings


@dataclass
class Reader:
    """Converts texts to tokens and labels, and counts those that are too long.

    Attributes:
      tokenizer: of the model's folder.
      settings: of `preprocess`.
      limit: the most tokens of an example.
      vocabulary: the number of tokens that the model knows, if that is known.
      ignored: the label of tokens that the loss does not count.
      tokens: the input of tokens.
      pairs: whether the model is an encoder-decoder: the encoder reads prompts, and the decoder's
        labels are completions.
      group: the number of rows that the loss compares: 2 for answers chosen and rejected.
      images: finds the images of rows, if the model takes some.
      packing: how texts share a row, if they do.
      lengths: the length of each example so far.
      long: the number of texts that were cut, split and skipped.
      others: how many messages of the assistant are in examples of their own, by their number in
        the chat.
      open: how many have no end token in the template.
      empty: how many that count have no text, thoughts or calls.
      unwritten: the number of chats with calls of tools that the template does not write.
      unread: the columns that nothing reads.
      unread_keys: the keys of messages that nothing reads.
      equal: the number of pairs of equal answers. They stay, as in TRL: of DPO each adds log 2 to
        the loss and nothing to its gradient, and ORPO learns the answer.
      dropped: the number of examples, parts of texts that are split among them, of which the loss
        counts no token: of a decoder the first one never counts.
      answer: that of the last row that says of its answer whether it is desirable.
      packed: the numbers of texts and of rows, by the name of the data.
      notes: for the history.
    """

    tokenizer: Tokenizer
    settings: TextSettings
    limit: int
    vocabulary: int | None
    ignored: int
    tokens: str
    pairs: bool
    group: int
    images: ImageReader | None
    packing: PackedRows | None
    lengths: list[int] = field(default_factory=list)
    long: Counter[str] = field(default_factory=Counter)
    others: Counter[int] = field(default_factory=Counter)
    open: int = 0
    empty: int = 0
    unwritten: int = 0
    unread: dict[str, None] = field(default_factory=dict)
    unread_keys: dict[str, None] = field(default_factory=dict)
    dropped: int = 0
    equal: int = 0
    answer: Any = None
    packed: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    notes: list[str] = field(default_factory=list)

    def read(self, data: Rows, rows: Iterable[Row], name: str) -> dict[str, list[Any]]:
        """Convert rows to columns of tokens, labels and weights; {} if no token counts.

        Args:
          data: the data of the rows.
          rows: all of them, or some.
          name: of the data, for the notes.
        """
        shape = find_shape(data, self.group == 2)
        assert shape is not None
        ids, labels, weights, judged, images = [], [], [], [], []
        for where, row in add_other_answers(rows, self.answer) if shape.is_judged else rows:
            weight = read_weight(where, row)
            if self.settings.pack and weight != 1:
                raise TrainingError(
                    f"{where} has the weight {weight:g}, and preprocess={{'pack': True}} joins "
                    "texts to rows with one weight: leave out one of the two"
                )
            examples, pixels = self._read_row(where, row, shape, data)
            images += [pixels] * len(examples)
            ids += [pair[0] for pair in examples]
            labels += [pair[1] for pair in examples]
            weights += [weight] * len(examples)
            if shape.is_judged:
                judged += [read_judgement(row[JUDGEMENT])] * len(examples)
                self.answer = row["completion"]
        columns = {self.tokens: ids, "labels": labels}
        if self.images is not None:
            columns[PIXELS] = images
        if self.packing is not None and ids:
            count = self.packing.number
            packed = pack_texts(ids, labels, self.limit, self.ignored, count)
            columns = dict(zip((self.tokens, "labels", self.packing.input), packed, strict=True))
            self.packed[name].update(texts=len(ids), rows=len(packed[0]))
        elif data.is_stream or {*weights} - {1}:
            columns[KEY] = weights
        if shape.is_judged:
            columns[JUDGEMENT] = judged
        sizes = zip(columns[self.tokens], columns["labels"], strict=True)
        self.lengths += [max(map(len, pair)) for pair in sizes]
        self.notes[:] = self._list_notes()
        return columns if ids else {}

    def _read_row(
        self, where: str, row: Any, shape: Shape, data: Rows
    ) -> tuple[list[_Example], RowImages | None]:
        """Return the examples of a row of which the loss counts a token, and its images."""
        if not shape.fits(row):
            columns = " and ".join(map(repr, shape.columns))
            raise TrainingError(f"{where} must have {columns}, as those before it")
        try:
            texts = shape.read(row, data.names)
        except (LookupError, TypeError, ValueError) as error:
            raise TrainingError(f"{where}: {error}") from error
        self._check_answers(where, shape, texts)
        images = None
        if self.images is not None:
            texts, images = self.images.find(where, row, texts, data.folder)
        answers = []
        for answer in texts.answers:
            part = Texts(texts.prompt, (answer,))
            if self.pairs:
                examples = [*self._encode_pair(where, part)]
            else:
                encoded = self._encode(where, row, part, images)
                examples = [x for pair in encoded for x in self._fit(where, shape, *pair)]
            counted = [
                pair for pair in examples if (pair[1][not self.pairs :] != self.ignored).any()
            ]
            self.dropped += len(examples) - len(counted)
            answers.append(counted)
        known_columns = {*shape.columns, *shape.optional, KEY, *(COLUMNS if self.images else ())}
        known_columns -= set() if texts.is_chat else {*VARIABLES}
        unread = (name for name in row if name not in known_columns and row[name] is not None)
        self.unread |= dict.fromkeys(unread)
        if len(answers) > 1 and {*map(len, answers)} != {1}:
            if max(map(len, answers)) > 1:
                raise TrainingError(
                    f"{where}: each answer must be one example, and the chat template writes "
                    "messages of the assistant differently when others follow: put those before "
                    "the last one into the prompt"
                )
            return [], images  # neither without the other
        if "rejected" in shape.columns:
            self.equal += all(map(np.array_equal, answers[0][0], answers[1][0]))
        return [example for answer in answers for example in answer], images

    def _check_answers(self, where: str, shape: Shape, texts: Texts) -> None:
        if self.pairs and (texts.is_chat or shape.columns != ("prompt", "completion")):
            raise TrainingError(
                f"{where}: an encoder and its decoder take texts as 'prompt', which the encoder "
                "reads, and 'completion'"
            )
        if len(texts.answers) > 1 and self.group != 2:
            raise TrainingError(
                f"{where} has answers 'chosen' and 'rejected', which a loss of pairs compares, "
                "like jaxonnx.losses.dpo(); columns={'chosen': 'completion'} learns those chosen"
            )
        if len(texts.answers) > 1 and self.settings.long == "split":
            raise TrainingError(
                "preprocess={'long': 'split'} splits texts, but not pairs of answers"
            )

    def _encode_pair(self, where: str, texts: Texts) -> Iterator[_Example]:
        """Yield the tokens of a prompt, and those of its completion with the end token."""
        prompt, places = self.tokenizer.locate_tokens(texts.prompt)
        completion = self.tokenizer.encode_target(texts.answers[0])
        pair = {"prompt": (texts.prompt, prompt), "completion": (texts.answers[0], completion)}
        for name, (text, ids) in pair.items():
            if not text:
                raise TrainingError(f"{where} has an empty {name}")
            self._check(f"the {name} of {where}", ids, least=1)
        longest = max(len(prompt), len(completion))
        if longest > self.limit and self._check_long(where, longest, "cut") == "skip":
            return
        # as transformers cuts texts, which keep the tokens that the tokenizer ends them with
        ends = int((places[::-1, 1] > 0).argmax())
        cut = min(self.limit, len(prompt)) - ends
        yield np.append(prompt[:cut], prompt[len(prompt) - ends :]), completion[: self.limit]

    def _encode(
        self, where: str, row: Mapping[str, Any], texts: Texts, images: RowImages | None
    ) -> Iterator[_Example]:
        """Yield the tokens and labels of examples, int64[n] both."""
        if texts.is_chat:
            yield from self._encode_chat(where, row, texts, images)
            return
        (answer,) = texts.answers
        if not answer:
            name = "completion" if texts.prompt else "text"
            raise TrainingError(f"{where} has an empty {name}")
        text = texts.prompt + answer
        ids, places = self._locate(text, images, special=True)
        first = np.flatnonzero(self._reach(ids, places, len(texts.prompt)))
        ids = self.tokenizer.append_end(text, ids)
        start = 0 if self.settings.loss == "all" else first[0] if len(first) else len(ids)
        yield ids, self._hide_images(ids, np.where(np.arange(len(ids)) < start, self.ignored, ids))

    def _locate(
        self, text: str, images: RowImages | None, special: bool, whole: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, with those of its images, and their spans in it."""
        ids, places = self.tokenizer.locate_tokens(text, special=special)
        if self.images is None or images is None:
            return ids, places
        return self.images.expand(ids, places, images, whole=whole)

    def _reach(self, ids: np.ndarray, places: np.ndarray, start: int) -> np.ndarray:
        """Find the tokens that reach beyond a place in a text, bool[n].

        A special token before it does not, though it may take the spaces behind it (`rstrip`).
        """
        before = np.isin(ids, self.tokenizer.special_tokens) & (places[:, 0] < start)
        return (places[:, 1] > start) & ~before

    def _hide_images(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return labels without the tokens that stand for images."""
        if self.images is None:
            return labels
        return np.where(ids == self.images.token, self.ignored, labels)

    def _encode_chat(
        self, where: str, row: Mapping[str, Any], texts: Texts, images: RowImages | None
    ) -> Iterator[_Example]:
        messages = [*texts.prompt, *texts.answers[0]]
        if not messages:
            raise TrainingError(f"{where} has no messages")
        for number, message in enumerate(messages, 1):
            what, weight = f"{where}: the weight of message {number}", message.get(KEY)
            require(what, weight, weight in (None, 0, 1), "0 or 1", TrainingError)
        counts_all, ends = self.settings.loss == "all", self.tokenizer.ends
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        ignored = [i for i in turns if messages[i].get(KEY) == 0]
        learned = [i for i in turns if i >= len(texts.prompt) and i not in ignored]
        roles = [message["role"] for message in messages]
        if not (counts_all or learned):
            raise TrainingError(
                f"{where} has no message of the assistant, whose tokens would be learned, but "
                f"messages of {', '.join(dict.fromkeys(map(repr, roles)))}; columns={{...: "
                "'assistant'}} renames a role, and preprocess={'loss': 'all'} learns all of them"
            )
        self.empty += sum(
            not any(messages[i].get(key) for key in ("content", "tool_calls", *REASONING))
            for i in learned
        )
        variables = self._read_variables(where, row)
        templates = self.tokenizer.templates
        chat, writes_calls = templates.fit_calls(Chat(messages, variables, where))
        self.unwritten += not writes_calls
        keys = templates.find_unread_keys(chat, {KEY, *self.unread_keys})
        self.unread_keys |= dict.fromkeys(keys)
        chats = self.tokenizer.write_chats(chat, ignored if counts_all else learned)
        if counts_all and len(chats) > 1:
            raise TrainingError(
                f"{where}: the chat template writes a message of weight 0 differently when others "
                "follow, so preprocess={'loss': 'all'} cannot leave it out"
            )
        for other, _, _ in chats[1:]:
            self.others[sum(m["role"] == "assistant" for m in other.messages)] += 1
        for chat, text, parts in chats:
            if not (parts or counts_all):
                continue
            whole = len(chat.messages) == len(messages)
            ids, places = self._locate(text, images, special=False, whole=whole)
            inside = np.zeros(len(ids), bool)
            for start, stop in parts:  # a token that reaches into a part counts
                inside |= self._reach(ids, places, start) & (places[:, 0] < stop)
            labels = np.where(inside ^ counts_all, ids, self.ignored)
            for start, stop in [(0, len(text))] if counts_all else parts:
                if not ends or self.tokenizer.is_ended(text[start:stop]):
                    continue
                behind = int((places[:, 0] < stop).sum())
                if behind < len(places):  # a runtime ends here, and goes on with the next message
                    labels[behind] = ids[behind] if ids[behind] in ends else ends[0]
                    self.open += ids[behind] not in ends
                elif chat.messages[-1]["role"] == "assistant" and labels[-1] != self.ignored:
                    token = self.tokenizer.find_end(chat, text)
                    ids, labels = np.append(ids, token), np.append(labels, token)
                    self.open += 1
            yield ids, self._hide_images(ids, labels)

    def _read_variables(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the chat template that a row has, lists also as JSON text."""
        try:
            *names, others = (
                json.loads(value) if isinstance(value := row.get(name), str) else value
                for name in VARIABLES
            )
            columns = zip(VARIABLES, names, strict=False)
            variables = {
                **(others or {}),
                **{n: value for n, value in columns if value is not None},
            }
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"{where}: tools and documents must be lists, and chat_template_kwargs an object "
                f"({error})"
            ) from error
        self.unread |= dict.fromkeys(self.tokenizer.templates.find_unread(variables))
        return variables

    def _check(self, where: str, ids: np.ndarray, least: int = 2) -> None:
        if len(ids) < least:
            way = ": there is no next one to predict" if least > 1 else ""
            raise TrainingError(f"{where} has {len(ids)} tokens{way}")
        if self.vocabulary is not None and ids.max() >= self.vocabulary:
            token = ids[ids >= self.vocabulary][0]
            raise TrainingError(
                f"{where}: the token {self.tokenizer.name(token)} is {token}, and the model scores "
                f"{self.vocabulary}: tokenizer.json, with {self.tokenizer.size} tokens, is of "
                "another model, or this one scores classes of tokens: pass it arrays, "
                "{'input_ids': ..., 'labels': ...}"
            )

    def _fit(
        self, where: str, shape: Shape, ids: np.ndarray, labels: np.ndarray
    ) -> Iterator[_Example]:
        """Yield the tokens and labels of an example, cut or split to the limit."""
        self._check(where, ids)
        counts = labels != self.ignored
        if len(ids) <= self.limit:
            yield ids, labels
            return
        how = self._check_long(where, len(ids), "split" if shape.is_plain else "cut")
        if how == "skip":
            return
        if how == "cut" and not counts[1 : self.limit].any():
            raise TrainingError(
                f"{where} has {np.flatnonzero(counts)[0]} tokens before those of the loss, and the "
                f"limit is {self.limit} tokens: pass a larger preprocess={{'max_length': ...}}"
                " or a shorter prompt"
            )
        if self.images is not None and (ids[self.limit :] == self.images.token).any():
            raise TrainingError(
                f"{where} has tokens of an image behind the limit of {self.limit} tokens: pass a "
                "larger preprocess={'max_length': ...}, or 'long': 'skip'"
            )
        last = self.limit if how == "cut" else len(ids) - 1
        for start in range(0, last, self.limit):
            yield ids[start : start + self.limit], labels[start : start + self.limit]

    def _check_long(self, where: str, length: int, usual: str) -> str:
        """Count a text that is too long, and choose "cut", "split" or "skip" for it.

        Raises:
          TrainingError: the setting is "refuse".
        """
        how = self.settings.long or usual
        if how == "refuse":
            raise TrainingError(f"{where} has {length} tokens, more than {self.limit}")
        self.long[how] += 1
        return how

    def _list_notes(self) -> list[str]:
        turns = [f"number {n} of {format_count(k, 'chat')}" for n, k in sorted(self.others.items())]
        turns[_SHOWN:] = ["..."] * (len(turns) > _SHOWN)
        done = [f"{n} {'skipped' if how == 'skip' else how}" for how, n in self.long.items()]
        ends, stops = self.tokenizer.folder.end_tokens
        notes = (
            (
                done,
                f"texts of more than {self.limit} tokens: {' and '.join(done)} "
                "(preprocess={'max_length': ..., 'long': 'cut', 'split', 'skip' or 'refuse'})",
            ),
            (
                self.equal,
                f"pairs whose answers are equal in their first {self.limit} tokens, and which thus "
                "teach no preference "
                f"(preprocess={{'max_length': ...}}): {self.equal}",
            ),
            (self.dropped, f"examples left out, of which the loss counts no token: {self.dropped}"),
            (self.unread, f"columns that nothing reads: {', '.join(map(repr, self.unread))}"),
            (
                self.unread_keys,
                f"keys of messages that nothing reads: {', '.join(map(repr, self.unread_keys))}; "
                'a message that is not to be learned has "weight" 0',
            ),
            (
                self.others,
                f"messages of the assistant in examples of their own: {self.others.total()}, with "
                "those before, as the chat template writes them, or what they answer, differently "
                f"when others follow ({', '.join(turns)}); the others are in whole chats",
            ),
            (
                self.open,
                "messages of the assistant without an end token directly behind them in the chat "
                f"template: {self.open}; it is the label there, or appended to the chat",
            ),
            (
                self.empty,
                f"messages of the assistant that are empty: {self.empty}; they teach to end at "
                'once, unless they have "weight": 0',
            ),
            (
                self.unwritten,
                "chats with calls of tools whose arguments the chat template does not write: "
                f"{self.unwritten}",
            ),
            (
                not self.tokenizer.ends and self.tokenizer.mask_token is None,
                "the end of texts is not learned: the folder names no end token (eos_token in "
                "tokenizer_config.json, eos_token_id in generation_config.json)",
            ),
            (
                stops and ends[0] not in stops,
                f"texts end with the tokenizer's end token {[*ends[:1]]}, at which runtimes do not "
                "stop: add it to eos_token_id in generation_config.json or genai_config.json",
            ),
            *(
                (True, f"{name}: {count['texts']} texts in {count['rows']} rows")
                for name, count in self.packed.items()
            ),
        )
        return [text for applies, text in notes if applies]


def read_weight(where: str, row: Mapping[str, Any]) -> float:
    """Return the weight of a row, which is 1 by default."""
    weight = 1 if row.get(KEY) is None else row[KEY]
    if isinstance(weight, str):  # a cell of a .csv file
        with suppress(ValueError):
            weight = float(weight)
    fits = isinstance(weight, int | float | np.number) and 0 <= weight < np.inf
    require(f"{where}: weight", weight, fits, "a number of at least 0", TrainingError)
    return float(weight)


# Pack short texts into rows of nearly equal length.


def pack_texts(
    tokens: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    capacity: int,
    ignored: int,
    number: Callable[[Sequence[int]], np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Concatenate short texts to rows of at most `capacity` tokens.

    The first label of each text is ignored: the last token of the text before would predict it.

    Args:
      tokens, labels: of each text.
      capacity: the most tokens of a row.
      ignored: the label that losses ignore.
      number: a function of the lengths of a row's texts that returns, for each token, the number by
        which the model tells texts apart.

    Returns:
      For each row the tokens, the labels, and the results of `number`.
    """
    rows, numbers, targets = [], [], []
    for chosen in fit_rows([len(ids) for ids in tokens], capacity):
        rows.append(np.concatenate([tokens[i] for i in chosen]))
        numbers.append(number([len(tokens[i]) for i in chosen]))
        first = (np.concatenate([[ignored], labels[i][1:]]) for i in chosen)
        targets.append(np.concatenate([*first]))
    return rows, targets, numbers


def fit_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign texts to rows by best-fit-decreasing bin packing.

    Longest texts first, each goes into the fullest row that has room for it. Johnson,
    "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest rows, plus one.

    Returns:
      The numbers of the texts of each row.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(spaces, (lengths[i], -1))
        space, row = spaces.pop(place) if place < len(spaces) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(spaces, (space - lengths[i], row))
    return rows
