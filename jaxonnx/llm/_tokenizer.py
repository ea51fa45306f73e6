"""The tokenizer of a language model's folder, and the chats that its templates write.

`tokenizer.json` is read by the package tokenizers.
"""

from __future__ import annotations

import filecmp
import functools
import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxonnx._data.kinds import to_python
from jaxonnx._files import wrap_errors
from jaxonnx._require import describe
from jaxonnx.errors import InputError, TrainingError, warn
from jaxonnx.llm._chat_templates import MARK, Chat, ChatTemplates, import_package, take_marks
from jaxonnx.llm._folders import ModelFolder
from jaxonnx.llm._shapes import is_chat, to_messages

_TRANSFORMERS = {"max_length", "padding", "return_assistant_tokens_mask", "return_dict"}
_TRANSFORMERS |= {"return_tensors", "sanitize_control_tokens", "tokenizer_kwargs", "truncation"}
"""Arguments of transformers' `apply_chat_template` that say what becomes of the tokens."""
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts whose spaces transformers drops (`clean_up_tokenization_spaces`), one after the other."""
_SPACES = "\u0120", "\u2581", "\u010a", "\u0109", "\u010d"
"""Spaces of byte-level BPE and SentencePiece, and line breaks and tabs of the former."""


def clean_up(text: str) -> str:
    """Drop spaces before punctuation and contractions, as transformers does.

    >>> clean_up("I do n't , it ' s .")
    "I don't, it's."
    """
    for spaced in _CLEANED:
        text = text.replace(spaced, spaced.strip())
    return text


def count_cleaned(text: str) -> int:
    """Return the length of the beginning that is cleaned up alike, whatever follows the text."""
    end = text.rfind(" ")
    while end > 0 and text[:end].endswith((" ", " '", " n")):  # which what follows completes
        end = text.rfind(" ", 0, end)
    return max(end, 0)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """The tokenizer and chat template of a model's folder."""

    folder: ModelFolder

    @functools.cached_property
    def _tokens(self) -> Any:
        path, text = self.folder.path / "tokenizer.json", self.folder.changed.get("tokenizer.json")
        if text is None and not path.is_file():
            raise TrainingError(
                f"'{self.folder.path}' has no tokenizer.json, by which texts become tokens; "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it "
                "where the tokenizer is_fast; of others (PhoBERT's) pass tokens, {'input_ids': ...}"
            )
        tokenizers = import_package("tokenizers")
        # the package raises nothing narrower than Exception
        with wrap_errors(f"'{path}' is not a tokenizer, or is damaged", TrainingError, Exception):
            tokenizer = tokenizers.Tokenizer.from_str(text or path.read_text("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def add_tokens(
        self, tokens: Sequence[str], special: bool
    ) -> tuple[Tokenizer, dict[str, int], dict[str, int]]:
        """Add tokens as `add_tokens` of transformers does, with the ids that it gives them.

        A token is found as a whole wherever its text occurs.

        Args:
          tokens: their texts.
          special: whether they are no text, as end tokens are.

        Returns:
          The tokenizer, the new tokens, and those of `tokens` that it has already, by their texts.

        Raises:
          TrainingError: the folder has no tokenizer.json.
        """
        ids = {text: self._tokens.token_to_id(text) for text in tokens}
        present = {text: token for text, token in ids.items() if token is not None}
        form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
        form |= {"special": special}
        added = type(self._tokens).from_str(self._tokens.to_str())
        kind = import_package("tokenizers").AddedToken
        added.add_tokens([kind(text, **form) for text in tokens if text not in present])
        new = {text: added.token_to_id(text) for text in tokens if text not in present}
        entries = [{"id": token, "content": text, **form} for text, token in new.items()]
        files = {"tokenizer.json": self.folder.read_json("tokenizer.json")}
        listed = files["tokenizer.json"].get("added_tokens") or []
        files["tokenizer.json"]["added_tokens"] = [*listed, *entries]
        if "added_tokens_decoder" in self._settings:  # which transformers 5 does not write
            more = {str(token): {"content": text, **form} for text, token in new.items()}
            decoder = {**self._settings["added_tokens_decoder"], **more}
            files["tokenizer_config.json"] = {**self._settings, "added_tokens_decoder": decoder}
        if older := self.folder.read_json("added_tokens.json"):
            files["added_tokens.json"] = older | new
        return Tokenizer(self.folder.with_json(files)), new, present

    @property
    def size(self) -> int:
        """The number of tokens, added ones included."""
        return self._tokens.get_vocab_size(with_added_tokens=True)

    @property
    def last(self) -> int:
        """The largest token, added ones included."""
        return max(self._tokens.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, special: bool = True, end: bool = True) -> np.ndarray:
        """Convert a text to tokens, int64[n]; the arguments are those of `locate_tokens`."""
        return self.locate_tokens(text, special, end)[0]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Write messages by a chat template of the folder, as training does.

        Args:
          messages: dicts with a role and content.
          add_generation_prompt: whether to begin the next message of the assistant.
          continue_final_message: whether to end within the last message, which is to be continued:
            True behind its content, or the key of another text, like "reasoning_content".
          tokenize: whether to return tokens, int64[n]; otherwise the text.
          **variables: "tools", "documents" and others that the template reads; a warning names
            those that it does not read. "chat_template" is the name of a template of the folder,
            or the text of one; by default "tool_use" if there are tools and such a template, else
            "default".

        Raises:
          TrainingError: there is no template, or it fails.
          InputError: an argument of transformers' that has no meaning here.
        """
        if not is_chat(messages):
            raise InputError(
                "messages must be a list of dicts with a role and content, of at least one, got "
                f"{describe(messages)}"
            )
        variables = to_python(variables)
        chat = Chat(to_messages(messages, {}), variables, "the chat")
        unread = self.templates.find_unread(variables)
        if refused := [name for name in unread if name in _TRANSFORMERS and variables[name]]:
            raise InputError(
                f"{', '.join(refused)}: apply_chat_template returns the tokens of one chat, "
                "int64[n], and takes no such arguments of transformers"
            )
        if unread := [name for name in unread if name not in _TRANSFORMERS]:
            warn(
                f"variables that the chat template does not read: {', '.join(unread)}",
            )
        chat, writes_calls = self.templates.fit_calls(chat)
        if not writes_calls:
            warn("the chat template does not write the arguments of calls of tools")
        if not continue_final_message:
            text, _ = take_marks(self.templates.render(chat, add_generation_prompt))
        elif add_generation_prompt:
            raise InputError("continue_final_message and add_generation_prompt exclude each other")
        else:
            key = "content" if continue_final_message is True else continue_final_message
            text = self.templates.render_open(chat, key)
        return self.encode(text, special=False) if tokenize else text

    def locate_tokens(
        self, text: str, special: bool = True, end: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, int64[n], and their spans in it, int64[n, 2].

        Args:
          text: the text.
          special: whether to add the tokens that the post-processor begins and ends texts with. A
            text that has them itself gets no second ones.
          end: whether to keep an end token of the post-processor. A prompt is continued without it.
        """
        encoding = self._tokens.encode(text, add_special_tokens=special)
        ids = np.array(encoding.ids, np.int64)
        added = np.array(encoding.special_tokens_mask, bool)
        start, stop = 0, len(ids)
        if len(body := np.flatnonzero(~added)):
            start = body[0] if ids[body[0]] == ids[0] else 0
            doubled = text.rstrip().endswith(self._tokens.id_to_token(int(ids[-1])))
            stop = body[-1] + 1 if doubled else stop
        while not end and stop - start > 1 and added[stop - 1] and ids[stop - 1] in self.ends:
            stop -= 1
        if (language := self._language) is not None:
            ids[added & (ids == language)] = self._find_language("src_lang", language)
        return ids[start:stop], np.array(encoding.offsets, np.int64).reshape(-1, 2)[start:stop]

    def encode_target(self, text: str) -> np.ndarray:
        """Convert a text that the decoder behind an encoder writes to tokens, int64[n].

        As in transformers' `text_target`, a tokenizer that marks the language of texts (mBART,
        NLLB) marks that of `tgt_lang` in `tokenizer_config.json`, or else of `forced_bos_token_id`.

        Raises:
          TrainingError: the tokenizer marks languages, and neither is there; or it is Marian's,
            which splits completions by pieces that tokenizer.json lacks.
        """
        if self._has_pieces_of_targets:
            raise TrainingError(
                f"the tokenizer in '{self.folder.path}' is Marian's, which splits completions by "
                "the pieces of target.spm, and tokenizer.json has those of source.spm alone; take "
                "'input_ids' and 'labels' as tokens from transformers: "
                "the argument text_target of MarianTokenizer takes completions"
            )
        ids, language = self.encode(text), self._language
        if language is None:
            return self.append_end(text, ids)
        files = map(self.folder.read_json, ("generation_config.json", "config.json"))
        forced = (file.get("forced_bos_token_id") for file in files)
        target = self._find_language("tgt_lang", next(filter(None, forced), None))
        if target is None:
            raise TrainingError(
                f"the tokenizer in '{self.folder.path}' marks the language of a text, like "
                f'{self.name(language)}, and nothing names that of completions: set "tgt_lang" in '
                "tokenizer_config.json"
            )
        return np.where(ids == self._find_language("src_lang", language), target, ids)

    def append_end(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Append the end token to the tokens of a text that has none."""
        ended = np.isin(ids[-1:], self.ends).any() or self.is_ended(text)
        return ids if ended else np.append(ids, np.array(self.ends[:1], np.int64))

    @functools.cached_property
    def _has_pieces_of_targets(self) -> bool:
        """Whether tokenizer.json, of one language, is half of a tokenizer of Marian's."""
        kind = self._settings.get("tokenizer_class") or ""
        model = self.folder.read_json("config.json").get("model_type")
        if not kind.startswith("Marian") and model != "marian":
            return False
        files = [self.folder.path / name for name in ("source.spm", "target.spm")]
        return not (all(map(Path.is_file, files)) and filecmp.cmp(*files, shallow=False))

    @functools.cached_property
    def _language(self) -> int | None:
        """The token by which the post-processor marks the language of a text, if it does."""
        if not {"src_lang", "tgt_lang"} & self._settings.keys():
            return None
        named = {*self.ends, *map(self._tokens.token_to_id, self.special.values())}
        return next((i for i in self._tokens.encode("").ids if i not in named), None)

    def _find_language(self, setting: str, otherwise: int | None) -> int | None:
        """Return the token of a language that `tokenizer_config.json` names."""
        token = self._tokens.token_to_id(self._settings.get(setting) or "")
        return otherwise if token is None else token

    def encode_segments(
        self, texts: Sequence[str], limit: int
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Convert a text, or the two of a pair, to tokens as transformers does.

        Args:
          texts: one or two.
          limit: the most tokens. Longer texts are cut between the special tokens, the longer one of
            a pair first, on the side that `tokenizer_config.json` says.

        Returns:
          The tokens, int64[n]; the segment of each, int64[n]; whether the texts were cut.

        Raises:
          TrainingError: the limit leaves no room beside the special tokens.
        """
        tokenizer = self._cutting
        if (tokenizer.truncation or {}).get("max_length") != limit:
            side = self._settings.get("truncation_side", "right")
            with wrap_errors(f"preprocess: max_length {limit}", TrainingError, Exception):
                tokenizer.enable_truncation(limit, strategy="longest_first", direction=side)
        encoding = tokenizer.encode(*texts)
        ids, segments = (np.array(x, np.int64) for x in (encoding.ids, encoding.type_ids))
        return ids, segments, bool(encoding.overflowing)

    @functools.cached_property
    def _cutting(self) -> Any:
        """A tokenizer of its own, which cuts texts."""
        return type(self._tokens).from_str(self._tokens.to_str())

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, special ones included."""
        text = self.decode_part(ids)
        return clean_up(text) if self.cleans_up else text

    def decode_part(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens with all spaces, to which that of others is added."""
        return self._tokens.decode([int(i) for i in ids], skip_special_tokens=False)

    @functools.cached_property
    def cleans_up(self) -> bool:
        """Whether texts go without spaces before punctuation and contractions (`clean_up`).

        As in transformers 5, the setting alone does not count for BPE, which keeps spaces.
        """
        setting, is_bpe = "clean_up_tokenization_spaces", type(self._tokens.model).__name__ == "BPE"
        forced = self._settings.get(f"{setting}_for_bpe_even_though_it_will_corrupt_output")
        return bool(self._settings.get(setting) and (forced or not is_bpe))

    def name(self, token: int) -> str:
        return repr(self._tokens.id_to_token(int(token)))

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        return self.folder.read_json("tokenizer_config.json")

    @functools.cached_property
    def special(self) -> dict[str, str]:
        """The special tokens by their roles, like "eos_token".

        As in transformers, a model's own ones count (`extra_special_tokens`), and for folders of
        older versions, whose tokenizer_config.json lists no tokens, special_tokens_map.json.
        """
        settings = dict(self._settings)
        if "added_tokens_decoder" not in settings:
            settings |= self.folder.read_json("special_tokens_map.json")
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(added := settings.get(key), Mapping):
                settings |= added
        tokens = {}
        for name, value in settings.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
        return tokens

    @functools.cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that are no text."""
        added = self._tokens.get_added_tokens_decoder()
        named = map(self._tokens.token_to_id, self.special.values())
        return sorted({*(i for i, token in added.items() if token.special), *named} - {None})

    @property
    def mask_token(self) -> int | None:
        """The token that hides others in masked language models, if there is one."""
        names = (self.special.get("mask_token", "[MASK]"), "[MASK]", "<mask>")
        ids = map(self._tokens.token_to_id, names)
        return next((i for i in ids if i is not None), None)

    def find_tokens(self, roles: Sequence[str]) -> tuple[list[int], ...]:
        """Return the token of each role that `special` has, in lists, which may be empty."""
        ids = (self._tokens.token_to_id(self.special.get(role, "")) for role in roles)
        return tuple([] if i is None else [i] for i in ids)

    @functools.cached_property
    def continues(self) -> np.ndarray | None:
        """Whether each token goes with the one before it to a word, bool[tokens].

        WordPiece marks tokens within words ("##s"), byte-level BPE and SentencePiece the space
        before a word. None if the tokenizer marks neither.
        """
        texts = [self._tokens.id_to_token(i) or "" for i in range(self.size)]
        prefix = json.loads(self._tokens.to_str())["model"].get("continuing_subword_prefix")
        if prefix:
            return np.array([text.startswith(prefix) for text in texts])
        begins = np.array([text.startswith(_SPACES) for text in texts])
        begins[self.special_tokens] = True
        return ~begins if any(text.startswith(_SPACES[:2]) for text in texts) else None

    @functools.cached_property
    def ends(self) -> list[int]:
        """The tokens that end a text. The first one is appended to texts for training."""
        return [*self.folder.end_tokens[0]]

    def is_ended(self, text: str) -> bool:
        """Check whether a text ends with one of the tokens that end texts, and spaces."""
        return text.rstrip().endswith(self._end_texts)

    def _drop_last_end(self, text: str) -> str:
        """Return a text without the token that ends it, if there is one."""
        text = text.rstrip()
        end = next((end for end in self._end_texts if text.endswith(end)), "")
        return text.removesuffix(end)

    @functools.cached_property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(filter(None, map(self._tokens.id_to_token, self.ends)))

    @functools.cached_property
    def templates(self) -> ChatTemplates:
        """The chat templates of the folder."""
        return ChatTemplates(self.folder, self.special)

    def write_chats(
        self, chat: Chat, chosen: Sequence[int]
    ) -> list[tuple[Chat, str, list[tuple[int, int]]]]:
        """Write a chat by the chat template, and find messages of the assistant in it.

        These are the `generation` blocks of the template. If it has none, a message is what the
        template adds to those before it, behind the beginning of the assistant's message
        (`add_generation_prompt`). A message that the template writes differently when others follow
        (without its thoughts) is in another chat, which ends with that message. So is one whose
        prompt the template writes differently once it is answered; it stands behind that prompt.

        Args:
          chat: the messages.
          chosen: the indices of the messages to find, all of the assistant.

        Returns:
          The whole chat, and those that end with an earlier message, each with its text, and the
          (start, stop) of the chosen messages in it.

        Raises:
          TrainingError: the template fails, or its blocks are not those of messages.
        """
        messages = chat.messages
        whole, blocks = take_marks(self.templates.render(chat))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts, others = [], []
        if len(blocks) == len(turns):
            parts = [block for i, block in zip(turns, blocks, strict=True) if i in chosen]
        elif blocks and len(chosen) in (0, len(turns)):
            parts = blocks if chosen else []
        elif blocks:
            raise TrainingError(
                f"{chat.where}: the chat template has {len(blocks)} generation blocks for "
                f"{len(turns)} messages of the assistant, so those to learn cannot be told apart"
            )
        for i in () if blocks else chosen:
            text = self.templates.render(chat.until(i + 1))
            before = self.templates.render(chat.until(i), more=True) if i else ""
            if not (before and text.startswith(before)):
                # the assistant begins the chat, or begins with a thought that this message lacks
                plain = isinstance(messages[i].get("content"), str | None)
                mark = MARK if plain else [{"type": "text", "text": MARK}]
                header = {k: messages[i][k] for k in ("role", "name") if k in messages[i]}
                marked = self.templates.render(chat.until(i, {**header, "content": mark}))
                prompt = before
                before = os.path.commonprefix([text, marked])  # noqa: RUF071 (of characters)
                request = self._drop_last_end(self.templates.render(chat.until(i))) if i else ""
                if not text.startswith(request):  # Mistral's system prompt is only in a request
                    answer = text[_find_end(before, prompt) :]
                    part = len(prompt), len(prompt + answer)
                    others.append((chat.until(i + 1), prompt + answer, [part]))
                    continue
            inside = self._drop_last_end(text)  # Phi-3 ends a message, and then the chat
            if whole.startswith(text) or (self.is_ended(inside) and whole.startswith(inside)):
                parts.append((len(before), len(text if whole.startswith(text) else inside)))
            else:
                others.append((chat.until(i + 1), text, [(len(before), len(text))]))
        return [(chat, whole, parts), *others]

    def find_end(self, chat: Chat, text: str) -> int:
        """Return the end token for a chat: the mark of the next role if it is one, as GLM's is."""
        role = "tool" if chat.messages[-1].get("tool_calls") else "user"
        try:
            longer = self.templates.render(
                chat.until(len(chat.messages), {"role": role, "content": ""})
            )
        except TrainingError:  # as a template may want the name of the tool
            longer = ""
        behind = longer[len(text) :] if longer.startswith(text) else ""
        mark = next((end for end in self._end_texts if behind.startswith(end)), None)
        return self.ends[0] if mark is None else self._tokens.token_to_id(mark)


def _find_end(text: str, prompt: str) -> int:
    """Return the end in a text of the longest part of it that ends a prompt, too."""
    lengths = range(1, len(prompt) + 1)
    longest = bisect_left(lengths, True, key=lambda n: prompt[-n:] not in text)
    return text.rindex(prompt[len(prompt) - longest :]) + longest
