"""The inputs of a decoder: tokens, masks, positions, caches, and those of an encoder before it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._data.ragged import derived_inputs
from jaxonnx._graph.ancestors import ancestors, find_boundary
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.caches import Caches, find_caches
from jaxonnx._graph.values import Value
from jaxonnx._rewrite.network import Network
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError
from jaxonnx.llm._caches import PaddedCaches, find_padding
from jaxonnx.llm._folders import ModelFolder
from jaxonnx.llm._tokens_and_logits import DECODER_TOKENS
from jaxonnx.llm._vision_language import PIXELS
from jaxonnx.views import CallView, Part

_READING_BY_LENGTH = ("GroupQueryAttention", "SparseAttention")
"""Operators whose past may have room behind its tokens."""
_TOTAL = 6
"""The input `total_sequence_length` of the first one."""
_JOINING_CACHES = ("Concat", "Attention", "MultiHeadAttention")
"""Operators that put new tokens behind all of the past."""

Side = Literal["behind", "before", "hidden"]
"""The side of the tokens on which a cache is filled up; "hidden" is before, without a mask."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model that continues rows of tokens, and how its inputs are made of them."""

    model: Network

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
        names |= {value.name for value in (*self._sources, *self._images)}
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
    def _images(self) -> tuple[Value, ...]:
        """The input of images of a vision-language model, whose prompts are tokens."""
        if self.model.folder is None or self.model.folder.image_token is None:
            return ()
        return tuple(value for value in self._inputs if value.name == PIXELS)

    def _feed_images(self, rows: Sequence[np.ndarray], pixels: Any) -> dict[str, jax.Array]:
        """Return the input of images: `pixels`, or zeros for rows without images.

        Raises:
          InputError: a row has image tokens, and there are no images.
        """
        if not self._images:
            return {}
        (value,) = self._images
        assert value.shape is not None
        if pixels is None:
            token = None if self.model.folder is None else self.model.folder.image_token
            if any((row == token).any() for row in rows):
                raise InputError(
                    f"tokens to continue have the token of images, {token}, and no images: pass "
                    'messages with parts like {"type": "image", "path": ...}'
                )
            sizes = (size if isinstance(size, int) else 1 for size in value.shape[1:])
            pixels = np.zeros((len(rows), *sizes))
        return {PIXELS: jnp.asarray(pixels, jax.dtypes.canonicalize_dtype(value.dtype))}

    @cached_property
    def _encoder_values(self) -> frozenset[str]:
        """The values that depend on the inputs of the encoder alone, which the decoder reads.

        They are the encoder's states, and keys and values for each layer of the decoder.
        """
        sources = {value.name for value in (*self._sources, *self._images)}
        others = {value.name for value in self._inputs} - sources
        return frozenset(find_boundary(self._program.graph, sources, others) if sources else ())

    def _encode(self, params: Any, state: Any, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `_encoder_values`."""
        names = self._encoder_values - source.keys()
        program = self._program.enter(Part(frozenset(source), (*sorted(names),)))
        return self._run(program, params, state, source) | {
            name: value for name, value in source.items() if name in self._encoder_values
        }

    def _after_encoder(self, *outputs: str, program: Program | None = None) -> Program:
        """Return the program of the decoder, from `_encoder_values` to these outputs."""
        return (program or self._program).enter(Part(self._encoder_values, outputs))

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
        limits.append(None if folder is None else folder.context_length)
        return min((limit for limit in limits if limit is not None), default=sys.maxsize)

    @cached_property
    def _decoder_prompt(self) -> tuple[list[int | None], list[int]]:
        """The first tokens of the decoder of an encoder-decoder model, and those of languages."""
        folder = self.model.folder
        if folder is None or folder.start_token is None:
            raise InputError(
                "the model is an encoder with a decoder, and was not loaded from a folder whose "
                "config.json has decoder_start_token_id, the first token of the decoder: pass "
                "decoder_prompt="
            )
        return read_decoder_prompt(folder)

    @cached_property
    def _suppressed_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that are not generated first, and those that are never generated."""
        folder = self.model.folder
        return ([], []) if folder is None else read_suppressed_tokens(folder)

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
        if self._images or self._caches is None or not self._growing_axes:
            return None
        sizes = {
            value.shape[axis]
            for value in self._caches.values
            if value.shape and (axis := self._growing_axes.get(value.name)) is not None
        }
        nodes = self._program.graph.nodes
        reading = [node for node in nodes if not {*node.reads}.isdisjoint(self._growing_axes)]
        readers = {node.op.name for node in reading}
        if len(sizes) > 1 or self._counts_keys(reading):  # some slide over a window
            return None
        if not masked:
            return None if self._padding is None else "hidden"
        if self._sources:
            return None
        readers.discard("Shape")
        if readers <= {*_READING_BY_LENGTH}:
            return "behind"
        return "before" if readers <= {*_JOINING_CACHES} else None

    @cached_property
    def _padding(self) -> PaddedCaches | None:
        """The view for caches with room of a decoder without a mask, if it can have them."""
        caches = self._caches
        if caches is None or self._has_fixed_caches or {*self._cross_caches} != caches.unread:
            return None
        return find_padding(self._program.graph, caches, self._program.constants)

    @cached_property
    def _cross_caches(self) -> dict[str, str]:
        """From inputs for an encoder's keys and values to the outputs that have them at first."""
        unread = () if self._caches is None else self._caches.unread
        pairs = {name: name.replace("past_key_values", "present", 1) for name in unread}
        return {name: out for name, out in pairs.items() if out in self._program.graph.outputs}

    def _counts_keys(self, readers: Sequence[Node]) -> bool:
        """Check whether a number of keys is computed from the values of a mask, not its shape.

        It is a shape where attention is computed, so such files (graph capture of the builder's)
        cannot have caches in a compiled step.
        """
        totals = [n.inputs[_TOTAL] for n in readers if n.op.name == _READING_BY_LENGTH[0]]
        nodes = [node for node in self._program.graph.nodes if node.op.name != "Shape"]
        return not ancestors(nodes, totals).isdisjoint({v.name for v in self._token_inputs})

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

    def _feed_encoder(self, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, jax.Array]:
        """Return the inputs of the encoder, which reads tokens [batch, width]."""
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        has_mask = any(value.name.endswith("mask") for value in self._sources)
        if not has_mask and not mask.all():
            raise InputError("the encoder has no mask: it takes rows of one length")
        return self._fill(self._sources, self._prompt_input, tokens, mask, mask.cumsum(1) - 1)

    def _check_tokens(
        self,
        rows: Sequence[np.ndarray],
        name: str | None = None,
        what: str = "row {} of the tokens to continue",
    ) -> None:
        """Raise an InputError unless rows are of tokens in the vocabulary of an input.

        Args:
          name: the input; None: that of prompts.
          what: what has the tokens, with the number of the row, for the message.
        """
        if not rows or not all(
            row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows
        ):
            raise InputError("prompts must be integer arrays of shape [length], or a list of them")
        name = name or self._prompt_input
        count = next(value.rows for value in self._inputs if value.name == name)
        for number, row in enumerate(rows):
            unknown = row[(row < 0) | (row >= count)] if count is not None else row[row < 0]
            if len(unknown):
                limit = "" if count is None else f" to {count - 1}"
                raise InputError(
                    f"{what.format(number)} has {unknown[0]}; the model has tokens from 0{limit}"
                )

    def _check_features(self, value: Value, rows: Sequence[np.ndarray]) -> None:
        """Raise an InputError unless rows are of numbers, each of the shape that `value` takes."""
        shape = (value.shape or ())[1:]
        for row in rows:
            sizes = zip(row.shape, shape, rows[0].shape, strict=False)
            fits = len(row.shape) == len(shape) and all(
                size == first and (size == expected or not isinstance(expected, int))
                for size, expected, first in sizes
            )
            if not fits or row.dtype.kind not in "fV":
                raise InputError(
                    f"the encoder reads features {list(shape)} of numbers for {value.name!r}, all "
                    f"of one shape; one has {list(row.shape)} of {row.dtype}"
                )
        if not rows:
            raise InputError(f"there are no input features for {value.name!r}")


_PRODUCTS = ("MatMul", "MatMulNBits")
_ELEMENTWISE = ("Add", "Cast", "Div", "Identity", "Mul", "Sub", "Tanh")
"""Operators behind the product of an output layer: biases, soft caps, scales."""


def find_head_input(graph: Graph, logits: str) -> str | None:
    """Find the value [batch, steps, size] of which an output layer computes logits, step by step.

    None if the layer is not known to keep steps apart.
    """
    producers, inputs, value = graph.producers, {*graph.inputs}, logits
    while (node := producers.get(value)) is not None:
        sources = [n for n in node.inputs if not inputs.isdisjoint(ancestors(graph.nodes, [n]))]
        if len(sources) == 1 and node.op.name in _PRODUCTS:
            return sources[0] if sources[0] == node.inputs[0] else None
        if len(sources) != 1 or node.op.name not in _ELEMENTWISE:
            return None
        (value,) = sources
    return None


def read_decoder_prompt(folder: ModelFolder) -> tuple[list[int | None], list[int]]:
    """Return the tokens that the decoder behind an encoder begins with, as transformers makes them.

    They are the start token, and Whisper's tokens for language, task and no timestamps or the first
    token of other models, where `generation_config.json` (or else `config.json`) has some.

    Returns:
      The tokens, with None for a language that is to be detected, and the tokens of all languages.

    Raises:
      InputError: the settings name a language or task that they have no token for.
    """
    config = folder.read_json("config.json")
    settings = folder.read_json("generation_config.json") or config
    languages, tasks = (settings.get(name) or {} for name in ("lang_to_id", "task_to_id"))
    language, task = settings.get("language"), settings.get("task")
    tokens: list[int | None] = [folder.start_token]
    if language is None and task is None:
        forced = settings.get("forced_decoder_ids") or config.get("forced_decoder_ids") or ()
        tokens += [pair[1] for pair in sorted(forced, key=lambda pair: pair[0])]
    if language is not None:
        names = (str(language).lower(), f"<|{language}|>".lower())
        tokens[1:2] = [next((languages[name] for name in names if name in languages), None)]
        if tokens[1] is None:
            raise InputError(
                f"'{folder.path}': the language {language!r} is none of lang_to_id in "
                "generation_config.json; pass decoder_prompt="
            )
    elif languages and tokens[1:2] in ([], [None]):
        tokens[1:2] = [None]
    if task is not None and task not in tasks:
        raise InputError(f"'{folder.path}': the task {task!r} is none of {[*tasks]}")
    if (task or language) and tasks:
        tokens.append(tasks[task or "transcribe"])
    for name in ("forced_bos_token_id", "no_timestamps_token_id"):
        if settings.get(name) not in (None, tokens[-1]):
            tokens.append(settings[name])
    open_place = 1 if languages else None
    tokens = [t for place, t in enumerate(tokens) if t is not None or place == open_place]
    return tokens, [*languages.values()]


def read_suppressed_tokens(folder: ModelFolder) -> tuple[list[int], list[int]]:
    """Return the tokens that are not generated first, and those that are never generated.

    These are of `begin_suppress_tokens`, `suppress_tokens`, and the words of one token, but for end
    tokens, of `bad_words_ids`.
    """
    settings = folder.read_json("generation_config.json") or folder.read_json("config.json")
    first, always = (
        [*(settings.get(name) or ())] for name in ("begin_suppress_tokens", "suppress_tokens")
    )
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    words = settings.get("bad_words_ids") or ()
    always += [word[0] for word in words if len(word) == 1 and word[0] not in ends]
    return first + always, always
