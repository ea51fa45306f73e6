"""Generate tokens with a decoder and its caches: greedy or sampled, compiled once.

The caches have room for all tokens from the beginning, so that each step has the same shapes.
An operator that takes the length of its past from the mask (GroupQueryAttention) finds the tokens
at the beginning of that room; where caches are joined to the new token (Concat, Attention), they
stand at its end, and the mask hides what is before them. Where neither fits, or without caches, all
tokens are computed again in each step. So they are where the decoder has an encoder, which reads
the prompts: the continuation is then what the decoder writes from its first token on.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.language_models import context_length, decoder_numbers
from jaxonnx._data.ragged import DECODER_TOKENS, derived_inputs
from jaxonnx._data.tokenizer import Tokenizer
from jaxonnx._graph.caches import Caches, find_caches
from jaxonnx._graph.values import Value
from jaxonnx._io.folders import GENAI
from jaxonnx._require import require, require_integer
from jaxonnx._rewrite.network import Network
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError
from jaxonnx.views import CallView, EmptyCaches, Outputs, omit_caches

_READING_BY_LENGTH = ("GroupQueryAttention", "SparseAttention")
"""Operators whose past may have room behind its tokens."""
_JOINING_CACHES = ("Concat", "Attention", "MultiHeadAttention")
"""Operators that put new tokens behind all of the past."""

Side = Literal["behind", "before"]
"""The side of the tokens on which a cache is filled up."""
Logits = Callable[..., tuple[jax.Array, dict[str, Any]]]


def stop_tokens(model: Network) -> tuple[int, ...]:
    """Return the tokens that end a text, from the configuration in the model's folder."""
    if model.folder is None:
        return ()
    settings = model.folder.read_json(GENAI).get("model", {})
    settings = settings or model.folder.read_json("generation_config.json")
    ids = settings.get("eos_token_id", ())
    return tuple(ids) if isinstance(ids, list) else (ids,) if isinstance(ids, int) else ()


