"""Properties of language models: maximum length, vocabulary size, token inputs."""

from __future__ import annotations

from collections.abc import Mapping

from jaxonnx._data.ragged import derived_inputs
from jaxonnx._io.folders import GENAI, ModelFolder
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import TrainingError

_TRANSCRIPT = "<|startoftranscript|>"
"""The token that Whisper's transcripts begin with."""


def context_length(folder: ModelFolder) -> int | None:
    """Return the context length that the configuration files of a model give, if any does."""
    settings = folder.read_json("config.json")
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
      TrainingError: there is none.
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


def decoder_numbers(folder: ModelFolder) -> tuple[int | None, int]:
    """Return the start token of an encoder-decoder, if the files give it, and the padding token.

    onnxruntime-genai's folders have the start token of Whisper in the tokenizer alone.
    """
    names = "decoder_start_token_id", "pad_token_id"
    files = [folder.read_json(name) for name in ("generation_config.json", "config.json")]
    files.append(folder.read_json(GENAI).get("model", {}))
    start, fill = (next((f[n] for f in files if isinstance(f.get(n), int)), None) for n in names)
    if start is None:
        added = folder.read_json("tokenizer.json").get("added_tokens", ())
        start = next((token["id"] for token in added if token["content"] == _TRANSCRIPT), None)
    return start, 0 if fill is None else fill
