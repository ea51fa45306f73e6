"""Choose tokens by logits: penalties, then the most likely token, or a draw from some of them.

The definitions and their order are those of transformers' `LogitsProcessor`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._require import require, require_integer
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError, warn
from jaxonnx.llm._folders import GENAI, ModelFolder

_USUAL_TOP_K = 50
"""The default of transformers and onnxruntime-genai for a folder that samples."""
_UNREAD = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), False),
    **dict.fromkeys(("top_h", "dola_layers", "watermarking_config", "constraints")),
    **dict.fromkeys(("exponential_decay_length_penalty", "max_time", "force_words_ids")),
}
"""Settings of transformers and onnxruntime-genai that change what is generated and are ignored, and
their values without an effect."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: draws from so many of the most likely tokens.
      top_p: draws from the fewest most likely tokens that have this probability together.
      min_p: draws from tokens with at least this fraction of the probability of the most likely
        one.
      repetition_penalty: logits of tokens that are in the decoder's prompt or were generated are
        divided by it, or multiplied if they are negative.
      biases: sequences of tokens, and the number that is added to the logit of the last one behind
        the others.
      forced_end: tokens of which one is the last of the most tokens that are asked for.
      stop_texts: the texts that end a continuation.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    forced_end: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require("temperature", self.temperature, self.temperature >= 0, "at least 0")
        if self.top_k is not None:
            require_integer("top_k", self.top_k)
        for name, x in (("top_p", self.top_p), ("min_p", self.min_p)):
            require(name, x, x is None or 0 <= x <= 1, "from 0 to 1")
        penalty = self.repetition_penalty
        require("repetition_penalty", penalty, penalty is None or penalty > 0, "above 0")

    @classmethod
    def of(
        cls,
        folder: ModelFolder | None,
        temperature: float | None,
        fill: bool = False,
        **others: Any,
    ) -> Sampling:
        """Return the arguments of `generate`.

        Args:
          folder: whose settings fill gaps; `genai_config.json` wins over `generation_config.json`.
          temperature: None for that of the folder.
          fill: whether they do so beside a temperature, too.
          others: the other arguments.
        """
        chosen = {name: value for name, value in others.items() if value is not None}
        if folder is None or (temperature is not None and not fill):
            sampling = cls(temperature or 0.0, **chosen)
        else:
            sampling = replace(_read_settings(folder, temperature), **chosen)
        unused = [name for name in chosen if name != "repetition_penalty"]
        if unused and not sampling.temperature:
            raise InputError(
                f"{', '.join(unused)}: at temperature 0 the most likely token is taken: pass "
                "temperature=1.0 or the like"
            )
        return sampling

    def numbers(self, count: int = 0) -> dict[str, Any]:
        """Return the settings that have an effect, without `top_k`, whose value is compiled.

        Args:
          count: the most tokens that are generated.
        """
        names = {"repetition_penalty": 1.0}
        if self.temperature > 0:
            names |= {"temperature": None, "top_p": 1.0, "min_p": 0.0}
        values = {name: getattr(self, name) for name in names}
        numbers: dict[str, Any] = {
            name: x for name, x in values.items() if x is not None and x != names[name]
        }
        if self.biases:
            groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
            for tokens, bias in self.biases:
                groups.setdefault(len(tokens), []).append((tokens, bias))
            numbers["biases"] = [
                (
                    np.array([tokens for tokens, _ in group]),
                    np.array([bias for _, bias in group], np.float32),
                )
                for group in groups.values()
            ]
        if self.forced_end:
            numbers["forced_end"] = np.array(self.forced_end), count - 1
        return numbers

    @property
    def tokens(self) -> np.ndarray:
        """All tokens that the settings name."""
        return np.array([*self.forced_end, *(t for tokens, _ in self.biases for t in tokens)], int)


