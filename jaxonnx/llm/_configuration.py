"""Properties of language models: maximum length, vocabulary size, token inputs, embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxonnx._data.ragged import derived_inputs, token_inputs
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError, TrainingError
from jaxonnx.llm._folders import GENAI, ModelFolder

DECODER_TOKENS = "decoder_input_ids"
"""The input of the decoder of an encoder-decoder, as Hugging Face names it: labels, shifted."""
_TRANSCRIPT = "<|startoftranscript|>"
"""The token that Whisper's transcripts begin with."""


_BEHIND_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mluke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
}
"""Model types of transformers whose first position is the one behind `pad_token_id`: the table of
`max_position_embeddings` has no places for as many tokens."""


def context_length(folder: ModelFolder) -> int | None:
    """Return the context length that the configuration files of a model give, if any does."""
    settings = folder.read_json("config.json")
    length, fill = settings.get("max_position_embeddings"), settings.get("pad_token_id")
    if settings.get("model_type") in _BEHIND_PADDING and isinstance(length, int):
        return length - 1 - (fill if isinstance(fill, int) else 1)
    nested = settings.get("text_config")
    for source, name in (
        (folder.read_json(GENAI).get("model", {}), "context_length"),
        (nested if isinstance(nested, Mapping) else {}, "max_position_embeddings"),
        (settings, "max_position_embeddings"),
        (settings, "n_positions"),
        (settings, "max_target_positions"),
    ):
        if isinstance(source.get(name), int):
            return source[name]
    return None


def token_input(model: Network, what: str = "the data has texts") -> str:
    """Return the name of the input that takes tokens.

    Args:
      what: what needs it, for the error.

    Raises:
      TrainingError: the model has no input of integers.
    """
    spare = derived_inputs(model.inputs)
    kinds = [(v.name, v.dtype) for v in model.inputs if v.name not in spare]
    integers = [name for name, kind in kinds if kind is not None and kind.kind in "iu"]
    if not integers:
        raise TrainingError(f"{what}, and the model has no input of tokens")
    return "input_ids" if "input_ids" in integers else integers[0]


def vocabulary(model: Network) -> int | None:
    """Return the size of the vocabulary: the last axis of the logits, if it is a number."""
    shapes = {value.name: value.shape for value in model.outputs}
    shape = shapes.get("logits", model.outputs[0].shape)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def scores_tokens(model: Network) -> bool:
    """Check whether the first output has a score for each token of the vocabulary at each place."""
    shape = model.outputs[0].shape
    tables = {v.rows for v in model.inputs if v.name in token_inputs(model.inputs)} - {None}
    return shape is not None and len(shape) == 3 and vocabulary(model) in tables


def find_embeddings(model: Network) -> dict[str, float]:
    """Return the values that are embeddings of tokens, each with the factor that scales it.

    Raises:
      TrainingError: the model has no embeddings.
    """
    tokens = token_input(model, "neftune adds noise to embeddings")
    producers, tensors = model.graph.producers, model.tensors
    same = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")  # tokens pass through these

    def source(name: str) -> str:
        while name in producers and producers[name].op.name in same:
            name = producers[name].inputs[0]
        return name

    values = {
        node.outputs[0]: 1.0
        for node in model.graph.nodes
        if node.op.like == "Gather" and source(node.inputs[1]) == tokens
    }
    if not values:
        raise TrainingError(
            f"neftune adds noise to embeddings, and no Gather reads rows by the input '{tokens}'"
        )
    for node in model.graph.nodes:
        if node.op.name == "Mul":
            for value, factor in (node.inputs, node.inputs[::-1]):
                number = tensors.get(source(factor), ())
                if source(value) in values and np.size(number) == 1:
                    values[source(value)] = float(np.asarray(number).item())
    return values


def read_end_tokens(folder: ModelFolder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that end a text, and those of them at which a runtime stops.

    A runtime reads the first file that names any: genai_config.json, generation_config.json,
    config.json. The tokenizer's own end token, which is learned, comes before them, as in
    transformers' Trainer.
    """
    files = map(folder.read_json, ("generation_config.json", "config.json"))
    sources = (folder.read_json(GENAI).get("model", {}), *files)
    listed = (source.get("eos_token_id") for source in sources)
    numbers = next((ids for ids in listed if isinstance(ids, list | int)), [])
    stops = tuple(numbers) if isinstance(numbers, list) else (numbers,)
    learned = folder.find_special_token("eos_token")
    return tuple(dict.fromkeys(stops if learned is None else (learned, *stops))), stops


def decoder_numbers(folder: ModelFolder) -> tuple[int | None, int]:
    """Return the start token of an encoder-decoder, if the files give it, and the padding token.

    onnxruntime-genai's folders have the start token of Whisper in the tokenizer alone.
    """
    files = [folder.read_json(name) for name in ("generation_config.json", "config.json")]
    files.append(folder.read_json(GENAI).get("model", {}))
    name = "decoder_start_token_id"
    start = next((f[name] for f in files if isinstance(f.get(name), int)), None)
    fill = folder.padding_token
    if start is None:
        added = folder.read_json("tokenizer.json").get("added_tokens", ())
        start = next((token["id"] for token in added if token["content"] == _TRANSCRIPT), None)
    return start, 0 if fill is None else fill


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
    tokens: list[int | None] = [decoder_numbers(folder)[0]]
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