@dataclass(frozen=True, eq=False)
class Generator:
    """Generate continuations of token rows by a model, with one program for each shape."""

    model: Network

    def __call__(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        prompts: Sequence[Any],
        count: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int | str] = (),
    ) -> list[np.ndarray]:
        """Return each prompt with its continuation, up to a token or a text of `stop`.

        It ends with the last position of the model, too, with a warning.

        An encoder-decoder model reads the prompts by its encoder, tokens or features; the decoder
        starts from its start token.

        Raises:
          InputError: the model is not a decoder, or the arguments do not fit.
        """
        rows = [np.asarray(prompt) for prompt in prompts]
        if self._features is None:
            self._check_tokens(rows)
        else:
            self._check_features(self._features, rows)
        require_integer("max_new_tokens", count)
        require("temperature", temperature, temperature >= 0, "at least 0")
        source: dict[str, Any] = {}
        if self._features is not None:
            dtype = jax.dtypes.canonicalize_dtype(self._features.dtype)
            source = {self._features.name: jnp.asarray(np.stack(rows), dtype)}
            rows = [np.array([self._start_token])] * len(rows)
        lengths = np.array([len(row) for row in rows])
        width, of_one_length = int(lengths.max()), len({*lengths.tolist()}) == 1
        side = self._padding_side if of_one_length or not self._has_fixed_caches else None
        pads_left = side == "before"
        tokens = np.zeros((len(rows), width), np.int64)
        for target, row in zip(tokens, rows, strict=True):
            target[width - len(row) if pads_left else 0 :][: len(row)] = row
        if self._sources and self._features is None:
            source = self._feed_encoder(tokens, lengths)
            tokens, lengths = np.full((len(rows), 1), self._start_token), np.ones(len(rows), int)
            rows = [*tokens]
        run, key = self._programs[side, temperature > 0], jax.random.key(seed)
        rooms = np.clip(self.positions - lengths, 0, count).tolist()
        most = max(1, *rooms)
        new = np.asarray(run(params, state, source, tokens, lengths, temperature, key, count=most))
        ends = [self._find_end(part[:n], stop) for part, n in zip(new, rooms, strict=True)]
        if any(end is None and room < count for end, room in zip(ends, rooms, strict=True)):
            warnings.warn(
                f"the model has positions for {self.positions} tokens: a continuation ends there, "
                f"with fewer than max_new_tokens={count}",
                stacklevel=4,
            )
        parts = zip(rows, new, ends, rooms, strict=True)
        return [np.append(row, x[: end or n]).astype(row.dtype) for row, x, end, n in parts]

    def _find_end(self, new: np.ndarray, stop: Sequence[int | str]) -> int | None:
        """Return the number of tokens up to the first stop; None if there is no stop."""
        stops = np.isin(new, [token for token in stop if not isinstance(token, str)])
        for text in stop:
            if isinstance(text, str):
                assert self.model.folder is not None  # `generate` refuses texts without
                read = Tokenizer(self.model.folder).decode
                stops |= [text in read(new[: i + 1]) for i in range(len(new))]
        return int(stops.argmax()) + 1 if stops.any() else None

    def _feed_encoder(self, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, jax.Array]:
        """Return the inputs of the encoder, which reads tokens [batch, width]."""
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        has_mask = any(value.name.endswith("mask") for value in self._sources)
        if not has_mask and not mask.all():
            raise InputError("the encoder has no mask: it takes rows of one length")
        return self._fill(self._sources, self._prompt_input, tokens, mask, mask.cumsum(1) - 1)

    def _check_tokens(self, rows: Sequence[np.ndarray]) -> None:
        """Raise an InputError unless rows are of tokens in the model's vocabulary."""
        if not rows or not all(
            row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows
        ):
            raise InputError("tokens to continue are integers, [length] or a list of such")
        count = next(value.rows for value in self._inputs if value.name == self._prompt_input)
        for number, row in enumerate(rows):
            unknown = row[(row < 0) | (row >= count)] if count is not None else row[row < 0]
            if len(unknown):
                limit = "" if count is None else f" to {count - 1}"
                raise InputError(
                    f"row {number} of the tokens to continue has {unknown[0]}; the model has "
                    f"tokens from 0{limit}"
                )

    def _check_features(self, value: Value, rows: Sequence[np.ndarray]) -> None:
        """Raise an InputError unless rows are of numbers, each of the shape that `value` takes."""
        shape = (value.shape or ())[1:]
        for row in rows:
            sizes = zip(row.shape, shape, rows[0].shape, strict=False)
            fits = len(row.shape) == len(shape) and all(
                size == first and (size == wanted or not isinstance(wanted, int))
                for size, wanted, first in sizes
            )
            if not fits or row.dtype.kind not in "fV":
                raise InputError(
                    f"the encoder reads features {list(shape)} of numbers for {value.name!r}, all "
                    f"of one shape; one has {list(row.shape)} of {row.dtype}"
                )
        if not rows:
            raise InputError(f"there are no input features for {value.name!r}")

    @cached_property
    def _programs(self) -> dict[Any, Any]:
        return {
            (side, draws): jax.jit(
                partial(self._decode_whole if side is None else self._decode_cached, side, draws),
                static_argnames="count",
            )
            for side in (None, "behind", "before")
            for draws in (False, True)
        }

    @cached_property
    def _program(self) -> Program:
        return self.model.program.leave(CallView)

    @cached_property
    def _inputs(self) -> tuple[Value, ...]:
        return replace(self.model, program=self._program).inputs

    @cached_property
    def _caches(self) -> Caches | None:
        return find_caches(self._program.graph, self._inputs)

    @cached_property
    def _token_inputs(self) -> tuple[Value, ...]:
        """The decoder's inputs of tokens, masks and positions: neither caches nor the encoder's."""
        names = set() if self._caches is None else self._caches.names
        names |= {value.name for value in self._sources}
        return tuple(value for value in self._inputs if value.name not in names)

    @cached_property
    def _sources(self) -> tuple[Value, ...]:
        """The inputs of the encoder before a decoder; a decoder alone has none."""
        if DECODER_TOKENS not in {value.name for value in self._inputs}:
            return ()
        names = set() if self._caches is None else self._caches.names
        values = (v for v in self._inputs if not v.name.startswith("decoder_"))
        return tuple(value for value in values if value.name not in names)

    @cached_property
    def _features(self) -> Value | None:
        """The input of an encoder of sounds or images; None where prompts are tokens."""
        features = [v for v in self._sources if v.dtype is not None and v.dtype.kind not in "iu"]
        return features[0] if len(features) == len(self._sources) == 1 else None

    @cached_property
    def positions(self) -> int:
        """The number of positions that the tables of the decoder have, or its folder says."""
        limits = [value.rows for value in self._token_inputs if "position" in value.name]
        for node in self._program.graph.nodes:
            names = zip(inspect.signature(node.op.function).parameters, node.inputs, strict=False)
            table = self.model.tensors.get(dict(names).get("cos_cache", ""))
            limits.append(None if table is None else len(table))
        folder = self.model.folder
        limits.append(None if folder is None else context_length(folder))
        return min((limit for limit in limits if limit is not None), default=sys.maxsize)

    @cached_property
    def _start_token(self) -> int:
        """The first token of the decoder of an encoder-decoder model."""
        folder = self.model.folder
        first = None if folder is None else decoder_numbers(folder)[0]
        if first is None:
            raise InputError(
                "the model is an encoder with a decoder, and was not loaded from a folder whose "
                "config.json has decoder_start_token_id, the first token of the decoder"
            )
        return first

    @cached_property
    def _token_input(self) -> str:
        return self._find_token_input(self._token_inputs)

    @property
    def rank_of_prompts(self) -> int:
        """1 for rows of tokens; features have as many axes as the encoder's input without batch."""
        return 1 if self._features is None else len(self._features.shape or ()) - 1

    @cached_property
    def _prompt_input(self) -> str:
        return self._find_token_input(self._sources or self._token_inputs)

    def _find_token_input(self, values: Sequence[Value]) -> str:
        """Return the name of the one input of tokens; masks and positions are derived from it."""
        derived = derived_inputs(values)
        names = [value.name for value in values if value.name not in derived]
        kinds = [v.dtype for v in values if v.name in names]
        if len(names) != 1 or kinds[0] is None or kinds[0].kind not in "iu":
            raise InputError(
                f"tokens can be continued where they are the only input; there are {names}"
            )
        return names[0]

    @cached_property
    def _logits_output(self) -> str:
        outputs = self._program.graph.outputs
        name = "logits" if "logits" in outputs else outputs[0]
        if self._caches is not None and name in self._caches.pairs.values():
            raise InputError("the model has no output of logits")
        return name

    @cached_property
    def _growing_axes(self) -> dict[str, int]:
        """The axis along which each cache grows, by name; caches of a fixed size are absent."""
        if self._caches is None:
            return {}
        axes = {}
        for value in self._caches.values:
            fixed_sizes = self._caches.sizes[value.name]
            open_axes = [
                axis
                for axis, size in enumerate(value.shape or ())
                if axis and not isinstance(size, int) and size not in fixed_sizes
            ]
            if len(open_axes) == 1:
                axes[value.name] = open_axes[0]
        return axes

    @cached_property
    def _has_fixed_caches(self) -> bool:
        """Whether caches have a fixed size, so that they cannot tell padding from tokens."""
        return self._caches is not None and len(self._growing_axes) < len(self._caches.pairs)

    @cached_property
    def _padding_side(self) -> Side | None:
        """The side on which prompts and caches are padded; None if caches cannot be used.

        Caches of a fixed length hold room for the tokens to come. Operators that take lengths
        (GroupQueryAttention) read a prefix, so that the room is behind; those that join past and
        new along an axis always append, so that the room is before the prompt, and masked.
        """
        masked = any(value.name.endswith("attention_mask") for value in self._token_inputs)
        if self._sources or self._caches is None or not masked or not self._growing_axes:
            return None
        sizes = {
            value.shape[axis]
            for value in self._caches.values
            if value.shape and (axis := self._growing_axes.get(value.name)) is not None
        }
        readers = {
            node.op.name
            for node in self._program.graph.nodes
            if not {*node.reads}.isdisjoint(self._growing_axes)
        }
        if len(sizes) > 1:  # some slide over a window
            return None
        readers.discard("Shape")
        if readers <= {*_READING_BY_LENGTH}:
            return "behind"
        return "before" if readers <= {*_JOINING_CACHES} else None

    def _feed(self, tokens: jax.Array, mask: jax.Array, positions: jax.Array) -> dict[str, Any]:
        """Return the inputs besides the caches and those of an encoder."""
        return self._fill(self._token_inputs, self._token_input, tokens, mask, positions)

    def _fill(
        self, values: Sequence[Value], name: str, tokens: Any, mask: Any, positions: Any
    ) -> dict[str, Any]:
        """Return the tokens for the input `name`, and masks and positions for the others."""
        feed: dict[str, Any] = {}
        for value in values:
            if value.name == name:
                feed[value.name] = tokens
            elif value.name.endswith("mask"):
                feed[value.name] = mask
            else:
                feed[value.name] = positions if "position" in value.name else 0 * tokens
            dtype = jax.dtypes.canonicalize_dtype(value.dtype or np.int64)
            feed[value.name] = feed[value.name].astype(dtype)
        return feed

    def _run(self, program: Program, params: Any, state: Any, feed: Any) -> dict[str, Any]:
        values = program.evaluate(params, state, feed, training=False)
        return dict(zip(program.graph.outputs, values, strict=True))

    def _decode_whole(
        self, _: None, draws: bool, params, state, source, tokens, lengths, heat, key, count
    ):
        """Return new tokens [batch, count]; each step runs the model on the whole sequence."""
        program = self._program
        if self._caches is not None:
            program = program.enter(*omit_caches(program.graph, self._caches))
        program = program.enter(Outputs.among(program.graph, {self._logits_output}))
        batch, width = tokens.shape
        size = max(width, min(width + count, self.positions))  # longer rows end before shorter ones
        tokens = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, size - width)))
        places = jnp.arange(size)

        def step(tokens, i):
            ends = jnp.asarray(lengths) + i
            mask = places < ends[:, None]
            positions = jnp.broadcast_to(places, tokens.shape)
            feed = {**source, **self._feed(tokens, mask, positions)}
            outputs = self._run(program, params, state, feed)
            logits = outputs[self._logits_output][jnp.arange(batch), ends - 1]
            chosen = _choose(logits, draws, heat, jax.random.fold_in(key, i))
            return tokens.at[jnp.arange(batch), ends].set(chosen.astype(tokens.dtype)), chosen

        return jax.lax.scan(step, tokens, jnp.arange(count))[1].T

    def _decode_cached(
        self, side: Side, draws: bool, params, state, _, tokens, lengths, temperature, key, count
    ):
        """Return new tokens [batch, count], by a prefill of the caches and a step for each token.

        The caches have their final size from the start, so that all steps share one program.
        """
        assert self._caches is not None
        caches, pads_left = self._caches, side == "before"
        names = {self._logits_output, *caches.pairs.values()}
        program = self._program.enter(Outputs.among(self._program.graph, names))
        first = program.enter(EmptyCaches.of(program.graph, caches))
        batch, width = tokens.shape
        size, lengths, tokens = width + count, jnp.asarray(lengths), jnp.asarray(tokens)
        columns = jnp.arange(width)
        mask = columns >= width - lengths[:, None] if pads_left else columns < lengths[:, None]
        positions = (mask.cumsum(1) - 1).clip(0)
        outputs = self._run(first, params, state, self._feed(tokens, mask, positions))
        ends = jnp.full(batch, width - 1) if pads_left else lengths - 1
        logits = outputs[self._logits_output][jnp.arange(batch), ends]

        def make_room(name: str, value: jax.Array) -> jax.Array:
            pads = [(0, 0)] * value.ndim
            if (axis := self._growing_axes.get(name)) is not None:
                # a step itself adds one slot, that of its new token
                pads[axis] = (size - 1 - width, 0) if pads_left else (0, size - width)
            return jnp.pad(value, pads)

        pasts = {name: make_room(name, outputs[out]) for name, out in caches.pairs.items()}
        slots = jnp.arange(size)

        def step(carry, i):
            pasts, logits = carry
            chosen = _choose(logits, draws, temperature, jax.random.fold_in(key, i))
            counts = lengths + i + 1
            mask = slots >= size - counts[:, None] if pads_left else slots < counts[:, None]
            feed = self._feed(chosen[:, None], mask, counts[:, None] - 1)
            feed |= {**caches.switches_on, **pasts}
            outputs = self._run(program, params, state, feed)
            pasts = {name: outputs[out] for name, out in caches.pairs.items()}
            if pads_left:  # drop the oldest slot, which is padding, to keep the size
                pasts = {
                    name: jax.lax.slice_in_dim(value, 1, None, axis=self._growing_axes[name])
                    if name in self._growing_axes
                    else value
                    for name, value in pasts.items()
                }
            return (pasts, outputs[self._logits_output][:, -1]), chosen

        return jax.lax.scan(step, (pasts, logits), jnp.arange(count))[1].T