def _read_settings(folder: ModelFolder, temperature: float | None) -> Sampling:
    settings = folder.read_json(GENAI).get("search", {})
    settings = settings or folder.read_json("generation_config.json")
    named = {
        field.name: settings[field.name] for field in fields(Sampling) if field.name in settings
    }
    unread = [n for n, usual in _UNREAD.items() if settings.get(n) not in (None, usual, [], {})]
    if unread:
        warn(f"settings of '{folder.path}' that are ignored: {unread}")
    ends, texts = (settings.get(name) for name in ("forced_eos_token_id", "stop_strings"))
    # words of one token are among the suppressed ones (`read_suppressed_tokens`)
    biases = {(*tokens,): float(bias) for tokens, bias in settings.get("sequence_bias") or ()}
    words = [(*word,) for word in settings.get("bad_words_ids") or () if len(word) > 1]
    always: dict[str, Any] = {
        "biases": (*biases.items(), *((word, -np.inf) for word in dict.fromkeys(words))),
        "forced_end": () if ends is None else (*(ends if isinstance(ends, list) else [ends]),),
        "stop_texts": (texts,) if isinstance(texts, str) else (*(texts or ()),),
    }
    if not (settings.get("do_sample") if temperature is None else temperature):
        return Sampling(repetition_penalty=named.get("repetition_penalty"), **always)
    usual = {"temperature": 1.0, "top_k": _USUAL_TOP_K}
    sampling = {**usual, **{name: x for name, x in named.items() if x is not None}}
    sampling |= {} if temperature is None else {"temperature": temperature}
    return Sampling(**{**sampling, "top_k": sampling["top_k"] or None}, **always)


def stop_tokens(model: Network) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's own, and those at which a runtime stops.

    vLLM and transformers' Trainer add the tokenizer's as well, which training appends to texts.
    """
    return () if model.folder is None else model.folder.end_tokens[0]


def process_logits(
    logits: jax.Array,
    occurrences: jax.Array | None,
    top_k: int | None,
    numbers: Mapping[str, Any],
    suppressed: Sequence[int] = (),
    recent: jax.Array | None = None,
    number: Any = 0,
) -> jax.Array:
    """Return the scores of tokens [batch, tokens], -inf for those that are not drawn from.

    Args:
      logits: [batch, tokens].
      occurrences: bool[batch, tokens], the tokens that a penalty applies to.
      top_k, numbers: those of `Sampling`. Where values tie at the end of the best ones, all of
        them stay.
      suppressed: tokens that are not chosen.
      recent: int[batch, count], the last tokens before, -1 where there are fewer; at least as many
        as sequences with a bias have before their last one.
      number: how many tokens were generated before.
    """
    scores = jnp.asarray(logits, jnp.float32)
    for sequences, biases in numbers.get("biases", ()):
        assert recent is not None
        before = recent[:, None, recent.shape[1] + 1 - sequences.shape[1] :]
        matches = (before == sequences[:, :-1]).all(-1)
        scores = scores.at[:, sequences[:, -1]].add(jnp.where(matches, biases, 0))
    penalty = numbers.get("repetition_penalty")
    if occurrences is not None and penalty is not None:
        scores = jnp.where(
            occurrences, jnp.where(scores < 0, scores * penalty, scores / penalty), scores
        )
    if "forced_end" in numbers:
        tokens, last = numbers["forced_end"]
        forced = jnp.full_like(scores, -jnp.inf).at[:, tokens].set(0)
        scores = jnp.where(number == last, forced, scores)
    if suppressed:
        scores = scores.at[:, np.array(suppressed)].set(-jnp.inf)
    if "temperature" not in numbers:
        return scores
    scores, best = scores / numbers["temperature"], None
    if top_k is not None:
        best = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0]
        scores = jnp.where(scores < best[:, -1:], -jnp.inf, scores)
    if (top_p := numbers.get("top_p")) is not None:
        best = jnp.sort(scores, descending=True) if best is None else best
        shares = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        # a token stays if those before it have less than `top_p`; the first one always does
        before = jnp.cumsum(shares, -1) - shares
        stays = (before < top_p).at[:, 0].set(True)
        least = jnp.min(jnp.where(stays, best, jnp.inf), -1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if (min_p := numbers.get("min_p")) is not None:
        shares = jnp.exp(scores - scores.max(-1, keepdims=True))
        scores = jnp.where(shares < min_p, -jnp.inf, scores)
    return scores


def choose_tokens(
    logits: jax.Array,
    occurrences: jax.Array | None,
    top_k: int | None,
    numbers: Mapping[str, Any],
    key: jax.Array,
    *more: Any,
) -> jax.Array:
    """Return a token for each row, int[batch]; the arguments are those of `process_logits`."""
    scores = process_logits(logits, occurrences, top_k, numbers, *more)
    return jax.random.categorical(key, scores) if "temperature" in numbers else scores.argmax(-1)
