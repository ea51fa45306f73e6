"""Generate tokens with a decoder and its caches, one compiled step for each.

The caches have room for all tokens from the beginning, so that each step has the same shapes, and a
step updates them in place. Their room and the width of prompts are rounded up to powers of two: the
next turn of a chat needs no new program, and where it begins with tokens that the caches of the
last call have, only the others are computed. An operator that takes the length of its past from the
mask (GroupQueryAttention) finds the tokens at the beginning of that room; where caches are joined
to the new token (Concat, Attention), they stand at its end, and the mask hides what is before them,
or where there is no mask, a view of the graph (`_caches.PaddedCaches`). Where none fits, or without
caches, all tokens are computed again in each step. If the decoder has an encoder, that reads the
prompts, once, and the continuation is what the decoder writes from its first token on.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._arrays import allow_promotion, make_key
from jaxonnx._require import describe, require, require_integer
from jaxonnx._rewrite.network import Network
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError, TrainingError, warn
from jaxonnx.llm._caches import SHIFT, VISIBLE, EmptyCaches, SharedCaches, omit_caches
from jaxonnx.llm._decoder import Decoder, Side, find_head_input
from jaxonnx.llm._images import encode_chat, is_open, stack_images
from jaxonnx.llm._sampling import Sampling, choose_tokens, stop_tokens
from jaxonnx.llm._shapes import is_chat
from jaxonnx.llm._tokenizer import Tokenizer, clean_up, count_cleaned
from jaxonnx.llm._tokens_and_logits import DECODER_TOKENS, AllSteps
from jaxonnx.lowering import jit
from jaxonnx.views import Outputs, Part

_LEAST = 16
"""The smallest width of prompts and room of caches."""
_LEAST_NEW = 32
"""The smallest width of tokens that are added to the caches of a conversation."""
_COMPARISONS = {"Greater": 1, "LessOrEqual": 1, "GreaterOrEqual": 0, "Less": 0}
"""By operator, the place of a number, the last length that counts as not longer."""
_SAME_LENGTH = ("Cast", "Gather", "Identity", "Slice", "Squeeze", "Unsqueeze")
"""Operators between the shape of an input and one of its sizes."""
_INCOMPLETE = "\ufffd"
"""The replacement of tokenizers for a part of a character."""


@dataclass
class Continuation:
    """The new tokens of one prompt, up to a stop.

    Attributes:
      stops: the tokens that end it.
      texts: the texts that end it.
      decode: converts tokens to text; not needed for tokens alone.
      room: the most tokens.
      cleans_up: whether `clean_up` changes the text.
      tokens: those so far, with that which ended it.
      ended: whether a token or a text has ended it.
    """

    stops: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    room: int = 0
    cleans_up: bool = False
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    _held: str = ""
    """Text that may be the beginning of a stop."""
    _open: str = ""
    """Text that is to be cleaned up with what follows."""
    _before: Sequence[int] = ()
    """Tokens of the text that is continued."""
    _places: tuple[int, int] = 0, 0
    """The tokens from the first place on are decoded, of which those before the second one were."""

    def continue_text(self, tokens: Sequence[int]) -> None:
        """Decode behind the tokens of a text, as some tokenizers drop the space of a first one."""
        self._before, self._places = tokens, (0, len(tokens))

    @property
    def is_done(self) -> bool:
        return self.ended or len(self.tokens) >= self.room

    def add(self, token: int) -> str:
        """Add a token, unless this has ended; return the text that is certain by now.

        It has whole characters only, and nothing of a text or token that ends it.
        """
        if self.is_done:
            return ""
        self.tokens.append(token)
        self.ended = token in self.stops
        if self.decode is None:
            return ""
        self._open += "" if self.ended else self._decode_new(self.decode)
        text = self._held + (clean_up(self._open) if self.cleans_up else self._open)
        ends = [at for stop in self.texts if (at := text.find(stop)) >= 0]
        if ends:
            self.ended, text = True, text[: min(ends)]
        if self.is_done:
            return text
        if self.cleans_up:
            end = count_cleaned(self._open)
            text, self._open = self._held + clean_up(self._open[:end]), self._open[end:]
        else:
            self._open = ""
        self._held = self._find_beginning(text)
        return text.removesuffix(self._held)

    def _decode_new(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text that the last tokens add; nothing if a character is not whole yet.

        The tokens before are decoded with them.
        """
        start, stop = self._places
        tokens = [*self._before, *self.tokens]
        before, text = decode(tokens[start:stop]), decode(tokens[start:])
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return ""
        self._places = stop, len(tokens)
        return text[len(before) :]

    def _find_beginning(self, text: str) -> str:
        """Return the longest end of a text that a stop begins with."""
        longest = max((len(stop) for stop in self.texts), default=1) - 1
        ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        return next((end for end in ends if any(s.startswith(end) for s in self.texts)), "")

    def follow(self, row: np.ndarray) -> np.ndarray:
        """Return the tokens of a prompt, and these behind them."""
        return np.append(row, self.tokens).astype(row.dtype)