def _choose(logits: jax.Array, draws: bool, temperature: Any, key: jax.Array) -> jax.Array:
    """Return a token for each row."""
    logits = logits.astype(jnp.float32)
    if not draws:
        return logits.argmax(-1)
    return jax.random.categorical(key, logits / temperature)


def generate(
    generator: Generator,
    ids: Any,
    count: int,
    temperature: float,
    seed: int,
    stop: int | str | Sequence[int | str] | None,
) -> Any:
    """Return the continuation of one prompt or several, as `Model.generate` does."""
    model = generator.model
    ids = ids if isinstance(ids, list) else np.asarray(ids)
    if not isinstance(ids, list) and not ids.ndim:
        raise InputError(
            "ids must be a prompt of tokens, [length], or several; the tokenizer in the model's "
            f"folder makes them of a text, got {ids.dtype} of rank 0"
        )
    single = np.ndim(ids[0]) == generator.rank_of_prompts - 1 if len(ids) else False
    several: list[Any] = [*stop] if isinstance(stop, list | tuple) else [stop]
    ends = stop_tokens(model) if stop is None else several
    for end in ends:
        is_text = isinstance(end, str) and end and model.folder is not None
        expected = "tokens, or texts for a model of a folder with a tokenizer"
        require("stop", end, is_text or np.asarray(end).dtype.kind in "iu", expected)
    prompts = [ids] if single else [*ids]
    continuations = generator(model.params, model.state, prompts, count, temperature, seed, ends)
    return continuations[0] if single else continuations
