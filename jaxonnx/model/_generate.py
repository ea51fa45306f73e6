"""Continuations by a decoder: greedy or drawn, through the caches of its file, compiled once.

The caches have room for all tokens from the beginning, so that each step has the same shapes.
An operator that takes the length of its past from the mask (GroupQueryAttention) finds the tokens
at the beginning of that room; where caches are joined to the new token (Concat, Attention), they
stand at its end, and the mask hides what is before them. Where neither fits, or without caches, all
tokens are computed again in each step. So they are where the decoder has an encoder, which reads
the prompts: the continuation is then what the decoder writes from its first token on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.language_models import decoder_numbers
from jaxonnx._data.ragged import DECODER_TOKENS, derived_inputs
from jaxonnx._graph.caches import Caches, find_caches
from jaxonnx._graph.values import Value
from jaxonnx._io.folders import GENAI
from jaxonnx._network import Network
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError

_BY_LENGTH = ("GroupQueryAttention", "SparseAttention")
"""Operators whose past may have room behind its tokens."""
_JOINING = ("Concat", "Attention", "MultiHeadAttention")
"""Operators that put new tokens behind all of the past."""

Room = Literal["behind", "before"]
Logits = Callable[..., tuple[jax.Array, dict[str, Any]]]


def stop_tokens(model: Network) -> tuple[int, ...]:
    """Return the tokens that end a text, as the folder of a model says."""
    if model.folder is None:
        return ()
    settings = model.folder.read_json(GENAI).get("model", {})
    settings = settings or model.folder.read_json("generation_config.json")
    ids = settings.get("eos_token_id", ())
    return tuple(ids) if isinstance(ids, list) else (ids,) if isinstance(ids, int) else ()


@dataclass(frozen=True, eq=False)
class Generator:
    """Continues tokens by a model, with one program for each shape."""

    model: Network

    def __call__(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        prompts: Sequence[Any],
        count: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> list[np.ndarray]:
        """Return each prompt with its continuation, up to a token of `stop`.

        Where an encoder reads the prompts, it is the first token of the decoder that is continued.

        Raises:
          InputError: the model is no decoder, or arguments that do not fit.
        """
        rows = [np.asarray(prompt) for prompt in prompts]
        if not rows or not all(
            row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows
        ):
            raise InputError("tokens to continue are integers, [length] or a list of such")
        self._check_tokens(rows)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"max_new_tokens must be a positive integer, and is {count!r}")
        if not temperature >= 0:
            raise InputError(f"temperature must be at least 0, and is {temperature!r}")
        lengths = np.array([len(row) for row in rows])
        width, even = int(lengths.max()), len({*lengths.tolist()}) == 1
        room = self._room if even or not self._states else None
        left = room == "before"
        tokens = np.zeros((len(rows), width), np.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[width - len(row) if left else 0 :][: len(row)] = row
        source: dict[str, Any] = {}
        if self._encoded:
            source = self._feed_encoder(tokens, lengths)
            tokens, lengths = np.full((len(rows), 1), self._first), np.ones(len(rows), int)
            rows = [*tokens]
        run, key = self._programs[room, temperature > 0], jax.random.key(seed)
        new = run(params, state, source, tokens, lengths, temperature, key, count=count)
        return [_end(row, part, stop) for row, part in zip(rows, np.asarray(new), strict=True)]

    def _feed_encoder(self, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, jax.Array]:
        """Return the inputs of the encoder, which reads tokens [batch, width]."""
        there = np.arange(tokens.shape[1]) < lengths[:, None]
        masked = any(value.name.endswith("mask") for value in self._encoded)
        if not masked and not there.all():
            raise InputError("the encoder has no mask: it takes rows of one length")
        return self._fill(self._encoded, self._prompt, tokens, there, there.cumsum(1) - 1)

    def _check_tokens(self, rows: Sequence[np.ndarray]) -> None:
        """Refuse tokens that the model does not have."""
        count = next(value.rows for value in self._inputs if value.name == self._prompt)
        for number, row in enumerate(rows):
            wrong = row[(row < 0) | (row >= count)] if count is not None else row[row < 0]
            if len(wrong):
                most = "" if count is None else f" to {count - 1}"
                raise InputError(
                    f"row {number} of the tokens to continue has {wrong[0]}; the model has tokens "
                    f"from 0{most}"
                )

    @cached_property
    def _programs(self) -> dict[Any, Any]:
        return {
            (room, draws): jax.jit(
                partial(self._write if room is None else self._continue, room, draws),
                static_argnames="count",
            )
            for room in (None, "behind", "before")
            for draws in (False, True)
        }

    @cached_property
    def _whole(self) -> Program:
        return self.model.program.restore()

    @cached_property
    def _inputs(self) -> tuple[Value, ...]:
        return replace(self.model, program=self._whole).inputs

    @cached_property
    def _caches(self) -> Caches | None:
        return find_caches(self._whole.graph, self._inputs)

    @cached_property
    def _others(self) -> tuple[Value, ...]:
        """The inputs besides the caches and those of an encoder: the tokens, and what they say."""
        names = set() if self._caches is None else self._caches.names
        names |= {value.name for value in self._encoded}
        return tuple(value for value in self._inputs if value.name not in names)

    @cached_property
    def _encoded(self) -> tuple[Value, ...]:
        """The inputs of the encoder before a decoder; a decoder alone has none."""
        if DECODER_TOKENS not in {value.name for value in self._inputs}:
            return ()
        names = set() if self._caches is None else self._caches.names
        given = (v for v in self._inputs if not v.name.startswith("decoder_"))
        return tuple(value for value in given if value.name not in names)

    @cached_property
    def _first(self) -> int:
        """The token that a decoder behind an encoder begins with."""
        folder = self.model.folder
        first = None if folder is None else decoder_numbers(folder)[0]
        if first is None:
            raise InputError(
                "the model is an encoder with a decoder, and was not loaded from a folder whose "
                "config.json has decoder_start_token_id, the first token of the decoder"
            )
        return first

    @cached_property
    def _tokens(self) -> str:
        return self._find_tokens(self._others)

    @cached_property
    def _prompt(self) -> str:
        return self._find_tokens(self._encoded or self._others)

    def _find_tokens(self, values: Sequence[Value]) -> str:
        """Return the one input of tokens among values, of which others can be derived."""
        derived = derived_inputs(values)
        names = [value.name for value in values if value.name not in derived]
        kinds = [v.dtype for v in values if v.name in names]
        if len(names) != 1 or kinds[0] is None or kinds[0].kind not in "iu":
            raise InputError(
                f"tokens can be continued where they are the only input; there are {names}"
            )
        return names[0]

    @cached_property
    def _logits(self) -> str:
        outputs = self._whole.graph.outputs
        name = "logits" if "logits" in outputs else outputs[0]
        if self._caches is not None and name in self._caches.pairs.values():
            raise InputError("the model has no output of logits")
        return name

    @cached_property
    def _growing(self) -> dict[str, int]:
        """The axis along which each cache that grows does so."""
        if self._caches is None:
            return {}
        found = {}
        for value in self._caches.values:
            kept = self._caches.sizes[value.name]
            open_axes = [
                axis
                for axis, size in enumerate(value.shape or ())
                if axis and not isinstance(size, int) and size not in kept
            ]
            if len(open_axes) == 1:
                found[value.name] = open_axes[0]
        return found

    @cached_property
    def _states(self) -> bool:
        """Whether caches have a fixed size, so that they cannot tell padding from tokens."""
        return self._caches is not None and len(self._growing) < len(self._caches.pairs)

    @cached_property
    def _room(self) -> Room | None:
        """Where caches have room for tokens to come; None for models without such caches."""
        masked = any(value.name.endswith("attention_mask") for value in self._others)
        if self._encoded or self._caches is None or not masked or not self._growing:
            return None
        sizes = {
            value.shape[axis]
            for value in self._caches.values
            if value.shape and (axis := self._growing.get(value.name)) is not None
        }
        readers = {
            node.op.name
            for node in self._whole.graph.nodes
            if not {*node.reads}.isdisjoint(self._growing)
        }
        if len(sizes) > 1:  # some slide over a window
            return None
        readers.discard("Shape")
        if readers <= {*_BY_LENGTH}:
            return "behind"
        return "before" if readers <= {*_JOINING} else None

    def _feed(self, tokens: jax.Array, mask: jax.Array, positions: jax.Array) -> dict[str, Any]:
        """Return the inputs besides the caches and those of an encoder."""
        return self._fill(self._others, self._tokens, tokens, mask, positions)

    def _fill(
        self, values: Sequence[Value], name: str, tokens: Any, mask: Any, positions: Any
    ) -> dict[str, Any]:
        """Return tokens for the input of that name, and what is derived of them for the others."""
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

    def _write(
        self, _: None, draws: bool, params, state, source, tokens, lengths, heat, key, count
    ):
        """Return new tokens [batch, count], with all computed again for each."""
        program = self._whole
        if self._caches is not None:
            program = program.without_cache(self._caches)
        program = program.with_outputs({self._logits})
        batch, width = tokens.shape
        tokens = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, count)))
        places = jnp.arange(width + count)

        def step(tokens, i):
            ends = jnp.asarray(lengths) + i
            mask = places < ends[:, None]
            positions = jnp.broadcast_to(places, tokens.shape)
            feed = {**source, **self._feed(tokens, mask, positions)}
            found = self._run(program, params, state, feed)
            logits = found[self._logits][jnp.arange(batch), ends - 1]
            new = _choose(logits, draws, heat, jax.random.fold_in(key, i))
            return tokens.at[jnp.arange(batch), ends].set(new.astype(tokens.dtype)), new

        return jax.lax.scan(step, tokens, jnp.arange(count))[1].T

    def _continue(
        self, room: Room, draws: bool, params, state, _, tokens, lengths, heat, key, count
    ):
        """Return new tokens [batch, count], through the caches."""
        assert self._caches is not None
        caches, left = self._caches, room == "before"
        program = self._whole.with_outputs({self._logits, *caches.pairs.values()})
        first = program.without_cache(caches)
        kept = replace(
            first.graph, outputs=program.graph.outputs, output_types=program.graph.output_types
        )
        first = replace(first, graph=kept)
        batch, width = tokens.shape
        size, lengths, tokens = width + count, jnp.asarray(lengths), jnp.asarray(tokens)
        here = jnp.arange(width)
        mask = here >= width - lengths[:, None] if left else here < lengths[:, None]
        positions = (mask.cumsum(1) - 1).clip(0)
        found = self._run(first, params, state, self._feed(tokens, mask, positions))
        ends = jnp.full(batch, width - 1) if left else lengths - 1
        logits = found[self._logits][jnp.arange(batch), ends]

        def make_room(name: str, value: jax.Array) -> jax.Array:
            pads = [(0, 0)] * value.ndim
            if (axis := self._growing.get(name)) is not None:
                # one place is that of the new token
                pads[axis] = (size - 1 - width, 0) if left else (0, size - width)
            return jnp.pad(value, pads)

        pasts = {name: make_room(name, found[out]) for name, out in caches.pairs.items()}
        places = jnp.arange(size)

        def step(carry, i):
            pasts, logits = carry
            new = _choose(logits, draws, heat, jax.random.fold_in(key, i))
            seen = lengths + i + 1
            mask = places >= size - seen[:, None] if left else places < seen[:, None]
            feed = self._feed(new[:, None], mask, seen[:, None] - 1)
            feed |= {**caches.switches_on, **pasts}
            found = self._run(program, params, state, feed)
            pasts = {name: found[out] for name, out in caches.pairs.items()}
            if left:
                pasts = {
                    name: jax.lax.slice_in_dim(value, 1, None, axis=self._growing[name])
                    if name in self._growing
                    else value
                    for name, value in pasts.items()
                }
            return (pasts, found[self._logits][:, -1]), new

        return jax.lax.scan(step, (pasts, logits), jnp.arange(count))[1].T


def _choose(logits: jax.Array, draws: bool, heat: Any, key: jax.Array) -> jax.Array:
    """Return a token for each row."""
    logits = logits.astype(jnp.float32)
    if not draws:
        return logits.argmax(-1)
    return jax.random.categorical(key, logits / heat)


def _end(prompt: np.ndarray, new: np.ndarray, stop: Sequence[int]) -> np.ndarray:
    """Return a prompt with its continuation, which ends with the first token of `stop`."""
    ends = np.flatnonzero(np.isin(new, [*stop]))
    return np.concatenate([prompt, new[: ends[0] + 1] if len(ends) else new]).astype(prompt.dtype)


def generate(
    generator: Generator,
    ids: Any,
    count: int,
    temperature: float,
    seed: int,
    stop: int | Sequence[int] | None,
) -> Any:
    """Return the continuation of one prompt or several, as `Model.generate` does."""
    model = generator.model
    ids = ids if isinstance(ids, list) else np.asarray(ids)
    single = np.ndim(ids[0]) == 0 if len(ids) else False
    ends = stop_tokens(model) if stop is None else np.ravel(stop).tolist()
    prompts = [ids] if single else [*ids]
    found = generator(model.params, model.state, prompts, count, temperature, seed, ends)
    return found[0] if single else found