class _ConversationCaches(NamedTuple):
    """The caches of a conversation, and the tokens in them."""

    tokens: np.ndarray
    past: dict[str, jax.Array]

    def count_shared(self, row: np.ndarray) -> int:
        """Count the tokens at the beginning that a longer row shares."""
        length = min(len(self.tokens), len(row) - 1)
        differs = self.tokens[:length] != row[:length]
        return int(differs.argmax()) if differs.any() else length

    def is_beyond(self, ends: Sequence[int], length: int) -> bool:
        """Check whether the caches are of other tables than those of a length."""
        least, most = sorted((len(self.tokens), length))
        return any(least <= end < most for end in ends)


@dataclass(frozen=True, eq=False)
class Generator(Decoder):
    """Generate continuations of token rows by a model, with one program for each shape."""

    def __call__(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        prompts: Sequence[Any],
        count: int,
        stop: Sequence[int] = (),
        pixels: Any = None,
    ) -> list[np.ndarray]:
        """Return each prompt with its most likely continuation, up to a token of `stop`."""
        rows, source = self.read_prompts(params, state, prompts, pixels=pixels)
        written = [Continuation(frozenset(stop)) for _ in rows]
        for _ in self.extend(params, state, rows, source, written, count):
            pass
        return [part.follow(row) for row, part in zip(rows, written, strict=True)]

    def read_prompts(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        prompts: Sequence[Any],
        beginning: Sequence[int] | None = None,
        pixels: Any = None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return rows of tokens to continue, and the inputs of an encoder.

        `pixels` are those of the images in the prompts of a vision-language model.

        An encoder-decoder model reads the prompts by its encoder, tokens or features; the decoder
        starts from the tokens of `beginning`, or those of its folder.

        Raises:
          InputError: the model is not a decoder, or does not take such prompts.
        """
        rows = [np.asarray(prompt) for prompt in prompts]
        if self._features is not None:
            self._check_features(self._features, rows)
            dtype = jax.dtypes.canonicalize_dtype(self._features.dtype)
            source = {self._features.name: jnp.asarray(np.stack(rows), dtype)}
        else:
            self._check_tokens(rows)
            if not self._sources:
                if beginning is not None:
                    raise InputError("decoder_prompt= is for an encoder with a decoder")
                return rows, self._feed_images(rows, pixels)
            source = self._feed_encoder(*_pad(rows, max(map(len, rows)), False))
        if beginning is not None:
            self._check_tokens([np.asarray(beginning)], self._token_input)
            return [np.asarray(beginning)] * len(rows), source
        tokens, languages = self._decoder_prompt
        first = np.tile(np.array([-1 if t is None else t for t in tokens]), (len(rows), 1))
        if None in tokens:
            first[:, 1] = self._detect_languages(
                params, state, source, first[:, :1], np.array(languages)
            )
        return [*first], source

    @cached_property
    def _detect_languages(self) -> Callable[..., jax.Array]:
        """The most likely of some tokens [batch] behind others [batch, 1], compiled."""

        def detect(params, state, source, tokens, languages):
            encoded = self._encode(params, state, source)
            logits = self._run_whole(params, state, encoded, tokens, jnp.ones(len(tokens), int))
            return jnp.take(languages, logits[:, languages].argmax(-1))

        return jit(detect)

    def extend(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        rows: Sequence[np.ndarray],
        source: Mapping[str, Any],
        written: Sequence[Continuation],
        count: int,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
        seed: int = 0,
        keep: bool = False,
    ) -> Iterator[list[str]]:
        """Add tokens to continuations until all have ended; yield the new text of each.

        Args:
          rows, source: those of `read_prompts`.
          written: one for each row, empty.
          count: the most tokens of each; a row ends with the last position of the model, too, with
            a warning.
          keep: start from the caches of the last such call, as far as they have the only row, and
            leave them for the next one; params and state must be the same.
        """
        if len(sampling.tokens):
            what = "sequence_bias, bad_words_ids or forced_eos_token_id of generation_config.json"
            self._check_tokens([sampling.tokens], self._token_input, what)
        numbers = sampling.numbers(count)
        rooms = np.clip([self.positions - len(row) for row in rows], 0, count).tolist()
        for part, room in zip(written, rooms, strict=True):
            part.room = room
        steps = self._decode(
            params, state, rows, source, max(rooms), sampling.top_k, numbers, seed, keep
        )
        with closing(steps):
            for new in steps if max(rooms) else ():
                yield [part.add(token) for part, token in zip(written, new.tolist(), strict=True)]
                if all(part.is_done for part in written):
                    break
        if any(not part.ended and part.room < count for part in written):
            warn(
                f"the model has positions for {self.positions} tokens: a continuation ends there, "
                f"with fewer than max_new_tokens={count}",
            )

    def _decode(self, params, state, rows, source, count, top_k, numbers, *more):
        """Yield new tokens [batch], `count` times, as `_decode_within` does.

        Behind the last length that the tables of a file are for, all tokens are computed again with
        the next ones, as in onnxruntime-genai and transformers.
        """
        done = 0
        while done < count:
            width = max(map(len, rows))
            end = next((length for length in self._ends_of_tables if length >= width), None)
            part = count - done if end is None else min(count - done, max(end - width, 1))
            counted = {**numbers, "written": np.int32(done)} if done else numbers
            steps = self._decode_within(
                params, state, rows, source, part, top_k, counted, *more, end=end
            )
            with closing(steps):
                for new in steps:
                    if end is not None:
                        rows = [np.append(row, x) for row, x in zip(rows, new, strict=True)]
                    yield new
            done += part

    @cached_property
    def _ends_of_tables(self) -> list[int]:
        """The lengths behind which the file rotates positions by other tables (LongRoPE).

        The builder's Phi-3 chooses them by an If, which compares the size of the mask.
        """
        graph, result = self._program.graph, set()
        for node in graph.nodes:
            chosen = graph.producers.get(node.inputs[0]) if node.op.name == "If" else None
            name = "" if chosen is None else chosen.op.name
            if chosen is None or name not in _COMPARISONS:
                continue
            for side, other in ((0, 1), (1, 0)):
                length = self.model.tensors.get(chosen.inputs[other])
                source = graph.producers.get(chosen.inputs[side])
                while source is not None and source.op.name in _SAME_LENGTH:
                    source = graph.producers.get(source.inputs[0])
                if length is not None and source is not None and source.op.name == "Shape":
                    result.add(int(np.asarray(length).item()) - (_COMPARISONS[name] == side))
        return sorted(result)

    def _decode_within(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        rows: Sequence[np.ndarray],
        source: Mapping[str, Any],
        count: int,
        top_k: int | None,
        numbers: Mapping[str, Any],
        seed: int,
        keep: bool,
        end: int | None,
    ) -> collections.abc.Generator[np.ndarray]:
        """Yield new tokens [batch], `count` times; the next step runs while they are read.

        Args:
          end: the length behind which the file has other tables.
        """
        lengths = {len(row) for row in rows}
        width, is_open = max(lengths), not self._has_fixed_caches
        side = self._padding_side
        if width == end or (len(lengths) > 1 and (side == "hidden" or not is_open)):
            side = None
        # longer rows end before shorter ones, so no row needs more places than the model has
        most = self.positions if end is None else min(self.positions, end)
        size = max(width + (side is not None), min(_round_up(width + count), most))
        padded = width
        # fixed states of convolutions take padding for tokens, and so does what has no mask
        if side in ("before", "behind") and is_open:
            padded = max(width, min(_round_up(width), size - 1, self.positions))
        begin, step, resume = self._programs[side, top_k]
        more = params, state, source, numbers, make_key(seed)
        keep &= side in ("before", "behind") and is_open and len(rows) == 1
        session = self._latest_caches.pop("latest", None) if keep else None
        if session is not None and session.is_beyond(self._ends_of_tables, width):
            session = None
        start = 0 if session is None else session.count_shared(rows[0])
        added = max(_LEAST_NEW, _round_up(width - start))
        start = min(start, size - 1 - added)
        if session is not None and start > 0 and added < padded and size <= self.positions:
            tokens, _ = _pad(rows, size, False)
            of_session = len(session.tokens), start, width
            arguments = *more, tokens, session.past, of_session
            new, carry = resume.in_pieces(*arguments, added=added)(*arguments, added=added)
        else:
            tokens, counts = _pad(rows, padded, side == "before")
            arguments = *more, tokens, counts
            new, encoded, carry = begin.in_pieces(*arguments, size=size)(*arguments, size=size)
            more = params, state, encoded, numbers, make_key(seed)
        tokens = [*rows[0]]
        try:
            if count > 1:  # the first token does not wait until the step is compiled
                yield np.asarray(new)
                step = step.in_pieces(*more, new, carry)
            for i in range(count - 1):
                latest, before, carry = new, carry, None  # a step reuses the memory
                new, carry = step(*more, latest, before)
                tokens.append(latest)
                if i > 0:
                    yield np.asarray(latest)
            yield np.asarray(new)
        finally:
            if keep and carry is not None:
                row = np.array([np.asarray(token).item() for token in tokens])
                self._latest_caches["latest"] = _ConversationCaches(row, carry["past"])

    @cached_property
    def _latest_caches(self) -> dict[str, _ConversationCaches]:
        """The caches of the latest conversation."""
        return {}

    @cached_property
    def _programs(self) -> _Programs:
        return _Programs(self)

    def _begin(
        self, side: Side | None, top_k, params, state, source, numbers, key, tokens, lengths, size
    ):
        """Return the first new tokens [batch], and what all steps and the next one need."""
        encoded = self._encode(params, state, source) if source else {}
        tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
        width = tokens.shape[1]
        columns = jnp.arange(width)
        mask = columns < lengths[:, None]
        if side == "before":
            mask = columns >= width - lengths[:, None]
        if side is None:
            tokens = jnp.pad(tokens, ((0, 0), (0, size - width)))
            logits, past = self._run_whole(params, state, encoded, tokens, lengths), tokens
        else:
            logits, past, crossed = self._fill_caches(
                side, params, state, encoded, tokens, mask, lengths, size
            )
            encoded |= crossed
        rows = jnp.where(mask, tokens[:, :width], logits.shape[1])
        new, carry = self._choose_first(top_k, numbers, key, logits, rows, past, lengths)
        return new, encoded, carry

    def _resume(
        self, side: Side, top_k, params, state, source, numbers, key, tokens, past, counts, added
    ):
        """Return the same as `_begin` for one row, from caches that have `start` tokens of it.

        Args:
          tokens: of the row, [1, room for all].
          past: the caches.
          counts: the number of tokens in them, `start`, and the length of the row.
          added: the number of tokens to compute; those behind the row count as tokens until others
            take their places, which no token before them sees.
        """
        tokens, (cached, start, length) = jnp.asarray(tokens), counts
        pads_left, size = side == "before", tokens.shape[1]
        for name, axis in self._growing_axes.items():
            value, room = past[name], size - pads_left
            if pads_left:
                value = jnp.roll(value, cached - start, axis)
                value = jax.lax.slice_in_dim(value, max(value.shape[axis] - room, 0), None, 1, axis)
            else:
                value = jax.lax.slice_in_dim(value, 0, min(room, value.shape[axis]), 1, axis)
            pads, more = [(0, 0)] * value.ndim, room - value.shape[axis]
            pads[axis] = (more, 0) if pads_left else (0, more)
            past = {**past, name: jnp.pad(value, pads)}
        new = jax.lax.dynamic_slice_in_dim(tokens, start, added, 1)
        ends = jnp.reshape(start + added, 1)
        more = new, length - start - 1, past, ends, {}
        logits, past = self._extend_caches(side, params, state, *more)
        if pads_left:
            behind = start + added - length
            axes = self._growing_axes
            past = {n: jnp.roll(x, behind, axes[n]) if n in axes else x for n, x in past.items()}
        rows = jnp.where(jnp.arange(size) < length, tokens, logits.shape[1])
        lengths = jnp.reshape(length, 1)
        return self._choose_first(top_k, numbers, key, logits, rows, past, lengths)

    def _choose_first(self, top_k, numbers, key, logits, rows, past, lengths):
        """Return the tokens behind rows [batch, tokens], and what the next step needs."""
        occurrences = None
        if "repetition_penalty" in numbers:
            occurrences = jnp.zeros(logits.shape, bool)
            occurrences = occurrences.at[jnp.arange(len(rows))[:, None], rows].set(
                True, mode="drop"
            )
        recent = _find_last(rows, logits.shape[1], numbers)
        number, suppressed = jnp.int32(numbers.get("written", 0)), self._suppressed_tokens
        new = choose_tokens(
            logits,
            occurrences,
            top_k,
            numbers,
            jax.random.fold_in(key, number),
            suppressed["written" in numbers],
            recent,
            number,
        )
        carry = {"past": past, "lengths": lengths, "occurrences": occurrences, "recent": recent}
        return new, {**carry, "step": number}

    def _step(self, side: Side | None, top_k, params, state, encoded, numbers, key, new, carry):
        """Return the tokens behind the `new` ones [batch], and what the next step needs."""
        places, ends = jnp.arange(len(new)), carry["lengths"]
        lengths, past, occurrences = ends + 1, carry["past"], carry["occurrences"]
        if occurrences is not None:
            occurrences = occurrences.at[places, new].set(True)
        if side is None:
            past = past.at[places, ends].set(new.astype(past.dtype), mode="drop")
            logits = self._run_whole(params, state, encoded, past, lengths)
        else:
            more = new[:, None], 0, past, lengths, encoded
            logits, past = self._extend_caches(side, params, state, *more)
        number, (_, always) = carry["step"] + 1, self._suppressed_tokens
        if (recent := carry["recent"]) is not None:
            recent = jnp.append(recent, new[:, None], 1)[:, 1:]
        more = jax.random.fold_in(key, number), always, recent, number
        carry = {
            "past": past,
            "lengths": lengths,
            "occurrences": occurrences,
            "recent": recent,
            "step": number,
        }
        return choose_tokens(logits, occurrences, top_k, numbers, *more), carry

    def _run_whole(self, params, state, encoded, tokens, lengths):
        """Return the logits [batch, tokens] behind the first tokens of each row, without caches."""
        program = self._after_encoder(self._logits_output)
        if self._caches is not None:
            program = program.enter(*omit_caches(program.graph, self._caches))
        program = self._read_logits(program)
        places = jnp.arange(tokens.shape[1])
        positions = jnp.broadcast_to(places, tokens.shape)
        feed = {**encoded, **self._feed(tokens, places < lengths[:, None], positions)}
        # longer rows end before shorter ones, and their last place is then read again
        ends = jnp.minimum(lengths, tokens.shape[1]) - 1
        return self._run_at(ends, program, params, state, feed)[0]

    def _run_at(self, places, program, params, state, feed):
        """Return the logits [batch, tokens] of one place of each row, and the other outputs.

        An output layer computes no other places: it has a column for each token of the vocabulary.
        """
        name, rows = self._logits_output, jnp.arange(len(places))
        layer = self._read_logits(self._program)
        below = find_head_input(layer.graph, name)
        if below is None or below not in program.graph.producers:
            values = self._run(program, params, state, feed)
            return values.pop(name)[rows, places], values
        others = (output for output in program.graph.outputs if output != name)
        program = program.enter(Part(frozenset(), (below, *others)))
        values = self._run(program, params, state, feed)
        feed = {below: values.pop(below)[rows, places][:, None]}
        layer = layer.enter(Part(frozenset({below}), (name,)))
        return self._run(layer, params, state, feed)[name][:, 0], values

    @cached_property
    def _first_program(self) -> Program:
        """The program that fills caches."""
        assert self._caches is not None
        outputs = (*self._caches.pairs.values(), *self._cross_caches.values())
        program = self._program
        if self._sources:
            program = self._after_encoder(self._logits_output, *outputs)
        program = self._read_logits(program, outputs)
        return program.enter(EmptyCaches.of(program.graph, self._caches))

    @cached_property
    def _cached_program(self) -> Program:
        """The program that extends caches."""
        assert self._caches is not None
        outputs = self._caches.pairs.values()
        if self._padding_side != "hidden":
            return self._read_logits(self._program.enter(SharedCaches()), outputs)
        assert self._padding is not None
        program = self._program.enter(self._padding)
        return self._after_encoder(self._logits_output, *outputs, program=program)

    def _read_logits(self, program: Program, others: Iterable[str] = ()) -> Program:
        """Return the program of the logits of all steps, and of other outputs.

        A file that gives those of the last step (`prune_lm_head`) would give those of padding.
        """
        outputs = Outputs.among(program.graph, {self._logits_output, *others})
        return program.enter(outputs, AllSteps(self._logits_output))

    def _fill_caches(self, side: Side, params, state, encoded, tokens, mask, lengths, size):
        """Return the logits [batch, tokens] behind prompts, and caches with room for `size`.

        The third result is keys and values of an encoder that the decoder's file computes.
        """
        caches, pads_left, (batch, width) = self._caches, side != "behind", tokens.shape
        assert caches is not None
        positions = (mask.cumsum(1) - 1).clip(0)
        feed = {**encoded, **self._feed(tokens, mask, positions)}
        ends = jnp.full(batch, width - 1) if pads_left else lengths - 1
        logits, outputs = self._run_at(ends, self._first_program, params, state, feed)

        def make_room(name: str, value: jax.Array) -> jax.Array:
            pads = [(0, 0)] * value.ndim
            if (axis := self._growing_axes.get(name)) is not None:
                # a step itself adds one slot, that of its new token
                pads[axis] = (size - 1 - width, 0) if pads_left else (0, size - width)
            return jnp.pad(value, pads)

        past = {name: make_room(name, outputs[out]) for name, out in caches.pairs.items()}
        crossed = {name: outputs[out] for name, out in self._cross_caches.items()}
        return logits, past, crossed

    def _extend_caches(self, side: Side, params, state, new, place, past, lengths, encoded):
        """Return the logits [batch, tokens] behind one of `new` [batch, added], and the caches.

        The caches have `lengths` tokens.
        """
        caches, pads_left, added = self._caches, side != "behind", new.shape[1]
        assert caches is not None
        name, axis = next(iter(self._growing_axes.items()))
        size = past[name].shape[axis] + pads_left * added
        slots, counts = jnp.arange(size), lengths[:, None]
        mask = slots >= size - counts if pads_left else slots < counts
        feed = self._feed(new, mask, counts - added + jnp.arange(added))
        feed |= {**caches.switches_on, **past, **encoded}
        if side == "hidden":  # all rows have the same length
            feed |= {VISIBLE: mask[:1, None, None], SHIFT: lengths[0] - size}
        places = jnp.broadcast_to(place, len(new))
        logits, outputs = self._run_at(places, self._cached_program, params, state, feed)
        past = {name: outputs[out] for name, out in caches.pairs.items()}
        if pads_left:  # drop the oldest slots, which are padding, to keep the size
            for name, axis in self._growing_axes.items():
                past[name] = jax.lax.slice_in_dim(past[name], added, None, axis=axis)
        return logits, past


def generate(
    model: Any,
    prompts: Any,
    count: int,
    sampling: Sampling,
    seed: int,
    stop: int | str | Sequence[int | str] | None,
    stream: bool,
    variables: Mapping[str, Any] | None = None,
    beginning: Sequence[int] | None = None,
) -> Any:
    """Return the continuation of one prompt or several, as `Model.generate` does."""
    require_integer("max_new_tokens", count)
    require_integer("seed", seed, -(2**63), 2**64 - 1)
    generator: Generator = model._generator
    is_single, listed = _list_prompts(prompts, generator.rank_of_prompts)
    if stream and not is_single:
        raise InputError(f"stream=True is for one prompt, and there are {len(listed)}")
    encoded = [_encode(model, prompt, variables) for prompt in listed]
    encoded, pixels = stack_images(encoded)
    rows, source = generator.read_prompts(model.params, model.state, encoded, beginning, pixels)
    tokens, texts = _read_stop(model, stop)
    if stop is None or texts:
        texts = (*texts, *sampling.stop_texts)
    is_text = [stream or _is_text(prompt) for prompt in listed]
    needs_text = bool(texts) or any(is_text)
    decode = model.tokenizer.decode_part if needs_text else None
    cleans_up = needs_text and model.tokenizer.cleans_up
    written = [Continuation(tokens, texts, decode, cleans_up=cleans_up) for _ in rows]
    if needs_text and not generator._sources:
        special = model.tokenizer.special_tokens
        for prompt, row, part in zip(listed, rows, written, strict=True):
            if isinstance(prompt, str) or (_is_text(prompt) and is_open(prompt, variables or {})):
                part.continue_text([*row[~np.isin(row, special)]])
    keep = is_chat(prompts) and not source  # caches are found by tokens, not by images
    steps = generator.extend(
        model.params, model.state, rows, source, written, count, sampling, seed, keep
    )
    if stream:
        return (piece for (piece,) in steps if piece)
    pieces = [*steps]
    results = [
        "".join(parts) if is_text[i] else written[i].follow(rows[i])
        for i, parts in enumerate(zip(*pieces, strict=True) if pieces else [()] * len(rows))
    ]
    return results[0] if is_single else results


def _is_text(prompt: Any) -> bool:
    """Check whether a prompt is a text or a list of messages."""
    return isinstance(prompt, str) or is_chat(prompt)


def _list_prompts(prompts: Any, rank: int) -> tuple[bool, list[Any]]:
    """Return True for a single prompt, and the prompts as a list.

    Args:
      rank: the number of axes of an array that is a prompt.
    """
    if _is_text(prompts):
        return True, [prompts]
    if isinstance(prompts, list | tuple) and any(map(_is_text, prompts)):
        return False, [*prompts]
    ids = prompts if isinstance(prompts, list) else np.asarray(prompts)
    if not isinstance(ids, list) and not ids.ndim:
        raise InputError(
            "prompts must be texts, lists of messages (dicts with a role and content), or arrays "
            f"of tokens, [length] each, got {describe(prompts)}"
        )
    is_single = len(ids) > 0 and np.ndim(ids[0]) == rank - 1
    return is_single, [ids] if is_single else [*ids]


def _encode(model: Any, prompt: Any, variables: Mapping[str, Any] | None) -> Any:
    """Convert a text or messages to tokens, and messages with images to tokens and images."""
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, end=bool(model._generator._sources))
    if _is_text(prompt):
        return encode_chat(model, model.tokenizer, prompt, **(variables or {}))
    return prompt


def _read_stop(model: Any, stop: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the tokens and the texts that end a continuation."""
    several: list[Any] = [*stop] if isinstance(stop, list | tuple) else [stop]
    usual = stop_tokens(model)
    if stop is None:
        return frozenset(usual), ()
    for end in several:
        is_text = isinstance(end, str) and end and model.folder is not None
        expected = "tokens, or texts for a model of a folder with a tokenizer"
        is_token = np.ndim(end) == 0 and np.asarray(end).dtype.kind in "iu"
        require("stop", end, is_text or is_token, expected)
    texts = tuple(end for end in several if isinstance(end, str))
    tokens = [int(end) for end in several if not isinstance(end, str)]
    return frozenset(tokens or (usual if texts else ())), texts


class _Programs(dict):
    """The compiled (first step, further steps, resumption), by padding side and `top_k`."""

    def __init__(self, generator: Generator):
        super().__init__()
        self._generator = generator

    def __missing__(self, key: tuple[Side | None, int | None]) -> tuple[Any, Any, Any]:
        generator = self._generator
        forms = generator._begin, generator._step, generator._resume
        begin, step, resume = (allow_promotion(partial(form, *key)) for form in forms)
        begin, step = jit(begin, static_argnames="size"), jit(step, donate_argnames="carry")
        resume = jit(resume, static_argnames="added")
        return self.setdefault(key, (begin, step, resume))


def _find_last(rows: jax.Array, end: int, numbers: Mapping[str, Any]) -> jax.Array | None:
    """Return the last tokens of rows that sequences with a bias ask for, -1 before the first one.

    Args:
      rows: [batch, tokens], padded with `end` on either side.
    """
    if "biases" not in numbers:
        return None
    count = max(sequences.shape[1] - 1 for sequences, _ in numbers["biases"])
    width = rows.shape[1]
    ends = width - (rows != end)[:, ::-1].argmax(1)
    places = ends[:, None] - count + jnp.arange(count)
    last = jnp.take_along_axis(rows, places.clip(0), 1)
    return jnp.where((places >= 0) & (last != end), last, -1)


def _round_up(length: int) -> int:
    return max(_LEAST, 1 << (length - 1).bit_length())


def _pad(rows: Sequence[np.ndarray], width: int, pads_left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of tokens as an array [batch, width], and their lengths."""
    tokens = np.zeros((len(rows), width), np.int64)
    for target, row in zip(tokens, rows, strict=True):
        target[width - len(row) if pads_left else 0 :][: len(row)] = row
    return tokens, np.array([len(row) for row in rows])


_COUNT = 40
"""Tokens of a continuation."""


class Continuations:
    """Writes greedy continuations by a model, with one program for all epochs.

    Args:
      model: the model that is trained.
      view: returns the parameters of a state of the training, as the model takes them.
      prompts: texts or lists of messages, for a model of a folder with a tokenizer, or tokens; None
        for none.

    Raises:
      TrainingError: `prompts` is not a list of prompts, or texts lack a tokenizer.
    """

    def __init__(
        self,
        model: Network,
        view: Callable[[Any], Mapping[str, Any]],
        prompts: Sequence[Any] | None,
    ):
        self._model, self._view = model, view
        several = isinstance(prompts, list | tuple) and len(prompts) > 0
        fits = prompts is None or (
            several and all(isinstance(p, str) or np.ndim(p) > 0 for p in prompts)
        )
        require("samples", prompts, fits, "a list of texts, messages or tokens", TrainingError)
        folder = self._model.folder
        texts = [p for p in prompts or () if isinstance(p, str) or is_chat(p)]
        if texts and folder is None:
            raise TrainingError(
                "samples has texts, and the model was not loaded from a folder with a tokenizer: "
                "give tokens, [length] each"
            )
        self._tokenizer = None if folder is None or not texts else Tokenizer(folder)
        # behind an encoder the decoder begins anew
        self._encoded = DECODER_TOKENS in [value.name for value in self._model.inputs]
        self._rows, self._pixels = stack_images([self._encode(prompt) for prompt in prompts or ()])
        longest = 1 if self._encoded else max(map(len, self._rows), default=0)
        self._generate = Generator(self._model)
        self._count = max(1, min(_COUNT, self._generate.positions - longest)) if prompts else _COUNT

    def write(self, state: Any, epoch: int) -> None:
        """Print the continuations by the state of the training at the end of an epoch, from 1."""
        if not self._rows:
            return
        tensors = {**self._model.state, **state.state}
        params, stop = self._view(state), stop_tokens(self._model)
        rows = self._generate(params, tensors, self._rows, self._count, stop, self._pixels)
        for prompt, row in zip(self._rows, rows, strict=True):
            pair = f"{self._decode(prompt)} -> {self._decode(row[1:])}" if self._encoded else ""
            print(f"epoch {epoch}: {pair or self._decode(row)}", flush=True)

    def _encode(self, prompt: Any) -> Any:
        if self._tokenizer is not None and isinstance(prompt, str):
            return self._tokenizer.encode(prompt, end=self._encoded)
        if self._tokenizer is not None and is_chat(prompt):
            return encode_chat(self._model, self._tokenizer, prompt)
        return np.asarray(prompt)

    def _decode(self, row: np.ndarray) -> Any:
        if row.ndim > 1:
            return f"features {list(row.shape)}"
        return row.tolist() if self._tokenizer is None else repr(self._tokenizer.decode(row))
